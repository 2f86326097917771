"""What watches a run beside its loop, the same on every rank: each guard's metrics, its one line, and what it stops."""

from __future__ import annotations

from collections.abc import Sequence

from learner.guards.variance import VarianceGuard
from shared.learner_config import LearnerConfig
from shared.log import get_logger
from shared.types import Group


class Guards:
    """Asked once after each step; all ranks ask with the same values, so that all of them stop together."""

    def __init__(self, config: LearnerConfig, *, speaks: bool) -> None:
        """`speaks`: this rank writes the lines."""
        self._variance = VarianceGuard(config)
        self._speaks = speaks

    def after_step(self, groups: Sequence[Group]) -> dict[str, float]:
        """The guards' metrics of a step on `groups`. ValueError where the recipe wants the run to end."""
        line = self._variance.step(groups)
        if self._variance.stops:
            raise ValueError(line)
        if line and self._speaks:
            get_logger("learner").warning("%s", line)
        return {"guard/steps_without_variance": float(self._variance.num_steps)}
