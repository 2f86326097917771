"""The vocabulary: every record that crosses a process boundary, with the bounds of its fields, and nothing else.

`shared.codec` holds every message against these types and bounds, when it is sent and when it is received.
Shape suffixes: T = tokens of one episode's compact stream (one placeholder per image).
"""

from __future__ import annotations

import hashlib
import sys
from enum import StrEnum
from typing import Annotated, Any, TypeVar

import numpy as np
import xxhash
from msgspec import Meta, Struct, field
from numpy.typing import NDArray

from shared.engines.urls import ENGINE_URL, ENGINES

Item = TypeVar("Item")
ITEMS = 2**16  # of one list or dict
INFO_CHARACTERS = 2**12  # of what an environment said of one turn
_INT31 = 2**31 - 1
Text = Annotated[str, Meta(max_length=2**22)]
Id = Annotated[str, Meta(max_length=2**8)]  # of a ticket or a process: the learner sends it back, many at once
Url = Annotated[str, Meta(max_length=2**11)]
EngineUrls = Annotated[tuple[Annotated[Url, Meta(pattern=ENGINE_URL)], ...], Meta(max_length=ENGINES)]
Many = Annotated[tuple[Item, ...], Meta(max_length=ITEMS)]
Natural = Annotated[int, Meta(ge=0, le=_INT31)]
Positive = Annotated[int, Meta(ge=1, le=_INT31)]
Finite = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
NonNegative = Annotated[float, Meta(ge=0, le=sys.float_info.max)]
Share = Annotated[float, Meta(ge=0, le=1)]
PolicyVersion = Natural
"""Number of weight publications that the policy has seen; -1 marks a token that no policy sampled."""
WeightName = Annotated[str, Meta(max_length=64)]
"""What published weights are called: their version and the learner process that published them, as in `6-1f0c9a2b`. A
restart undoes versions and uses their numbers again; of each process a number stands for one set of weights."""


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


IMAGE_NAME = "sha256:"  # the beginning of an image's name; hexadecimal digits follow


def image_name(data: bytes | memoryview) -> str:
    return IMAGE_NAME + hashlib.sha256(data).hexdigest()


class Image:
    """One image, as the very bytes the engine was given (an encoded file such as PNG); received large ones are
    read-only views, equal to their bytes. Never changed after it is made."""

    __slots__ = ("_name", "content_hash", "data")
    data: bytes | memoryview
    content_hash: str  # XXH3 (128 bits) of `data`, 32 hex digits: it tells damage, not forgery

    def __init__(self, data: bytes | memoryview, content_hash: str = "") -> None:
        self.data, self.content_hash = data, content_hash
        self._name = ""

    @property
    def name(self) -> str:
        """What engines call it: no two files have the same name, whoever makes them. Computed once."""
        self._name = self._name or image_name(self.data)
        return self._name

    @staticmethod
    def of(data: bytes | memoryview) -> Image:
        return Image(data, xxhash.xxh3_128_hexdigest(data))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Image) and (self.content_hash, self.data) == (other.content_hash, other.data)

    def __hash__(self) -> int:
        return hash((self.content_hash, self.data))

    def __repr__(self) -> str:
        return f"Image({len(self.data)} bytes, {self.content_hash!r})"


class Record(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A record that travels as a map of its fields."""


class Sample(Record, frozen=True):
    """One prompt: from a dataset row or from a seed. `build_env` reads only `label` and `metadata`.

    `prompt` holds chat messages that come before the environment's first observation (usually a system message);
    `images` the images that the prompt's messages refer to, in order.
    """

    id: Text
    prompt: Many[dict[str, Any]] = ()
    images: Many[Image] = ()
    label: Text | None = None
    metadata: dict[str, Any] = field(default_factory=dict)


class Sampling(Record, frozen=True):
    """How the engine samples. `max_new_tokens` is the limit of one turn; `top_k` -1 means no limit."""

    temperature: NonNegative = 1.0
    top_p: Share = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=_INT31)] = -1
    max_new_tokens: Positive = 256


class Ticket(Record, frozen=True):
    """The learner's permission to play one group of episodes of one sample."""

    id: Id
    sample: Sample
    group_size: Annotated[int, Meta(ge=1, le=2**16)]
    version: PolicyVersion  # the version at which the ticket was issued
    sampling: Sampling
    lease_s: NonNegative
    evaluation: Text = ""  # "" = training; otherwise the name of the evaluation it belongs to
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0


class VersionSpan(Record, frozen=True, array_like=True):
    """Tokens [start, end) of one completion were sampled by `version`, that of the learner process `process`; empty
    where the engine names none."""

    version: PolicyVersion
    start: int
    end: int
    process: str = ""


class Completion(Record, frozen=True):
    """One engine answer: `token_ids` and `logprobs` (float, <= 0) have the same length; `spans` cover them."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[VersionSpan, ...]
    finish_reason: str  # "stop" | "length" | "abort"


class Turn(Record, frozen=True, array_like=True):
    """Tokens [start, end) of the compact stream were written by the model; `reward` arrives at the end of it."""

    start: Natural
    end: Positive
    reward: Finite


class TurnNote(Record, frozen=True, array_like=True):
    """Where a turn's time went, in seconds, and what the environment's step said of its answer."""

    begin_s: NonNegative = 0.0  # after the episode's start, when the engine was asked
    generate_s: NonNegative = 0.0  # until its answer was there
    wait_s: NonNegative = 0.0  # for a free thread of the environment
    env_s: NonNegative = 0.0  # that the environment took
    info: Annotated[str, Meta(max_length=INFO_CHARACTERS)] = ""  # as bounded JSON


class Trajectory(Record, frozen=True, eq=False):
    """One episode. All arrays have length T; `token_ids` holds one image placeholder per image, in order."""

    token_ids: NDArray[np.int32]  # [T]
    loss_mask: NDArray[np.uint8]  # [T], 1 = sampled by the policy
    behaviour_logprobs: NDArray[np.float32]  # [T], 0 where the mask is 0
    policy_versions: NDArray[np.int32]  # [T], -1 where the mask is 0
    turns: Many[Turn]
    reward: Finite  # of the whole episode
    images: Many[Image]
    ending: Ending
    metrics: Annotated[dict[str, Finite], Meta(max_length=ITEMS)] = field(default_factory=dict)
    text: Text = ""  # the readable transcript, for logs
    error: Text = ""  # the reason, when the ending is a failure
    weights: Many[WeightName] = ()  # that sampled the tokens, by their full names, as far as the engine told them
    notes: Many[TurnNote] = ()  # of the turns; none where nobody took any
    started: NonNegative = 0.0  # seconds since 1970, by the actor's clock

    @property
    def trainable(self) -> bool:
        return self.ending in TRAINABLE_ENDINGS and bool(self.turns)


class Message(Record, frozen=True, tag_field="kind", tag=True):
    """A record that travels alone, with the name of its class as its `kind`."""


class Group(Message, frozen=True, eq=False, weakref=True):
    """A ticket's trajectories, all of one sample."""

    ticket_id: Id
    actor: Id
    trajectories: Many[Trajectory]
    played_s: NonNegative = 0.0


# ------------------------------------------------------------------ messages, actor -> learner


class Hello(Message, frozen=True):
    """An actor introduces itself and its own engines, which may be none; repeated as a heartbeat, with the held
    tickets."""

    actor: Id
    engine_urls: Many[Url]
    vocab_size: Positive
    held: Many[Id] = ()  # ids of tickets being played or waiting for acknowledgment
    idle_frac: Share = 0.0  # share of the last interval in which no episode was running


class Request(Message, frozen=True):
    """An actor plays `slots` groups at once; the learner fills the places that are free."""

    slots: Annotated[int, Meta(ge=0, le=2**16)]


class Bye(Message, frozen=True):
    """An actor leaves; its open tickets may be issued again at once."""

    reason: Text


# ------------------------------------------------------------------ messages, learner -> actor


class Welcome(Message, frozen=True):
    """The learner knows the actor. `run_id` is new with each run, `process_id` also with each restart of a run.
    `engines`: all engines of the run, for an actor that has none of its own; an engine that is gone is not named."""

    run_id: Id
    version: PolicyVersion
    process_id: Id
    engines: EngineUrls = ()


class Tickets(Message, frozen=True):
    tickets: Many[Ticket]


class Receipt(Message, frozen=True):
    """The groups of these tickets came and are taken; to be kept until their Ack."""

    ticket_ids: Many[Id]


class Refusal(Message, frozen=True):
    """The group of `ticket_id` came and is of no use; to be forgotten."""

    ticket_id: Id
    reason: Text


class Ack(Message, frozen=True):
    """The groups of these tickets are trained and in the ledger (or their evaluation has them): to be forgotten."""

    ticket_ids: Many[Id]


class Cancel(Message, frozen=True):
    """These tickets are void; an actor stops playing them and discards what it holds of them."""

    ticket_ids: Many[Id]
    reason: Text


class Stop(Message, frozen=True):
    """The run is over; `failed` tells the actors to end with an error."""

    reason: Text
    failed: bool = False
