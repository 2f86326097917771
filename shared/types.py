"""The vocabulary: every record that crosses a process boundary, and nothing else.

Shape suffixes: T = tokens of one episode's compact stream (one placeholder per image).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
import xxhash

PolicyVersion = int
"""Number of weight publications that the policy has seen; -1 marks a token that no policy sampled."""


class Ending(StrEnum):
    """Why an episode stopped. Everything but the first four is a failure, and is never trained on."""

    COMPLETED = "completed"  # the environment said done
    MAX_TURNS = "max_turns"  # the turn limit was reached
    OUT_OF_TOKENS = "out_of_tokens"  # the model's token budget ran out (or one turn hit its length limit)
    CONTEXT_FULL = "context_full"  # the next observation or turn does not fit in the context
    ABORTED = "aborted"  # the engine aborted the request
    ENGINE_ERROR = "engine_error"  # the engine's answer was missing, late or invalid
    ENV_ERROR = "env_error"  # the environment raised, or returned the wrong type
    ENV_TIMEOUT = "env_timeout"  # the environment took longer than its time limit
    REWARD_ERROR = "reward_error"  # the reward function raised, or returned no finite number
    REWARD_TIMEOUT = "reward_timeout"  # the reward function took longer than its time limit
    WIRE_ERROR = "wire_error"  # the episode breaks the wire's contract or its limits


TRAINABLE_ENDINGS = frozenset({Ending.COMPLETED, Ending.MAX_TURNS, Ending.OUT_OF_TOKENS, Ending.CONTEXT_FULL})


@dataclass(frozen=True, slots=True)
class Image:
    """One image, as the very bytes the engine was given (an encoded file such as PNG); received large ones are
    read-only views, equal to their bytes."""

    data: bytes | memoryview
    content_hash: str = ""  # XXH3 (128 bits) of `data`, 32 hex digits

    @staticmethod
    def of(data: bytes | memoryview) -> Image:
        return Image(data, xxhash.xxh3_128_hexdigest(data))


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt: from a dataset row or from a seed. `build_env` reads only `label` and `metadata`.

    `prompt` holds chat messages that come before the environment's first observation (usually a system message);
    `images` the images that the prompt's messages refer to, in order.
    """

    id: str
    prompt: tuple[dict[str, Any], ...] = ()
    images: tuple[Image, ...] = ()
    label: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the engine samples. `max_new_tokens` is the limit of one turn; `top_k` -1 means no limit."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_new_tokens: int = 256


@dataclass(frozen=True, slots=True)
class Ticket:
    """The learner's permission to play one group of episodes of one sample."""

    id: str
    sample: Sample
    group_size: int
    version: PolicyVersion  # the version at which the ticket was issued
    sampling: Sampling
    lease_s: float
    evaluation: str = ""  # "" = training; otherwise the name of the evaluation it belongs to
    seed: int = 0


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens [start, end) of one completion were sampled by `version`."""

    version: PolicyVersion
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Completion:
    """One engine answer: `token_ids` and `logprobs` (float, <= 0) have the same length; `spans` cover them."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[VersionSpan, ...]
    finish_reason: str  # "stop" | "length" | "abort"


@dataclass(frozen=True, slots=True)
class Turn:
    """Tokens [start, end) of the compact stream were written by the model; `reward` arrives at the end of it."""

    start: int
    end: int
    reward: float


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """One episode. All arrays have length T; `token_ids` holds one image placeholder per image, in order."""

    token_ids: np.ndarray  # int32 [T]
    loss_mask: np.ndarray  # uint8 [T], 1 = sampled by the policy
    behaviour_logprobs: np.ndarray  # float32 [T], 0 where the mask is 0
    policy_versions: np.ndarray  # int32 [T], -1 where the mask is 0
    turns: tuple[Turn, ...]
    reward: float  # of the whole episode
    images: tuple[Image, ...]
    ending: Ending
    metrics: dict[str, float] = field(default_factory=dict)
    text: str = ""  # the readable transcript, for logs
    error: str = ""  # the reason, when the ending is a failure

    @property
    def trainable(self) -> bool:
        return self.ending in TRAINABLE_ENDINGS and bool(self.turns)


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """A ticket's trajectories, all of one sample."""

    ticket_id: str
    actor: str
    trajectories: tuple[Trajectory, ...]
    played_s: float = 0.0


# ------------------------------------------------------------------ messages, actor -> learner


@dataclass(frozen=True, slots=True)
class Hello:
    """An actor introduces itself and the engines it uses; repeated as a heartbeat, with the held tickets."""

    actor: str
    engine_urls: tuple[str, ...]
    vocab_size: int
    held: tuple[str, ...] = ()  # ids of tickets being played or waiting for acknowledgment
    idle_frac: float = 0.0  # share of the last interval in which no episode was running


@dataclass(frozen=True, slots=True)
class Request:
    """An actor plays `slots` groups at once; the learner fills the places that are free."""

    slots: int


@dataclass(frozen=True, slots=True)
class Bye:
    """An actor leaves; its open tickets may be issued again at once."""

    reason: str


# ------------------------------------------------------------------ messages, learner -> actor


@dataclass(frozen=True, slots=True)
class Welcome:
    """The learner knows the actor. `run_id` is new with each run, `process_id` also with each restart of a run."""

    run_id: str
    version: PolicyVersion
    process_id: str


@dataclass(frozen=True, slots=True)
class Tickets:
    tickets: tuple[Ticket, ...]


@dataclass(frozen=True, slots=True)
class Receipt:
    """The groups of these tickets came and are taken; to be kept until their Ack."""

    ticket_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Refusal:
    """The group of `ticket_id` came and is of no use; to be forgotten."""

    ticket_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Ack:
    """The groups of these tickets are trained and in the ledger (or their evaluation has them): to be forgotten."""

    ticket_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Cancel:
    """These tickets are void; an actor stops playing them and discards what it holds of them."""

    ticket_ids: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Stop:
    """The run is over; `failed` tells the actors to end with an error."""

    reason: str
    failed: bool = False
