"""Environments and rewards in processes of their own: what they do there ends their episode, and nothing else.

All with real processes; the user's code is tests/data/user_code/hostile.py.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from random import Random

import numpy as np
import pytest
from PIL import Image

from actor.engine_pool import EnginePool
from actor.isolation import process_messages, processes
from actor.isolation.fork_server import ForkConfig
from actor.isolation.process_messages import (
    MAX_INFO_BYTES,
    pack_plain,
    pack_played,
    pack_with_info,
    unpack,
    unpack_plain,
)
from actor.isolation.processes import RemoteEnv, UserProcesses
from actor.rollout import Player
from actor.worker import make_player, user_processes
from envs.base import Played
from envs.sokoban import random_response
from shared.config.recipe import Recipe
from shared.rgb_images import as_png
from shared.types import Ending, Sample, Trajectory
from tests.support.actor_rig import Learner, actor_process, give
from tests.support.machine import is_there, until
from tests.support.rollout_rig import SYSTEM, Scripted, renderer, ticket

__all__ = ["renderer"]  # a fixture
pytestmark = pytest.mark.slow

HOSTILE = "tests/data/user_code/hostile.py"
APART = {"isolation": "process", "memory_mb": 512, "timeout_s": 60.0}
SOON = {**APART, "timeout_s": 2.0}


def recipe(env: dict | None = None, **sections: dict) -> Recipe:
    values = {"model": {"path": "m"}, "env": {"module": HOSTILE, **(APART if env is None else env)}}
    return Recipe.model_validate(values | sections)


class Stage:
    """Plays episodes of a recipe with scripted answers."""

    def __init__(self, renderer, recipe: Recipe) -> None:
        self.processes = user_processes(recipe)
        self.renderer, self.recipe = renderer, recipe

    def player(self, answers: tuple[str, ...] = ("up", "end")) -> Player:
        engines = EnginePool([Scripted(answers)])
        return make_player(self.recipe, self.renderer, engines, processes=self.processes)

    def play(self, answers: tuple[str, ...] = ("up", "end"), **metadata: object) -> Trajectory:
        sample = Sample("s", (SYSTEM,), metadata=metadata)
        return asyncio.run(self.player(answers).play(ticket(sample=sample)))

    def close(self) -> None:
        if self.processes is not None:
            self.processes.close()


@pytest.fixture(scope="module")
def stage(renderer) -> Iterator[Stage]:
    with closing(Stage(renderer, recipe())) as made:
        yield made


@pytest.fixture
def hasty(renderer) -> Iterator[Stage]:
    with closing(Stage(renderer, recipe(SOON))) as made:
        yield made


def test_an_info_that_is_no_plain_data_is_named_by_its_type_and_the_episode_goes_on(stage: Stage) -> None:
    trajectory = stage.play(do="tells too much")
    assert trajectory.trainable and '"secret":"(NoPlainData)"' in trajectory.notes[0].info


@pytest.mark.parametrize(
    ("what", "ending", "words"),
    [
        ("eats", Ending.ENV_ERROR, "MemoryError: more memory than env.memory_mb = 512 in step"),
        ("aborts", Ending.ENV_ERROR, "ProcessEnded: its process was ended by SIGABRT in step"),
        ("segfaults", Ending.ENV_ERROR, "ProcessEnded: its process was ended by SIGSEGV in step"),
        ("exits", Ending.ENV_ERROR, "ProcessEnded: its process ended with exit code"),
        ("interrupts", Ending.ENV_ERROR, "KeyboardInterrupt (tests/data/user_code/hostile.py:"),
        ("raises", Ending.ENV_ERROR, "KeyError: 'board' (tests/data/user_code/hostile.py:"),
        ("cannot be built", Ending.ENV_ERROR, "OSError: no board"),
        ("nan reward", Ending.REWARD_ERROR, "nan"),
    ],
)
def test_whatever_an_environment_does_ends_its_episode_alone(stage: Stage, what, ending, words) -> None:
    bystander = RemoteEnv(stage.processes, Sample("b"), 30.0)
    bystander.reset()
    trajectory = stage.play(do=what)
    assert trajectory.ending is ending
    assert words in trajectory.error
    assert not trajectory.trainable
    _, _, info = bystander.step("up")
    assert info["reward"] == 2.0
    bystander.close()
    assert stage.play().ending is Ending.COMPLETED


COROUTINES = """
import asyncio

async def build_env(sample=None, args=None, **_): return E(sample.metadata)
async def episode_reward(env): return await env.said

class E:
    def __init__(self, metadata):
        self.do, self.said = metadata.get("do"), asyncio.get_running_loop().create_future()
    async def reset(self):
        return {"obs_str": "begin"}, {}
    async def step(self, text):
        if self.do == "waits":
            await asyncio.Event().wait()
        if self.do == "raises":
            raise KeyError("board")
        self.said.set_result(7.0)
        return {}, True, {}
    async def close(self):
        await asyncio.sleep(0)
"""


def test_coroutines_are_played_in_a_process_with_the_same_endings(renderer, tmp_path: Path) -> None:
    path = tmp_path / "coroutines.py"
    path.write_text(COROUTINES)
    with closing(Stage(renderer, recipe({**SOON, "module": str(path)}))) as stage:
        for what in ("", "raises", "waits", ""):
            trajectory = stage.play(do=what)
            if what == "raises":
                assert trajectory.ending is Ending.ENV_ERROR
                assert "KeyError: 'board' (coroutines.py:16 in step)" in trajectory.error
            elif what == "waits":
                assert trajectory.error == "no return within 2 s; its process was ended"
            else:
                assert (trajectory.ending, trajectory.reward) == (Ending.COMPLETED, 7.0), trajectory.error


def test_what_a_model_may_write_into_a_tool_call_leaves_its_process(stage: Stage) -> None:
    info = {"tool_call": {"answer": 10**30, "list": (-(10**400), 2**63)}, "text": "\ud800x", "name": "ok"}
    told = {"tool_call": {"answer": 1e30, "list": [-sys.float_info.max, 2**63]}, "text": "?x", "name": "ok"}
    assert unpack_plain(pack_plain([True, info], "what step returned")) == [True, told]
    played = Played(Sample("a"), stage.play(), ("up",), (info,), env=None)
    assert unpack(pack_played(played), Played).infos == (told,)
    with pytest.raises(TypeError, match="what step returned cannot leave its process: object is no plain data"):
        pack_plain([10**30, object()], "what step returned")


@pytest.mark.parametrize("spelled", ["fine", "\ud800"])
@pytest.mark.parametrize("number", [1, 10**30])
def test_an_image_of_an_observation_is_encoded_once_and_leaves_its_process_as_a_file(monkeypatch, spelled, number):
    frames = []
    monkeypatch.setattr(process_messages, "as_png", lambda image: frames.append(as_png(image)) or frames[-1])
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (400, 400, 3), dtype=np.uint8))
    seen = {"image": noise, "text": "look"}
    info = {"text": spelled, "number": number, "frame": b"\xff" * 9, "no": object(), "large": "x" * 2**16}
    seen, left = unpack_plain(pack_with_info([seen], info, "what step returned"))
    assert seen == {"image": as_png(noise), "text": "look"} and len(frames) == 1 and len(frames[0]) > MAX_INFO_BYTES
    assert left["frame"] == info["frame"] and left["number"] == float(number) and left["no"] == "(object)"
    assert left["large"] == "(str of 65,541 bytes, kept in its process)"


@pytest.mark.parametrize("text", ["a", "\ud800"])
def test_an_image_beside_a_text_that_is_no_unicode_stays_a_file(text):
    image = Image.new("RGB", (8, 8))
    seen, info = unpack_plain(pack_with_info([{"image": image, "text": text}], {}, "the observation"))
    assert seen["image"] == as_png(image) and info == {}


def test_what_is_large_in_an_info_stays_in_its_process_and_all_else_leaves_it() -> None:
    info = {"reward": 1.0, "frame": np.zeros((480, 640), np.uint8), "many": [[] for _ in range(10**6)], "move": "up"}
    seen, over, left = unpack_plain(pack_with_info([{}, True], info, "what step returned"))
    assert (seen, over, left["reward"], left["move"]) == ({}, True, 1.0, "up")
    assert left["frame"] == "(ndarray of 308,643 bytes, kept in its process)"
    assert left["many"] == "(list of 1,000,005 bytes, kept in its process)"


@pytest.mark.parametrize("what", ["computes", "deaf"])
def test_an_environment_that_hangs_is_ended_in_time(hasty: Stage, what: str) -> None:
    trajectory = hasty.play(do=what)
    assert trajectory.ending is Ending.ENV_TIMEOUT
    assert trajectory.error == "no return within 2 s; its process was ended"
    assert not trajectory.trainable
    assert hasty.play().ending is Ending.COMPLETED


def test_a_process_that_is_ended_takes_what_it_started_with_it(hasty: Stage, tmp_path: Path) -> None:
    told = tmp_path / "pids"
    assert hasty.play(do="has a child", pids=str(told)).ending is Ending.ENV_TIMEOUT
    for pid in map(int, told.read_text().split()):
        until(lambda pid=pid: not is_there(pid))


def test_a_process_serves_one_episode_after_another_until_it_has_taken_much_memory(renderer) -> None:
    with closing(Stage(renderer, recipe())) as stage:

        def serving(**metadata: object) -> int:
            env = RemoteEnv(stage.processes, Sample("s", metadata=metadata), 30.0)
            env.reset()
            _, _, info = env.step("up")
            env.close()
            return info["pid"]

        first = serving()
        assert serving() == first
        assert serving(do="leaks") == first  # 176 of 512 MiB
        assert serving(do="leaks") == first
        second = serving()
        assert second != first
        assert not is_there(first)


def test_each_process_throws_dice_of_its_own(stage: Stage) -> None:
    envs = [RemoteEnv(stage.processes, Sample("s"), 30.0) for _ in range(3)]
    dice = set()
    for env in envs:
        env.reset()
        dice.add(env.step("up")[2]["dice"])
    for env in envs:
        env.close()
    assert len(dice) == 3


def test_an_episode_that_is_given_up_leaves_no_process(renderer) -> None:
    with closing(Stage(renderer, recipe())) as stage:
        env = RemoteEnv(stage.processes, Sample("s"), 30.0)
        env.reset()
        pid = env.step("up")[2]["pid"]
        del env
        until(lambda: not is_there(pid))
        assert stage.play().ending is Ending.COMPLETED
        assert not Path(f"/proc/{pid}").exists()  # its parent has collected it


def test_the_parent_of_the_processes_may_be_killed(renderer) -> None:
    with closing(Stage(renderer, recipe())) as stage:
        env = RemoteEnv(stage.processes, Sample("s"), 30.0)
        env.reset()
        pid = env.step("up")[2]["pid"]
        stage.processes._fork_server._process.kill()
        until(lambda: not is_there(pid))
        assert stage.play().ending is Ending.COMPLETED


def test_a_parent_that_cannot_be_started_again_at_once_is_tried_anew(renderer, monkeypatch) -> None:
    with closing(Stage(renderer, recipe())) as stage:
        stage.processes._fork_server._process.kill()
        with monkeypatch.context() as broken:
            broken.setattr(processes, "START_LIMIT_S", 1e-3)
            assert stage.play().ending is Ending.ENV_ERROR
            assert stage.play().ending is Ending.ENV_ERROR
        assert stage.play().ending is Ending.COMPLETED


def test_a_parent_that_answers_too_late_is_asked_nothing_more(renderer) -> None:
    with closing(Stage(renderer, recipe())) as stage:
        parent, process = stage.processes._fork_server, stage.processes.lease()
        parent._control.settimeout(0.2)
        os.kill(parent._process.pid, signal.SIGSTOP)
        assert stage.processes.end(process) == "ended with its parent"
        os.kill(parent._process.pid, signal.SIGCONT)
        with pytest.raises(EOFError):
            parent.fork()
        assert stage.play().ending is Ending.COMPLETED


@pytest.mark.parametrize("env", [{**APART}, {}], ids=["with the environment", "alone"])
@pytest.mark.parametrize(
    ("path", "what", "ending", "words"),
    [
        ("reward", "", Ending.COMPLETED, ""),
        ("later", "", Ending.COMPLETED, ""),
        ("reward", "deaf", Ending.REWARD_TIMEOUT, "no return within 2 s"),
        ("later", "raises", Ending.REWARD_ERROR, "KeyError: 'board' (tests/data/user_code/hostile.py:"),
        ("later", "aborts", Ending.REWARD_ERROR, "ended by SIGABRT in reward"),
    ],
)
def test_a_reward_that_hangs_or_crashes_is_no_reward(renderer, env, path, what, ending, words) -> None:
    apart = {"isolation": "process", "timeout_s": 2.0 if what == "deaf" else 60.0}
    with closing(Stage(renderer, recipe(env | {"reward": f"{HOSTILE}:{path}"}, reward=apart))) as stage:
        trajectory = stage.play(reward=what)
        assert trajectory.ending is ending
        assert words in trajectory.error
        assert trajectory.trainable == (not what)
        if not what:
            assert trajectory.reward == (20.0 if env else 2.0)  # the environment itself is seen where it is
            assert [turn.reward for turn in trajectory.turns] == [0.0, trajectory.reward]
        assert stage.play().ending is Ending.COMPLETED


def test_a_reward_in_a_thread_is_told_that_the_environment_is_elsewhere(renderer) -> None:
    with closing(Stage(renderer, recipe({**APART, "reward": f"{HOSTILE}:reward"}))) as stage:
        trajectory = stage.play()
    assert trajectory.ending is Ending.REWARD_ERROR
    assert "'heard' of an environment that runs in a process of its own; set reward.isolation" in trajectory.error


@pytest.mark.parametrize("mode", ["vision", "text"])
def test_sokoban_is_the_same_in_both_modes(renderer, mode: str) -> None:
    answers = [random_response(Random(seed)) for seed in range(8)]
    args = {"render_mode": mode, "pixels_per_cell": 32, "progress_reward": 0.1, "diagnostics": True}

    def played(isolation: str) -> list[Trajectory]:
        env = {"module": "envs.sokoban", "isolation": isolation, "args": args, "max_tokens": 4000}
        with closing(Stage(renderer, recipe(env, model={"path": "m", "max_context": 8000}))) as stage:
            return [stage.play(tuple(answers), seed=seed) for seed in range(3)]

    def told(trajectory: Trajectory) -> tuple:
        metrics = {name: value for name, value in trajectory.metrics.items() if not name.endswith("_s")}
        values = {name: getattr(trajectory, name) for name in trajectory.__struct_fields__}
        arrays = [values.pop(name).tolist() for name in list(values) if hasattr(values[name], "tolist")]
        infos = [note.info for note in trajectory.notes]  # without their times
        return arrays, values | {"metrics": metrics, "notes": infos, "started": 0.0}

    here, there = played("thread"), played("process")
    assert [told(trajectory) for trajectory in here] == [told(trajectory) for trajectory in there]
    assert all(trajectory.trainable and len(trajectory.turns) > 1 for trajectory in here)
    assert all(bool(trajectory.images) == (mode == "vision") for trajectory in here)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("x = 1\n", "has no function build_env"),
        ("import nothing_of_this_name\n", "imports 'nothing_of_this_name', which is not installed"),
        ("import os; os.abort()\n", "was ended by SIGABRT at its import"),
    ],
)
def test_a_broken_module_is_the_users_mistake_in_one_line(tmp_path: Path, source: str, words: str) -> None:
    (tmp_path / "own.py").write_text(source)
    with pytest.raises(ValueError, match=words):
        UserProcesses(ForkConfig(env=str(tmp_path / "own.py")))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rollout": {"path": "own.py:play"}}, "a rollout function plays in the actor itself"),
        ({"reward": {"isolation": "process"}}, "reward.isolation = 'process' without env.reward"),
    ],
)
def test_there_must_be_something_to_isolate(changes: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        recipe(**changes)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_when_the_actor_ends(tmp_path: Path, number: signal.Signals) -> None:
    """A real actor process, whose environment hangs and has a child."""
    told = tmp_path / "pids"
    hanging = ticket(sample=Sample("s", (SYSTEM,), metadata={"reset": "has a child", "pids": str(told)}))
    settings = ("--env.module", HOSTILE, "--env.isolation", "process")
    with closing(Learner()) as learner, actor_process(learner, *settings) as process:
        asyncio.run(give(learner, hanging))
        until(told.exists, 60)
        pids = [*map(int, told.read_text().split())]
        assert all(map(is_there, pids))
        os.kill(process.pid, number)
        process.wait(30)
        until(lambda: not any(map(is_there, pids)))
