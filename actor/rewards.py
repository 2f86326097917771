"""Where an episode's reward comes from: the environment, a function named in the recipe, or a server elsewhere.

A reward raises TimeoutError when it takes too long and any other exception when it fails; the episode then ends with
that cause and is given no reward.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
from collections.abc import Awaitable, Callable
from typing import Any, Protocol
from urllib.parse import urlsplit

from actor.env_threads import EnvThreads
from envs.base import Played, flat_metrics
from shared.http_client import HttpFailure, JsonClient

RETRY_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
FIRST_PAUSE_S = 0.2


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
    threads of environments, an async one on a loop in a thread of its own."""

    replaces_turns = True

    def __init__(self, function: Callable[[Played], Any], threads: EnvThreads, timeout_s: float) -> None:
        self._function, self._threads, self._timeout_s = function, threads, timeout_s
        self._loop: asyncio.AbstractEventLoop | None = None
        if inspect.iscoroutinefunction(function):
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="reward", daemon=True).start()

    async def __call__(self, played: Played) -> float:
        if self._loop is None:
            return finite(await self._threads.run(lambda: self._function(played), self._timeout_s))
        running = asyncio.run_coroutine_threadsafe(self._function(played), self._loop)
        async with asyncio.timeout(self._timeout_s):
            return finite(await asyncio.wrap_future(running))


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
