"""Agents that are programs of their own: real processes play through the endpoint, and all that they start is ended,
whatever they do."""

from __future__ import annotations

import asyncio
import signal
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

from actor.agents import agent_program
from actor.agents.agent_endpoint import AgentEndpoint
from actor.agents.agent_episode import AgentReward
from actor.agents.agent_program import Program
from actor.agents.remote_agents import PostedResults
from actor.engine_pool import EnginePool
from actor.episode import EpisodeLimits
from actor.render import Renderer
from actor.rewards import FunctionReward
from actor.rollout import Player
from launch.tiny_models.build import TOOLS_TEMPLATE, build_tokenizer
from shared.rgb_images import as_png
from shared.types import Ending, Image, Sample
from shared.vision import VisionSpec
from tests.support.actor_rig import actor_process, give, with_learner
from tests.support.actor_rig import ticket as one_ticket
from tests.support.agent_rig import image_part, play_agent
from tests.support.machine import is_there, until, until_async
from tests.support.rollout_rig import SYSTEM, Scripted, threads, ticket
from tests.support.tiny import PHRASES, draw_image

__all__ = ["threads"]  # a fixture
ASK = """
import json, os, sys, time, urllib.request
def post(route, body):
    request = urllib.request.Request(os.environ["PRONK_BASE_URL"] + route, json.dumps(body).encode())
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)
def ask(messages):
    body = {"model": os.environ["PRONK_MODEL_NAME"], "messages": messages}
    return post("/chat/completions", body)["choices"][0]["message"]["content"]
QUESTION = [{"role": "user", "content": "Which move?"}]
"""
QUICK = EpisodeLimits(max_turns=64, max_tokens=100_000, max_context=100_000, env_timeout_s=60.0)
SOON = EpisodeLimits(max_turns=64, max_tokens=100_000, max_context=100_000, env_timeout_s=5.0)


@pytest.fixture(scope="module")
def renderer(folder):
    return Renderer(build_tokenizer(PHRASES, 640, TOOLS_TEMPLATE), VisionSpec.load(folder))


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Return the folder in which episodes' files are made, which are all gone at the end."""
    folder = tmp_path / "files"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    until(lambda: not [*folder.iterdir()])


@pytest.fixture
def play(renderer, threads, tmp_path, files):
    """Play an episode by a program of Python; `answers` are the policy's. All of its processes are gone at the end."""

    def played(source, answers=("up",), limits=QUICK, reward=None, **changes):
        program = tmp_path / "program.py"
        program.write_text(ASK + textwrap.dedent(source))
        words = Program.of(f"{sys.executable} {program}")
        endpoint = AgentEndpoint(results=PostedResults())
        trajectory, _ = play_agent(renderer, threads, words, [*answers], limits, reward, endpoint, **changes)
        until(lambda: not mine(tmp_path))
        return trajectory

    return played


def mine(folder):
    """The processes that have a file of this test's in their words."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if str(folder).encode() in words and is_there(int(entry.name)):
                found.append(int(entry.name))
    return found


# ---------------------------------------------------------------------- what it gets, and what it gives


def test_a_program_gets_its_episode_and_the_last_line_that_it_prints_is_the_reward(play, monkeypatch):
    monkeypatch.setenv("PRONK_ACTOR", "with secrets")
    monkeypatch.setenv("MY_OWN", "kept")
    picture = Image.of(as_png(draw_image(64, 64, 5)))
    prompt = (SYSTEM, {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which move?"}]})
    trajectory = play(
        """
        given = json.load(open(os.environ["PRONK_EPISODE"]))
        sample = given["sample"]
        assert given["base_url"] == os.environ["PRONK_BASE_URL"] and given["args"] == {"a": 1}
        assert given["evaluation"] == "" and os.stat(os.environ["PRONK_EPISODE"]).st_mode & 0o77 == 0
        assert sample["label"] == "up" and sample["metadata"]["seed"] == 3 and os.environ["PRONK_SEED"] == "3"
        assert sample["prompt"][1]["content"][0]["image_url"]["url"] == sample["images"][0]
        assert os.environ["MY_OWN"] == "kept" and "PRONK_ACTOR" not in os.environ
        assert sys.stdin.read() == ""
        print("some words of a library")
        said = ask(sample["prompt"])
        print("and", said, file=sys.stderr)
        print(0.75 if said == sample["label"] else 0)
        print()
        """,
        sample=Sample("s", prompt, (picture,), label="up", metadata={"seed": 3}),
    )
    assert trajectory.ending is Ending.COMPLETED, trajectory.error
    assert trajectory.reward == trajectory.turns[-1].reward == 0.75 and trajectory.images == (picture,)
    assert image_part(bytes(picture.data))["image_url"]["url"].startswith("data:image/png")


def test_an_object_in_the_last_line_has_metrics_and_a_posted_result_counts_before_what_is_printed(play):
    result = {"reward": 0.5, "metrics": {"moves": 2}, "success": True}
    printed = play(f"ask(QUESTION); print(json.dumps({result}))")
    posted = play(f"ask(QUESTION); assert post('/result', {result}) == {{'taken': True}}; print(7)")
    kills_itself = play(f"ask(QUESTION); post('/result', {result}); os.kill(os.getpid(), 9)")
    for trajectory in (printed, posted, kills_itself):
        assert trajectory.ending is Ending.COMPLETED, trajectory.error
        assert trajectory.reward == 0.5 and trajectory.metrics["moves"] == 2 and trajectory.metrics["success"] == 1.0


def test_a_program_that_goes_on_after_its_result_is_ended_and_its_result_counts(play, monkeypatch):
    monkeypatch.setattr(agent_program, "GRACE_S", 0.1)
    trajectory = play("ask(QUESTION); post('/result', {'reward': 0.5}); time.sleep(1000)")
    assert trajectory.ending is Ending.COMPLETED and trajectory.reward == 0.5


def test_without_a_number_the_recipes_reward_counts_and_without_that_the_ending_says_why(play, threads):
    graded = FunctionReward(lambda played: len(played.answers) + 0.25, threads, 5.0)
    for source in ("ask(QUESTION)", "ask(QUESTION); print('done')", "ask(QUESTION); print('{\"reward\": null}')"):
        trajectory = play(source, reward=graded)
        assert trajectory.ending is Ending.COMPLETED and trajectory.reward == 1.25, trajectory.error
    nothing, words = play("ask(QUESTION)"), play("ask(QUESTION); print('done')")
    assert nothing.ending is words.ending is Ending.REWARD_ERROR and not nothing.trainable
    assert "the program printed nothing, and the recipe names no other reward" in nothing.error
    assert "the program's last line, 'done', is no number" in words.error


@pytest.mark.parametrize("line", ["nan", "-inf", "1e999", '{"reward": "1"}', '{"reward": NaN}', '{"score": 1}'])
def test_a_reward_that_is_no_finite_number_is_never_trained_on(play, threads, line):
    trajectory = play(f"ask(QUESTION); print({line!r})", reward=FunctionReward(lambda _: 1.0, threads, 5.0))
    assert trajectory.ending is Ending.REWARD_ERROR and not trajectory.trainable, trajectory.error
    assert trajectory.reward == 0.0 and trajectory.error


# ---------------------------------------------------------------------- how it fails


def test_a_failure_keeps_the_last_words_with_file_and_line(play, tmp_path):
    trajectory = play("ask(QUESTION)\nprint(1)\nraise LookupError('no such board')")
    assert trajectory.ending is Ending.ENV_ERROR and not trajectory.trainable
    assert "the program ended with exit code 1; its last words: Traceback" in trajectory.error
    line = ASK.count("\n") + 3
    assert f'program.py", line {line}' in trajectory.error and "LookupError: no such board" in trajectory.error
    assert "\n" not in trajectory.error
    killed = play("ask(QUESTION); print('I go', flush=True); os.abort()")
    assert killed.ending is Ending.ENV_ERROR and "the program was ended by SIGABRT" in killed.error
    assert "I go" in killed.error


def test_a_limit_of_the_episode_is_its_ending_also_where_the_program_fails_by_it(play):
    limits = EpisodeLimits(max_turns=1, max_tokens=1000, max_context=10_000)
    caught = play("ask(QUESTION)\ntry: ask(QUESTION)\nexcept OSError: print(0.5)", limits=limits)
    left = play("ask(QUESTION); ask(QUESTION)", limits=limits)
    assert caught.ending is left.ending is Ending.MAX_TURNS and caught.trainable and left.trainable
    assert (caught.reward, left.reward) == (0.5, 0.0)


def test_a_program_that_never_asks_the_model_or_reports_an_error_is_an_ending(play):
    silent, reports = play("print(1)"), play("ask(QUESTION); post('/result', {'error': 'the browser is gone'})")
    assert silent.ending is reports.ending is Ending.ENV_ERROR
    assert "without an answer of the model's" in silent.error
    assert reports.error == "the agent reports: the browser is gone"


def test_a_program_that_hangs_is_ended_in_time_whatever_it_ignores(play):
    trajectory = play(
        """
        import signal
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_IGN)
        ask(QUESTION)
        print("\\x1b[2J\\0here I wait, password=hunter2", flush=True)
        while True:
            time.sleep(1000)
        """,
        limits=SOON,
    )
    assert trajectory.ending is Ending.ENV_TIMEOUT and not trajectory.trainable
    assert trajectory.error == (
        "the agent neither called the model nor returned within 5 s; its last words: "
        "[2Jhere I wait, password=(not shown)"
    )


def test_a_program_that_wants_to_clean_up_has_time_for_it(play, tmp_path):
    trajectory = play(
        f"""
        import signal
        def clean(*_):
            open({str(tmp_path / "cleaned")!r}, "w").close()
            sys.exit()
        signal.signal(signal.SIGTERM, clean)
        ask(QUESTION)
        time.sleep(1000)
        """,
        limits=SOON,
    )
    assert trajectory.ending is Ending.ENV_TIMEOUT and (tmp_path / "cleaned").exists()


def test_what_a_program_leaves_behind_is_ended_though_it_holds_the_outputs_and_has_sessions_of_its_own(play):
    trajectory = play(
        """
        import subprocess
        ask(QUESTION)
        for number in range(20):
            words = [sys.executable, "-c", "import time; time.sleep(1000)", __file__]
            subprocess.Popen(words, start_new_session=bool(number % 2))
            if os.fork() == 0:  # a child that has children
                os.setsid()
                os.fork()
                time.sleep(1000)
        print(0.5, flush=True)
        os._exit(0)
        """
    )
    assert trajectory.ending is Ending.COMPLETED and trajectory.reward == 0.5, trajectory.error


def test_processes_that_start_others_without_end_are_ended(play):
    trajectory = play(
        """
        ask(QUESTION)
        if os.fork() == 0:
            while True:  # each lives for a moment only, and its child goes on
                if os.fork():
                    os._exit(0)
        if os.fork() == 0:
            for _ in range(200):
                if os.fork() == 0:
                    time.sleep(1000)
            time.sleep(1000)
        time.sleep(0.2)
        print(0.5)
        """
    )
    assert trajectory.ending is Ending.COMPLETED and trajectory.reward == 0.5, trajectory.error


def test_output_without_end_ends_the_program_and_most_of_it_is_not_kept(play):
    endless = play("ask(QUESTION)\nwhile True: sys.stdout.write('so it goes ' * 10_000)")
    assert endless.ending is Ending.ENV_ERROR and len(endless.error) < 1100
    assert "the program wrote more than 64 MiB; its last words: " in endless.error and "so it goes" in endless.error
    much = play("ask(QUESTION); sys.stderr.write('x' * 30_000_000); print('y' * 30_000_000); print(0.5)")
    assert much.ending is Ending.COMPLETED and much.reward == 0.5, much.error
    odd = play("ask(QUESTION); os.write(1, bytes(range(256)) * 9 + b'\\n0.5'); os.close(1); os.close(2)")
    assert odd.ending is Ending.COMPLETED and odd.reward == 0.5, odd.error


def test_a_program_that_ends_its_guard_is_an_ending(play):
    killed = play("ask(QUESTION); os.kill(os.getppid(), 9); time.sleep(1000)")
    assert killed.ending is Ending.ENV_ERROR and "guards the program was killed" in killed.error


def test_a_program_that_stops_its_guard_is_ended(play, monkeypatch):
    monkeypatch.setattr(agent_program, "END_S", 0.2)
    stopped = play(f"ask(QUESTION); os.kill(os.getppid(), {signal.SIGSTOP:d}); time.sleep(1000)", limits=SOON)
    assert stopped.ending is Ending.ENV_TIMEOUT, stopped.error


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_an_actor_that_ends_or_is_killed_leaves_no_program_behind(tmp_path, number):
    begun, program = tmp_path / "begun", tmp_path / "program.sh"
    program.write_text(f"#!/bin/sh\n{sys.executable} -c 'import time; time.sleep(1000)' {program} &\n"
                       f"echo $$ $! > {begun}\nwait\n")  # fmt: skip
    program.chmod(0o700)

    async def main(learner):
        with actor_process(learner, "--rollout.command", str(program)) as actor:
            await give(learner, one_ticket("t"))
            await until_async(lambda: begun.exists() and begun.read_text().count(" "))
            pids = [int(word) for word in begun.read_text().split()]
            assert all(map(is_there, pids))
            actor.send_signal(number)
            await until_async(lambda: not any(map(is_there, pids)) and not mine(program))

    with_learner(main)()


def test_an_episode_that_is_cancelled_ends_its_program(renderer, threads, tmp_path, files):
    program, begun = tmp_path / "program.py", tmp_path / "begun"
    program.write_text(ASK + f"open({str(begun)!r}, 'w').close(); time.sleep(1000)")

    async def main():
        endpoint = AgentEndpoint(results=PostedResults())
        words = Program.of(f"{sys.executable} {program}")
        player = Player(
            lambda _: None, renderer, EnginePool([Scripted([])]), QUICK, threads, AgentReward(None), agent=words,
            endpoint=endpoint,
        )  # fmt: skip
        task = asyncio.create_task(player.play(ticket()))
        await until_async(begun.exists)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await endpoint.close()

    asyncio.run(main())
    until(lambda: not mine(tmp_path))


# ---------------------------------------------------------------------- what is told before


def test_a_command_that_cannot_be_run_is_told_in_one_line(tmp_path):
    script = tmp_path / "agent.sh"
    script.write_text("#!/bin/sh\n")
    with pytest.raises(ValueError, match=r"'no-such-agent --fast': there is no program no-such-agent; install it"):
        Program.of("no-such-agent --fast")
    with pytest.raises(ValueError, match=r"agent\.sh cannot be executed; chmod \+x"):
        Program.of(str(script))
    script.chmod(0o700)
    assert Program.of(f"{script} 'two words'").words == (str(script), "two words")


def test_a_script_in_the_working_folder_needs_no_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.sh").write_text("#!/bin/sh\n")
    (tmp_path / "agent.sh").chmod(0o700)
    assert Program.of("agent.sh").words == (str(tmp_path / "agent.sh"),)


def test_a_file_that_is_no_program_is_an_ending(renderer, threads, tmp_path, files):
    (tmp_path / "agent").write_text("no program\n")
    (tmp_path / "agent").chmod(0o700)
    program = Program.of(str(tmp_path / "agent"))
    trajectory, _ = play_agent(renderer, threads, program, [], QUICK, None, AgentEndpoint(results=PostedResults()))
    assert trajectory.ending is Ending.ENV_ERROR
    assert "the program cannot be started: Exec format error" in trajectory.error
