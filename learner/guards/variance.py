"""Says so when nothing can be learned: steps in a row whose rewards do not differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

from learner.batch import episode_rewards, penalty
from learner.guards.state import GuardState
from shared.learner_config import LearnerConfig
from shared.settings.objective import ObjectiveConfig
from shared.types import Group, Trajectory

SAY_EVERY = 20  # steps
EXAMPLE_CHARACTERS = 240


class VarianceGuard:
    """Counts steps in a row without variance of reward, and puts what is known about them into one line.

    A step has variance if any of its groups has; with one episode a group, if its episodes differ among themselves or
    from those of the steps before.
    """

    def __init__(self, config: LearnerConfig, state: GuardState) -> None:
        self._config, self._state = config, state
        self._endings: Counter[str] = Counter()
        self._rewards: tuple[float, ...] = ()  # the lowest and the highest
        self._example = ""
        self._before: list[Group] = []  # of the last step without variance

    def step(self, groups: Sequence[Group]) -> str:
        """After each step. The line to be said now, or an empty one."""
        if varies([*self._before, *groups], self._config):
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
        """In a row; a restarted run goes on counting."""
        return self._state.steps_without_variance

    @property
    def stops(self) -> bool:
        """Whether the run is to end."""
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


def varies(groups: Sequence[Group], config: LearnerConfig) -> bool:
    """Whether episodes that are compared with one another earned different rewards."""
    objective = config.objective
    if config.group_size == 1:
        return len({earned(t, objective) for group in groups for t in group.trajectories if t.trainable}) > 1
    if objective.group_relative:
        return any(len(set(episode_rewards(group, objective))) > 1 for group in groups)
    return any(len({earned(t, objective) for t in group.trajectories if t.trainable}) > 1 for group in groups)


def earned(trajectory: Trajectory, objective: ObjectiveConfig) -> Hashable:
    """What a critic is trained on: the rewards of the turns, or the episode's, less what a token limit took off."""
    less = penalty(trajectory, objective)
    if objective.turn_rewards:
        return (*(turn.reward for turn in trajectory.turns), -less)
    return trajectory.reward - less
