"""Where an episode's reward comes from: the environment, a function named in the recipe, or a server elsewhere.

A reward raises TimeoutError when it takes too long and any other exception when it fails; the episode then ends with
that cause and is given no reward.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable
from typing import Any, Protocol
from urllib.parse import urlsplit

from actor.env_threads import EnvThreads, of_user
from actor.isolation.processes import GRACE_S, RemoteEnv, Session, UserProcesses
from actor.isolation.wire import pack_played, unpack_plain
from envs.base import Played, flat_metrics
from shared.guards.threads import start_thread
from shared.http_client import HttpFailure, JsonClient

RETRY_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
FIRST_PAUSE_S = 0.2
TURN_LIMIT_S = 1.0  # within which an event loop takes a turn


class Reward(Protocol):
    """`replaces_turns`: its reward comes at the last turn, and the environment's turn rewards are not trained on."""

    replaces_turns: bool

    def __call__(self, played: Played) -> Awaitable[float]: ...


class EnvReward:
    """The environment's own `episode_reward(env)`. It runs in the threads of the environments."""

    replaces_turns = False

    def __init__(self, function: Callable[[Any], float], threads: EnvThreads, timeout_s: float) -> None:
        self._function, self._threads, self._timeout_s = function, threads, timeout_s

    async def __call__(self, played: Played) -> float:
        return finite(await self._threads.run(lambda: self._function(played.env), self._timeout_s))


class FunctionReward:
    """A function `(played) -> float`, or an async one. It runs off the actor's event loop either way: a function in the
    threads of environments, an async one on a loop in a thread of its own. Should one of them block that loop beyond
    its limit, the others go on in a new one."""

    replaces_turns = True

    def __init__(self, function: Callable[[Played], Any], threads: EnvThreads, timeout_s: float) -> None:
        self._function, self._threads, self._timeout_s = function, threads, timeout_s
        self._loop = own_loop() if inspect.iscoroutinefunction(function) else None

    async def __call__(self, played: Played) -> float:
        if self._loop is None:
            return finite(await self._threads.run(lambda: self._function(played), self._timeout_s))
        loop = self._loop
        running = asyncio.run_coroutine_threadsafe(of_user(self._function(played)), loop)
        try:
            async with asyncio.timeout(self._timeout_s):
                return finite(await asyncio.wrap_future(running))
        except TimeoutError:
            if self._loop is loop and not await answers(loop) and self._loop is loop:
                self._threads.lose()
                self._loop = own_loop()
                asyncio.run_coroutine_threadsafe(retire(self._threads), loop)
            raise


def own_loop() -> asyncio.AbstractEventLoop:
    """An event loop that runs in a new thread."""
    loop = asyncio.new_event_loop()
    start_thread(loop.run_forever)
    return loop


async def retire(threads: EnvThreads) -> None:
    """On a loop that was given up and goes on after all: lets it end what it has begun, and then itself."""
    threads.find()
    begun = asyncio.all_tasks() - {asyncio.current_task()}
    if begun:
        await asyncio.wait(begun)
    asyncio.get_running_loop().stop()


async def answers(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether the loop of another thread takes its turns."""
    turn = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop)
    done, _ = await asyncio.wait([asyncio.wrap_future(turn)], timeout=TURN_LIMIT_S)
    return bool(done)


class ProcessReward:
    """A function `(played) -> float`, or an async one, in a user process: that of the environment where it has one."""

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


class HttpReward:
    """Posts the episode as JSON (see `as_json`) to `url`, whose answer is a number or {"reward": number}.

    The request is sent up to `tries` times, each with a limit of `timeout_s`, while the server is busy, broken or
    silent.
    """

    replaces_turns = True

    def __init__(self, url: str, timeout_s: float, tries: int) -> None:
        query = urlsplit(url).query
        self._path = f"?{query}" if query else ""
        self._http, self._timeout_s, self._tries = JsonClient(url, connections=64), timeout_s, tries

    async def __call__(self, played: Played) -> float:
        body = as_json(played)
        for attempt in range(self._tries):
            try:
                answer = await self._http.request("POST", self._path, body, timeout_s=self._timeout_s)
                return finite(answer.get("reward") if isinstance(answer, dict) else answer)
            except HttpFailure as failure:
                last = attempt == self._tries - 1
                if failure.status and (last or failure.status not in RETRY_STATUS):
                    raise
                if last and failure.sent:
                    raise TimeoutError(f"{failure} ({self._tries} tries)") from failure
                if last:
                    raise
                await asyncio.sleep(FIRST_PAUSE_S * 2**attempt)
        raise AssertionError


def as_json(played: Played) -> dict[str, Any]:
    """The episode for a server: what was asked, what the model wrote, and what the environment said of each turn."""
    trajectory, sample = played.trajectory, played.sample
    return {
        "sample_id": sample.id,
        "label": sample.label,
        "metadata": sample.metadata,
        "answers": list(played.answers),
        "text": trajectory.text,
        "ending": trajectory.ending.value,
        "turn_rewards": [turn.reward for turn in trajectory.turns],
        "turn_metrics": [flat_metrics(info.get("metrics") or {}) for info in played.infos],
    }


class BadReward(ValueError):
    """A reward that is no finite number."""


def finite(value: Any) -> float:
    """`value` as a float; BadReward if it is none, or not finite."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise BadReward(f"the reward is {value!r}, not a finite number")
    return number
