"""A guard that detects, by its entropy, a policy that degenerates into noise or collapses into one answer."""

from __future__ import annotations

from math import isfinite

from learner.training.guard_state import GuardState
from shared.config.sections import GuardConfig

OUTSIDE_STEPS = 3
"""Steps in a row outside of the bounds before something is done."""


class EntropyGuard:
    """Counts consecutive steps whose entropy is outside of the bounds."""

    def __init__(self, config: GuardConfig, state: GuardState) -> None:
        self._config, self._state = config, state
        self._last = 0.0

    @property
    def num_steps(self) -> int:
        """The number of consecutive steps; a restarted run continues the count."""
        return self._state.steps_outside_entropy

    @property
    def highest(self) -> float:
        """The upper bound in nats per token: the recipe's, or one derived from the first step."""
        if self._config.entropy_max is not None:
            return self._config.entropy_max
        start = self._state.start_entropy
        return float("inf") if start is None else 2 * start + 1

    def step(self, entropy: float | None) -> None:
        """Count a step by the mean entropy of its tokens. None or a value that is not finite leaves the count as it
        is."""
        if entropy is None or not isfinite(entropy):
            return
        if self._state.start_entropy is None:
            self._state.start_entropy = entropy
        self._last = entropy
        inside = self._config.entropy_min <= entropy <= self.highest
        self._state.steps_outside_entropy = 0 if inside else self.num_steps + 1

    @property
    def good(self) -> bool:
        """True if a checkpoint made now is worth going back to: the entropy is within its bounds, and less than half
        way to the upper one."""
        start, low = self._state.start_entropy, self._config.entropy_min
        if start is None:
            return True
        return low <= self._last <= (max(start, low) + self.highest) / 2

    @property
    def out(self) -> bool:
        return self.num_steps >= OUTSIDE_STEPS

    def line(self, step: int) -> str:
        """Return one line about the violation, without the cure."""
        config, start = self._config, self._state.start_entropy
        if self._last < config.entropy_min:
            bound, what = f"below learner.guard.entropy_min = {config.entropy_min:g}", "has collapsed"
        else:
            explanation = "" if config.entropy_max is not None else f", twice the first step's {start:.3g}, plus 1"
            bound, what = f"above learner.guard.entropy_max ({self.highest:.3g}{explanation})", "falls apart"
        return (
            f"the policy {what}: its entropy was {bound} nats a token in {self.num_steps} steps in a row, "
            f"{self._last:.3g} in the last, step {step}"
        )
