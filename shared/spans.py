"""Record the spans of a trace: what a process did from when to when, by its monotonic clock.

A span goes to the buffer of this context (the group that an actor plays) or else to that of the process (a learner's
rank). While there is neither, nothing is measured and nothing kept.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from shared.types import SPANS_BYTES

NAMES = {
    # a learner's rank
    "wait for groups": "for groups of the actors, on other ranks for rank 0",
    "step": "one training step; its note names the groups",
    "prepare": "plan the step, deliver images, wait for the next microbatch",
    "pack": "a thread packs the next microbatch",
    "forward": "forward passes and the loss",
    "backward": "the backward pass",
    "optimizer": "reduce, clip and apply the gradient",
    "wait for evaluations": "before a publication, for the episodes of open evaluations",
    "publish": "send the weights to the engines",
    "gather": "gather one bucket of the weights on rank 0",
    "wait for engines": "until engines have begun, taken a bucket or ended",
    "broadcast": "one bucket of the weights travels",
    "verify": "compare what engines hold",
    "record": "acknowledge the groups, write ledger and metrics",
    "checkpoint": "copy the state, or write it",
    "write checkpoint": "a thread writes the copied state",
    # an actor
    "group": "a ticket's episodes; its note is the ticket",
    "wait for a place": "while the actor plays actor.groups others",
    "episode": "one episode from its first call to its reward",
    "turn": "the engine's answer and the environment's",
    "wait for an engine": "while no engine is well",
    "engine call": "the request to an engine until its answer",
    "wait for a thread": "while env.threads others compute",
    "reward": "the reward of the whole episode",
    # an environment
    "environment reset": "make and reset an environment",
    "environment step": "one step of an environment",
    # an embedded engine
    "queue": "the request waits for a slot",
    "prefill": "from its slot to its first token",
    "decode": "the other tokens",
    "receive weights": "an engine's answer to a bucket",
    "install weights": "an engine's answer to the end of an update",
}
"""The names of spans and what they stand for."""

ENVIRONMENTS = "environments"  # the place of an actor's environments
MOST_SPANS = 200_000  # of one process
MOST_OF_GROUP = 8192


class Span(msgspec.Struct, frozen=True, array_like=True):
    """One span, in seconds. Spans of one `track` of a `place` do not overlap but hold each other; "" is the process
    itself."""

    name: str
    begin: float
    end: float
    place: Annotated[str, Meta(max_length=256)] = ""
    track: Annotated[str, Meta(max_length=64)] = ""
    note: Annotated[str, Meta(max_length=4096)] = ""


@dataclass(slots=True)
class SpanBuffer:
    """Spans as they come, `most` of them; `lost` counts the others. Threads may share it."""

    most: int = MOST_SPANS
    spans: list[Span] = field(default_factory=list)
    lost: int = 0

    def add(self, span: Span) -> None:
        if len(self.spans) < self.most:
            self.spans.append(span)
        else:
            self.lost += 1


_of_context: ContextVar[tuple[SpanBuffer, str] | None] = ContextVar("spans", default=None)  # buffer and track
_of_process: SpanBuffer | None = None
_NOTHING = nullcontext()


def record_process(buffer: SpanBuffer | None) -> None:
    """Record this process's spans into the buffer from now on; None ends it."""
    global _of_process
    _of_process = buffer


def recording() -> SpanBuffer | None:
    """Return the buffer that a span would go to now; None if nothing is recorded."""
    here = _of_context.get()
    return _of_process if here is None else here[0]


@contextmanager
def recorded_into(buffer: SpanBuffer | None, track: str) -> Iterator[None]:
    """Record the spans of this context, and of tasks begun in it, into the buffer; None changes nothing."""
    if buffer is None:
        yield
        return
    token = _of_context.set((buffer, track))
    try:
        yield
    finally:
        _of_context.reset(token)


def on_track(track: str) -> AbstractContextManager[Any]:
    """Return a context whose spans are recorded on another track, if anything is recorded."""
    here = _of_context.get()
    return _NOTHING if here is None else recorded_into(here[0], track)


def span(name: str, *, place: str = "", track: str = "", note: str = "") -> AbstractContextManager[Any]:
    """Return a context whose duration is recorded as a span, if anything is recorded."""
    return _NOTHING if recording() is None else _measured(name, place, track, note)


@contextmanager
def _measured(name: str, place: str, track: str, note: str) -> Iterator[None]:
    began = time.monotonic()
    try:
        yield
    finally:
        add_span(name, began, time.monotonic(), place=place, track=track, note=note)


def add_span(name: str, begin: float, end: float, *, place: str = "", track: str = "", note: str = "") -> None:
    """Record a span that is over, if anything is recorded."""
    here = _of_context.get()
    buffer, own = (_of_process, "") if here is None else here
    if buffer is not None:
        buffer.add(Span(name, begin, end, place, track or own, note))


# ------------------------------------------------------------------ on the wire


class _Sent(msgspec.Struct, array_like=True):
    spans: list[msgspec.Raw]
    lost: int


def packed_spans(buffer: SpanBuffer, add_s: float) -> bytes:
    """Return the buffer's spans as bytes, `SPANS_BYTES` at most, with `add_s` added to their times."""
    moved = [msgspec.structs.replace(each, begin=each.begin + add_s, end=each.end + add_s) for each in buffer.spans]
    kept, size = list[msgspec.Raw](), 64
    for each in moved:
        raw = msgspec.Raw(msgspec.msgpack.encode(each))
        size += len(raw)
        if size > SPANS_BYTES:
            break
        kept.append(raw)
    return msgspec.msgpack.encode(_Sent(kept, buffer.lost + len(moved) - len(kept)))


def unpacked_spans(data: bytes) -> tuple[list[Span], int]:
    """Return the sound spans of such bytes, which may hold anything, and how many are lost or odd."""
    try:
        sent = msgspec.msgpack.decode(data, type=_Sent)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return [], 1
    sound = [each for raw in sent.spans[:MOST_OF_GROUP] if (each := _sound(raw)) is not None]
    return sound, len(sent.spans) - len(sound) + max(0, sent.lost)


def _sound(raw: msgspec.Raw) -> Span | None:
    try:
        each = msgspec.msgpack.decode(raw, type=Span)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    is_sound = each.name in NAMES and math.isfinite(each.begin) and math.isfinite(each.end) and each.begin <= each.end
    return each if is_sound else None
