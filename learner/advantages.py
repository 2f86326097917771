"""Advantages that are known before any forward: relative to the group, and the running scale of a critic's.

Shape suffixes: G = episodes of one group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from shared.settings.objective import ObjectiveConfig

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

    def on(self, device: torch.device) -> Scaling:
        """For advantages on this device."""
        return self if self.centres is None else self._replace(centres=self.centres.to(device))

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
    root mean square (DreamerV3 limits its scale of returns likewise: Hafner et al., 2023).

    AdamW undoes any scaling of gradients, so that noise has to slow the learning rate. It shrinks with a deviation
    below that floor. It also shrinks by as much as returns deviate less than advantages, both around their turn's mean:
    what goes beyond is the critic's own error, and returns that do not vary at all move nothing. Group-relative
    advantages are scaled in their groups; of theirs, the rate alone is said.

    All of it is known before a step, hence the same in all its microbatches; the first step starts it from the returns.
    """

    def __init__(self, config: ObjectiveConfig) -> None:
        self.moments: np.ndarray | None = None  # float64 [turns, MOMENTS], running; None before the first step
        self.returns: np.ndarray | None = None  # the same of the returns, as if a critic said 0
        self._config = config
        self._used = config.normalize_advantages and not config.group_relative

    def __call__(self, episodes: Sequence[ScaledEpisode]) -> Scaling:
        """Before a step on `episodes`."""
        if self._config.group_relative:
            signals = [e.signal for e in episodes if e.advantage != 0.0]
            return Scaling(rate=float(np.mean(signals))) if signals else Scaling()
        if not self._used or not episodes:
            return Scaling()
        returns = moments_of_returns(episodes, self._config.gamma)
        self.returns = self._mixed(self.returns, returns)
        if self.moments is None:
            self.moments = self._mixed(None, returns)
        if self.moments is None or self.returns is None:
            return Scaling()
        deviation, told = _deviation(self.moments), _deviation(self.returns)
        counts, sums = self.moments[:, 0], self.moments[:, 1]
        centres = np.divide(sums, counts, out=np.zeros_like(sums), where=counts > 0)
        floor = self._config.advantage_floor * float(np.sqrt(self.moments[:, 4].sum() / self.moments[:, 3].sum()))
        largest = max(deviation, floor)
        if largest == 0.0:
            return Scaling()
        rate = min(deviation, told) / largest if self._config.advantage_floor else 1.0
        return Scaling(1.0 / max(largest, 1e-6), torch.from_numpy(centres).float(), rate)

    def follow(self, moments: np.ndarray) -> None:
        """After a step, with its sums, float64 [turns, MOMENTS]. Without a token, or not finite, they count nothing."""
        self.moments = self._mixed(self.moments, moments)

    def state(self) -> dict[str, Any]:
        """What a resumed run goes on from, as plain JSON values."""
        kept = {"advantage_moments": self.moments, "return_moments": self.returns}
        return {name: None if moments is None else moments.tolist() for name, moments in kept.items()}

    def load_state(self, state: dict[str, Any]) -> None:
        """What a checkpoint lacks starts anew."""
        kept = (state.get(name) for name in ("advantage_moments", "return_moments"))
        self.moments, self.returns = (None if moments is None else np.array(moments) for moments in kept)

    def _mixed(self, before: np.ndarray | None, moments: np.ndarray) -> np.ndarray | None:
        if not moments[:, 0].sum() > 0 or not np.isfinite(moments).all():
            return before
        keep = self._config.advantage_memory
        return moments if before is None else keep * before + (1 - keep) * moments


def moments_of_returns(episodes: Sequence[ScaledEpisode], gamma: float) -> np.ndarray:
    """float64 [turns, MOMENTS] of a critic that says 0: advantages and targets are the turns' discounted returns."""
    found = np.zeros((NUM_TURNS, len(MOMENTS)))
    for e in episodes:
        ends = np.flatnonzero(e.turn_end)
        later = 0.0
        for turn in reversed(range(len(ends))):
            start = ends[turn - 1] + 1 if turn else 0
            tokens = ends[turn] + 1 - start
            later = float(e.rewards[start : ends[turn] + 1].sum(dtype=np.float64)) + gamma * later
            found[min(turn, NUM_TURNS - 1)] += tokens * np.array([1.0, later, later**2, 1.0, later**2])
    return found


def _deviation(moments: np.ndarray) -> float:
    """Of advantages around the mean of their turn; exactly 0 where it is only rounding."""
    counts, sums, squares = moments[:, 0], moments[:, 1], moments[:, 2]
    inside = float((squares - np.divide(sums**2, counts, out=np.zeros_like(sums), where=counts > 0)).sum())
    return float(np.sqrt(inside / counts.sum())) if inside > 1e-12 * squares.sum() else 0.0
