"""How old what is trained on is, and how long it took to play."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shared.metrics import Distribution
from shared.types import Group, PolicyVersion


class Ages:
    """Of the batches since the last `drain`: the staleness of each token and of each group's oldest one (versions), and
    the seconds that a group was played."""

    def __init__(self) -> None:
        self.max_seen = 0  # staleness, since the run began
        self._tokens, self._groups, self._played_s = Distribution(), Distribution(), Distribution()

    def add(self, groups: Sequence[Group], version: PolicyVersion) -> None:
        """A batch that is trained on at this version; each group has a trainable trajectory. It is measured as a whole,
        since a learner takes thousands of groups a second."""
        played: list[np.ndarray] = []
        starts, count = [], 0  # where each group's tokens begin among all
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
        values = self._tokens.drain("staleness/token") | self._groups.drain("staleness/group")
        return values | self._played_s.drain("actors/group_s")
