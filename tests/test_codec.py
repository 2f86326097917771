"""Every kind of message survives the wire, and none with a wrong field, or beyond the limits, does."""

from __future__ import annotations

import dataclasses

import msgpack
import numpy as np
import pytest

from shared.codec import MESSAGES, SCHEMA_VERSION, Limits, WireError, decode, encode
from shared.frames import digest
from shared.types import Group, Hello, Image, Refusal, Request, Sample, Stop, Tickets
from tests.support.codec_rig import EXAMPLES, GROUP, SAMPLE, STOP, TICKET, changed_header, raw, with_header
from tests.support.wires import episode

IMAGELESS = msgpack.packb(STOP | {"pictures": ["0" * 32] * 9})


def same(a: object, b: object) -> bool:
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, tuple | list):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))  # type: ignore[arg-type]
    if dataclasses.is_dataclass(a):
        return type(a) is type(b) and all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    return type(a) is type(b) and a == b


def test_every_kind_of_message_has_an_example() -> None:
    assert {type(m).__name__ for m in EXAMPLES} == set(MESSAGES)


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda m: type(m).__name__)
def test_a_message_comes_back_equal(message: object) -> None:
    assert same(decode(raw(encode(message))), message)  # type: ignore[arg-type]


def test_arrays_are_copied_neither_on_the_way_out_nor_in() -> None:
    trajectory = episode()
    frames = encode(Group("t", "a", (trajectory,)))
    assert any(np.shares_memory(np.frombuffer(frame, np.uint8), trajectory.token_ids) for frame in frames[1:])
    received = raw(frames)
    group = decode(received)
    assert isinstance(group, Group)
    ids = group.trajectories[0].token_ids
    assert any(np.shares_memory(np.frombuffer(frame, np.uint8), ids) for frame in received[1:])
    assert not ids.flags.writeable


def test_an_image_that_episodes_share_travels_once() -> None:
    one = sum(map(len, encode(Group("t", "a", (episode(image=b"p" * 10_000),)))))
    frames = encode(Group("t", "a", (episode(image=b"p" * 10_000),) * 8))
    assert sum(map(len, frames)) < one + 4_000
    group = decode(raw(frames))
    assert isinstance(group, Group)
    assert [t.images[0].data for t in group.trajectories] == [b"p" * 10_000] * 8


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        ([1], 7, "wrong_type"),  # actor
        ([3], 1, "wrong_type"),  # played_s: no float
        ([3], float("nan"), "not_finite"),
        ([3], -1.0, "out_of_range"),
        ([2], {}, "wrong_type"),  # trajectories
        ([2, 0], [], "wrong_type"),
        ([2, 0, 0], 6, "length"),  # token ids
        ([2, 0, 0], -1, "too_large"),
        ([2, 0, 0], 2**40, "too_large"),
        ([2, 0, 0], True, "wrong_type"),
        ([2, 0, 4, 0, 0], -1, "out_of_range"),  # a turn's start: turns are columns
        ([2, 0, 4, 0, 0], 1.0, "wrong_type"),
        ([2, 0, 4, 0, 0], True, "wrong_type"),
        ([2, 0, 4, 1, 0], 0, "out_of_range"),
        ([2, 0, 4, 2, 0], float("inf"), "not_finite"),
        ([2, 0, 4, 2], [1.0], "length"),
        ([2, 0, 4, 2], None, "wrong_type"),
        ([2, 0, 4], [[1], [2]], "wrong_type"),
        ([2, 0, 6, 0], 2, "missing_frame"),  # an image
        ([2, 0, 6, 0], -1, "missing_frame"),
        ([2, 0, 6, 0], "0" * 32, "wrong_type"),
        ([2, 0, 6], [0] * 70_000, "too_many"),
        ([2, 0, 6], [], "extra_frames"),
        ([2, 0, 7], "sleeping", "unknown_value"),
        ([2, 0, 8], {"success": "yes"}, "wrong_type"),
        ([2, 0, 8], {"success": float("nan")}, "not_finite"),
        ([2, 0, 9], None, "wrong_type"),
    ],
)
def test_a_group_with_a_wrong_field_is_refused_and_names_its_ticket(path: list, value: object, reason: str) -> None:
    with pytest.raises(WireError) as caught:
        decode(changed_header(GROUP, path, value))
    assert caught.value.reason == reason
    assert caught.value.ticket_id == "0-a"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("message", "path", "value", "reason"),
    [
        (Request(1), [0], -1, "out_of_range"),
        (Hello("a", (), 1), [4], 1.5, "out_of_range"),
        (Tickets((TICKET,)), [0, 0, 2], 0, "out_of_range"),
        (Tickets((TICKET,)), [0, 0, 1, 4], {"deep": [[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]}, "too_deep"),
        (Tickets((TICKET,)), [0, 0, 1, 4], {"bytes": b"1"}, "wrong_type"),
        (Refusal("t", ""), [1], 1, "wrong_type"),
    ],
)
def test_a_wrong_field_is_refused(message: object, path: list, value: object, reason: str) -> None:
    with pytest.raises(WireError) as caught:
        decode(changed_header(message, path, value))
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([], "too_many"),
        ([b""], "header"),
        ([b"\xc1"], "header"),
        ([b"\x80\x80"], "header"),
        ([msgpack.packb([1])], "header"),
        ([msgpack.packb({"v": SCHEMA_VERSION + 1, "kind": "Stop", "body": ["x"]})], "schema_version"),
        ([msgpack.packb({"v": SCHEMA_VERSION - 1, "kind": "Stop", "body": ["x", True]})], "schema_version"),
        ([msgpack.packb(STOP)], "digest"),
        ([msgpack.packb(STOP), b""], "digest"),
        (with_header(STOP | {"kind": "Trajectory"}), "unknown_kind"),
        (with_header(STOP | {"kind": ["Stop"]}), "unknown_kind"),
        (with_header(STOP | {"more": 1}), "unknown_kind"),
        (with_header({"v": SCHEMA_VERSION}), "unknown_kind"),
        (with_header(STOP | {"body": ["x", "y"]}), "wrong_type"),
        (with_header(STOP, b"1"), "extra_frames"),
        (with_header(STOP | {"pictures": [Image.of(b"1").content_hash]}, b"1"), "extra_frames"),
        (with_header(STOP | {"pictures": ["0" * 32]}, b"1"), "image_hash"),
        (with_header(STOP | {"pictures": [None]}, b"1"), "image_hash"),
        (with_header(STOP | {"pictures": None}), "missing_frame"),
        ([IMAGELESS, digest([IMAGELESS])], "missing_frame"),
        ([b"\xdd\xff\xff\xff\xff"], "header"),
        ([b"\x91" * 100_000], "header"),
    ],
)
def test_frames_that_are_no_message_are_refused(frames: list[bytes], reason: str) -> None:
    with pytest.raises(WireError) as caught:
        decode(frames)
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    "limits",
    [
        Limits(message_bytes=100),
        Limits(header_bytes=50),
        Limits(frames=5),
        Limits(items=1),
        Limits(text_chars=3),
        Limits(trajectory_tokens=3),
    ],
    ids=str,
)
def test_limits_hold(limits: Limits) -> None:
    with pytest.raises(WireError) as caught:
        decode(raw(encode(GROUP)), limits)
    assert caught.value.reason in ("too_large", "too_many")


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (Group("t", "a", (episode(token_ids=np.zeros(7, np.int64)),)), "wrong_type"),
        (Group("t", "a", (episode(images=(Image(b"raw"),)),)), "image_hash"),
        (Group("t", "a", (episode(reward=float("nan")),)), "not_finite"),
        (Tickets((dataclasses.replace(TICKET, sample=Sample("s", metadata={"x": object()})),)), "wrong_type"),
        (Stop("\ud800"), "out_of_range"),
        (SAMPLE, "unknown_kind"),
    ],
)
def test_the_sender_refuses_what_the_receiver_would(message: object, reason: str) -> None:
    with pytest.raises(WireError) as caught:
        encode(message)  # type: ignore[arg-type]
    assert caught.value.reason == reason


def test_numpy_numbers_are_sent_as_plain_ones() -> None:
    message = Group("t", "a", (episode(metrics={"success": np.float32(1)}, reward=np.float64(1)),), np.float32(0.5))
    group = decode(raw(encode(message)))
    assert isinstance(group, Group)
    assert type(group.trajectories[0].reward) is float
