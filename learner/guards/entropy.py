"""Notices a policy that falls apart, or into one answer, by its entropy."""

from __future__ import annotations

from math import isfinite

from learner.guards.state import GuardState
from shared.sections import GuardConfig


class EntropyGuard:
    """Counts steps in a row whose entropy lies outside of the bounds."""

    def __init__(self, config: GuardConfig, state: GuardState) -> None:
        self._config, self._state = config, state
        self._last = 0.0

    @property
    def num_steps(self) -> int:
        """In a row; a restarted run goes on counting."""
        return self._state.steps_outside_entropy

    @property
    def highest(self) -> float:
        """Nats a token; without a bound of the recipe's, from the first step's."""
        if self._config.entropy_max is not None:
            return self._config.entropy_max
        start = self._state.start_entropy
        return float("inf") if start is None else 2 * start + 1

    def step(self, entropy: float | None) -> None:
        """After each step, with the mean over its tokens; None or not finite counts neither way."""
        if entropy is None or not isfinite(entropy):
            return
        if self._state.start_entropy is None:
            self._state.start_entropy = entropy
        self._last = entropy
        inside = self._config.entropy_min <= entropy <= self.highest
        self._state.steps_outside_entropy = 0 if inside else self.num_steps + 1

    @property
    def good(self) -> bool:
        """Whether a checkpoint of now is worth going back to: inside, and not half the way to the upper bound."""
        start, low = self._state.start_entropy, self._config.entropy_min
        if start is None:
            return True
        return low <= self._last <= (max(start, low) + self.highest) / 2

    @property
    def out(self) -> bool:
        return self.num_steps >= self._config.entropy_steps

    def line(self, step: int) -> str:
        """What has happened, without the cure."""
        config, start = self._config, self._state.start_entropy
        if self._last < config.entropy_min:
            bound, what = f"below learner.guard.entropy_min = {config.entropy_min:g}", "has collapsed"
        else:
            own = "" if config.entropy_max is not None else f", twice the first step's {start:.3g}, plus 1"
            bound, what = f"above learner.guard.entropy_max ({self.highest:.3g}{own})", "falls apart"
        return (
            f"the policy {what}: its entropy was {bound} nats a token in {self.num_steps} steps in a row, "
            f"{self._last:.3g} in the last, step {step}"
        )
