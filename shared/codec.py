"""The wire format: a small msgpack header, then raw little-endian frames (arrays, image bytes). No pickle, no code.

Frame 0 is msgpack of {"v": SCHEMA_VERSION, "kind": message class, "body": fields in order} (see `shared.fields`).
Arrays are neither copied out of the caller's memory nor out of the received frames. Everything is checked on both ends:
an unknown kind, a wrong type, a number out of range, a length that does not fit, a hash that does not match, a frame
too many or too few: each is a `WireError` with its reason.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgpack
import numpy as np

from shared.fields import DTYPES, check_lengths, codec_of
from shared.types import Ack, Bye, Cancel, Group, Hello, Receipt, Request, Stop, Tickets, Trajectory, Welcome
from shared.wire import DEFAULT_LIMITS, Frame, Limits, Sink, Source, WireError

__all__ = ["Frame", "Limits", "Message", "TokenRules", "WireError", "check_trajectory", "decode", "encode"]

SCHEMA_VERSION = 2
_KINDS = (Hello, Request, Bye, Group, Welcome, Tickets, Receipt, Ack, Cancel, Stop)
MESSAGES: dict[str, type] = {m.__name__: m for m in _KINDS}
Message = Hello | Request | Bye | Group | Welcome | Tickets | Receipt | Ack | Cancel | Stop


def encode(message: Message, limits: Limits = DEFAULT_LIMITS) -> list[Frame]:
    """The frames of `message`; arrays and image bytes are views of the caller's memory. Raises WireError."""
    kind = type(message).__name__
    if MESSAGES.get(kind) is not type(message):
        raise WireError("unknown_kind", f"{kind} is no message")
    sink = Sink(limits)
    try:
        body = codec_of(MESSAGES[kind]).write(message, sink)
        header = msgpack.packb({"v": SCHEMA_VERSION, "kind": kind, "body": body}, use_bin_type=True)
    except WireError as error:
        raise error.inside(kind) from None
    except (UnicodeEncodeError, OverflowError) as error:
        raise WireError("out_of_range", f"{kind} holds text or a number that cannot be sent: {error}") from None
    frames: list[Frame] = [header, *sink.frames]
    _check_sizes(frames, limits)
    return frames


def decode(frames: Sequence[Frame], limits: Limits = DEFAULT_LIMITS) -> Message:
    """The message in `frames`, fully checked; its arrays are read-only views of `frames`. Raises WireError."""
    _check_sizes(frames, limits)
    try:
        header = msgpack.unpackb(frames[0], raw=False, strict_map_key=True)
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
        raise WireError("header", f"frame 0 is no msgpack: {type(error).__name__} {str(error)[:80]}") from None
    if not isinstance(header, dict) or "v" not in header:
        raise WireError("header", "frame 0 is no map with a schema version")
    if type(header["v"]) is not int or header["v"] != SCHEMA_VERSION:
        got = str(header["v"])[:20]
        raise WireError("schema_version", f"peer speaks {got}, this process {SCHEMA_VERSION}; install the same Pronk")
    kind = header.get("kind")
    if header.keys() != {"v", "kind", "body"} or not isinstance(kind, str) or kind not in MESSAGES:
        raise WireError("unknown_kind", f"no message of kind {str(kind)[:40]!r}")
    source = Source(frames, limits, position=1)
    try:
        message = codec_of(MESSAGES[kind]).read(header["body"], source)
        if source.position != len(frames):
            raise WireError("extra_frames", f" uses {source.position} frames of {len(frames)}")
    except WireError as error:
        error = error.inside(kind)
        body = header["body"]
        if kind == "Group" and isinstance(body, list) and body and isinstance(body[0], str):
            error.ticket_id = body[0]
        raise error from None
    return message


def _check_sizes(frames: Sequence[Frame], limits: Limits) -> None:
    if not 1 <= len(frames) <= limits.frames:
        raise WireError("too_many", f"message of {len(frames)} frames, limit {limits.frames}")
    if len(frames[0]) > limits.header_bytes:
        raise WireError("too_large", f"header of {len(frames[0])} bytes, limit {limits.header_bytes}")
    total = sum(len(frame) for frame in frames)
    if total > limits.message_bytes:
        raise WireError("too_large", f"message of {total} bytes, limit {limits.message_bytes}")


# ------------------------------------------------------------------ trajectories


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
    ids, mask, logprobs, versions = t.token_ids, t.loss_mask, t.behaviour_logprobs, t.policy_versions
    if ids.size and not (ids.min() >= 0 and ids.max() < vocab_size):
        raise WireError("token_id", f"token ids {ids.min()}..{ids.max()} leave the vocabulary of {vocab_size}")
    if mask.size and mask.max() > 1:
        raise WireError("loss_mask", f"loss mask holds {mask.max()}, allowed 0 and 1")
    sampled = mask == 1
    placeholders = int(np.count_nonzero(ids == placeholder_id))
    if placeholders != len(t.images):
        raise WireError("placeholders", f"{placeholders} image placeholders for {len(t.images)} images")
    if np.isin(ids[sampled], np.asarray([*banned_ids, placeholder_id])).any():
        raise WireError("sampled_vision_id", "the policy sampled a vision token")
    if not (np.isfinite(logprobs).all() and (logprobs <= 0).all() and not logprobs[~sampled].any()):
        raise WireError("logprob", "behaviour logprobs must be finite, <= 0, and 0 where the mask is 0")
    if (versions[sampled] < 0).any() or (versions[~sampled] != -1).any():
        raise WireError("version", "policy versions must be >= 0 where the mask is 1 and -1 elsewhere")
    covered, end = np.zeros(len(ids), bool), 0
    for turn in t.turns:
        if not (end <= turn.start < turn.end <= len(ids)):
            raise WireError("turns", f"turn [{turn.start}, {turn.end}) after {end} in {len(ids)} tokens")
        end = turn.end
        covered[turn.start : turn.end] = True
    if (covered != sampled).any():
        raise WireError("turns", "turns do not cover exactly the tokens with loss mask 1")
    if not (math.isfinite(t.reward) and all(math.isfinite(turn.reward) for turn in t.turns)):
        raise WireError("not_finite", "a reward is not finite")
