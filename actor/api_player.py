"""Plays episodes with a model behind an API, as `Player` does with an engine."""

from __future__ import annotations

import logging

from msgspec.structs import replace

from actor.api_sampler import ApiModel, ApiRefused, ApiSampler
from actor.descriptions import describable
from actor.engine_pool import EnginePool
from actor.env_threads import EnvThreads
from actor.episode import EpisodeLimits, Stream
from actor.render import Renderer
from actor.rewards import Reward
from actor.rollout import BuildEnv, OpenEpisode, Player
from shared.types import Ending, Ticket, Trajectory
from shared.util.user_errors import describe

log = logging.getLogger("actor")
NO_LIMIT = 2**31 - 1  # of context and episode, which the recipe counts in the tokens of another model


class ApiPlayer(Player):
    """Plays episodes of tickets with `model`. An episode's metrics tell what its answers have taken."""

    def __init__(
        self,
        model: ApiModel,
        build_env: BuildEnv,
        renderer: Renderer,
        limits: EpisodeLimits,
        threads: EnvThreads,
        reward_function: Reward | None,
    ) -> None:
        limits = EpisodeLimits(
            limits.max_turns, NO_LIMIT, NO_LIMIT, NO_LIMIT, limits.env_timeout_s, window=limits.window
        )
        super().__init__(build_env, renderer, EnginePool([]), limits, threads, reward_function)
        self.model = model

    async def play(self, ticket: Ticket, index: int = 0) -> Trajectory:
        """Play episode `index` of the ticket's group. Raise ApiRefused if the server refuses such requests."""
        sampler = ApiSampler(self.model, ticket, index, self.renderer, self.limits)
        episode = OpenEpisode(self, sampler, ticket, index)
        try:
            trajectory = await episode.play()
        except ApiRefused:
            raise
        except Exception as error:  # as in Player.play
            log.exception("an episode of ticket %s broke off", ticket.id)
            return Stream().trajectory((), Ending.ENV_ERROR, error=describe(error))
        trajectory, left_out = describable(trajectory)
        usage = sampler.usage
        counted = {
            "api_requests": float(usage.requests),
            "api_retries": float(usage.retries),
            "prompt_tokens": float(usage.prompt_tokens),
            "answer_tokens": float(usage.answer_tokens),
            "metrics_left_out": float(len(left_out | episode.metrics.left_out)),
        }
        return replace(trajectory, metrics=trajectory.metrics | counted)
