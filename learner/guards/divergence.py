"""A bound on how far one step moves the policy, by a brake on its learning rate.

The KL of a step is quadratic in its length, so the brake is multiplied by sqrt(max_kl / KL). PPO adapts to the measured
KL too: the penalty in Schulman et al., 2017, section 4; the learning rate in Rudin et al., 2022. The trainer skips
later updates of a step, as PPO does when it stops at a target KL.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite, sqrt

from learner.metrics.token_metrics import LAGS
from learner.training.guard_state import GuardState

LEAST = 0.01  # the brake's lower limit
HARDEST = 0.25  # one step multiplies the brake by this at least
# Factor for the brake after a step with less than a quarter of the bound. The KL then stays below 0.6 of the bound.
RELEASE = 1.5
MEAN_LAG = dict(zip(LAGS, (0.0, 1.0, 2.0, 3.5, 6.5, 9.0), strict=True))  # the mean lag for each name in LAGS


def kl_of_a_step(metrics: Mapping[str, float], publish_every: int) -> float | None:
    """Return KL(policy one step ago, policy now) per token: `guard/kl_step` if the trainer has measured it.

    Otherwise it is estimated from tokens of older versions (their KL divided by their lag in steps, mean over tokens).
    None if neither is known.
    """
    if "guard/kl_step" in metrics:
        return metrics["guard/kl_step"]
    total = steps = 0.0
    for lag, mean in MEAN_LAG.items():
        tokens = metrics.get(f"tokens/lag_{lag}", 0.0) if mean else 0.0
        if tokens:
            total += tokens * metrics[f"behaviour/kl/lag_{lag}"]
            steps += tokens * mean * publish_every
    return total / steps if steps else None


def braked(state: GuardState, kl: float, max_kl: float) -> float:
    """Return the brake for the next step, after a step that moved the policy by `kl`. A KL that is not finite changes
    nothing."""
    if not isfinite(kl):
        return state.brake
    if kl > max_kl:
        return max(LEAST, state.brake * max(HARDEST, sqrt(max_kl / kl)))
    if kl < max_kl / 4:
        return min(state.ceiling, state.brake * RELEASE)
    return min(state.ceiling, state.brake)
