"""Advantages that are known before any forward: relative to the group, and the running scale of V-trace's.

Shape suffixes: G = episodes of one group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from learner.vtrace import token_vtrace
from shared.learner_config import ObjectiveConfig


class Episode(Protocol):
    """The sampled tokens of one episode, [K] each."""

    @property
    def rewards(self) -> np.ndarray: ...
    @property
    def turn_end(self) -> np.ndarray: ...


def group_advantages(
    rewards_G: Sequence[float], *, divide_by_std: bool = True, leave_one_out: bool = False, std_floor: float = 1e-6
) -> np.ndarray:
    """Rewards relative to their group, float64 [G]: exactly 0 when all rewards are equal, whatever their value.

    The baseline is the group's mean (GRPO: Shao et al., 2024, section 4.1.1) or, with `leave_one_out`, the mean of the
    other episodes (RLOO: Ahmadian et al., 2024, equation 8), which is G/(G-1) times as far. `divide_by_std` is GRPO's
    division by the standard deviation of the group; without it, groups that are nearly all right or nearly all wrong
    weigh no more than others (Liu et al., 2025, "Dr. GRPO").
    """
    rewards = np.asarray(rewards_G, dtype=np.float64)
    if equal(rewards):
        return np.zeros_like(rewards)
    advantages = rewards - rewards.mean()
    if leave_one_out:
        advantages *= len(rewards) / (len(rewards) - 1)
    return advantages / max(float(rewards.std()), std_floor) if divide_by_std else advantages


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


class RunningScale:
    """What V-trace advantages are multiplied by: 1/sqrt of a running mean of their squares, or 1/`advantage_floor`
    where that is less: advantages that are noise around 0 are then not blown up to unit size.

    It is known before a step, hence the same in all its microbatches; the first step starts it from the returns alone.
    """

    def __init__(self, config: ObjectiveConfig) -> None:
        self.moment = 0.0  # running mean of squares; 0 before the first step
        self._config = config
        self._used = config.normalize_advantages and not config.group_relative

    def __call__(self, episodes: Sequence[Episode]) -> float:
        if not self._used or not episodes:
            return 1.0
        if self.moment == 0.0:
            moment = self._moment_of_returns(episodes)
            self.moment = moment if np.isfinite(moment) else 0.0
        return 1.0 / max(self.moment**0.5, self._config.advantage_floor, 1e-6) if self.moment > 0 else 1.0

    def follow(self, advantage_rms: float) -> None:
        """After a step, with the root mean square of its advantages."""
        moment = advantage_rms**2
        if 0.0 < moment < float("inf"):
            keep = self._config.advantage_memory
            self.moment = keep * (self.moment or moment) + (1 - keep) * moment

    def _moment_of_returns(self, episodes: Sequence[Episode]) -> float:
        rewards = torch.from_numpy(np.concatenate([e.rewards for e in episodes]))
        turn_end = torch.from_numpy(np.concatenate([e.turn_end for e in episodes]))
        episode_end = torch.zeros_like(turn_end)
        episode_end[np.cumsum([len(e.rewards) for e in episodes]) - 1] = True
        zeros = torch.zeros_like(rewards)
        gamma, lam = self._config.gamma, self._config.lam
        returns = token_vtrace(zeros, rewards, zeros, turn_end, episode_end, gamma=gamma, lam=lam)
        return float(returns.advantages.double().square().mean())
