"""Advantages that are known before any forward: relative to the group, and the running scale of a critic's.

Shape suffixes: G = episodes of one group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from learner.vtrace import token_vtrace, turn_indices
from shared.learner_config import ObjectiveConfig

NUM_TURNS = 9  # that have moments of their own; the last also has all later ones
MOMENTS = ("tokens", "advantage", "advantage_sq", "value_weight", "vs_sq")  # sums over the tokens of a turn


class ScaledEpisode(Protocol):
    """The sampled tokens of one episode, [K] each."""

    @property
    def rewards(self) -> np.ndarray: ...
    @property
    def turn_end(self) -> np.ndarray: ...
    @property
    def advantage(self) -> float: ...
    @property
    def signal(self) -> float: ...


def group_advantages(
    rewards_G: Sequence[float], *, divide_by_std: bool = True, leave_one_out: bool = False, floor: float = 0.0
) -> np.ndarray:
    """Rewards relative to their group, float64 [G]: exactly 0 when all rewards are equal, whatever their value.

    The baseline is the group's mean (GRPO: Shao et al., 2024, section 4.1.1) or, with `leave_one_out`, the mean of the
    other episodes (RLOO: Ahmadian et al., 2024, equation 8), which is G/(G-1) times as far. `divide_by_std` is GRPO's
    division by the standard deviation of the group; without it, groups that are nearly all right or nearly all wrong
    weigh no more than others (Liu et al., 2025, "Dr. GRPO"). A deviation below `floor` times the rewards' root mean
    square counts as that much.
    """
    rewards = np.asarray(rewards_G, dtype=np.float64)
    if equal(rewards):
        return np.zeros_like(rewards)
    advantages = rewards - rewards.mean()
    if leave_one_out:
        advantages *= len(rewards) / (len(rewards) - 1)
    return advantages / max(float(rewards.std()), floor * _size(rewards), 1e-6) if divide_by_std else advantages


def group_signal(rewards_G: Sequence[float], floor: float) -> float:
    """The rewards' deviation over `floor` times their root mean square, at most 1: how far it is from being noise."""
    rewards = np.asarray(rewards_G, dtype=np.float64)
    smallest = floor * _size(rewards)
    return min(1.0, float(rewards.std()) / smallest) if smallest > 0 else 1.0


def _size(rewards: np.ndarray) -> float:
    return float(np.sqrt(np.square(rewards).mean())) if rewards.size else 0.0


def equal(rewards_G: Sequence[float] | np.ndarray) -> bool:
    """Whether a group says nothing about what is better; a group of none or one does not."""
    rewards = np.asarray(rewards_G, dtype=np.float64)
    return rewards.size == 0 or bool((rewards == rewards[0]).all())


class SurveyedEpisode(Protocol):
    """One whose tokens have been seen by the policy and the reference as the step began."""

    @property
    def advantage(self) -> float: ...
    @property
    def group(self) -> int: ...
    @property
    def proximal_logprobs(self) -> np.ndarray | None: ...
    @property
    def reference_logprobs(self) -> np.ndarray | None: ...


def penalised_advantages(episodes: Sequence[SurveyedEpisode], config: ObjectiveConfig) -> list[float]:
    """Group-relative advantages of rewards less kl_coef log(prox/reference), summed over the tokens of each episode.

    Advantages that are not divided by a deviation are linear in the rewards, so that the penalty's are added to those
    the episodes have. The baseline of the penalty is over the group's episodes here (those cut off may be masked).
    """
    penalties = []
    for e in episodes:
        assert e.proximal_logprobs is not None and e.reference_logprobs is not None
        divergence = (e.proximal_logprobs.astype(np.float64) - e.reference_logprobs).sum()
        penalties.append(-config.kl_coef * float(divergence))
    members: dict[int, list[int]] = {}
    for i, e in enumerate(episodes):
        members.setdefault(e.group, []).append(i)
    advantages = [e.advantage for e in episodes]
    for group in members.values():
        how = {"divide_by_std": False, "leave_one_out": config.leave_one_out}
        for i, more in zip(group, group_advantages([penalties[i] for i in group], **how), strict=True):
            advantages[i] += float(more)
    return advantages


class Scaling(NamedTuple):
    """What becomes of a critic's advantages, and of the policy's learning rate, in one step."""

    factor: float = 1.0  # that advantages are multiplied by, after
    centres: Tensor | None = (
        None  # float32 [turns]: what is taken off those of each turn; the last is also for later ones
    )
    rate: float = 1.0  # that the policy's learning rate is multiplied by

    def __call__(self, advantages_N: Tensor, turns_N: Tensor) -> Tensor:
        """Centred and scaled; `turns_N`: int64, which turn of its episode each token is in, from 0."""
        if self.centres is not None:
            advantages_N = advantages_N - self.centres.to(advantages_N)[turns_N.clamp(max=len(self.centres) - 1)]
        return advantages_N * self.factor


class RunningScale:
    """Keeps running moments of a critic's advantages, and says before each step how they are to be scaled.

    Each turn's mean is taken off. A baseline that knows the turn alone leaves the expected gradient as it is, and a
    critic that knows little leaves advantages of one sign: under truncated ratios negative ones drive the policy away
    from what was played, whatever it was (Arnal et al., 2025, "Asymmetric REINFORCE for off-policy reinforcement
    learning"). Then they are divided by their deviation or, where that is more, by `advantage_floor` times the targets'
    root mean square (DreamerV3 limits its scale of returns likewise: Hafner et al., 2023). Below that floor
    the learning rate shrinks too, as AdamW would undo any scaling of gradients. Group-relative advantages are scaled in
    their groups; of theirs, the rate alone is said.

    All of it is known before a step, hence the same in all its microbatches; the first step starts it from the returns.
    """

    def __init__(self, config: ObjectiveConfig) -> None:
        self.moments: np.ndarray | None = None  # float64 [turns, MOMENTS], running; None before the first step
        self._config = config
        self._used = config.normalize_advantages and not config.group_relative

    def __call__(self, episodes: Sequence[ScaledEpisode]) -> Scaling:
        if self._config.group_relative:
            signals = [e.signal for e in episodes if e.advantage != 0.0]
            return Scaling(rate=float(np.mean(signals))) if signals else Scaling()
        if not self._used or not episodes:
            return Scaling()
        if self.moments is None or not _deviation(self.moments) > 0:
            moments = self._moments_of_returns(episodes)
            self.moments = moments if np.isfinite(moments).all() else None
        if self.moments is None or not (deviation := _deviation(self.moments)) > 0:
            return Scaling()
        counts, sums = self.moments[:, 0], self.moments[:, 1]
        centres = np.divide(sums, counts, out=np.zeros_like(sums), where=counts > 0)
        weights, squares = self.moments[:, 3].sum(), self.moments[:, 4].sum()
        floor = self._config.advantage_floor * float(np.sqrt(squares / weights)) if weights > 0 else 0.0
        rate = min(1.0, deviation / floor) if floor > 0 else 1.0
        return Scaling(1.0 / max(deviation, floor, 1e-6), torch.from_numpy(centres).float(), rate)

    def follow(self, moments: np.ndarray) -> None:
        """After a step, with its sums, float64 [turns, MOMENTS]. Without a token, or not finite, they count nothing."""
        if not moments[:, 0].sum() > 0 or not np.isfinite(moments).all():
            return
        keep = self._config.advantage_memory
        self.moments = moments if self.moments is None else keep * self.moments + (1 - keep) * moments

    def _moments_of_returns(self, episodes: Sequence[ScaledEpisode]) -> np.ndarray:
        """Advantages and targets of a critic that says 0."""
        rewards = torch.from_numpy(np.concatenate([e.rewards for e in episodes]))
        turn_end = torch.from_numpy(np.concatenate([e.turn_end for e in episodes]))
        episode_end = torch.zeros_like(turn_end)
        episode_end[np.cumsum([len(e.rewards) for e in episodes]) - 1] = True
        zeros = torch.zeros_like(rewards)
        gamma, lam = self._config.gamma, self._config.lam
        returns = token_vtrace(zeros, rewards, zeros, turn_end, episode_end, gamma=gamma, lam=lam).advantages.double()
        rows = torch.stack([torch.ones_like(returns), returns, returns**2, torch.ones_like(returns), returns**2], dim=1)
        turns = turn_indices(turn_end, episode_end).clamp(max=NUM_TURNS - 1)
        return torch.zeros(NUM_TURNS, len(MOMENTS), dtype=torch.float64).index_add(0, turns, rows).numpy()


def _deviation(moments: np.ndarray) -> float:
    """Of advantages around the mean of their turn."""
    counts, sums, squares = moments[:, 0], moments[:, 1], moments[:, 2]
    inside = squares - np.divide(sums**2, counts, out=np.zeros_like(sums), where=counts > 0)
    total = counts.sum()
    return float(np.sqrt(max(inside.sum(), 0.0) / total)) if total > 0 else 0.0
