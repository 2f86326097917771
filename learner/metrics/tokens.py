"""Sums over trained tokens, split by version lag, that become the step's metrics."""

from __future__ import annotations

import torch
from torch import Tensor

from learner.objectives import Loss, Tokens

LAGS = ("0", "1", "2", "3-4", "5-8", "9+")
_EDGES = (1, 2, 3, 5, 9)
COLUMNS = (
    "tokens", "abs_gap", "ratio", "ratio_sq", "kl", "clipped", "entropy", "policy_loss", "reference_kl", "error",
    "error_sq", "vs", "vs_sq", "advantage_sq",
)  # fmt: skip


def loss_columns(tokens: Tokens, loss: Loss) -> dict[str, Tensor]:
    """The columns that `TokenStats` adds up, [N] each."""
    log_rhos = (tokens.logprobs - tokens.behaviour_logprobs).detach()
    rhos, error = log_rhos.exp(), loss.vs_N - tokens.values.detach()
    return {
        "tokens": torch.ones_like(rhos),
        "abs_gap": log_rhos.abs(),
        "ratio": rhos,
        "ratio_sq": rhos.square(),
        "kl": rhos - 1 - log_rhos,
        "clipped": loss.clipped_N,
        "entropy": tokens.entropies,
        "policy_loss": loss.policy_N,
        "reference_kl": loss.kl_N,
        "error": error,
        "error_sq": error.square(),
        "vs": loss.vs_N,
        "vs_sq": loss.vs_N.square(),
        "advantage_sq": loss.advantages_N.square(),
    }


class TokenStats:
    """float64 [lags, columns], summed over microbatches, then over ranks."""

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(len(LAGS), len(COLUMNS), dtype=torch.float64, device=device)
        self._edges = torch.tensor(_EDGES, device=device)

    @torch.no_grad()
    def add(self, lags_N: Tensor, columns: dict[str, Tensor]) -> None:
        """`lags_N`: versions between sampling and training. `columns`: [N] each."""
        rows = torch.stack([columns[name].detach().double() for name in COLUMNS], dim=1)
        self.sums.index_add_(0, torch.bucketize(lags_N, self._edges, right=True), rows)

    def metrics(self) -> dict[str, float]:
        """One value for each name, and NAME/lag_L for each lag that occurred. Empty without tokens."""
        table = self.sums.cpu()
        total = dict(zip(COLUMNS, table.sum(0).tolist(), strict=True))
        if not (tokens := total["tokens"]):
            return {}
        result = _split_metrics(total) | {
            "loss/policy": total["policy_loss"] / tokens,
            "loss/value": 0.5 * total["error_sq"] / tokens,
            "reference/kl": total["reference_kl"] / tokens,
            "policy/entropy": total["entropy"] / tokens,
            "policy/advantage_rms": (total["advantage_sq"] / tokens) ** 0.5,
            "value/target_mean": total["vs"] / tokens,
        }
        for lag, row in zip(LAGS, table.tolist(), strict=True):
            part = dict(zip(COLUMNS, row, strict=True))
            if part["tokens"]:
                result[f"tokens/lag_{lag}"] = part["tokens"]
                result |= {f"{name}/lag_{lag}": value for name, value in _split_metrics(part).items()}
        return result


def _split_metrics(sums: dict[str, float]) -> dict[str, float]:
    """The metrics that are also given for each lag."""
    tokens = sums["tokens"]
    values = {
        "behaviour/logprob_gap": sums["abs_gap"] / tokens,
        "behaviour/kl": sums["kl"] / tokens,
        "behaviour/ratio_mean": sums["ratio"] / tokens,
        "behaviour/ess": sums["ratio"] ** 2 / (tokens * sums["ratio_sq"]),
        "policy/clip_fraction": sums["clipped"] / tokens,
    }
    variance = sums["vs_sq"] / tokens - (sums["vs"] / tokens) ** 2
    if variance > 1e-12:  # else all targets are equal
        error_variance = sums["error_sq"] / tokens - (sums["error"] / tokens) ** 2
        values["value/explained_variance"] = 1.0 - error_variance / variance
    return values
