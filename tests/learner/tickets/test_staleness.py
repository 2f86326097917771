"""The pacing formula against a simulation of the schedule that it paces."""

from __future__ import annotations

import pytest

from learner.tickets.staleness import may_issue


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
@pytest.mark.parametrize("groups_per_version", [1, 4])
def test_greedy_issue_and_consumption_in_order_reach_the_bound_and_never_pass_it(
    max_staleness: int, groups_per_version: int
) -> None:
    issued_at: list[int] = []
    ages = []
    for version in range(12):
        while may_issue(len(issued_at), 0, version, max_staleness, groups_per_version):
            issued_at.append(version)
        consumed = issued_at[version * groups_per_version : (version + 1) * groups_per_version]
        assert len(consumed) == groups_per_version
        ages += [version - at for at in consumed]
    assert max(ages) == max_staleness


def test_a_dropped_group_makes_room_for_one_more() -> None:
    assert not may_issue(8, 0, 0, 1, 4)
    assert may_issue(8, 1, 0, 1, 4)
    assert not may_issue(9, 1, 0, 1, 4)
