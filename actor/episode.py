"""The parts of an episode while it is played: its limits, its token stream, the times of its turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from actor.history import EVERYTHING, Window
from actor.render import Fragment
from shared.engine.engine_messages import weight_name
from shared.recordings.bounded_json import bounded_json
from shared.types import (
    INFO_CHARACTERS,
    Completion,
    Ending,
    Hint,
    Image,
    PolicyVersion,
    Ticket,
    Trajectory,
    Turn,
    TurnNote,
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """The limits of one episode. `max_tokens` and `turn_tokens` count sampled tokens, `max_context` all tokens with
    images expanded."""

    max_turns: int = 8
    max_tokens: int = 1536
    turn_tokens: int = 256
    max_context: int = 2048
    env_timeout_s: float = 30.0
    rollout_timeout_s: float = 600.0  # for the user's rollout function
    window: Window = EVERYTHING


def process_of(ticket: Ticket) -> str:
    """Return the learner process that has issued the ticket."""
    return ticket.id.rpartition("-")[2]


def cache_key(ticket: Ticket, held: tuple[PolicyVersion, str] = (-1, "")) -> str:
    """Return the key under which an engine shares its prefix cache with episodes of this ticket.
    The key contains the policy version and the learner process, since after a restart the same version number means
    other weights. If the engine has already sampled with later weights, `held`, the key is that of their version."""
    process = process_of(ticket)
    version = max(ticket.version, held[0]) if held[1] in ("", process) else ticket.version
    return f"version {version} of {process}"


def episode_seed(ticket: Ticket, index: int, turn: int) -> int | None:
    """Return a seed for one turn, different for each turn and episode of a ticket; None, which leaves the choice to the
    engine, if the ticket has no seed."""
    return (ticket.seed * 1_000_003 + index * 1009 + turn) % 2**31 if ticket.seed else None


class Stream:
    """The compact stream of an episode as it grows. All lists of tokens have the same length.

    An episode may be of several segments, which the model reads each by itself: `segment_ids` and `segment_images` are
    those of the last one, and so is `num_expanded`, which counts every image's visual tokens. `all_expanded` counts
    those of all segments.
    """

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.mask: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.images: list[Image] = []
        self.weights: set[str] = set()  # full names of the weights that sampled
        self.num_expanded = self.all_expanded = 0
        self.num_sampled = 0
        self.hints: list[Hint] = []
        self.segments: list[int] = []  # where the second and later ones begin
        self._first_image = 0

    @classmethod
    def of_segments(cls, segments: Sequence[Stream]) -> Stream:
        """Return the stream of an episode whose segments are these, each of them a stream of its own."""
        whole = cls()
        for part in segments:
            whole.begin_segment()
            whole._append(part)
            whole.images += part.images
            whole.weights |= part.weights
            whole.num_expanded = part.num_expanded
            whole.all_expanded += part.all_expanded
            whole.num_sampled += part.num_sampled
        return whole

    def copy(self) -> Stream:
        """Return a stream that grows by itself from here."""
        other = Stream.of_segments([self])
        other.segments, other._first_image = [*self.segments], self._first_image
        other.hints = [*self.hints]
        return other

    def _append(self, part: Stream) -> None:
        self.token_ids += part.token_ids
        self.mask += part.mask
        self.logprobs += part.logprobs
        self.versions += part.versions

    @property
    def segment_ids(self) -> list[int]:
        return self.token_ids[self.segments[-1] :] if self.segments else self.token_ids

    @property
    def segment_images(self) -> list[Image]:
        return self.images[self._first_image :]

    def begin_segment(self) -> None:
        """Begin another segment with what is observed next: its whole prompt. An empty segment is gone on with."""
        if self.segment_ids:
            self.segments.append(len(self.token_ids))
            self._first_image = len(self.images)
            self.num_expanded = 0

    def observe(self, fragment: Fragment) -> None:
        """Append tokens that no policy sampled."""
        count = len(fragment.token_ids)
        if fragment.hint_ids:
            self.hints.append(Hint(len(self.token_ids) + count - fragment.hint_back, fragment.hint_ids))
        self.token_ids += fragment.token_ids
        self.mask += [0] * count
        self.logprobs += [0.0] * count
        self.versions += [-1] * count
        self.images += fragment.images
        self.num_expanded += fragment.num_expanded
        self.all_expanded += fragment.num_expanded

    def sample(self, completion: Completion) -> None:
        """Append the sampled tokens, exactly as the engine returned them."""
        count = len(completion.token_ids)
        self.token_ids += completion.token_ids
        self.mask += [1] * count
        self.logprobs += completion.logprobs
        for span in completion.spans:
            self.versions += [span.version] * (span.end - span.start)
            if span.process:
                self.weights.add(weight_name(span.version, span.process))
        self.num_expanded += count
        self.all_expanded += count
        self.num_sampled += count

    def trajectory(
        self,
        turns: Sequence[Turn],
        ending: Ending,
        *,
        reward: float = 0.0,
        metrics: Mapping[str, float] | None = None,
        text: str = "",
        error: str = "",
    ) -> Trajectory:
        """Return the episode's record."""
        return Trajectory(
            token_ids=np.asarray(self.token_ids, dtype=np.int32),
            loss_mask=np.asarray(self.mask, dtype=np.uint8),
            behaviour_logprobs=np.asarray(self.logprobs, dtype=np.float32),
            policy_versions=np.asarray(self.versions, dtype=np.int32),
            turns=tuple(turns),
            reward=float(reward),
            images=tuple(self.images),
            ending=ending,
            metrics=dict(metrics or {}),
            text=text,
            error=error,
            weights=tuple(sorted(self.weights)),
            segments=tuple(self.segments),
            hints=tuple(self.hints),
        )


class TurnTimings:
    """Measures where the time of an episode goes, beginning now. All times are of this process's clock."""

    def __init__(self) -> None:
        self.started = max(0.0, time.time())  # a clock before 1970 is wrong, and no reason to lose the episode
        self._began = time.monotonic()
        self._request = (0.0, 0.0)  # start and duration of the last request to the engine
        self._turns: list[list[float]] = []  # begin, generation, waiting, environment
        self._entered = 0.0  # when a thread started the environment's call

    def record_answer(self, asked: float, answered: float) -> None:
        """Record when an engine was asked and when it answered, by the monotonic clock. Call `record_turn` next if the
        answer has any token."""
        self._request = (asked - self._began, answered - asked)

    def record_turn(self) -> None:
        """Begin a turn with the last recorded answer. A turn without a request to an engine (a replayed one) begins
        now."""
        begin, took = self._request if any(self._request) else (time.monotonic() - self._began, 0.0)
        self._turns.append([begin, took, 0.0, 0.0])
        self._request = (0.0, 0.0)

    def timed(self, function: Callable[[], T]) -> Callable[[], T]:
        """Wrap the function so that it records when a thread starts it."""
        self._entered = 0.0

        def run() -> T:
            self._entered = time.monotonic()
            return function()

        return run

    def record_call(self, asked: float, returned: float) -> float:
        """Add the times of a call of the environment, made through `timed`, to the turn before it. Return when a thread
        has started it."""
        entered = self._entered or returned
        if self._turns:
            self._turns[-1][2] += entered - asked
            self._turns[-1][3] += returned - entered
        return entered

    def notes(self, infos: Sequence[Any]) -> tuple[TurnNote, ...]:
        """Return a note for each turn. `infos` are the environment's reports about the turns; those of the last turns
        may be missing."""
        texts = [bounded_json(info, INFO_CHARACTERS) for info in infos[: len(self._turns)]]
        texts += [""] * (len(self._turns) - len(texts))
        rows = zip(self._turns, texts, strict=True)
        return tuple(TurnNote(begin, generate, wait, env, info) for (begin, generate, wait, env), info in rows)
