"""Two pure formulas that bound staleness (when a ticket may be issued, which groups may be trained first), and a meter
of the staleness that occurred."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from shared.metrics import Distribution
from shared.types import Group, PolicyVersion


def may_issue(issued: int, dropped: int, version: PolicyVersion, max_staleness: int, groups_per_version: int) -> bool:
    """Tell whether one more training ticket may be issued.

    Groups are consumed oldest first, so the group of the n-th ticket that is not dropped is trained on at version n //
    groups_per_version. The bound keeps that at most `max_staleness` versions after the ticket's issue.
    """
    return issued - dropped < (version + 1 + max_staleness) * groups_per_version


def leaves_room(
    open_by_version: Mapping[PolicyVersion, int],
    trained: int,
    version: PolicyVersion,
    max_staleness: int,
    groups_per_version: int,
) -> bool:
    """Tell whether all open tickets (counted by the version that issued them) can still be trained in time.

    A ticket that was issued at version v must be trained at version v + max_staleness at the latest. So up to the end
    of each version there must be room for all tickets that are due by then; training newer groups first reduces that
    room.
    """
    due = 0
    for issued_at in sorted(open_by_version):
        due += open_by_version[issued_at]
        last = max(issued_at + max_staleness, version)
        if due > max(0, (last + 1) * groups_per_version - trained):
            return False
    return True


class StalenessMeter:
    """Measures the batches since the last `drain`: staleness of each token and of each group's oldest token (in
    versions), and the seconds that each group was played."""

    def __init__(self) -> None:
        self.max_seen = 0  # largest staleness of a group since the run began
        self._tokens = Distribution()
        self._groups = Distribution()
        self._played_s = Distribution()

    def add(self, groups: Sequence[Group], version: PolicyVersion) -> None:
        """Measure a batch that is trained on at this version; each group must have a trainable trajectory.

        All groups are measured in one call, since a learner can take thousands of groups a second.
        """
        played: list[np.ndarray] = []
        starts: list[int] = []  # index of each group's first token in the batch
        count = 0
        for group in groups:
            starts.append(count)
            for t in group.trajectories:
                if t.trainable:
                    played.append(t.policy_versions[t.loss_mask == 1])
                    count += len(played[-1])
        tokens = np.maximum(version - np.concatenate(played), 0)
        oldest = np.maximum.reduceat(tokens, starts)
        self._tokens.add(tokens)
        self._groups.add(oldest)
        self._played_s.add([group.played_s for group in groups])
        self.max_seen = max(self.max_seen, int(oldest.max()))

    def drain(self) -> dict[str, float]:
        """Return the metrics of the batches since the last call."""
        values = self._tokens.drain("staleness/token") | self._groups.drain("staleness/group")
        return values | self._played_s.drain("actors/group_s")
