"""Episodes by a rollout function of the user's own (`rollout.path`), for what an environment cannot express."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from actor.engine_pool import Seat
from actor.env_threads import EnvThreads, of_user
from actor.limits import EpisodeLimits
from actor.render import Renderer
from actor.stream import Stream
from shared.engine_api import EngineError
from shared.types import Ending, Sample, Sampling, Trajectory


@dataclass(frozen=True, slots=True)
class RolloutContext:
    """What a rollout function is given. `engine.generate` continues a `Stream` and outlives an engine, `renderer`
    makes tokens of messages, `env_args` are the recipe's; code that blocks must run through `in_thread`."""

    sample: Sample
    sampling: Sampling
    seed: int
    engine: Seat
    renderer: Renderer
    limits: EpisodeLimits
    env_args: dict[str, Any]
    threads: EnvThreads

    async def in_thread(self, function: Callable[[], Any]) -> Any:
        """The result of a function that blocks. EnvTimeout after `limits.env_timeout_s`."""
        return await self.threads.run(function, self.limits.env_timeout_s)


Rollout = Callable[[RolloutContext], Awaitable[Trajectory]]


async def play_custom(rollout: Rollout, context: RolloutContext) -> Trajectory:
    """The function's trajectory; a failure becomes the episode's ending."""
    timeout_s = context.limits.rollout_timeout_s
    ending = Ending.ENV_ERROR
    try:
        async with asyncio.timeout(timeout_s):
            trajectory = await of_user(rollout(context))
        if isinstance(trajectory, Trajectory) and isinstance(trajectory.metrics, dict):
            return trajectory
        what = "Trajectory without metrics" if isinstance(trajectory, Trajectory) else type(trajectory).__name__
        error = f"rollout returned {what}, not a Trajectory (see Stream.trajectory)"
    except TimeoutError as late:
        ending, error = Ending.ENV_TIMEOUT, str(late) or f"rollout did not return within {timeout_s:g} s"
    except EngineError as failure:
        ending, error = Ending.ENGINE_ERROR, str(failure)
    except Exception as failure:  # noqa: BLE001 - whatever the user's function raises ends this episode alone
        error = f"rollout: {type(failure).__name__}: {failure}"
    return Stream().trajectory((), ending, error=error)
