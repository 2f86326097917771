"""The wire format: a small msgpack header, then raw little-endian frames (arrays, image bytes). No pickle, no code.

    header | arrays | images | digest

The header is msgpack of {"v": SCHEMA_VERSION, "kind": message class, "body": fields in order, "pictures": content
hashes} (see `shared.fields`); the digest is that of header and arrays. Nothing of a message is believed before its
digest and its images' hashes match. Arrays and large images are neither copied out of the caller's memory nor out
of the received frames. Everything is checked on both ends: an unknown kind, a wrong type, a number out of range, a
length that does not fit, a frame too many or too few: each is a `WireError` with its reason.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np

from shared.fields import DTYPES, check_lengths, codec_of
from shared.frames import DEFAULT_LIMITS, Frame, Limits, Sink, Source, WireError, digest
from shared.types import (
    Ack,
    Bye,
    Cancel,
    Group,
    Hello,
    Image,
    Receipt,
    Refusal,
    Request,
    Stop,
    Tickets,
    Trajectory,
    Welcome,
)

__all__ = ["Frame", "Limits", "Message", "TokenRules", "WireError", "check_trajectory", "decode", "encode"]

SCHEMA_VERSION = 4
_KINDS = (Hello, Request, Bye, Group, Welcome, Tickets, Receipt, Refusal, Ack, Cancel, Stop)
MESSAGES: dict[str, type] = {m.__name__: m for m in _KINDS}
Message = Hello | Request | Bye | Group | Welcome | Tickets | Receipt | Refusal | Ack | Cancel | Stop


def encode(message: Message, limits: Limits = DEFAULT_LIMITS) -> list[Frame]:
    """The frames of `message`; arrays and image bytes are views of the caller's memory. Raises WireError."""
    kind = type(message).__name__
    if MESSAGES.get(kind) is not type(message):
        raise WireError("unknown_kind", f"{kind} is no message")
    sink = Sink(limits)
    try:
        body = codec_of(MESSAGES[kind]).write(message, sink)
        header = msgpack.packb({"v": SCHEMA_VERSION, "kind": kind, "body": body, "pictures": list(sink.rows)})
    except WireError as error:
        raise error.inside(kind) from None
    except (UnicodeEncodeError, OverflowError) as error:
        raise WireError("out_of_range", f"{kind} holds text or a number that cannot be sent: {error}") from None
    arrays: list[Frame] = [header, *sink.frames]
    frames = [*arrays, *sink.images, digest(arrays)]
    _check_sizes(frames, limits)
    return frames


def decode(frames: Sequence[Frame], limits: Limits = DEFAULT_LIMITS) -> Message:
    """The message in `frames`, fully checked; its arrays are read-only views of `frames`. Raises WireError."""
    _check_sizes(frames, limits)
    header = _header_of(frames[0])
    kind, body, hashes = header.get("kind"), header.get("body"), header.get("pictures")
    num_images = len(hashes) if type(hashes) is list and len(hashes) < len(frames) - 1 else 0
    arrays = frames[: len(frames) - 1 - num_images]
    if digest(arrays) != frames[-1]:
        raise WireError("digest", "damaged on its way: its digest does not match")
    if header.keys() != {"v", "kind", "body", "pictures"} or not isinstance(kind, str) or kind not in MESSAGES:
        raise WireError("unknown_kind", f"no message of kind {str(kind)[:40]!r}")
    if type(hashes) is not list or len(hashes) != num_images:
        raise WireError("missing_frame", f"header names more images than {len(frames)} frames hold")
    images = [Image.of(source) for source in frames[len(arrays) : -1]]
    if [image.content_hash for image in images] != hashes:
        raise WireError("image_hash", "damaged on its way: an image does not match its content hash")
    source = Source(arrays, limits, images)
    try:
        message = codec_of(MESSAGES[kind]).read(body, source)
        if source.position != len(arrays) or len(source.named) != len(images):
            used = source.position + len(source.named)
            raise WireError("extra_frames", f" uses {used} frames of {len(frames) - 1}")
    except WireError as error:
        error = error.inside(kind)
        if kind == "Group" and isinstance(body, list) and body and isinstance(body[0], str):
            error.ticket_id = body[0]
        raise error from None
    return message


def _header_of(frame: Frame) -> dict[str, Any]:
    try:
        header = msgpack.unpackb(frame, raw=False, strict_map_key=True)
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
        raise WireError("header", f"frame 0 is no msgpack: {type(error).__name__} {str(error)[:80]}") from None
    if not isinstance(header, dict) or "v" not in header:
        raise WireError("header", "frame 0 is no map with a schema version")
    if type(header["v"]) is not int or header["v"] != SCHEMA_VERSION:
        got = str(header["v"])[:20]
        raise WireError("schema_version", f"peer speaks {got}, this process {SCHEMA_VERSION}; install the same Pronk")
    return header


def _check_sizes(frames: Sequence[Frame], limits: Limits) -> None:
    if not 1 <= len(frames) <= limits.frames:
        raise WireError("too_many", f"message of {len(frames)} frames, limit {limits.frames}")
    if len(frames[0]) > limits.header_bytes:
        raise WireError("too_large", f"header of {len(frames[0])} bytes, limit {limits.header_bytes}")
    total = sum(map(len, frames))
    if total > limits.message_bytes:
        raise WireError("too_large", f"message of {total} bytes, limit {limits.message_bytes}")


# ------------------------------------------------------------------ trajectories

_LOWEST = np.finfo(np.float32).min


@dataclass(frozen=True, slots=True)
class TokenRules:
    """What the model says about token ids; both ends of the wire hold a trajectory against it."""

    placeholder_id: int
    banned_ids: tuple[int, ...]
    vocab_size: int


def check_trajectory(t: Trajectory, *, placeholder_id: int, banned_ids: Sequence[int], vocab_size: int) -> None:
    """Raises WireError unless `t` is what a trajectory must be: see `shared.types.Trajectory`.

    Turns are in order, do not overlap, and cover exactly the tokens with mask 1.
    """
    for name, dtype in DTYPES.items():
        array = getattr(t, name)
        if array.dtype != dtype or array.ndim != 1:
            raise WireError("wrong_type", f"{name} is {array.dtype}{list(array.shape)}, expected {dtype.name}[T]")
    check_lengths(t)
    ids, logprobs, versions = t.token_ids, t.behaviour_logprobs, t.policy_versions
    mask = _check_turns(t)
    sampled = t.loss_mask.view(bool)
    if mask and ids.view(np.uint32).max() >= vocab_size:  # negative ones are large
        raise WireError("token_id", f"token ids {ids.min()}..{ids.max()} leave the vocabulary of {vocab_size}")
    placeholders = np.flatnonzero(ids == placeholder_id)
    if len(placeholders) != len(t.images):
        raise WireError("placeholders", f"{len(placeholders)} image placeholders for {len(t.images)} images")
    banned = [placeholders, *(np.flatnonzero(ids == token) for token in banned_ids if token != placeholder_id)]
    if any(np.count_nonzero(sampled[places]) for places in banned):
        raise WireError("sampled_vision_id", "the policy sampled a vision token")
    if mask and not (logprobs.min() >= _LOWEST and logprobs.max() <= 0):  # neither holds for NaN
        raise WireError("logprob", "behaviour logprobs must be finite and <= 0")
    if np.count_nonzero((logprobs < 0) > sampled):
        raise WireError("logprob", "behaviour logprobs must be 0 where the mask is 0")
    if mask and (versions.min() < -1 or (versions >= 0).tobytes() != mask):
        raise WireError("version", "policy versions must be >= 0 where the mask is 1 and -1 elsewhere")
    if not (math.isfinite(t.reward) and all(math.isfinite(turn.reward) for turn in t.turns)):
        raise WireError("not_finite", "a reward is not finite")


def _check_turns(t: Trajectory) -> bytes:
    """The mask, if it is what the turns make it."""
    mask = t.loss_mask.tobytes()
    written, end = bytearray(len(mask)), 0  # the mask, by the turns
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
