"""What a user's environment, reward or rollout may do costs its own episode alone: exit, cancel, hang, be given up."""

from __future__ import annotations

import asyncio
import math
import sys
import threading
import time
from collections.abc import Callable
from concurrent import futures
from typing import Any

import pytest
from msgspec.structs import replace

from actor import render
from actor.engine_pool import EnginePool
from actor.env_threads import EnvCalls, EnvThreads, EnvTimeout, TooManyHang
from actor.episode import EpisodeLimits
from actor.rewards import FunctionReward
from actor.rollout import Player
from shared.types import Ending, Group
from shared.util.user_errors import UserCodeExit
from shared.wire.codec import decode, encode
from tests.support.rollout_rig import Counting, Scripted, completion, play, renderer, threads, ticket

__all__ = ["renderer", "threads"]  # fixtures


class Gated(EnvThreads):
    """One thread, and an event that its calls may wait for."""

    def __init__(self, **settings: int) -> None:
        super().__init__(1, **settings)
        self.begun, self.release = threading.Event(), threading.Event()

    def hang(self) -> None:
        self.begun.set()
        self.release.wait()


async def until(holds: Callable[[], object]) -> None:
    while not holds():
        await asyncio.sleep(0.001)


def run(main: Any) -> None:
    asyncio.run(asyncio.wait_for(main, 60))


def exits(_: object) -> float:
    sys.exit(2)


async def exits_later(_: object) -> float:
    sys.exit(2)


async def cancels(_: object) -> float:
    inner = asyncio.create_task(asyncio.sleep(60))
    inner.cancel()
    return await inner or 0.0


def cancels_in_a_loop(_: object) -> float:
    return asyncio.run(cancels(None))


@pytest.mark.parametrize(("step", "words"), [(exits, "SystemExit 2"), (cancels_in_a_loop, "CancelledError")])
def test_an_environment_that_exits_or_cancels_itself_is_its_episodes_ending(renderer, threads, step, words):
    class Leaving(Counting):
        def step(self, text):
            return step(text)

    trajectory, _ = play(renderer, threads, ["up"], env=Leaving)
    assert trajectory.ending is Ending.ENV_ERROR and words in trajectory.error


class StrangeMeta(type):
    @property
    def __name__(cls) -> str:
        raise RuntimeError("no name")


class StrangeClass(Exception):
    @property
    def __class__(self) -> Any:
        raise RuntimeError("no class")


class StrangeName(Exception, metaclass=StrangeMeta):
    pass


class StrangeFacts(Exception):
    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)


class Interrupting(Exception):
    def __str__(self) -> str:
        raise KeyboardInterrupt


STRANGE = [
    (StopIteration("over"), "StopIteration over"),
    (futures.CancelledError("off"), "CancelledError off"),
    (futures.InvalidStateError("odd"), "InvalidStateError odd"),
    (KeyboardInterrupt(), "KeyboardInterrupt"),
    (GeneratorExit("end"), "GeneratorExit end"),
    (BaseException("base"), "BaseException base"),
    (StrangeClass("v"), "StrangeClass: v"),
    (StrangeName("v"), "StrangeName: v"),
    (StrangeFacts("v"), "StrangeFacts: v"),
    (Interrupting(), "__str__ raised KeyboardInterrupt"),
    (ExceptionGroup("two", [ValueError("one"), ExceptionGroup("in", [TypeError("x")])]), "ValueError: one; TypeError"),
    (BaseExceptionGroup("two", [KeyboardInterrupt()]), "KeyboardInterrupt"),
    (ValueError("a\n\x1b[31mred\u202e"), "a [31mred"),
]


@pytest.mark.parametrize(("error", "words"), STRANGE, ids=[words for _, words in STRANGE])
def test_whatever_it_raises_is_named_with_its_place(renderer, threads, error, words):
    class Raising(Counting):
        def step(self, text):
            raise error

    began = time.monotonic()
    trajectory, _ = play(renderer, threads, ["up"], env=Raising)
    assert trajectory.ending is Ending.ENV_ERROR and time.monotonic() - began < 5
    assert words in trajectory.error and "test_user_code.py" in trajectory.error and trajectory.error.isprintable()


@pytest.mark.parametrize("function", [exits, exits_later, cancels, cancels_in_a_loop])
def test_so_is_a_reward(renderer, threads, function):
    async def main() -> None:
        reward = FunctionReward(function, threads, 30.0)
        player = Player(Counting, renderer, EnginePool([Scripted(["end"])]), EpisodeLimits(), threads, reward)
        trajectory = await player.play(ticket())
        assert trajectory.ending is Ending.REWARD_ERROR and trajectory.error.startswith("UserCodeExit: ")

    run(main())


@pytest.mark.parametrize("function", [exits_later, cancels])
def test_so_is_a_rollout(renderer, threads, function):
    async def main() -> None:
        engines, limits = EnginePool([Scripted([])]), EpisodeLimits()
        player = Player(Counting, renderer, engines, limits, threads, rollout=function)
        trajectory = await player.play(ticket())
        assert trajectory.ending is Ending.ENV_ERROR and "rollout: UserCodeExit: " in trajectory.error

    run(main())


def test_a_rollout_is_still_cancelled_with_its_ticket(renderer, threads):
    async def main() -> None:
        begun = asyncio.Event()

        async def waits(_: object) -> Any:
            begun.set()
            await asyncio.sleep(60)

        player = Player(Counting, renderer, EnginePool([Scripted([])]), EpisodeLimits(), threads, rollout=waits)
        playing = asyncio.create_task(player.play(ticket()))
        await begun.wait()
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing

    run(main())


def test_a_call_whose_waiter_is_cancelled_keeps_its_limit():
    async def main() -> None:
        pool = Gated()
        waiting = asyncio.create_task(pool.run(pool.hang, 0.2))
        await until(pool.begun.is_set)
        behind = asyncio.create_task(pool.run(lambda: pytest.fail("begun"), 0.2))  # in the queue
        await asyncio.sleep(0)
        for task in (waiting, behind):
            task.cancel()
        assert await pool.run(lambda: 7, 5.0) == 7  # by a thread in place of the one that hangs
        assert pool.num_lost == 1
        pool.release.set()
        await until(lambda: not pool.num_lost)
        pool.close()

    run(main())


def test_so_many_of_them_end_the_process_too():
    async def main() -> None:
        pool = Gated(max_lost=0)
        waiting = asyncio.create_task(pool.run(pool.hang, 0.05))
        await until(pool.begun.is_set)
        waiting.cancel()
        await until(lambda: pool.num_lost == 1)
        with pytest.raises(TooManyHang, match="1 calls"):
            await pool.run(lambda: 7, 5.0)
        pool.release.set()
        pool.close()

    run(main())


def test_what_would_end_a_thread_is_an_exception_for_the_waiter():
    async def main() -> None:
        pool = EnvThreads(1)
        with pytest.raises(UserCodeExit, match="SystemExit 2"):
            await pool.run(lambda: exits(None), 5.0)
        assert await pool.run(lambda: 7, 5.0) == 7
        pool.close()

    run(main())


# ---------------------------------------------------------------------- episodes that are given up


@pytest.mark.parametrize("where", ["step", "generate", "reward"])
def test_the_environment_of_a_cancelled_episode_is_closed_after_the_call_that_runs(renderer, where):
    async def main() -> None:
        pool, envs, found_closed = Gated(), [], []

        def hang_in(env):
            pool.hang()
            found_closed.append(env.closed)
            return 1.0

        class Slow(Counting):
            def step(self, text):
                if where == "step":
                    hang_in(self)
                return super().step(text)

        class Silent(Scripted):
            async def generate(self, *args, **settings):
                pool.begun.set()
                await asyncio.sleep(60)

        engines = EnginePool([Silent([]) if where == "generate" else Scripted(["end"])])
        reward = FunctionReward(lambda played: hang_in(played.env), pool, 5.0) if where == "reward" else None
        player = Player(lambda _: envs.append(Slow()) or envs[-1], renderer, engines, EpisodeLimits(), pool, reward)
        playing = asyncio.create_task(player.play(ticket()))
        await until(pool.begun.is_set)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        if where != "generate":
            assert not envs[0].closed
            pool.release.set()
        await until(lambda: envs[0].closed)
        assert found_closed == ([] if where == "generate" else [False])
        pool.close()

    run(main())


def test_an_episode_that_is_cancelled_while_it_waits_to_close_its_environment_closes_it_once(renderer):
    async def main() -> None:
        pool, closed = Gated(), []

        class Closed(Counting):
            def close(self):
                closed.append(pool.release.is_set())

        async def reward(_: object) -> float:
            pool.run_unwatched(pool.hang, 60.0)  # takes the only thread
            await until(pool.begun.is_set)
            return 1.0

        reward.replaces_turns = True
        player = Player(lambda _: Closed(), renderer, EnginePool([Scripted(["end"])]), EpisodeLimits(), pool, reward)
        playing = asyncio.create_task(player.play(ticket()))
        await until(pool.begun.is_set)
        await asyncio.sleep(0.01)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        pool.release.set()
        await until(lambda: closed)
        await pool.run(lambda: None, 5.0)
        assert closed == [True]
        pool.close()

    run(main())


def test_an_environment_that_is_built_too_late_is_closed(renderer):
    async def main() -> None:
        pool, envs = Gated(), []

        def build(_: object) -> Counting:
            pool.hang()
            envs.append(Counting())
            return envs[0]

        player = Player(build, renderer, EnginePool([Scripted([])]), EpisodeLimits(env_timeout_s=0.1), pool)
        assert (await player.play(ticket())).ending is Ending.ENV_TIMEOUT
        pool.release.set()
        await until(lambda: envs and envs[0].closed)
        pool.close()

    run(main())


def test_a_call_that_begins_after_the_episode_was_given_up_does_nothing():
    calls = EnvCalls(lambda: pytest.fail("closed"))
    call = calls.guarded(lambda: pytest.fail("called"))
    assert calls.give_up()
    with pytest.raises(EnvTimeout, match="given up"):
        call()


# ---------------------------------------------------------------------- texts


def test_long_texts_and_more_than_the_last_few_are_not_kept():
    made: list[str] = []
    encode = render.cached_if_short(lambda text: made.append(text) or text)
    long = "x" * (render.CACHED_CHARACTERS + 1)
    for text in ("a", "a", long, long):
        assert encode(text) == text
    assert made == ["a", long, long]
    for number in range(render.CACHED_TEXTS):
        encode(str(number))
    encode("a")
    assert made[-1] == "a"


@pytest.mark.parametrize(
    "changes",
    [{"metrics": None}, {"metrics": {"far": math.nan, "n": "3"}}, {"metrics": 3}, {"text": 3}, {"started": math.nan}],
)
def test_what_describes_a_rollouts_episode_does_not_cost_it(renderer, threads, changes):
    async def main() -> None:
        async def rollout(context: Any) -> Any:
            good, _ = await asyncio.to_thread(play, renderer, threads, ["end"])
            return replace(good, **changes)

        player = Player(Counting, renderer, EnginePool([Scripted([])]), EpisodeLimits(), threads, rollout=rollout)
        trajectory = await player.play(ticket())
        assert trajectory.trainable
        assert "far" not in trajectory.metrics
        assert decode(encode(Group("t", "a", (trajectory,)))).trajectories[0].trainable

    run(main())


class Bad(Exception):
    """An exception that cannot be told."""

    def __str__(self) -> str:
        return self.args[5]


def raises_bad(*_: object) -> Any:
    raise Bad


@pytest.mark.parametrize("method", ["reset", "step", "format_observation", "close"])
def test_an_exception_whose_text_raises_costs_its_episode_alone_and_is_told(renderer, threads, method: str) -> None:
    class Env(Counting):
        pass

    setattr(Env, method, raises_bad)
    trajectory, _ = play(renderer, threads, ["end"], env=Env)
    if method == "close":
        assert trajectory.ending is Ending.COMPLETED and trajectory.metrics["close_failed"] == 1.0
    else:
        assert trajectory.ending is Ending.ENV_ERROR
        assert trajectory.error.startswith(
            "Bad: (its message cannot be had: __str__ raised IndexError) (tests/actor/test_user_code"
        )


def test_an_error_names_the_frames_of_the_users_code_and_its_traceback_is_logged_once(
    renderer, threads, caplog: pytest.LogCaptureFixture
) -> None:
    class Env(Counting):
        def step(self, text: str) -> Any:
            return self.helper()

        def helper(self) -> Any:
            return 1 / 0

    player = Player(Env, renderer, EnginePool([Scripted(["a", "b", "c"])]), EpisodeLimits(), threads)
    errors = [asyncio.run(player.play(ticket())).error for _ in range(3)]
    assert len(set(errors)) == 1
    assert errors[0].startswith("ZeroDivisionError: division by zero (") and " in helper, called at " in errors[0]
    logged = [record.getMessage() for record in caplog.records if "Traceback" in record.getMessage()]
    assert len(logged) == 1 and "return 1 / 0" in logged[0]


def test_an_info_that_breaks_when_it_is_read_costs_its_episode_alone(renderer, threads) -> None:
    class Info(dict):
        def get(self, *_: object) -> Any:
            raise Bad

        def __iter__(self) -> Any:
            raise Bad

        items = keys = values = get

    class Env(Counting):
        def step(self, text: str) -> Any:
            observation, done, _ = super().step(text)
            return observation, done, Info(reward=1.0)

    trajectory, _ = play(renderer, threads, ["end"], env=Env)
    assert trajectory.ending is Ending.ENV_ERROR and trajectory.error.startswith("Bad: ")


@pytest.mark.parametrize("metrics", [{"far": math.nan}, {"far": "3"}, {"far": 10**400}, [math.nan], "far", math.nan])
def test_a_metric_that_is_no_number_does_not_cost_the_episode_and_is_named(renderer, threads, caplog, metrics):
    class Describing(Counting):
        def step(self, text):
            observation, done, info = super().step(text)
            return observation, done, {**info, "metrics": metrics}

    trajectory, _ = play(renderer, threads, ["end"], env=Describing)
    assert trajectory.trainable and trajectory.metrics["metrics_left_out"] == 1.0
    assert decode(encode(Group("t", "a", (trajectory,)))).trajectories[0].trainable
    assert (
        "was no number in 100 %" in caplog.text
        or "was not finite in 100 %" in caplog.text
        or "unreadable" in caplog.text
    )


@pytest.mark.parametrize("reward", ["0.5", "\u0661", None, math.nan])
def test_a_reward_that_is_no_number_ends_its_episode_with_words_that_show_it(renderer, threads, reward):
    class Paying(Counting):
        def step(self, text):
            observation, done, info = super().step(text)
            return observation, done, {**info, "reward": reward}

    trajectory, _ = play(renderer, threads, ["end"], env=Paying)
    assert trajectory.ending is Ending.REWARD_ERROR and f"the reward is {reward!r} (" in trajectory.error


def test_what_an_environment_reports_at_the_start_counts_for_an_episode_that_is_cut_off(renderer, threads):
    class Telling(Counting):
        def reset(self):
            observation, _ = super().reset()
            return observation, {"metrics": {"success": 0.0, "answered": False}}

    trajectory, _ = play(renderer, threads, [completion("up", reason="length")], env=Telling)
    assert trajectory.ending is Ending.OUT_OF_TOKENS
    assert {name: trajectory.metrics[name] for name in ("success", "answered")} == {"success": 0.0, "answered": 0.0}
