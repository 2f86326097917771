"""Every message survives the wire, and nothing that breaks the contract does."""

from __future__ import annotations

import dataclasses
import random

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.codec import MESSAGES, SCHEMA_VERSION, Limits, WireError, check_trajectory, decode, encode
from shared.types import (
    Ack,
    Bye,
    Cancel,
    Group,
    Hello,
    Image,
    Receipt,
    Request,
    Sample,
    Sampling,
    Stop,
    Ticket,
    Tickets,
    Trajectory,
    Turn,
    Welcome,
)
from shared.wire import digest
from tests.wires import PLACEHOLDER, RULES, VISION_START, episode, failed_episode, sealed

SAMPLE = Sample(
    "s",
    ({"role": "system", "content": [{"type": "text", "text": "größe"}, {"type": "image"}]},),
    (Image.of(b"x"),),
    None,
    {"seed": 2**40, "nested": {"f": 0.5, "n": None, "b": True}},
)
TICKET = Ticket("0-a", SAMPLE, 2, 3, Sampling(0.7, 0.9, 50, 12), 30.0, "eval", 5)
GROUP = Group("0-a", "actor", (episode(picture=b"one"), episode(2), failed_episode()), 1.5)
STOP = {"v": SCHEMA_VERSION, "kind": "Stop", "body": ["x", True], "pictures": []}
PICTURELESS = msgpack.packb(STOP | {"pictures": ["0" * 32] * 9})
EXAMPLES = [
    Hello("a", ("http://x:1", "http://y:2"), 100, ("0-a", "1-a"), 0.25),
    Request(3),
    Bye("done"),
    GROUP,
    Welcome("run", 4, "p"),
    Tickets((TICKET, dataclasses.replace(TICKET, evaluation=""))),
    Receipt("0-a", False, "stale"),
    Ack(("0-a", "1-a")),
    Cancel(("0-a",), "void"),
    Stop("over"),
]


def raw(frames: list) -> list[bytes]:
    return [bytes(frame) for frame in frames]


def same(a: object, b: object) -> bool:
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, tuple | list):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))  # type: ignore[arg-type]
    if dataclasses.is_dataclass(a):
        return type(a) is type(b) and all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    return type(a) is type(b) and a == b


def changed_header(message: object, path: list, value: object) -> list[bytes]:
    """The frames of `message` with one place of the header's body replaced, and the digest of what is there now."""
    frames = raw(encode(message))  # type: ignore[arg-type]
    header = msgpack.unpackb(frames[0])
    place = header["body"]
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return with_header(header, *frames[1:-1])


def with_header(header: dict, *frames: bytes) -> list[bytes]:
    return sealed([msgpack.packb(header), *frames])


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


def test_a_picture_that_episodes_share_travels_once() -> None:
    one = sum(map(len, encode(Group("t", "a", (episode(picture=b"p" * 10_000),)))))
    frames = encode(Group("t", "a", (episode(picture=b"p" * 10_000),) * 8))
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
        ([2, 0, 6, 0], 2, "missing_frame"),  # a picture
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
        (Receipt("t", True), [1], 1, "wrong_type"),
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
        ([PICTURELESS, digest([PICTURELESS])], "missing_frame"),
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


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda m: type(m).__name__)
def test_a_bit_flipped_in_any_frame_is_noticed_and_nothing_of_the_message_is_believed(message: object) -> None:
    frames = raw(encode(message))  # type: ignore[arg-type]
    for place, frame in enumerate(frames):
        for bit in {0, 5, 4 * len(frame), 8 * len(frame) - 1} & set(range(8 * len(frame))):
            flipped = bytearray(frame)
            flipped[bit // 8] ^= 1 << bit % 8
            with pytest.raises(WireError) as caught:
                decode([*frames[:place], bytes(flipped), *frames[place + 1 :]])
            assert caught.value.reason in {"digest", "header" if place == 0 else "image_hash", "schema_version"}
            assert caught.value.ticket_id == ""


def test_a_bit_flipped_in_each_array_of_a_trajectory_is_noticed() -> None:
    trajectory = episode()
    frames = raw(encode(Group("t", "a", (trajectory,))))
    for name in ("token_ids", "loss_mask", "behaviour_logprobs", "policy_versions"):
        place = frames.index(getattr(trajectory, name).tobytes())
        flipped = bytearray(frames[place])
        flipped[-1] ^= 1
        with pytest.raises(WireError, match="digest"):
            decode([*frames[:place], bytes(flipped), *frames[place + 1 :]])


def test_frames_that_change_places_or_boundaries_are_noticed() -> None:
    frames = raw(encode(GROUP))
    for swapped in (
        [frames[0], frames[2], frames[1], *frames[3:]],
        [frames[0], frames[1] + frames[2][:1], frames[2][1:], *frames[3:]],
        [*frames[:-3], frames[-2], frames[-3], frames[-1]],  # pictures
        [*frames[:-2], frames[-1]],
    ):
        with pytest.raises(WireError, match=r"digest|image_hash"):
            decode(swapped)


@settings(max_examples=400, deadline=None)
@given(seed=st.integers(0, 2**32), edits=st.integers(1, 8), which=st.sampled_from(EXAMPLES))
def test_mutated_messages_raise_wire_errors_or_decode(seed: int, edits: int, which: object) -> None:
    rng = random.Random(seed)
    frames = [bytearray(frame) for frame in encode(which)][:-1]  # type: ignore[arg-type]
    for _ in range(edits):
        frame = frames[rng.randrange(len(frames))] if rng.random() < 0.3 else frames[0]
        match rng.randrange(4):
            case 0 if frame:
                frame[rng.randrange(len(frame))] = rng.randrange(256)
            case 1 if frame:
                del frame[rng.randrange(len(frame))]
            case 2:
                frame.insert(rng.randrange(len(frame) + 1), rng.randrange(256))
            case 3 if len(frames) > 1:
                frames.pop(rng.randrange(1, len(frames)))
    try:
        message = decode(sealed(frames))
    except WireError as error:
        assert error.reason.isidentifier()
        assert len(str(error)) < 1000
    else:
        encode(message)


def check(trajectory: Trajectory) -> None:
    check_trajectory(trajectory, **dataclasses.asdict(RULES))


def test_trajectories_that_keep_the_contract_pass() -> None:
    check(episode())
    check(failed_episode())


def replaced(name: str, index: int, value: float) -> dict[str, np.ndarray]:
    array = getattr(episode(), name).copy()
    array[index] = value
    return {name: array}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"loss_mask": np.zeros(6, np.uint8)}, "length"),
        ({"token_ids": np.zeros(7, np.int64)}, "wrong_type"),
        ({"token_ids": np.zeros((7, 1), np.int32)}, "wrong_type"),
        (replaced("token_ids", 0, 100), "token_id"),
        (replaced("token_ids", 0, -1), "token_id"),
        (replaced("loss_mask", 2, 2), "loss_mask"),
        ({"images": ()}, "placeholders"),
        (replaced("token_ids", 0, PLACEHOLDER), "placeholders"),
        (replaced("token_ids", 2, VISION_START), "sampled_vision_id"),
        (replaced("behaviour_logprobs", 2, 0.1), "logprob"),
        (replaced("behaviour_logprobs", 2, np.nan), "logprob"),
        (replaced("behaviour_logprobs", 2, -np.inf), "logprob"),
        (replaced("behaviour_logprobs", 0, -1), "logprob"),
        (replaced("policy_versions", 2, -1), "version"),
        (replaced("policy_versions", 0, 0), "version"),
        ({"turns": (Turn(2, 4, 0.0),)}, "turns"),
        ({"turns": (Turn(6, 7, 0.0), Turn(2, 4, 0.0))}, "turns"),
        ({"turns": (Turn(2, 4, 0.0), Turn(6, 8, 0.0))}, "turns"),
        ({"turns": (Turn(2, 4, np.nan), Turn(6, 7, 0.0))}, "not_finite"),
        ({"reward": np.inf}, "not_finite"),
    ],
)
def test_trajectories_that_break_the_contract_are_refused(changes: dict, reason: str) -> None:
    with pytest.raises(WireError) as caught:
        check(episode(**changes))
    assert caught.value.reason == reason
