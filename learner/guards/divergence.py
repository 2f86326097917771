"""Bounds how far one step moves the policy, by a brake on its learning rate.

The KL of a step is quadratic in its length, so that the brake is scaled by sqrt(max_kl / KL). A learning rate that
follows the measured KL is known from PPO (Schulman et al., 2017, section 4, for the penalty; Rudin et al., 2022, for
the rate). Later updates of one step are left out by the trainer, as PPO's stop at a target KL does.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite, sqrt

from learner.guards.state import GuardState
from learner.metrics.tokens import LAGS

LEAST = 0.01  # of the brake
HARDEST = 0.25  # that one step may multiply it by
RELEASE = 1.5  # a step, once the policy moves by less than a quarter of the bound: it then stays below 0.6 of it
MEAN_LAG = dict(zip(LAGS, (0.0, 1.0, 2.0, 3.5, 6.5, 9.0), strict=True))  # of each name of lags


def kl_of_a_step(metrics: Mapping[str, float], publish_every: int) -> float | None:
    """KL(policy of a step ago, policy now) a token: `guard/kl_step` where the trainer has measured it, else from what
    behaviour of older versions shows: KL over lag in steps, mean over their tokens. None where neither is known."""
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
    """The brake of the next step, after one that moved the policy by `kl`; a KL that is not finite changes nothing."""
    if not isfinite(kl):
        return state.brake
    if kl > max_kl:
        return max(LEAST, state.brake * max(HARDEST, sqrt(max_kl / kl)))
    if kl < max_kl / 4:
        return min(state.ceiling, state.brake * RELEASE)
    return min(state.ceiling, state.brake)
