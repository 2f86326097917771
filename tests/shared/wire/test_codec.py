"""Every kind of message survives the wire, and none with a wrong field, or beyond the limits, does."""

from __future__ import annotations

from collections.abc import Callable
from types import GenericAlias
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from shared.types import Group, Hello, Image, Refusal, Request, Sample, Stop, Tickets
from shared.wire.codec import MESSAGES, SCHEMA_VERSION, Limits, WireError, check_trajectory, decode, encode, frames_of
from shared.wire.frames import DTYPES, digest, dtype_of, num_items
from tests.support.wires import EXAMPLES, GROUP, RULES, SAMPLE, STOP, TICKET, changed_header, episode, raw, with_header

pack = msgspec.msgpack.encode
METADATA = ["tickets", 0, "sample", "metadata"]
IMAGELESS = pack(STOP | {"images": ["0" * 32] * 9})


def test_an_arrays_dtype_is_read_from_its_type_in_whatever_form_numpy_gives_that():
    whole = np.ndarray[tuple[Any, ...], np.dtype[np.int32]]  # as numpy writes NDArray out, and msgspec always
    alias = GenericAlias(list, (np.int32,))  # as NDArray[np.int32] is from numpy 2.5 on
    assert dtype_of(whole) == dtype_of(alias) == np.dtype(np.int32)
    assert {name: str(dtype) for name, dtype in DTYPES.items()} == {
        "token_ids": "int32",
        "loss_mask": "uint8",
        "behaviour_logprobs": "float32",
        "policy_versions": "int32",
    }


def with_body(body: bytes) -> list[bytes]:
    return with_header(STOP | {"message": msgspec.Raw(body)})


def same(a: object, b: object) -> bool:
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, tuple | list):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))  # type: ignore[arg-type]
    if isinstance(a, msgspec.Struct):
        return type(a) is type(b) and same(msgspec.structs.astuple(a), msgspec.structs.astuple(b))
    return type(a) is type(b) and a == b


def refused(reason: str, action: Callable[[], object]) -> WireError:
    with pytest.raises(WireError) as caught:
        action()
    assert caught.value.reason == reason
    return caught.value


def test_every_kind_of_message_has_an_example() -> None:
    assert {type(m).__name__ for m in EXAMPLES} == set(MESSAGES)


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda m: type(m).__name__)
def test_a_message_comes_back_equal(message: object) -> None:
    assert same(decode(raw(encode(message))), message)  # type: ignore[arg-type]


def test_a_name_of_weights_that_no_learner_gives_is_refused() -> None:
    check_trajectory(episode(6, weights=("5-a", "6-1f0c9a2b")), RULES)
    for name in ("6-", "-a", "a-6", "6-a b", "6-A", "6-a-b"):
        refused("version", lambda name=name: check_trajectory(episode(6, weights=(name,)), RULES))


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


def test_a_received_group_is_handed_on_in_the_frames_it_came_in() -> None:
    received = raw(encode(GROUP))
    group = decode(received)
    assert isinstance(group, Group) and frames_of(group) is received
    assert raw(list(frames_of(GROUP))) == received  # made here: encoded


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
        (["actor"], 7, "wrong_type"),
        (["played_s"], "1", "wrong_type"),
        (["played_s"], True, "wrong_type"),
        (["played_s"], float("nan"), "out_of_range"),
        (["played_s"], float("inf"), "not_finite"),
        (["played_s"], -1.0, "out_of_range"),
        (["more"], 1, "wrong_type"),
        (["trajectories", 0], {}, "wrong_type"),
        (["trajectories", 0, "token_ids"], "<f4", "wrong_type"),
        (["trajectories", 0, "token_ids"], ">i4", "wrong_type"),
        (["trajectories", 0, "token_ids"], 7, "wrong_type"),
        (["trajectories", 0, "turns", 0, 0], -1, "out_of_range"),
        (["trajectories", 0, "turns", 0, 0], True, "wrong_type"),
        (["trajectories", 0, "turns", 0, 1], 0, "out_of_range"),
        (["trajectories", 0, "turns", 0, 2], float("inf"), "not_finite"),
        (["trajectories", 0, "turns", 0, 2], float("nan"), "not_finite"),
        (["trajectories", 0, "turns", 0], [1, 2], "wrong_type"),
        (["trajectories", 0, "turns", 0], [1, 2, 1.0, 4], "wrong_type"),
        (["trajectories", 0, "images", 0], 2, "missing_frame"),
        (["trajectories", 0, "images", 0], -1, "missing_frame"),
        (["trajectories", 0, "images", 0], "0" * 32, "wrong_type"),
        (["trajectories", 0, "images"], [0] * 70_000, "too_many"),
        (["trajectories", 0, "images"], [], "extra_frames"),
        (["trajectories", 0, "ending"], "sleeping", "unknown_value"),
        (["trajectories", 0, "metrics"], {"success": "yes"}, "wrong_type"),
        (["trajectories", 0, "metrics"], {"success": float("nan")}, "not_finite"),
        (["trajectories", 0, "metrics"], {str(i): 0.0 for i in range(70_000)}, "too_many"),
        (["trajectories", 0, "text"], "x" * (2**22 + 1), "too_large"),
        (["trajectories", 0, "weights"], ["6-" + "a" * 70], "too_large"),
        (["trajectories", 0, "weights"], [6], "wrong_type"),
    ],
)
def test_a_group_with_a_wrong_field_is_refused_and_names_its_ticket(path: list, value: object, reason: str) -> None:
    error = refused(reason, lambda: decode(changed_header(GROUP, path, value)))
    assert error.ticket_id == "0-a" and "\n" not in str(error)


@pytest.mark.parametrize(
    ("message", "path", "value", "reason"),
    [
        (Request(1), ["slots"], -1, "out_of_range"),
        (Hello("a", (), 1), ["idle_frac"], 1.5, "out_of_range"),
        (Tickets((TICKET,)), ["tickets", 0, "group_size"], 0, "out_of_range"),
        (Tickets((TICKET,)), [*METADATA, "deep"], [[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]], "too_deep"),
        (Tickets((TICKET,)), [*METADATA, "bytes"], b"1", "wrong_type"),
        (Tickets((TICKET,)), [*METADATA, "key"], {1: 2}, "wrong_type"),
        (Tickets((TICKET,)), [*METADATA, "number"], 2**63, "out_of_range"),
        (Tickets((TICKET,)), [*METADATA, "number"], float("nan"), "not_finite"),
        (Tickets((TICKET,)), [*METADATA, "items"], [None] * 70_000, "too_many"),
        (Refusal("t", ""), ["reason"], 1, "wrong_type"),
        (Stop("x"), ["kind"], "Trajectory", "unknown_kind"),
        (Stop("x"), ["kind"], None, "wrong_type"),
    ],
)
def test_a_wrong_field_is_refused(message: object, path: list, value: object, reason: str) -> None:
    refused(reason, lambda: decode(changed_header(message, path, value)))


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([], "too_many"),
        ([b""], "header"),
        ([b"\xc1"], "header"),
        ([b"\x80\x80"], "header"),
        ([pack([1])], "header"),
        ([pack({"v": SCHEMA_VERSION + 1, "kind": "Stop", "body": ["x"]})], "schema_version"),
        ([pack(STOP | {"v": SCHEMA_VERSION - 1})], "schema_version"),
        ([pack(STOP | {"v": [1]})], "header"),
        ([pack(STOP)], "digest"),
        ([pack(STOP), b""], "digest"),
        (with_header(STOP | {"more": 1}), "header"),
        (with_header({"v": SCHEMA_VERSION}), "header"),
        (with_header(STOP | {"message": {}}), "unknown_kind"),
        (with_header(STOP | {"message": ["Stop", "x"]}), "wrong_type"),
        (with_header(STOP, b"1"), "extra_frames"),
        (with_header(STOP | {"images": [Image.of(b"1").content_hash]}, b"1"), "extra_frames"),
        (with_header(STOP | {"images": ["0" * 32]}, b"1"), "image_hash"),
        (with_header(STOP | {"images": [None]}, b"1"), "header"),
        (with_header(STOP | {"images": None}), "header"),
        ([IMAGELESS, digest([IMAGELESS])], "missing_frame"),
        ([b"\xdd\xff\xff\xff\xff"], "header"),
        ([b"\x91" * 100_000], "header"),
        ([b"\x81\xa1v" + b"\x91" * 1000], "header"),
        (with_body(b"\x91" * 100_000), "header"),
        (with_body(b"\xa2\xff\xff"), "wrong_type"),
        (with_body(b"\x82\xa4kind\xa4Stop\xa6reason\xa2\xff\xff"), "wrong_type"),
    ],
)
def test_frames_that_are_no_message_are_refused(frames: list[bytes], reason: str) -> None:
    refused(reason, lambda: decode(frames))


@pytest.mark.parametrize(
    "limit", [{"message_bytes": 100}, {"header_bytes": 50}, {"frames": 5}, {"trajectory_tokens": 3}]
)
def test_limits_hold(limit: dict[str, int]) -> None:
    with pytest.raises(WireError, match=r"too_large|too_many"):
        decode(raw(encode(GROUP)), Limits(**limit))


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (Group("t", "a", (episode(token_ids=np.zeros(7, np.int64)),)), "wrong_type"),
        (Group("t", "a", (episode(images=(Image(b"raw"),)),)), "image_hash"),
        (Group("t", "a", (episode(reward=float("nan")),)), "not_finite"),
        (Tickets((replace(TICKET, sample=Sample("s", metadata={"x": object()})),)), "wrong_type"),
        (Stop("\ud800"), "out_of_range"),
        (SAMPLE, "unknown_kind"),
    ],
)
def test_the_sender_refuses_what_the_receiver_would(message: object, reason: str) -> None:
    refused(reason, lambda: encode(message))  # type: ignore[arg-type]


def test_numpy_numbers_are_sent_as_plain_ones() -> None:
    message = Group("t", "a", (episode(metrics={"success": np.float32(1)}, reward=np.float64(1)),), np.float32(0.5))
    group = decode(raw(encode(message)))
    assert isinstance(group, Group)
    assert type(group.trajectories[0].reward) is float


def items_of(tree: object) -> int:
    """A plain count of the items in a tree."""
    parts = [part for pair in tree.items() for part in pair] if isinstance(tree, dict) else tree
    return 1 + sum(map(items_of, parts)) if isinstance(parts, list) else 1


ODD_ITEMS = [0, -1, 127, 128, -33, 2**16, 2**32, -(2**40), 0.5, None, True, "x" * 31, "x" * 32, "é" * 300, "x" * 2**16]
ODD_ITEMS += [b"", b"x" * 300, b"x" * 2**16, [0] * 16, [[]] * 2**16, {str(i): i for i in range(20)}, {}]


def test_the_items_of_a_header_are_counted_without_reading_it() -> None:
    trees = [msgspec.msgpack.decode(encode(message)[0]) for message in EXAMPLES]
    for tree in [*trees, *ODD_ITEMS, ODD_ITEMS]:
        packed = msgspec.msgpack.encode(tree)
        assert num_items(packed, 10**9) == num_items(memoryview(packed), 10**9) == items_of(tree)
    assert num_items(b"\x80" * 1000, 10) == 11  # it stops there
