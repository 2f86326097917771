"""The sources of an episode's reward: the environment, a function named in the recipe, or a server.

A reward raises TimeoutError when it takes too long and any other exception when it fails; the episode then ends for
that reason and gets no reward.
"""

from __future__ import annotations

import asyncio
import base64
import inspect
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

from msgspec.structs import replace

from actor.env_threads import EnvThreads, EnvTimeout
from actor.isolation.process_messages import pack_played, unpack_plain
from actor.isolation.processes import GRACE_S, RemoteEnv, Session, UserProcesses
from envs.base import Played, flat_metrics
from envs.env_calls import number_of, reward_of
from envs.env_loops import contained
from shared.engine.http_client import HttpFailure, JsonClient
from shared.types import Ending, Image, Trajectory
from shared.util.http_status import RETRY_STATUS
from shared.util.threads import start_thread
from shared.util.user_errors import TracebackLog, describe, in_words, text_of

Answer = TypeVar("Answer")
FIRST_PAUSE_S = 0.2
TRIES = 3  # requests to the reward server before the episode counts as failed
RESPONSE_LIMIT_S = 1.0  # a healthy event loop runs a callback within this time


@dataclass(frozen=True, slots=True)
class Graded:
    """An episode's reward with one for each of its turns, and metrics of the grading."""

    reward: float
    turns: tuple[float, ...]
    metrics: dict[str, float]


class Reward(Protocol):
    """Computes an episode's reward. With `replaces_turns` this reward is given at the last turn, and the environment's
    turn rewards are not trained on."""

    replaces_turns: bool

    def __call__(self, played: Played) -> Awaitable[float | Graded]: ...

    async def close(self) -> None:
        """Free what the reward holds; nothing is computed any more."""
        return


class EnvReward(Reward):
    """The environment's own `episode_reward(env)`. It runs in the environments' threads."""

    replaces_turns = False

    def __init__(self, function: Callable[[Any], float], threads: EnvThreads, timeout_s: float) -> None:
        self._function, self._threads, self._timeout_s = function, threads, timeout_s

    async def __call__(self, played: Played) -> float:
        return finite(await self._threads.run(lambda: reward_of(self._function, played.env), self._timeout_s))


class FunctionReward(Reward):
    """A function `(played) -> float`, or an async one. Neither runs on the actor's event loop: a plain function runs in
    the environments' threads, an async one on its own loop in another thread. If a call blocks that loop beyond its
    limit, later calls get a new loop."""

    replaces_turns = True

    def __init__(self, function: Callable[[Played], Any], threads: EnvThreads, timeout_s: float) -> None:
        self._function, self._threads, self._timeout_s = function, threads, timeout_s
        self._loop = start_loop() if inspect.iscoroutinefunction(function) else None

    async def __call__(self, played: Played) -> float:
        if self._loop is None:
            return finite(await self._threads.run(lambda: self._function(played), self._timeout_s))
        loop = self._loop
        running = asyncio.run_coroutine_threadsafe(contained(self._function(played)), loop)
        try:
            async with asyncio.timeout(self._timeout_s):
                return finite(await asyncio.wrap_future(running))
        except TimeoutError:
            if self._loop is loop and not await is_responsive(loop) and self._loop is loop:
                self._threads.count_lost()
                self._loop = start_loop()
                asyncio.run_coroutine_threadsafe(retire(self._threads), loop)
            raise


def start_loop() -> asyncio.AbstractEventLoop:
    """Start an event loop in a new thread and return it."""
    loop = asyncio.new_event_loop()
    start_thread(loop.run_forever)
    return loop


async def retire(threads: EnvThreads) -> None:
    """Stop the loop that this runs on when its tasks have ended. For a loop that was given up as blocked, and has
    continued after all."""
    threads.count_returned()
    begun = asyncio.all_tasks() - {asyncio.current_task()}
    if begun:
        await asyncio.wait(begun)
    asyncio.get_running_loop().stop()


async def is_responsive(loop: asyncio.AbstractEventLoop) -> bool:
    """Tell whether the loop of another thread still runs callbacks."""
    turn = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop)
    done, _ = await asyncio.wait([asyncio.wrap_future(turn)], timeout=RESPONSE_LIMIT_S)
    return bool(done)


class ProcessReward(Reward):
    """A function `(played) -> float`, or an async one, in a user process: the environment's own process if it has
    one."""

    replaces_turns = True

    def __init__(self, processes: UserProcesses, threads: EnvThreads, timeout_s: float) -> None:
        self._processes, self._threads, self._timeout_s = processes, threads, timeout_s

    async def __call__(self, played: Played) -> float:
        return finite(await self._threads.run(lambda: self._reward(played), self._timeout_s + GRACE_S))

    def _reward(self, played: Played) -> Any:
        session = played.env if isinstance(played.env, RemoteEnv) else Session(self._processes, self._timeout_s)
        try:
            return unpack_plain(session.call("reward", pack_played(played), self._timeout_s))
        finally:
            if session is not played.env:
                session.close()


class HttpReward(Reward):
    """Posts the episode as JSON (see `as_json`) to `url`, whose answer is a number or {"reward": number}. `send`: what
    it gets besides, "observations" and "images".

    The request is sent up to `TRIES` times, each with a limit of `timeout_s`, while the server is busy, broken or
    silent.
    """

    replaces_turns = True

    def __init__(self, url: str, timeout_s: float, send: Collection[str] = ()) -> None:
        query = urlsplit(url).query
        self._path = f"?{query}" if query else ""
        self._http, self._timeout_s, self._send = JsonClient(url, connections=64), timeout_s, send

    async def __call__(self, played: Played) -> float:
        body = as_json(played, self._send)

        async def ask() -> float:
            answer = await self._http.request("POST", self._path, body, timeout_s=self._timeout_s)
            return finite(answer.get("reward") if isinstance(answer, dict) else answer)

        return await answered(ask, TRIES, lambda attempt, _: FIRST_PAUSE_S * 2**attempt)

    async def close(self) -> None:
        await self._http.close()


async def answered(
    ask: Callable[[], Awaitable[Answer]], tries: int, pause_s: Callable[[int, HttpFailure], float | None]
) -> Answer:
    """Return what a server answers that is asked again while it is busy, broken or silent, `tries` times at most.
    `pause_s`(attempt, failure) is how long to wait before the next attempt; None: not at all.

    Raise TimeoutError if the last attempt brought no answer, otherwise the HttpFailure.
    """
    for attempt in range(tries):
        try:
            return await ask()
        except HttpFailure as failure:
            last = attempt == tries - 1
            if failure.status and (last or failure.status not in RETRY_STATUS):
                raise
            if last and failure.sent:
                raise TimeoutError(f"{failure} ({tries} tries)") from failure
            pause = None if last else pause_s(attempt, failure)
            if pause is None:
                raise
            await asyncio.sleep(pause)
    raise AssertionError


def as_json(played: Played, send: Collection[str] = ()) -> dict[str, Any]:
    """Return the episode for a reward server: the sample, the model's answers, and what the environment reported about
    each turn; with the parts that `send` names."""
    trajectory, sample = played.trajectory, played.sample
    parts: dict[str, Any] = {}
    if "observations" in send:
        parts["observations"] = [list(messages) for messages in played.observations]
    if "images" in send:
        parts["images"] = [image_uri(image) for image in played.images]
    return parts | {
        "sample_id": sample.id,
        "label": sample.label,
        "metadata": sample.metadata,
        "answers": list(played.answers),
        "text": trajectory.text,
        "ending": trajectory.ending.value,
        "turn_rewards": [turn.reward for turn in trajectory.turns],
        "turn_metrics": [flat_metrics(info.get("metrics") or {}) for info in played.infos],
    }


def image_uri(image: Image) -> str:
    """Return an image of an episode, a PNG, as a data URI."""
    return f"data:image/png;base64,{base64.b64encode(image.data).decode()}"


async def rewarded(trajectory: Trajectory, played: Played, reward: Reward, tracebacks: TracebackLog) -> Trajectory:
    """Return the trajectory with its reward; a failure of the reward becomes the ending, and its traceback is logged
    once."""
    began = time.monotonic()
    try:
        graded = await reward(played)
    except (EnvTimeout, TimeoutError) as error:
        return replace(trajectory, ending=Ending.REWARD_TIMEOUT, error=text_of(error) or "the reward took too long")
    except Exception as error:  # noqa: BLE001 - whatever the user's function raises ends this episode alone
        tracebacks.add("a reward function", error)
        return replace(trajectory, ending=Ending.REWARD_ERROR, error=describe(error))
    metrics = trajectory.metrics | {"reward_s": time.monotonic() - began}
    turns = trajectory.turns
    if isinstance(graded, Graded):
        rewards = graded.turns
        turns = tuple(replace(turn, reward=reward) for turn, reward in zip(turns, rewards, strict=True))
        return replace(trajectory, reward=graded.reward, metrics=metrics | graded.metrics, turns=turns)
    if reward.replaces_turns:
        turns = (*(replace(turn, reward=0.0) for turn in turns[:-1]), replace(turns[-1], reward=graded))
    return replace(trajectory, reward=graded, metrics=metrics, turns=turns)


class BadReward(ValueError):
    """The reward is not a finite number."""


def number_or_turns(value: Any) -> float | tuple[float, ...]:
    """Return an episode's reward, one number, or those of its turns, a list. Raise BadReward if that is not finite."""
    return tuple(map(finite, value)) if isinstance(value, list | tuple) else finite(value)


def finite(value: Any) -> float:
    """Return `value` as a float. Raise BadReward if it is not a finite number; a text is none, whatever it says."""
    number = number_of(value)
    if isinstance(number, str):
        raise BadReward(f"the reward is {in_words(value, 100)} ({type(value).__name__}), not a finite number")
    return number
