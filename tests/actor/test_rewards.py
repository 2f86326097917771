"""Rewards as functions, near and far, and rollout functions: what they are given, and how their failures end."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from actor import rewards
from actor.engine_pool import EnginePool
from actor.episode import EpisodeLimits
from actor.rewards import FunctionReward, HttpReward
from actor.rollout import Player
from actor.worker import make_reward
from envs.loader import load_function
from shared.config.recipe import Recipe
from shared.engine.engine_api import EngineError
from shared.types import Ending, Sample, Trajectory
from tests.support.machine import LocalServer, QuietHandler, until_async
from tests.support.rollout_rig import SYSTEM, Counting, Scripted, completion, renderer, threads, ticket

__all__ = ["renderer", "threads"]  # fixtures

SAMPLE = Sample("row-7", ({"role": "system", "content": "Play."},), label="42", metadata={"row": 7})


def played(renderer, threads, reward_function=None, answers=("up", "end"), rollout=None, **limits) -> Trajectory:
    engines = EnginePool([Scripted(answers)])
    player = Player(Counting, renderer, engines, EpisodeLimits(**limits), threads, reward_function, rollout, {"a": 1})
    return asyncio.run(player.play(ticket(sample=SAMPLE)))


def test_a_function_sees_the_episode_and_its_reward_comes_at_the_last_turn(renderer, threads):
    seen = []

    def reward(played):
        seen.append(played)
        assert not played.env.closed
        return len(played.answers) + float(played.sample.label)

    trajectory = played(renderer, threads, FunctionReward(reward, threads, 5.0))
    (record,) = seen
    assert record.answers == ("up", "end")
    assert [info["reward"] for info in record.infos] == [2.0, 3.0]
    assert record.trajectory.ending is Ending.COMPLETED
    assert "Play." in record.trajectory.text
    assert record.env.heard == ["up", "end"]
    assert trajectory.reward == 44.0
    assert [turn.reward for turn in trajectory.turns] == [0.0, 44.0]


def test_an_answer_that_the_environment_did_not_see_has_no_info(renderer, threads):
    seen = []
    reward_function = FunctionReward(lambda played: seen.append(played) or 0.0, threads, 5.0)
    played(renderer, threads, reward_function, answers=["up", completion("half", reason="length")])
    assert (seen[0].answers, len(seen[0].infos)) == (("up", "half"), 1)


def test_an_async_function_that_blocks_does_not_hold_up_the_actors_loop(renderer, threads):
    async def reward(played):
        await asyncio.sleep(0.01)
        time.sleep(0.5)  # what it must not do
        return 1.5

    async def main():
        reward_function = FunctionReward(reward, threads, 5.0)
        player = Player(Counting, renderer, EnginePool([Scripted(["end"])]), EpisodeLimits(), threads, reward_function)
        game = asyncio.create_task(player.play(ticket()))
        beats = 0
        while not game.done():
            await asyncio.sleep(0.01)
            beats += 1
        return game.result(), beats

    trajectory, beats = asyncio.run(main())
    assert trajectory.reward == 1.5
    assert beats > 10


@pytest.mark.parametrize(
    ("result", "ending", "words"),
    [
        (KeyError("no label"), Ending.REWARD_ERROR, "KeyError: 'no label'"),
        (math.nan, Ending.REWARD_ERROR, "nan"),
        ("good", Ending.REWARD_ERROR, "'good'"),
        (None, Ending.REWARD_TIMEOUT, ""),
    ],
)
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_function_that_fails_is_the_episodes_ending(renderer, threads, kind, result, ending, words):
    def sync_reward(played):
        if result is None:
            time.sleep(1.0)
        if isinstance(result, Exception):
            raise result
        return result

    async def async_reward(played):
        if result is None:
            await asyncio.sleep(30)
        return sync_reward(played)

    reward = sync_reward if kind == "sync" else async_reward
    trajectory = played(renderer, threads, FunctionReward(reward, threads, 0.1))
    assert trajectory.ending is ending
    assert words in trajectory.error
    assert not trajectory.trainable


def test_an_async_function_that_blocks_its_loop_beyond_its_limit_costs_that_loop_and_no_other_reward(
    renderer, threads, monkeypatch
):
    release = threading.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    original = rewards.start_loop

    def start_loop():
        loops.append(original())
        return loops[-1]

    async def reward(played):
        if played.sample.label == "blocks":
            release.wait()
        return 1.5

    async def main():
        reward_function = FunctionReward(reward, threads, 1.0)

        async def play(label):
            engines = EnginePool([Scripted(["end"])])
            player = Player(Counting, renderer, engines, EpisodeLimits(), threads, reward_function)
            return await player.play(ticket(sample=Sample("s", (SYSTEM,), label=label)))

        assert (await play("blocks")).ending is Ending.REWARD_TIMEOUT
        assert threads.num_lost == 1
        assert (await play("fine")).reward == 1.5
        release.set()
        await until_async(lambda: threads.num_lost == 0 and [loop.is_running() for loop in loops] == [False, True])

    monkeypatch.setattr(rewards, "start_loop", start_loop)
    asyncio.run(main())


class Server(LocalServer):
    """A reward server whose next answers are given: (status, body), or seconds to be silent for."""

    def __init__(self, answers: list) -> None:
        self.bodies: list[dict] = []
        self.paths: list[str] = []
        outer, waiting = self, list(answers)

        class Handler(QuietHandler):
            def do_POST(self) -> None:
                outer.paths.append(self.path)
                outer.bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
                answer = waiting.pop(0) if waiting else (500, b"")
                if isinstance(answer, float):
                    time.sleep(answer)
                    answer = (200, b"0")
                self.reply(answer[1], answer[0])

        super().__init__(Handler)
        self.url += "/grade?key=1"


@pytest.fixture
def serve() -> Iterator:
    with ExitStack() as servers:
        yield lambda *answers: servers.enter_context(closing(Server(list(answers))))


def test_a_server_is_posted_the_episode_and_asked_again_when_it_is_busy(renderer, threads, serve):
    server = serve((503, b"later"), (200, b'{"reward": 0.25}'))
    trajectory = played(renderer, threads, HttpReward(server.url, 5.0))
    assert trajectory.reward == 0.25
    assert [turn.reward for turn in trajectory.turns] == [0.0, 0.25]
    assert len(server.bodies) == 2
    body = server.bodies[-1]
    assert (body["sample_id"], body["label"], body["metadata"]) == ("row-7", "42", {"row": 7})
    assert (body["answers"], body["ending"], body["turn_rewards"]) == (["up", "end"], "completed", [2.0, 3.0])
    assert body["turn_metrics"][0] == {"short": 1.0, "turns_heard": 1.0}
    assert server.paths[0] == "/grade?key=1"


@pytest.mark.parametrize(
    ("answers", "ending", "asked"),
    [
        ([(500, b"")] * 4, Ending.REWARD_ERROR, 3),
        ([(400, b"bad request")], Ending.REWARD_ERROR, 1),
        ([(200, b"high")], Ending.REWARD_ERROR, 1),
        ([(200, b'{"score": 1}')], Ending.REWARD_ERROR, 1),
        ([1.0] * 4, Ending.REWARD_TIMEOUT, 3),
    ],
)
def test_a_server_that_fails_is_the_episodes_ending_and_no_reward(renderer, threads, serve, answers, ending, asked):
    server = serve(*answers)
    trajectory = played(renderer, threads, HttpReward(server.url, 0.2))
    assert trajectory.ending is ending
    assert trajectory.error
    assert not trajectory.trainable
    assert len(server.bodies) == asked


def test_a_reward_that_is_closed_leaves_no_connection_behind(renderer, threads, serve, caplog):
    server = serve((200, b"1"), (200, b"1"))

    async def main() -> None:
        reward = HttpReward(server.url, 5.0)
        player = Player(Counting, renderer, EnginePool([Scripted(["end"])]), EpisodeLimits(), threads, reward)
        assert (await player.play(ticket(sample=SAMPLE))).reward == 1.0
        await reward.close()

    gc.collect()  # what other tests have left behind
    caplog.clear()
    asyncio.run(main())
    gc.collect()
    assert "Unclosed" not in caplog.text


def test_a_server_that_is_not_there_is_the_episodes_ending(renderer, threads, serve):
    server = serve()
    server.close()
    trajectory = played(renderer, threads, HttpReward(server.url, 1.0))
    assert trajectory.ending is Ending.REWARD_ERROR
    assert "cannot connect" in trajectory.error


def test_the_recipe_names_the_reward(threads, tmp_path: Path):
    (tmp_path / "own.py").write_text("async def reward(played):\n    return 1.0\n")
    base = {"model": {"path": "m"}, "env": {"module": "envs.colour"}}
    named = {**base, "env": {"module": "envs.colour", "reward": f"{tmp_path}/own.py:reward"}}
    remote = {**base, "reward": {"url": "https://host/grade"}}
    assert make_reward(Recipe.model_validate(base), threads) is None
    assert isinstance(make_reward(Recipe.model_validate(named), threads), FunctionReward)
    assert isinstance(make_reward(Recipe.model_validate(remote), threads), HttpReward)


ROLLOUT = '''
"""One question; the length of the answer is its reward."""
from actor.episode import Stream
from shared.types import Ending, Turn


async def rollout(context):
    stream = Stream()
    prompt = [*context.sample.prompt, {"role": "user", "content": "Say something."}]
    stream.observe(context.renderer.start(prompt, context.sample.images))
    start = len(stream.token_ids)
    completion = await context.engine.generate(
        stream.token_ids,
        stream.images,
        context.sampling,
        banned_ids=context.renderer.banned_ids,
        stop_ids=context.renderer.end_ids,
        max_new_tokens=context.limits.turn_tokens,
        seed=context.seed,
    )
    stream.sample(completion)
    text = context.renderer.decode(completion.token_ids)
    reward = await context.in_thread(lambda: float(len(text) + context.env_args["a"]))
    turn = Turn(start, len(stream.token_ids), reward)
    return stream.trajectory([turn], Ending.COMPLETED, reward=reward, text=text)
'''


def test_a_rollout_function_plays_the_episode_by_itself(renderer, threads, tmp_path: Path):
    (tmp_path / "own.py").write_text(ROLLOUT)
    rollout = load_function(f"{tmp_path}/own.py:rollout")
    trajectory = played(renderer, threads, answers=["hello"], rollout=rollout)
    assert trajectory.reward == 6.0
    assert trajectory.trainable
    assert trajectory.loss_mask.sum() == len(completion("hello").token_ids)


@pytest.mark.parametrize(
    ("result", "ending", "words"),
    [
        (ZeroDivisionError("oh"), Ending.ENV_ERROR, "ZeroDivisionError: oh"),
        (EngineError("http://e", "gone"), Ending.ENGINE_ERROR, "gone"),
        (1.0, Ending.ENV_ERROR, "returned float"),
        (None, Ending.ENV_TIMEOUT, "within 0.1 s"),
    ],
)
def test_a_rollout_function_that_fails_is_the_episodes_ending(renderer, threads, result, ending, words):
    async def rollout(context):
        if result is None:
            await asyncio.sleep(30)
        if isinstance(result, Exception):
            raise result
        return result

    trajectory = played(renderer, threads, rollout=rollout, rollout_timeout_s=0.1 if result is None else 60.0)
    assert trajectory.ending is ending
    assert words in trajectory.error
