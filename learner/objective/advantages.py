"""Advantages that need no forward: relative to the group; and the running scale of a critic's advantages.

Shape suffixes: G = episodes of one group, T = turns of one episode.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from shared.config.objective_section import ObjectiveConfig

NUM_TURNS = 9  # turns with separate moments; later turns count as the last of them
MOMENTS = ("tokens", "advantage", "advantage_sq")  # sums over the tokens of a turn
# A deviation of rewards below this is regarded as noise, in the rewards' units (with a critic: after `reward_scale`).
# Rewards do not tell by themselves what is noise: adding a constant to all of them must change nothing.
REWARD_NOISE = 0.03


class ScaledEpisode(Protocol):
    """The sampled tokens of one episode, [K] each."""

    @property
    def rewards(self) -> np.ndarray: ...
    @property
    def turn_end(self) -> np.ndarray: ...
    @property
    def advantage_size(self) -> float: ...
    @property
    def signal(self) -> float: ...


def group_advantages(
    rewards_G: Sequence[float], *, divide_by_std: bool = True, leave_one_out: bool = False, floor: float = 0.0
) -> np.ndarray:
    """Return rewards relative to their group, float64 [G]: exactly 0 if all rewards are equal, whatever their value.

    The baseline is the group's mean (GRPO: Shao et al., 2024, section 4.1.1) or, with `leave_one_out`, the mean of the
    other episodes (RLOO: Ahmadian et al., 2024, equation 8), which multiplies the differences by G/(G-1).
    `divide_by_std` is GRPO's division by the group's standard deviation; without it, groups that are nearly all right
    or nearly all wrong weigh no more than others (Liu et al., 2025, "Dr. GRPO"). A deviation below `floor`, in the
    rewards' units, is replaced by it.
    """
    rewards = np.asarray(rewards_G, dtype=np.float64)
    if are_equal(rewards):
        return np.zeros_like(rewards)
    advantages = rewards - rewards.mean()
    if leave_one_out:
        advantages *= len(rewards) / (len(rewards) - 1)
    return advantages / max(float(rewards.std()), floor, 1e-6) if divide_by_std else advantages


def group_signal(rewards_G: Sequence[float], floor: float) -> float:
    """Return the rewards' deviation divided by `floor`, at most 1; 1 if `floor` is 0. Values below 1 mean that the
    deviation is regarded as noise."""
    return min(1.0, float(np.asarray(rewards_G, dtype=np.float64).std()) / floor) if floor > 0 else 1.0


def most_varying(rewards: Sequence[Sequence[float]], share: float) -> frozenset[int]:
    """Return the indices of the groups whose rewards vary most, as few as have together at least `share` of the sum of
    all groups' variances (RAGEN-2's filter of rollouts). None of them if no group varies."""
    variances = [0.0 if are_equal(r) else float(np.var(np.asarray(r, dtype=np.float64))) for r in rewards]
    kept: set[int] = set()
    left = share * sum(variances)
    for index in sorted(range(len(variances)), key=lambda i: -variances[i]):
        if left <= 0 or variances[index] == 0:
            break
        kept.add(index)
        left -= variances[index]
    return frozenset(kept)


def are_equal(rewards_G: Sequence[float] | np.ndarray) -> bool:
    """Tell whether all rewards are equal, so that the group does not show which episodes are better. True for fewer
    than two rewards."""
    rewards = np.asarray(rewards_G, dtype=np.float64)
    return rewards.size == 0 or bool((rewards == rewards[0]).all())


def discounted_returns(rewards_T: Sequence[float], gamma: float) -> list[float]:
    """Return, for each turn of an episode, its reward and the later ones', discounted by `gamma` between turns."""
    returns, later = [], 0.0
    for reward in reversed(rewards_T):
        later = reward + gamma * later
        returns.append(later)
    return returns[::-1]


def turn_advantages(
    returns: Sequence[Sequence[float]], situations: Sequence[Sequence[Hashable | None]], **how: Any
) -> list[np.ndarray]:
    """Return the advantages of the turns of a group's episodes, float64 [T] each: a turn's return relative to those of
    all turns in the same situation, as `group_advantages(..., **how)` compares them; 0 for a turn whose situation is
    None.

    With states as situations these are the step advantages of GiGPO (Feng et al., 2025).
    """
    advantages = [np.zeros(len(of_episode)) for of_episode in returns]
    for turns in in_same_situation(situations).values():
        compared = group_advantages([returns[i][t] for i, t in turns], **how)
        for (i, t), advantage in zip(turns, compared, strict=True):
            advantages[i][t] = advantage
    return advantages


def in_same_situation(
    situations: Sequence[Sequence[Hashable | None]],
) -> dict[Hashable, list[tuple[int, int]]]:
    """Return the turns, as (episode, turn), of each situation that several turns were in."""
    turns: dict[Hashable, list[tuple[int, int]]] = {}
    for i, of_episode in enumerate(situations):
        for t, situation in enumerate(of_episode):
            if situation is not None:
                turns.setdefault(situation, []).append((i, t))
    return {situation: alike for situation, alike in turns.items() if len(alike) > 1}


class GroupedEpisode(Protocol):
    """An episode with an advantage relative to its group."""

    @property
    def advantage(self) -> float: ...
    @property
    def group(self) -> int: ...


def penalised_advantages(
    episodes: Sequence[GroupedEpisode], divergences: Sequence[float], config: ObjectiveConfig
) -> list[float]:
    """Return group-relative advantages of rewards minus kl_coef log(prox/reference), summed over each episode's tokens.

    `divergences`: that log ratio's sum for each episode. Advantages that are not divided by a deviation are linear in
    the rewards, so the penalty's advantages are added to the episodes' own. The penalty's baseline covers the given
    episodes of the group (episodes cut off by a limit may be masked).
    """
    penalties = [-config.kl_coef * divergence for divergence in divergences]
    members: dict[int, list[int]] = {}
    for i, e in enumerate(episodes):
        members.setdefault(e.group, []).append(i)
    advantages = [e.advantage for e in episodes]
    for group in members.values():
        relative = group_advantages(
            [penalties[i] for i in group], divide_by_std=False, leave_one_out=config.leave_one_out
        )
        for i, added in zip(group, relative, strict=True):
            advantages[i] += float(added)
    return advantages


class Scaling(NamedTuple):
    """The scaling, in one step, of a critic's advantages and of the policy's learning rate."""

    factor: float = 1.0  # multiplies the centred advantages
    # float32 [turns]: subtracted from the advantages of each turn; the last entry is also for later turns.
    centres: Tensor | None = None
    rate: float = 1.0  # multiplies the policy's learning rate

    def on(self, device: torch.device) -> Scaling:
        """Return the scaling with its tensors on this device."""
        return self if self.centres is None else self._replace(centres=self.centres.to(device))

    def __call__(self, advantages_N: Tensor, turns_N: Tensor) -> Tensor:
        """Return advantages centred and scaled. `turns_N`: int64, index of each token's turn in its episode, from 0."""
        if self.centres is not None:
            advantages_N = advantages_N - self.centres.to(advantages_N)[turns_N.clamp(max=len(self.centres) - 1)]
        return advantages_N * self.factor


class RewardMoments(NamedTuple):
    """Number, mean and summed squared deviation of rewards. Central sums: a constant added to all rewards changes only
    the mean."""

    number: float
    mean: float
    squares: float

    @classmethod
    def of(cls, rewards: Sequence[float]) -> RewardMoments:
        """Return the moments of at least one reward."""
        values = np.asarray(rewards, dtype=np.float64)
        mean = float(values.mean())
        return cls(float(len(values)), mean, float(np.square(values - mean).sum()))

    def mixed_with(self, new: RewardMoments, keep: float) -> RewardMoments:
        """Return the moments of both, of which these weigh `keep` and the new ones the rest."""
        own, other = keep * self.number, (1 - keep) * new.number
        count, gap = own + other, new.mean - self.mean
        squares = keep * self.squares + (1 - keep) * new.squares + own * other / count * gap**2
        return RewardMoments(count, self.mean + other / count * gap, squares)

    @property
    def deviation(self) -> float:
        return float(np.sqrt(self.squares / self.number))


class RunningScale:
    """Running moments of rewards and of a critic's advantages, from which each step's scaling follows.

    Each turn's mean is subtracted from a critic's advantages. A baseline that depends only on the turn does not change
    the expected gradient. Without it, an inaccurate critic leaves advantages of one sign: under truncated ratios
    negative ones drive the policy away from whatever was played (Arnal et al., 2025, "Asymmetric REINFORCE for
    off-policy reinforcement learning"). Then the advantages are divided by their deviation or, if that is larger, by
    the noise (DreamerV3 limits its scale of returns similarly: Hafner et al., 2023).

    The noise depends on how rewards differ, never on their size. In a group it is `advantage_floor` times the running
    deviation of all rewards, at least `REWARD_NOISE`. Advantages of a critic that deviate by less than
    `advantage_floor` times the returns' deviation around their turn's mean are noise: the critic knows 99 % of the
    returns (with 0.1), and what is left is jitter of its own.

    AdamW undoes any scaling of gradients, so noise has to reduce the learning rate instead, for all terms of the loss
    alike. With a critic the rate is multiplied by the ratio of the advantages' deviation to that noise, by the ratio of
    the returns' deviation to the advantages' (the excess is the critic's own error), and by the ratio of the returns'
    deviation to `REWARD_NOISE`, each if it is below 1. Relative to groups, the rate is multiplied by the mean of the
    groups' signals (`group_signal`), each weighted by the sum of its absolute advantages, that is by its part of the
    gradient. Where nothing varies the rate is 0, and it goes to 0 with the variation; an objective that learns from
    episodes of zero advantage too keeps its rate.

    All of it is known before a step, so it is the same in all microbatches. The first step initialises it from the
    returns, less what the critic predicts then (`start_value`).
    """

    def __init__(self, config: ObjectiveConfig) -> None:
        self.moments: np.ndarray | None = None  # float64 [turns, MOMENTS], running; None before the first step
        self.returns: np.ndarray | None = None  # the same for the returns, that is for a critic that always predicts 0
        self.start_value = 0.0  # what the critic predicts before its first update
        self.rewards: RewardMoments | None = None  # running, of the rewards that groups compare
        self._config = config
        self._used = config.normalize_advantages and config.has_critic
        self._slows = config.advantage_floor > 0 and not config.has_teacher  # a teacher teaches whatever is earned

    def reward_noise(self, rewards: Sequence[float]) -> float:
        """Return the deviation of a group's rewards that is regarded as noise, for a step with these rewards; 0 = none
        is. Call it once before the step."""
        floor = self._config.advantage_floor
        if not self._config.is_group_relative or not floor or not rewards:
            return 0.0
        new = RewardMoments.of(rewards)
        self.rewards = new if self.rewards is None else self.rewards.mixed_with(new, self._config.advantage_memory)
        return max(floor * self.rewards.deviation, REWARD_NOISE)

    def __call__(self, episodes: Sequence[ScaledEpisode]) -> Scaling:
        """Return the scaling for a step on `episodes`. Call it before the step."""
        if self._config.is_group_relative:
            spec = self._config.spec
            slowed = self._slows and (spec.zero_advantage_means_zero_loss or spec.whitens)
            return Scaling(rate=_weighted_signal(episodes) if slowed else 1.0)
        if not self._used or not episodes:
            return Scaling()
        returns = moments_of_returns(episodes, self._config.gamma)
        self.returns = self._mixed(self.returns, returns)
        if self.moments is None:
            self.moments = self._mixed(None, moments_of_returns(episodes, self._config.gamma, self.start_value))
        if self.moments is None or self.returns is None:
            return Scaling()
        deviation = _deviation(self.moments)
        of_returns = _deviation(self.returns)
        counts, sums = self.moments[:, 0], self.moments[:, 1]
        centres = np.divide(sums, counts, out=np.zeros_like(sums), where=counts > 0)
        floor = self._config.advantage_floor
        largest = max(deviation, floor * max(of_returns, REWARD_NOISE))
        if largest == 0.0:
            return Scaling()
        rate = 1.0
        if self._slows:
            rate = min(1.0, of_returns / REWARD_NOISE) * min(deviation, of_returns) / largest
        return Scaling(1.0 / max(largest, 1e-6), torch.from_numpy(centres).float(), rate)

    def follow(self, moments: np.ndarray) -> None:
        """Mix in a step's sums, float64 [turns, MOMENTS], after the step. Sums without tokens or with values that are
        not finite are ignored."""
        self.moments = self._mixed(self.moments, moments)

    def state(self) -> dict[str, Any]:
        """Return the state for a resumed run, as plain JSON values."""
        moments = {"advantage_moments": self.moments, "return_moments": self.returns}
        return {
            **{name: None if table is None else table.tolist() for name, table in moments.items()},
            "reward_moments": None if self.rewards is None else list(self.rewards),
            "start_value": self.start_value,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Load a result of `state`; parts that a checkpoint lacks start anew."""
        stored = (state.get(name) for name in ("advantage_moments", "return_moments"))
        # the first columns are the same in checkpoints that have more of them
        self.moments, self.returns = (
            None if moments is None else np.array(moments)[:, : len(MOMENTS)] for moments in stored
        )
        rewards = state.get("reward_moments")
        self.rewards = None if rewards is None else RewardMoments(*rewards)
        self.start_value = state.get("start_value", 0.0)

    def _mixed(self, before: np.ndarray | None, moments: np.ndarray) -> np.ndarray | None:
        if not moments[:, 0].sum() > 0 or not np.isfinite(moments).all():
            return before
        keep = self._config.advantage_memory
        return moments if before is None else keep * before + (1 - keep) * moments


def _weighted_signal(episodes: Sequence[ScaledEpisode]) -> float:
    """Return the mean of the groups' signals, weighted by absolute advantages; 0 if no group varies."""
    weights = [e.advantage_size for e in episodes]
    total = sum(weights)
    return sum(weight * e.signal for weight, e in zip(weights, episodes, strict=True)) / total if total else 0.0


def moments_of_returns(episodes: Sequence[ScaledEpisode], gamma: float, value: float = 0.0) -> np.ndarray:
    """Return float64 [turns, MOMENTS] for a critic that always predicts `value`: advantages are the turns' discounted
    returns minus it."""
    moments = np.zeros((NUM_TURNS, len(MOMENTS)))
    for e in episodes:
        ends = np.flatnonzero(e.turn_end)
        spans = list(pairwise([0, *(ends + 1)]))
        returns = discounted_returns([float(e.rewards[a:b].sum(dtype=np.float64)) for a, b in spans], gamma)
        for turn, ((start, end), later) in enumerate(zip(spans, returns, strict=True)):
            advantage = later - value
            moments[min(turn, NUM_TURNS - 1)] += (end - start) * np.array([1.0, advantage, advantage**2])
    return moments


def _deviation(moments: np.ndarray) -> float:
    """Return the deviation of advantages around their turn's mean; exactly 0 if it is only rounding."""
    counts, sums, squares = moments[:, 0], moments[:, 1], moments[:, 2]
    inside = float((squares - np.divide(sums**2, counts, out=np.zeros_like(sums), where=counts > 0)).sum())
    return float(np.sqrt(inside / counts.sum())) if inside > 1e-12 * squares.sum() else 0.0
