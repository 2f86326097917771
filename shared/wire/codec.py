"""The wire format: a small msgpack header, then raw little-endian frames (arrays, image bytes). No pickle, no code.

    header | arrays | images | digest

The header is the map {"v": SCHEMA_VERSION, "message": the record's fields and its `kind`, "images": content hashes}.
An array stands in the message as its dtype, and its values are the next frame; an image stands there as its row in
`images`, so that an image shared by the episodes of a group travels once. The digest covers header and arrays. No part
of a message is used before its digest and the hashes of its images match. Arrays and large images are not copied,
neither when they are sent nor when they are received.

msgspec holds the header against the types and bounds of `shared.types`. `encode` reads back what it has written, so
that both ends apply the same rules; each violation is a `WireError` with its reason.
"""

from __future__ import annotations

import math
import re
import threading
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated
from weakref import WeakKeyDictionary

import msgspec
import numpy as np

from shared.engine.engine_messages import parse_weight_name
from shared.types import Group, Image, Message, Tickets, Trajectory
from shared.wire.frames import (
    DEFAULT_LIMITS,
    DTYPES,
    Frame,
    FrameReader,
    FrameWriter,
    Limits,
    WireError,
    check_plain,
    digest,
    num_items,
)

__all__ = ["Frame", "Limits", "Message", "TokenRules", "WireError", "check_trajectory", "decode", "encode", "frames_of"]

SCHEMA_VERSION = 10
MESSAGES: dict[str, type[Message]] = {kind.__name__: kind for kind in Message.__subclasses__()}


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    v: Annotated[int, msgspec.Meta(ge=SCHEMA_VERSION, le=SCHEMA_VERSION)]
    message: msgspec.Raw
    images: list[str]


class _Stub(msgspec.Struct, frozen=True):
    """The fields that can still be read from a header or a message that breaks the rules."""

    v: int = SCHEMA_VERSION
    kind: str = ""
    ticket_id: str = ""


_HEADER = msgspec.msgpack.Decoder(_Header)
_reading = threading.local()
_MESSAGE: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(
    typing.Union[*MESSAGES.values()],
    dec_hook=lambda hint, value: _reading.source.read(hint, value),
)
_received: WeakKeyDictionary[Group, Sequence[Frame]] = WeakKeyDictionary()


def encode(message: Message, limits: Limits = DEFAULT_LIMITS) -> list[Frame]:
    """Return the frames of `message`; arrays and image bytes are views of the caller's memory. Raise WireError for one
    that breaks the rules."""
    kind = type(message).__name__
    if MESSAGES.get(kind) is not type(message):
        raise WireError("unknown_kind", f"{kind} is no message")
    out = FrameWriter()
    try:
        _check_free_form(message, limits)
        body = msgspec.Raw(msgspec.msgpack.encode(message, enc_hook=out.write))
    except (UnicodeEncodeError, OverflowError) as error:
        raise WireError("out_of_range", f"{kind} holds text or a number that cannot be sent: {error}") from None
    except (TypeError, AttributeError, RecursionError) as error:
        raise WireError("wrong_type", f"{kind} holds what cannot be sent: {error}") from None
    _message_of(body, FrameReader(out.arrays, list(out.images.values()), limits))
    arrays = [msgspec.msgpack.encode(_Header(SCHEMA_VERSION, body, list(out.images))), *out.arrays]
    frames = [*arrays, *(image.data for image in out.images.values()), digest(arrays)]
    _check_sizes(frames, limits)
    return frames


def decode(frames: Sequence[Frame], limits: Limits = DEFAULT_LIMITS, images: Sequence[Image] | None = None) -> Message:
    """Return the message in `frames`, fully checked; its arrays are read-only views of `frames`. Raise WireError, and
    nothing else, whatever the frames hold. `images` are the images of the message if `split_images` has removed their
    frames."""
    try:
        message = _decode(frames, limits, images)
    except WireError:
        raise
    except Exception as error:  # a message on which the decoder fails in any way is refused
        raise WireError("unreadable", f"{type(error).__name__}: {_one_line(error)}") from error
    if isinstance(message, Group) and images is None:
        _received[message] = frames
    return message


def frames_of(group: Group) -> Sequence[Frame]:
    """Return the frames in which `group` was received, so that they can be forwarded unchanged; encode a group that was
    made in this process."""
    return _received.get(group) or encode(group)


def split_images(frames: Sequence[Frame]) -> tuple[list[Frame], list[Image]]:
    """Return the frames of a valid message without its image frames, and the images."""
    names = _header_of(frames[0]).images
    end = len(frames) - 1 - len(names)
    return [*frames[:end], frames[-1]], list(map(Image, frames[end:-1], names))


def _decode(frames: Sequence[Frame], limits: Limits, images: Sequence[Image] | None) -> Message:
    _check_sizes(frames, limits)
    header = _header_of(frames[0])
    num_images = len(header.images) if images is None and len(header.images) < len(frames) - 1 else 0
    arrays = frames[: len(frames) - 1 - num_images]
    if digest(arrays) != frames[-1]:
        raise WireError("digest", "damaged on its way: its digest does not match")
    if images is None:
        images = [Image.of(frame) for frame in frames[len(arrays) : -1]]
    if len(header.images) != len(images):
        raise WireError("missing_frame", f"header names {len(header.images)} images in {len(frames)} frames")
    if [image.content_hash for image in images] != header.images:
        raise WireError("image_hash", "damaged on its way: an image does not match its content hash")
    message = _message_of(header.message, FrameReader(arrays[1:], images, limits))
    _check_free_form(message, limits)
    return message


def _header_of(frame: Frame) -> _Header:
    try:
        return _HEADER.decode(frame)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        version = _stub_of(frame).v
        if version != SCHEMA_VERSION:
            detail = f"peer speaks {version}, this process {SCHEMA_VERSION}; install the same Pronk"
            raise WireError("schema_version", detail) from None
        raise WireError("header", f"frame 0 is no header: {_one_line(error)}") from None


def _stub_of(data: Frame | msgspec.Raw) -> _Stub:
    try:
        return msgspec.msgpack.decode(data, type=_Stub)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return _Stub()


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _check_sizes(frames: Sequence[Frame], limits: Limits) -> None:
    if not 1 <= len(frames) <= limits.frames:
        raise WireError("too_many", f"message of {len(frames)} frames, limit {limits.frames}")
    if len(frames[0]) > limits.header_bytes:
        raise WireError("too_large", f"header of {len(frames[0])} bytes, limit {limits.header_bytes}")
    total = sum(map(len, frames))
    if total > limits.message_bytes:
        raise WireError("too_large", f"message of {total} bytes, limit {limits.message_bytes}")
    may_be_more = len(frames[0]) > limits.items  # each item takes at least one byte
    if may_be_more and num_items(frames[0], limits.items) > limits.items:
        raise WireError("too_many", f"header of more than {limits.items} items")


# ------------------------------------------------------------------ the message in a header


def _message_of(body: msgspec.Raw, source: FrameReader) -> Message:
    """Return the record in `body`, with arrays and images from `source`. Raise WireError if it breaks the rules; the
    error of a Group names its ticket."""
    _reading.source = source
    try:
        message = _MESSAGE.decode(body)
        source.check_used()
        if isinstance(message, Group):
            for trajectory in message.trajectories:
                check_lengths(trajectory)
        return message
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _refusal(error, _stub_of(body)) from None
    finally:
        _reading.source = None


_REASONS = (  # msgspec's messages and our reasons for them
    (re.compile(r"Expected `float` (<=|>=) -?1\.79769"), "not_finite"),
    (re.compile(r"Expected `(int|float)` (<=|>=) "), "out_of_range"),
    (re.compile(r"Expected `str` of length <="), "too_large"),
    (re.compile(r"Expected `str` matching regex"), "wrong_form"),
    (re.compile(r"Expected `(array|object)` of length <="), "too_many"),
    (re.compile(r"Invalid enum value"), "unknown_value"),
    (re.compile(r"Invalid value .* `\$\.kind`$|.* required field `kind`$"), "unknown_kind"),
    (re.compile(r"maximum recursion depth"), "too_deep"),
)


def _refusal(error: Exception, stub: _Stub) -> WireError:
    """Return the WireError for a message that breaks its types or bounds, with the reason that the receiver counts and
    the text for the log."""
    text = _one_line(error)
    cause = error if isinstance(error, WireError) else error.__cause__
    if isinstance(cause, WireError):
        reason, text = cause.reason, text.removeprefix(f"{cause.reason}: ")
    else:
        reason = next((reason for pattern, reason in _REASONS if pattern.match(text)), "wrong_type")
    if stub.kind in MESSAGES:
        text = text.replace("`$", f"`{stub.kind}")
    return WireError(reason, text, stub.ticket_id if stub.kind == Group.__name__ else "")


def _check_free_form(message: Message, limits: Limits) -> None:
    """Raise WireError unless a sample's prompt and metadata hold None, bool, int, float, str, and lists and
    string-keyed dicts of them."""
    if isinstance(message, Tickets):
        for number, ticket in enumerate(message.tickets):
            where = f"Tickets.tickets[{number}].sample"
            check_plain(ticket.sample.prompt, limits.depth + 1, f"{where}.prompt")
            check_plain(ticket.sample.metadata, limits.depth, f"{where}.metadata")


# ------------------------------------------------------------------ trajectories

_LOWEST = np.finfo(np.float32).min


@dataclass(frozen=True, slots=True)
class TokenRules:
    """What the model requires of token ids; both ends of the wire check each trajectory against it."""

    placeholder_id: int
    banned_ids: tuple[int, ...]
    vocab_size: int


def check_trajectory(t: Trajectory, rules: TokenRules) -> None:
    """Raise WireError unless `t` fulfils what `shared.types.Trajectory` requires.

    Turns are in order, do not overlap, and cover exactly the tokens with mask 1.
    """
    for name, dtype in DTYPES.items():
        array = getattr(t, name)
        if array.dtype != dtype or array.ndim != 1:
            raise WireError("wrong_type", f"{name} is {array.dtype}{list(array.shape)}, expected {dtype.name}[T]")
    check_lengths(t)
    ids = t.token_ids
    logprobs = t.behaviour_logprobs
    versions = t.policy_versions
    mask = _check_turns(t)
    sampled = t.loss_mask.view(bool)
    if mask and ids.view(np.uint32).max() >= rules.vocab_size:  # read as unsigned, negative ids are large
        raise WireError("token_id", f"token ids {ids.min()}..{ids.max()} leave the vocabulary of {rules.vocab_size}")
    special = {rules.placeholder_id, *rules.banned_ids}  # they are near each other in every family of models
    near = np.flatnonzero((ids - min(special)).view(np.uint32) <= max(special) - min(special))
    special_ids = ids[near].tolist()
    if (num_placeholders := special_ids.count(rules.placeholder_id)) != len(t.images):
        raise WireError("placeholders", f"{num_placeholders} image placeholders for {len(t.images)} images")
    if special_ids and not special.isdisjoint(ids[near[sampled[near]]].tolist()):
        raise WireError("sampled_vision_id", "the policy sampled a vision token")
    if mask and not (logprobs.min() >= _LOWEST and logprobs.max() <= 0):  # both comparisons are false for NaN
        raise WireError("logprob", "behaviour logprobs must be finite and <= 0")
    if np.count_nonzero((logprobs < 0) > sampled):
        raise WireError("logprob", "behaviour logprobs must be 0 where the mask is 0")
    if mask and (versions.min() < -1 or (versions >= 0).tobytes() != mask):
        raise WireError("version", "policy versions must be >= 0 where the mask is 1 and -1 elsewhere")
    _check_weights(t)
    _check_segments(t, mask)
    _check_hints(t, mask, rules.vocab_size, special)
    if not (math.isfinite(t.reward) and all(math.isfinite(turn.reward) for turn in t.turns)):
        raise WireError("not_finite", "a reward is not finite")


def _check_turns(t: Trajectory) -> bytes:
    """Return the loss mask as bytes. Raise WireError unless it is 1 exactly in the tokens of the turns."""
    mask = t.loss_mask.tobytes()
    written = bytearray(len(mask))  # the mask that the turns describe
    end = 0
    for turn in t.turns:
        if not (end <= turn.start < turn.end <= len(written)):
            raise WireError("turns", f"turn [{turn.start}, {turn.end}) after {end} in {len(written)} tokens")
        end = turn.end
        written[turn.start : end] = b"\1" * (end - turn.start)
    if written != mask:
        if max(mask) > 1:
            raise WireError("loss_mask", f"loss mask holds {max(mask)}, allowed 0 and 1")
        raise WireError("turns", "turns do not cover exactly the tokens with loss mask 1")
    return mask


def _check_hints(t: Trajectory, mask: bytes, vocab_size: int, special: set[int]) -> None:
    """Raise WireError unless hints are in order, of text, and stand outside of turns, not before a segment."""
    before = 0
    for hint in t.hints:
        if not before < hint.at < len(mask) or hint.at in t.segments or (mask[hint.at - 1] and mask[hint.at]):
            raise WireError("hints", f"a hint at {hint.at}, after {before} of {len(mask)} tokens, or within a turn")
        if any(token >= vocab_size or token in special for token in hint.token_ids):
            raise WireError("hints", "a hint holds a token that is no text")
        before = hint.at


def _check_segments(t: Trajectory, mask: bytes) -> None:
    """Raise WireError unless segments are in order and each begins with a token that no policy sampled, outside of any
    turn."""
    before = 0
    for start in t.segments:
        if not before < start < len(mask):
            raise WireError("segments", f"a segment begins at {start}, after {before} of {len(mask)} tokens")
        if mask[start]:
            raise WireError("segments", f"a segment begins with a sampled token, at {start}")
        before = start


def _check_weights(t: Trajectory) -> None:
    try:
        for name in t.weights:
            parse_weight_name(name)
    except ValueError as error:
        raise WireError("version", str(error)) from None


def check_lengths(t: Trajectory) -> None:
    """Raise WireError unless all arrays have the same length."""
    lengths = {len(t.token_ids), len(t.loss_mask), len(t.behaviour_logprobs), len(t.policy_versions)}
    if len(lengths) != 1:
        raise WireError("length", f"arrays of different lengths {sorted(lengths)}")
