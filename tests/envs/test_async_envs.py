"""Environments whose functions are coroutines: checked, played and shown as plain ones are."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from envs import check, play, show
from envs.base import Env
from envs.check import check_env
from envs.env_calls import CallHung, call_within, close_env, make_env, play_a_turn, reset_env, reward_of, step_env
from tests.support.machine import until

GUESS = '''
"""Say the number. Every function is a coroutine, and all of them need the loop of the first."""
import asyncio
from random import Random

SYSTEM_PROMPT = "Say the number."

async def build_env(sample=None, args=None, **_):
    await asyncio.sleep(0)
    return Guess(Random(sample.metadata["seed"]).randrange(1000))

async def episode_reward(env):
    return await env.ask(env.said == env.number)

class Guess:
    def __init__(self, number):
        self.number, self.said, self.questions = number, None, asyncio.Queue()
        self.server = asyncio.create_task(self.serve())
    async def serve(self):
        while True:
            value, answer = await self.questions.get()
            answer.set_result(float(value))
    async def ask(self, value):
        answer = asyncio.get_running_loop().create_future()
        await self.questions.put((value, answer))
        return await answer
    async def reset(self):
        return {"text": f"It is {await self.ask(self.number):g}."}, {}
    async def step(self, response_text):
        self.said = int(response_text) if response_text.isdecimal() else None
        right = await self.ask(self.said == self.number)
        return {}, True, {"reward": right, "metrics": {"success": right}}
    async def format_observation(self, observation):
        await asyncio.sleep(0)
        return {"role": "user", "content": observation["text"]}
    async def close(self):
        self.server.cancel()
        await asyncio.gather(self.server, return_exceptions=True)
'''


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "guess.py").write_text(GUESS)
    return str(tmp_path / "guess.py")


def test_coroutines_are_checked_played_and_shown(path, tmp_path, capsys, monkeypatch):
    assert check.main([path]) == 0
    monkeypatch.setattr("builtins.input", lambda _: "864")
    assert play.main([path]) == 0
    assert "It is 864." in capsys.readouterr().out
    assert show.main([path, "--out", str(tmp_path / "episode.png")]) == 0


class Loops(Env):
    """Notes the loop of each call, and leaves a task to it."""

    def __init__(self) -> None:
        self.loops: list[Any] = []
        self.task: Any = None

    async def reset(self):  # type: ignore[override]
        self.loops.append(asyncio.get_running_loop())
        self.task = asyncio.create_task(asyncio.sleep(1000))
        return {"obs_str": "begin"}, {}

    async def step(self, response_text):  # type: ignore[override]
        self.loops.append(asyncio.get_running_loop())
        assert not self.task.done()
        return {"obs_str": "go on"}, False, {"reward": 1.0}

    async def close(self):  # type: ignore[override]
        self.loops.append(asyncio.get_running_loop())


async def of(env: Loops) -> float:
    env.loops.append(asyncio.get_running_loop())
    return 2.0


def test_all_calls_of_an_environment_run_on_one_loop_that_ends_with_it():
    env, other = Loops(), Loops()
    for each in (env, other):
        reset_env(each)
        step_env(each, "a")
    assert reward_of(of, env) == 2.0
    close_env(env)
    (loop,) = set(env.loops)
    assert len(env.loops) == 4 and loop not in other.loops
    until(loop.is_closed)
    assert env.task.cancelled()
    assert not other.loops[0].is_closed()
    close_env(other)


def test_a_builder_that_fails_leaves_no_loop():
    loops = []

    async def build() -> None:
        loops.append(asyncio.get_running_loop())
        raise ValueError("no board")

    with pytest.raises(ValueError, match="no board"):
        make_env(build)
    until(loops[0].is_closed)


def test_what_an_await_never_gives_is_cancelled_when_its_time_is_over():
    ended = threading.Event()

    class Waits(Env):
        def reset(self):
            return {"obs_str": "begin"}, {}

        async def step(self, response_text):  # type: ignore[override]
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

    with pytest.raises(CallHung, match="a first turn did not return"):
        call_within(0.1, "a first turn", lambda: play_a_turn(Waits))
    assert ended.wait(60)


@pytest.mark.parametrize(
    ("step", "words"),
    [
        ("raise KeyError('x')", "step raised KeyError: 'x' (guess.py:"),
        ("raise SystemExit(3)", "step raised UserCodeExit: SystemExit 3 (guess.py:"),
        ("raise KeyboardInterrupt", "step raised UserCodeExit: KeyboardInterrupt (guess.py:"),
        ("raise asyncio.CancelledError", "step raised UserCodeExit: CancelledError (guess.py:"),
        ("await asyncio.sleep(1000)", "step did not return within 1 s"),
    ],
)
def test_what_a_coroutine_raises_is_a_problem_in_one_line_with_its_place(tmp_path, step, words):
    path = tmp_path / "guess.py"
    path.write_text(GUESS.replace("        self.said = int", f"        {step}\n        self.said = int"))
    (problem,) = check_env(str(path), limit_s=1.0).problems
    assert problem.startswith(words)


@pytest.mark.slow
def test_a_hanging_thread_of_a_coroutine_does_not_keep_the_process(tmp_path):
    source = GUESS.replace(
        "        self.said = int", "        await asyncio.to_thread(__import__('time').sleep, 1000)\n#"
    )
    (tmp_path / "guess.py").write_text(source)
    command = [sys.executable, "-m", "envs.check", str(tmp_path / "guess.py"), "--limit", "0.5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (1, "problem: step did not return within 0.5 s\n"), done.stderr
