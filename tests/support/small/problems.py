"""Small problems with known solutions: states and rewards of episodes, and the return of the best policy.

A turn is an observation of one token, which names the state, then the policy's tokens, the last of which is its move. A
problem gives the mean reward of a move; the actual reward may have noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A problem in which every turn pays the same, whatever the move. `noise` is the standard deviation of rewards."""

    num_actions: int
    turn_tokens: int = 1
    max_turns: int = 1
    pays: float = 0.0
    noise: float = 0.0
    start: float = 0.0  # mean return of the uniform policy
    shift: float = 0.0  # added to the reward of every episode's last turn; not part of `start` and `best`
    best: float = 0.0  # mean return of the best policy; equal to `start` if all are equal

    def step(self, state: int, move: int, turn: int) -> tuple[int, float, bool]:
        """Return (next state, mean reward, whether the episode is over); a state is one of 0 to 7, the first is 0."""
        return turn + 1, self.pays, turn + 1 == self.max_turns

    @property
    def threshold(self) -> float:
        """A return that counts as the optimum: nine tenths of the way to it."""
        return self.start + 0.9 * (self.best - self.start)


@dataclass(frozen=True, kw_only=True)
class Bandit(Problem):
    means: Sequence[float]

    def step(self, state: int, move: int, turn: int) -> tuple[int, float, bool]:
        return state, self.means[move], True


@dataclass(frozen=True, kw_only=True)
class Corridor(Problem):
    """A row of cells, of which the first is the start. Move 1 goes right, 0 left; the last cell pays 1 and ends the
    episode."""

    length: int

    def step(self, state: int, move: int, turn: int) -> tuple[int, float, bool]:
        state = min(state + 1, self.length - 1) if move == 1 else max(state - 1, 0)
        arrived = state == self.length - 1
        return state, float(arrived), arrived


@dataclass(frozen=True, kw_only=True)
class Distraction(Problem):
    """In the first turn, move 0 pays 0.3 and leads to a room that pays nothing; other moves lead to a room where move 1
    pays 1."""

    def step(self, state: int, move: int, turn: int) -> tuple[int, float, bool]:
        if turn == 0:
            return (1, 0.3, False) if move == 0 else (2, 0.0, False)
        return state, float(state == 2 and move == 1), True


@dataclass(frozen=True, kw_only=True)
class Lock(Problem):
    """One digit per turn, and each turn costs 0.1. If all digits are right, the end pays 1."""

    digits: Sequence[int]

    def step(self, state: int, move: int, turn: int) -> tuple[int, float, bool]:
        right = state == turn and move == self.digits[turn]  # the state counts the right digits
        over = turn + 1 == len(self.digits)
        return turn + 1 if right else 7, float(right and over) - 0.1, over


TEN = (*(i / 10 for i in range(9)), 1.0)
PROBLEMS: dict[str, Problem] = {
    "two_arms": Bandit(num_actions=2, means=(0.2, 0.8), noise=0.4, start=0.5, best=0.8),
    "ten_arms": Bandit(num_actions=10, means=TEN, noise=1.0, start=0.46, best=1.0),
    "corridor": Corridor(num_actions=2, turn_tokens=2, max_turns=8, length=5, start=0.25, best=1.0),
    "distraction": Distraction(num_actions=3, turn_tokens=2, max_turns=2, start=0.322, best=1.0),
    "lock": Lock(num_actions=4, turn_tokens=2, max_turns=3, digits=(2, 0, 3), start=1 / 64 - 0.3, best=0.7),
}
UNTEACHABLE: dict[str, Problem] = {  # no policy is better than another
    "constant": Problem(num_actions=4, turn_tokens=2, max_turns=2, pays=-0.5),
    "nearly_constant": Problem(num_actions=4, turn_tokens=2, max_turns=2, pays=-0.5, noise=0.001),
    "noise": Problem(num_actions=4, turn_tokens=2, max_turns=2, noise=1.0),
}
