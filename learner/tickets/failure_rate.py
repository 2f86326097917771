"""How many of the latest episodes failed for a reason that the next ones have too, and whether that is too many."""

from __future__ import annotations

from collections import Counter, deque

from shared.types import TRAINABLE_ENDINGS, Ending, Group, Trajectory

BLAMED = frozenset({Ending.ENV_ERROR, Ending.ENV_TIMEOUT, Ending.REWARD_ERROR, Ending.REWARD_TIMEOUT})
WINDOW = 256  # episodes looked back on
KEPT_CHARACTERS = 1000  # of a reason
LEAST = 32  # nothing is concluded from fewer
FULL_AT_ONCE = (
    "the prompt and the first observation leave no room for an answer: raise model.max_context, or lower "
    "model.max_pixels"
)


class Endings:
    """How the training episodes ended that came since the last `drain`, those of no use among them."""

    def __init__(self) -> None:
        self._counts: Counter[Ending] = Counter()

    def add(self, group: Group) -> None:
        self._counts.update(t.ending for t in group.trajectories)

    def drain(self) -> dict[str, float]:
        """The share of each ending, and of all that are not trained on; nothing if none came."""
        counts, total = self._counts, self._counts.total()
        self._counts = Counter()
        if not total:
            return {}
        shares = {f"rollout/ending/{ending.value}": counts[ending] / total for ending in Ending}
        failed = sum(counts[ending] for ending in frozenset(Ending) - TRAINABLE_ENDINGS)
        return shares | {"rollout/failed": failed / total}


class TooManyFailures(ValueError):
    """Too many episodes are of no use for the run to go on; one line with the first reason."""


def reason_of(t: Trajectory) -> str:
    """Why an episode failed for a reason that the next ones have too; "" for any other."""
    if t.ending in BLAMED:
        return f"{t.ending}: {t.error}"
    if t.ending is Ending.CONTEXT_FULL and not t.turns:
        return f"{t.ending}: {FULL_AT_ONCE}"
    return ""


class FailureRate:
    """The endings of the last `WINDOW` episodes; `max_share` of them may be failures (1.0: all of them)."""

    def __init__(self, max_share: float) -> None:
        self._max_share = max_share
        self._recent: deque[str] = deque(maxlen=WINDOW)  # the reason of a failure, "" for any other episode

    def add(self, group: Group) -> None:
        for t in group.trajectories:
            self._recent.append(reason_of(t)[:KEPT_CHARACTERS])

    def refused(self, reason: str) -> None:
        """A whole group that no step could train on, such as one with a reward beyond all bounds."""
        self._recent.append(reason[:KEPT_CHARACTERS])

    def check(self) -> None:
        """TooManyFailures, with the first reason that is remembered, if the share is passed."""
        reasons = [reason for reason in self._recent if reason]
        if len(self._recent) >= LEAST and len(reasons) > self._max_share * len(self._recent):
            first = " ".join(reasons[0].split())[:500]
            raise TooManyFailures(
                f"{len(reasons)} of the last {len(self._recent)} episodes failed, more than "
                f"env.max_failure_share = {self._max_share:g}; the first: {first}"
            )
