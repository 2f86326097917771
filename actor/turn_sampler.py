"""The policy's turns of one episode, asked of its engine within the limits of turn, episode and context."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from actor.engine_pool import EngineLease
from actor.episode import EpisodeLimits, Stream, cache_key, episode_seed
from actor.render import Renderer
from shared.engine.engine_api import EngineError
from shared.types import Completion, Ending, Ticket
from shared.util.user_errors import describe


class EpisodeEnded(Exception):
    """Raised to end the episode."""

    def __init__(self, ending: Ending, error: str = "") -> None:
        super().__init__(error)
        self.ending, self.error = ending, error


class TurnPolicy(Protocol):
    """The policy of one episode. Its methods raise `EpisodeEnded` when the episode is over."""

    def shown(self, messages: Sequence[dict[str, Any]]) -> None:
        """Take in the messages that the environment shows next."""

    def most_tokens(self, stream: Stream, num_sampled: int) -> int: ...

    async def generate(self, stream: Stream, turn: int, most: int) -> Completion: ...

    def text(self, completion: Completion) -> str: ...

    def check_finish(self, completion: Completion, stream: Stream) -> None: ...


class TurnSampler:
    """Asks the engine of one episode for its turns. Its methods raise `EpisodeEnded` when the episode is over."""

    def __init__(
        self, lease: EngineLease, ticket: Ticket, index: int, renderer: Renderer, limits: EpisodeLimits
    ) -> None:
        self._lease, self._ticket, self._index = lease, ticket, index
        self._renderer, self._limits = renderer, limits

    def shown(self, messages: Sequence[dict[str, Any]]) -> None:
        """Do nothing: the engine reads the stream."""

    def most_tokens(self, stream: Stream, num_sampled: int) -> int:
        """Return how many tokens the next turn of the stream's last segment may have, if the episode has `num_sampled`
        of the policy's already."""
        room = self._limits.max_context - stream.num_expanded
        budget = self._limits.max_tokens - num_sampled
        if room < 1:
            raise EpisodeEnded(Ending.CONTEXT_FULL)
        if budget < 1:
            raise EpisodeEnded(Ending.OUT_OF_TOKENS)
        return min(room, budget, self._limits.turn_tokens, self._ticket.sampling.max_new_tokens)

    async def generate(self, stream: Stream, turn: int, most: int) -> Completion:
        """Return the policy's answer to what the stream's last segment shows, of `most` tokens at most. `turn` is its
        number in the episode, for the seed."""
        self._lease.cache_key = self._lease.cache_key or cache_key(self._ticket, self._lease.client.weights)
        try:
            completion = await self._lease.generate(
                stream.segment_ids,
                stream.segment_images,
                self._ticket.sampling,
                banned_ids=self._renderer.banned_ids,
                stop_ids=self._renderer.end_ids,
                max_new_tokens=most,
                seed=episode_seed(self._ticket, self._index, turn),
            )
        except EngineError as error:
            raise EpisodeEnded(Ending.ENGINE_ERROR, str(error)) from error
        if not set(completion.token_ids).isdisjoint(self._renderer.banned_ids):
            raise EpisodeEnded(Ending.ENGINE_ERROR, f"{self._lease.url} sampled a banned vision token")
        return completion

    def text(self, completion: Completion) -> str:
        """Return the answer's text."""
        try:
            return self._renderer.decode(completion.token_ids)
        except Exception as error:  # tokens that the tokenizer does not know
            words = f"{self._lease.url} sampled tokens that are no text: {describe(error)}"
            raise EpisodeEnded(Ending.ENGINE_ERROR, words) from error

    def check_finish(self, completion: Completion, stream: Stream) -> None:
        """Raise EpisodeEnded if the answer, which is the last in the stream, was cut off or aborted."""
        if not completion.token_ids and completion.finish_reason == "stop":
            raise EpisodeEnded(Ending.ENGINE_ERROR, f"{self._lease.url} answered without a token")
        if completion.finish_reason == "abort":
            raise EpisodeEnded(Ending.ABORTED, f"{self._lease.url} aborted the request")
        if completion.finish_reason == "length":
            full = stream.num_expanded >= self._limits.max_context
            raise EpisodeEnded(Ending.CONTEXT_FULL if full else Ending.OUT_OF_TOKENS)
