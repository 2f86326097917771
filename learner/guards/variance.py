"""A guard that reports when nothing can be learned: consecutive steps whose rewards do not differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from learner.batch.episodes import has_variance
from learner.training.guard_state import GuardState
from shared.config.learner_section import LearnerConfig
from shared.types import Group

SAY_EVERY = 20  # steps between two reports
EXAMPLE_CHARACTERS = 240


class VarianceGuard:
    """Counts consecutive steps without variance of reward, and describes them in one line.

    A step has variance if any of its groups has; with one episode per group, if its episodes differ among themselves or
    from those of earlier steps.
    """

    def __init__(self, config: LearnerConfig, state: GuardState) -> None:
        self._config, self._state = config, state
        self._endings: Counter[str] = Counter()
        self._rewards: tuple[float, ...] = ()  # (lowest, highest)
        self._example = ""
        self._before: list[Group] = []  # a group of the last step without variance; used with one episode per group

    def step(self, groups: Sequence[Group]) -> str:
        """Count a step; return the line to be reported now, or ""."""
        if has_variance([*self._before, *groups], self._config):
            self._state.steps_without_variance = 0
            self._before = []
            self._endings.clear()
            self._rewards = ()
            return ""
        self._state.steps_without_variance += 1
        self._before = list(groups[:1]) if self._config.group_size == 1 else []
        episodes = [t for group in groups for t in group.trajectories]
        self._endings.update(t.ending.value for t in episodes)
        rewards = [*self._rewards, *(t.reward for t in episodes if t.trainable)]
        self._rewards = (min(rewards), max(rewards)) if rewards else ()
        if episodes:
            self._example = " ".join((episodes[0].text or episodes[0].error).split())
        due = self.num_steps % SAY_EVERY == 0 or self.stops
        return self._line() if due else ""

    @property
    def num_steps(self) -> int:
        """The number of consecutive steps; a restarted run continues the count."""
        return self._state.steps_without_variance

    @property
    def stops(self) -> bool:
        """True if the run has to end."""
        return 0 < self._config.stop_without_variance <= self.num_steps

    def _line(self) -> str:
        total = max(sum(self._endings.values()), 1)
        endings = ", ".join(f"{name} {100 * count / total:.0f} %" for name, count in self._endings.most_common())
        what = "step" if self._config.group_size == 1 else "group"
        text = self._example
        if len(text) > EXAMPLE_CHARACTERS:
            text = "... " + text[-EXAMPLE_CHARACTERS:]
        return (
            f"no {what} had any variance of reward for {self.num_steps} steps, so that nothing can be learned: "
            f"{self._spread()}; the reward is constant, the task is too hard (or too easy) from this start, or the "
            f"model does not know the format; endings: {endings or 'none'}; an example: {text!r}; make the task "
            "easier, show the model the format, or check env.reward; learner.stop_without_variance = "
            f"{self._config.stop_without_variance} ends the run after so many steps, 0 never"
        )

    def _spread(self) -> str:
        if not self._rewards:
            return "no episode could be trained on"
        low, high = self._rewards
        if low == high:
            return f"every reward was {low:g}"
        return f"rewards were {low:g} to {high:g}, equal among those that are compared"
