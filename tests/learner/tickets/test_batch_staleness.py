"""The staleness of a batch: of its tokens, and of each group by its oldest one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from learner.tickets.staleness import StalenessMeter


@dataclass
class Played:
    policy_versions: np.ndarray
    loss_mask: np.ndarray
    trainable: bool = True


@dataclass
class Together:
    trajectories: tuple[Played, ...]
    played_s: float


def played(*versions: int, trainable: bool = True) -> Played:
    """-1: a token that the policy did not sample."""
    found = np.array(versions)
    return Played(found, (found >= 0).astype(np.uint8), trainable)


def test_a_group_is_as_old_as_its_oldest_sampled_token_of_a_trainable_episode() -> None:
    ages = StalenessMeter()
    young, old = (
        Together((played(-1, 5, 5), played(6)), 1.0),
        Together((played(3, -1, 6), played(0, trainable=False)), 3.0),
    )
    ages.add([young, old], 6)
    found = ages.drain()
    assert found["staleness/token/mean"] == pytest.approx((1 + 1 + 0 + 3 + 0) / 5)
    assert found["staleness/group/mean"] == pytest.approx((1 + 3) / 2)
    assert (found["staleness/group/max"], found["actors/group_s/mean"], ages.max_seen) == (3, 2.0, 3)
    ages.add([young], 5)  # an engine that has the next version already plays with no negative age
    assert ages.drain()["staleness/token/max"] == 0 and ages.max_seen == 3 and ages.drain() == {}
