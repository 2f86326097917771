"""Nothing that was damaged on its way, or that breaks the contract of a trajectory, is taken for a message."""

from __future__ import annotations

import numpy as np
import pytest

from shared.types import Turn
from shared.wire.codec import WireError, check_trajectory, decode, encode
from tests.support.wires import EXAMPLES, GROUP, PLACEHOLDER, RULES, VISION_START, episode, failed_episode, raw


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


def test_frames_that_change_places_or_boundaries_are_noticed() -> None:
    header, first, second, *rest = raw(encode(GROUP))
    for swapped in (
        [header, second, first, *rest],
        [header, first + second[:1], second[1:], *rest],
        [header, first, second, *rest[:-3], rest[-2], rest[-3], rest[-1]],  # images
        [header, first, second, *rest[:-2], rest[-1]],
    ):
        with pytest.raises(WireError, match=r"digest|image_hash"):
            decode(swapped)


def test_trajectories_that_keep_the_contract_pass() -> None:
    check_trajectory(episode(), RULES)
    check_trajectory(failed_episode(), RULES)


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
        ({"segments": (7,)}, "segments"),
        ({"segments": (2,)}, "segments"),  # a sampled token
        ({"segments": (5, 4)}, "segments"),
        ({"segments": (4, 4)}, "segments"),
    ],
)
def test_trajectories_that_break_the_contract_are_refused(changes: dict, reason: str) -> None:
    with pytest.raises(WireError) as caught:
        check_trajectory(episode(**changes), RULES)
    assert caught.value.reason == reason


def test_a_version_below_that_of_no_version_is_refused() -> None:
    played = episode()
    played.policy_versions[0] = -2
    with pytest.raises(WireError, match="version"):
        check_trajectory(played, RULES)
