"""Episodes played by the user's own rollout function (`rollout.path`), for cases that an environment cannot express."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from actor.engine_pool import EngineLease
from actor.env_threads import EnvThreads
from actor.episode import EpisodeLimits, Stream
from actor.render import Renderer
from envs.env_loops import contained
from shared.engine.engine_api import EngineError
from shared.types import Ending, Sample, Sampling, Trajectory
from shared.util.user_errors import TracebackLog, describe, text_of


@dataclass(frozen=True, slots=True)
class RolloutContext:
    """The argument of a rollout function. `engine.generate` continues a `Stream`, on another engine if one fails;
    `renderer` turns messages into tokens; `env_args` are the recipe's. Blocking code must run through `in_thread`."""

    sample: Sample
    sampling: Sampling
    seed: int
    engine: EngineLease
    renderer: Renderer
    limits: EpisodeLimits
    env_args: dict[str, Any]
    threads: EnvThreads

    async def in_thread(self, function: Callable[[], Any]) -> Any:
        """Run a function that blocks and return its result. Raise EnvTimeout after `limits.env_timeout_s`."""
        return await self.threads.run(function, self.limits.env_timeout_s)


Rollout = Callable[[RolloutContext], Awaitable[Trajectory]]


async def play_custom(rollout: Rollout, context: RolloutContext, tracebacks: TracebackLog) -> Trajectory:
    """Return the function's trajectory; a failure becomes the episode's ending, and its traceback is logged once."""
    timeout_s = context.limits.rollout_timeout_s
    ending = Ending.ENV_ERROR
    try:
        async with asyncio.timeout(timeout_s):
            trajectory = await contained(rollout(context))
        if isinstance(trajectory, Trajectory):
            return trajectory
        error = f"rollout returned {type(trajectory).__name__}, not a Trajectory (see Stream.trajectory)"
    except TimeoutError as late:
        ending, error = Ending.ENV_TIMEOUT, text_of(late) or f"rollout did not return within {timeout_s:g} s"
    except EngineError as failure:
        ending, error = Ending.ENGINE_ERROR, str(failure)
    except Exception as failure:  # noqa: BLE001 - an exception of the user's function ends only this episode
        tracebacks.add("the rollout function", failure)
        error = f"rollout: {describe(failure)}"
    return Stream().trajectory((), ending, error=error)
