"""Nothing that was damaged on its way, or that breaks the contract of a trajectory, is taken for a message."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.codec import WireError, check_trajectory, decode, encode
from shared.types import Group, Trajectory, Turn
from tests.support.codec_rig import EXAMPLES, GROUP, raw
from tests.support.wires import PLACEHOLDER, RULES, VISION_START, episode, failed_episode, sealed


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
        [*frames[:-3], frames[-2], frames[-3], frames[-1]],  # images
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
