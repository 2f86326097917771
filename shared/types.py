"""The vocabulary: every record that crosses a process boundary, with the bounds of its fields, and nothing else.

`shared.wire.codec` holds every message against these types and bounds, when it is sent and when it is received.
Shape suffixes: T = tokens of one episode's compact stream (one placeholder per image).
"""

from __future__ import annotations

import hashlib
import sys
from enum import StrEnum
from itertools import pairwise
from typing import Annotated, Any, TypeVar

import numpy as np
import xxhash
from msgspec import Meta, Struct, field
from numpy.typing import NDArray

from shared.engine_urls import ENGINE_URL, MAX_ENGINES

Item = TypeVar("Item")
ITEMS = 2**16  # items of one list or dict
SPANS_BYTES = 2**20  # of a group's spans on the wire
INFO_CHARACTERS = 2**12  # length limit of what an environment reports about one turn
_INT31 = 2**31 - 1
TEXT_CHARACTERS = 2**22  # length limit of a text
Text = Annotated[str, Meta(max_length=TEXT_CHARACTERS)]
# The id of a ticket or a process. It is short because the learner sends many of them back in one message.
Id = Annotated[str, Meta(max_length=2**8)]
Url = Annotated[str, Meta(max_length=2**11)]
EngineUrls = Annotated[tuple[Annotated[Url, Meta(pattern=ENGINE_URL)], ...], Meta(max_length=MAX_ENGINES)]
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
    """Why an episode stopped. All but the first four are failures, which are never trained on."""

    COMPLETED = "completed"  # the environment reported the end of the episode
    MAX_TURNS = "max_turns"  # the turn limit was reached
    OUT_OF_TOKENS = "out_of_tokens"  # the model's token budget ran out (or one turn hit its length limit)
    CONTEXT_FULL = "context_full"  # the next observation or turn does not fit in the context
    ABORTED = "aborted"  # the engine aborted the request
    ENGINE_ERROR = "engine_error"  # the engine's answer was missing, late or invalid
    ENV_ERROR = "env_error"  # the environment raised, or returned the wrong type
    ENV_TIMEOUT = "env_timeout"  # the environment took longer than its time limit
    REWARD_ERROR = "reward_error"  # the reward function raised, or returned no finite number
    REWARD_TIMEOUT = "reward_timeout"  # the reward function took longer than its time limit
    AGENT_GONE = "agent_gone"  # no agent elsewhere took the episode, or its agent let the lease run out
    WIRE_ERROR = "wire_error"  # the episode breaks the wire's contract or its limits


TRAINABLE_ENDINGS = frozenset({Ending.COMPLETED, Ending.MAX_TURNS, Ending.OUT_OF_TOKENS, Ending.CONTEXT_FULL})


CUT_OFF = frozenset({Ending.OUT_OF_TOKENS, Ending.CONTEXT_FULL})
"""Endings of episodes that a token limit has cut off."""


IMAGE_NAME = "sha256:"  # the beginning of an image's name; hexadecimal digits follow


def image_name(data: bytes | memoryview) -> str:
    return IMAGE_NAME + hashlib.sha256(data).hexdigest()


class Image:
    """One image: the exact bytes that the engine was given (an encoded file such as PNG). The data of a large received
    image is a read-only view, equal to its bytes. An image never changes after it is made."""

    __slots__ = ("_name", "content_hash", "data")
    data: bytes | memoryview
    content_hash: str  # XXH3 (128 bits) of `data`, 32 hex digits: it detects damage, not forgery

    def __init__(self, data: bytes | memoryview, content_hash: str = "") -> None:
        self.data, self.content_hash = data, content_hash
        self._name = ""

    @property
    def name(self) -> str:
        """The name by which engines know the image: the SHA-256 of the file, so that no two files share a name, not
        even ones made to do so. Computed once."""
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
    """One prompt: from a dataset row or from a seed. `build_env` may read all of it.

    `prompt` holds chat messages that come before the environment's first observation (usually a system message);
    `images` the images that the prompt's messages refer to, in order; `tools` the schemas of the tools that the model
    may call, for the chat template. `task`: the name of its task, "" in a run of one; `held_out`: the set that it
    belongs to if there are several held-out sets.
    """

    id: Text
    prompt: Many[dict[str, Any]] = ()
    images: Many[Image] = ()
    label: Text | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    tools: Many[dict[str, Any]] = ()
    task: Id = ""
    held_out: Id = ""


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
    version: PolicyVersion  # the policy version when the ticket was issued
    sampling: Sampling
    lease_s: NonNegative
    evaluation: Text = ""  # "" = training; otherwise the name of the evaluation it belongs to
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    traced: bool = False  # the group is to bring its spans


class VersionSpan(Record, frozen=True, array_like=True):
    """Tokens [start, end) of one completion, and what sampled them: the policy `version` that the learner process
    `process` published. `process` is empty where the engine names none."""

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
    state: Annotated[str, Meta(max_length=64)] = ""  # key of the environment's state before the turn; "" = not known


class TurnNote(Record, frozen=True, array_like=True):
    """Where the time of a turn went, in seconds, and what the environment reported about the turn's answer."""

    begin_s: NonNegative = 0.0  # when the request to the engine began, counted from the start of the episode
    generate_s: NonNegative = 0.0  # from the request until the engine's answer
    wait_s: NonNegative = 0.0  # wait for a free thread of the environment
    env_s: NonNegative = 0.0  # time in the environment
    info: Annotated[str, Meta(max_length=INFO_CHARACTERS)] = ""  # JSON of bounded length


class Hint(Record, frozen=True, array_like=True):
    """Tokens that a teacher alone reads: before the token at position `at` of the compact stream."""

    at: Positive
    token_ids: Annotated[tuple[Natural, ...], Meta(max_length=2**12)]


class Trajectory(Record, frozen=True, eq=False):
    """One episode. All arrays have length T; `token_ids` holds one image placeholder per image, in order.

    The compact stream may be of several segments, one after another: token streams that the model reads each by itself,
    from a prompt on, and that share the episode's reward. Most episodes have one. `segments` are the positions in the
    stream at which the others begin.
    """

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
    weights: Many[WeightName] = ()  # full names of the weights that sampled the tokens, where the engine named them
    notes: Many[TurnNote] = ()  # one for each turn; empty if no notes were taken
    started: NonNegative = 0.0  # seconds since 1970, by the actor's clock
    segments: Many[Positive] = ()  # where the second and later segments begin
    hints: Many[Hint] = ()  # what the environment tells a teacher and not the policy, in order

    @property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """The segments as (first position, position after the last one) in the compact stream."""
        return tuple(pairwise((0, *self.segments, len(self.token_ids))))

    @property
    def trainable(self) -> bool:
        return self.ending in TRAINABLE_ENDINGS and bool(self.turns)


class Message(Record, frozen=True, tag_field="kind", tag=True):
    """A record that is sent as a message of its own, with the name of its class as its `kind`."""


class Group(Message, frozen=True, eq=False, weakref=True):
    """A ticket's trajectories, all of one sample."""

    ticket_id: Id
    actor: Id
    trajectories: Many[Trajectory]
    played_s: NonNegative = 0.0
    spans: Annotated[bytes, Meta(max_length=SPANS_BYTES)] = (
        b""  # of a traced ticket by the learner's clock: shared.spans
    )


# ------------------------------------------------------------------ messages, actor -> learner


class AgreedSetting(Record, frozen=True, array_like=True):
    """A setting that must agree between actor and learner: its value, or a digest of it, and where the value is long,
    words that show a person where it comes from."""

    digest: Annotated[str, Meta(max_length=2**8)]
    shown: Annotated[str, Meta(max_length=2**9)] = ""


class Hello(Message, frozen=True):
    """An actor introduces itself and its own engines, if it has any. It repeats the message as a heartbeat, with the
    tickets that it holds."""

    actor: Id
    engine_urls: Many[Url]
    vocab_size: Positive
    held: Many[Id] = ()  # ids of tickets being played or waiting for acknowledgment
    idle_frac: Share = 0.0  # share of the last interval in which no episode was running
    # What must agree with the learner's, see shared/agreement.py.
    settings: Annotated[dict[Annotated[str, Meta(max_length=2**8)], AgreedSetting], Meta(max_length=2**9)] = field(
        default_factory=dict
    )
    clock_s: NonNegative = 0.0  # the actor's monotonic clock


class Request(Message, frozen=True):
    """An actor plays `slots` groups at once; the learner fills the free slots."""

    slots: Annotated[int, Meta(ge=0, le=2**16)]


class Bye(Message, frozen=True):
    """An actor leaves; its open tickets may be issued again at once."""

    reason: Text


# ------------------------------------------------------------------ messages, learner -> actor


class Welcome(Message, frozen=True):
    """The learner knows the actor. `run_id` is new with each run, `process_id` also with each restart of a run.
    `engines`: all engines of the run, for an actor that has none of its own; lost engines are left out."""

    run_id: Id
    version: PolicyVersion
    process_id: Id
    engines: EngineUrls = ()
    hello_s: NonNegative = 0.0  # `clock_s` of the Hello that this answers
    clock_s: NonNegative = 0.0  # the learner's monotonic clock
    clock: Id = ""  # what processes with the same clock share


class Tickets(Message, frozen=True):
    tickets: Many[Ticket]


class Receipt(Message, frozen=True):
    """The learner has received and accepted the groups of these tickets; the actor keeps them until their Ack."""

    ticket_ids: Many[Id]


class Refusal(Message, frozen=True):
    """The learner has received the group of `ticket_id` and cannot use it; the actor forgets it."""

    ticket_id: Id
    reason: Text


class Ack(Message, frozen=True):
    """The groups of these tickets are trained and in the ledger (or counted in their evaluation); the actor forgets
    them."""

    ticket_ids: Many[Id]


class Cancel(Message, frozen=True):
    """These tickets are void; an actor stops playing them and discards their episodes."""

    ticket_ids: Many[Id]
    reason: Text


class Stop(Message, frozen=True):
    """The run is over; `failed` tells the actors to end with an error."""

    reason: Text
    failed: bool = False
