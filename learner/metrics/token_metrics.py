"""Sums over trained tokens, by version lag and by turn, from which the step's metrics are computed.

A step costs two reductions over ranks, and the host waits for no device between microbatches. N = sampled tokens of one
microbatch.
"""

from __future__ import annotations

from bisect import bisect_right
from math import exp, sinh

import numpy as np
import torch
from torch import Tensor

from learner.distributed import Ranks, all_max, all_sum
from learner.objective.advantages import MOMENTS
from learner.objective.loss_records import Dropped, Loss, Tokens
from learner.vtrace import segment_start, turn_indices
from shared.config.objective_section import ObjectiveConfig

LAGS = ("0", "1", "2", "3-4", "5-8", "9+")
TURNS = ("1", "2", "3", "4", "5", "6", "7", "8", "9+")
_EDGES = (1, 2, 3, 5, 9)
COLUMNS = (
    "tokens", "abs_gap", "ratio", "ratio_sq", "chi_square", "kl", "clipped", "entropy", "policy_loss", "reference_kl",
    "hold", "teacher", "value_weight", "error", "error_sq", "vs", "vs_sq", "advantage_sq", "trace", "whole_trace",
    "masked_token", "masked_sequence", "masked_veto", "fresh", "fresh_gap",
)  # fmt: skip
TURN_COLUMNS = ("tokens", "advantage", "advantage_sq", "value_weight", "error", "error_sq", "vs", "vs_sq")
# The histogram of log ratios has bins of equal width in asinh(log ratio / FINE), which resolves noise of 1e-5 as well
# as ratios of 1e9: the logarithm to 2 % or 2e-6.
FINE, WIDTH, BINS = 1e-4, 0.02, 1300
# Targets whose variance is at most this share of their mean square are equal: they are float32, each a sum of several.
EQUAL_TARGETS = 1e-9
_SHAPES = ((len(LAGS), len(COLUMNS)), (len(TURNS), len(TURN_COLUMNS)), (len(LAGS), BINS))


def lag_name(lag: int) -> str:
    """Return the name in LAGS of a lag in versions."""
    return LAGS[bisect_right(_EDGES, lag)]


def loss_columns(tokens: Tokens, loss: Loss) -> dict[str, Tensor]:
    """Return the columns that `TokenStats` adds up, [N] each.

    These are COLUMNS without the fresh ones, and the columns from which those, the sums by turn and the histogram are
    computed. Columns of the value have the weights of its loss: with whole turns as actions, only the first tokens of
    turns count.
    """
    log_rhos = (tokens.logprobs - tokens.behaviour_logprobs).detach()
    rhos, error, weights = log_rhos.exp(), loss.vs_N - tokens.values.detach(), loss.value_weights_N
    nothing = torch.zeros_like(rhos)
    dropped = loss.dropped or Dropped(nothing, nothing, nothing)
    return {
        "tokens": torch.ones_like(rhos),
        "abs_gap": log_rhos.abs(),
        "ratio": rhos,
        # Squares are of float64: in float32 the square of a small number is 0, and that of equal numbers differs.
        "ratio_sq": rhos.double().square(),
        "chi_square": log_rhos.expm1().square(),
        "kl": rhos - 1 - log_rhos,
        "clipped": loss.clipped_N,
        "entropy": tokens.entropies,
        "policy_loss": loss.policy_N,
        "reference_kl": loss.kl_N,
        "hold": nothing if loss.hold_N is None else loss.hold_N,
        "teacher": nothing if loss.teacher_N is None else loss.teacher_N,
        "value_weight": weights,
        "error": weights * error,
        "error_sq": weights * error.double().square(),
        "vs": weights * loss.vs_N,
        "vs_sq": weights * loss.vs_N.double().square(),
        "trace": nothing if loss.trace_N is None else loss.trace_N,
        "whole_trace": nothing if loss.whole_trace_N is None else loss.whole_trace_N,
        "masked_token": dropped.token,
        "masked_sequence": dropped.sequence,
        "masked_veto": dropped.veto,
        "advantage": loss.advantages_N,
        "advantage_sq": loss.advantages_N.double().square(),
        "log_rho": log_rhos,
        "episode_end": tokens.episode_end,
        "turn": turn_indices(tokens.turn_end, tokens.episode_end),
    }


def fresh_tokens(lags_N: Tensor, episode_end_N: Tensor) -> Tensor:
    """Return bool [N]: the tokens of the current version with no token of an older version before them in their
    episode.

    Only for these do engine and learner compute the same probability. After a publication with
    `learner.publish.pause_mode = "in_place"` an engine continues with its cache, so it samples all later tokens of the
    episode with keys and values of older versions.
    """
    older_N = (lags_N > 0).long()
    so_far_N = older_N.cumsum(0)
    before_N = torch.where(segment_start(episode_end_N), so_far_N - older_N, 0).cummax(0).values
    return so_far_N == before_N


class TokenStats:
    """Sums in float64 over microbatches, then over ranks (`gather`): [lags, columns], [turns, columns], [lags,
    bins]."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(sum(rows * width for rows, width in _SHAPES), dtype=torch.float64, device=device)
        self._by_lag, self._by_turn, self._histogram = _parts(self._sums)
        self._largest = torch.full((len(LAGS),), -torch.inf, dtype=torch.float64, device=device)  # log ratios
        self._edges = torch.tensor(_EDGES, device=device)

    @torch.no_grad()
    def add(self, lags_N: Tensor, columns: dict[str, Tensor], own: Tensor | None = None) -> None:
        """Add tokens of whole episodes. `lags_N`: versions between sampling and training; `columns`: from
        `loss_columns`; `own`: positions of those that count, None = all."""
        fresh_N = fresh_tokens(lags_N, columns["episode_end"])
        columns = columns | {"fresh": fresh_N, "fresh_gap": torch.where(fresh_N, columns["abs_gap"], 0.0)}
        if own is not None:
            lags_N, columns = lags_N[own], {name: column[own] for name, column in columns.items()}
        lag_N = torch.bucketize(lags_N, self._edges, right=True)
        self._by_lag.index_add_(0, lag_N, _rows(columns, COLUMNS))
        self._by_turn.index_add_(0, columns["turn"].clamp(max=len(TURNS) - 1), _rows(columns, TURN_COLUMNS))
        log_rhos_N = columns["log_rho"].double()
        self._largest.scatter_reduce_(0, lag_N, log_rhos_N, "amax")
        places_N = torch.asinh(log_rhos_N / FINE) / WIDTH + BINS / 2
        bins_N = places_N.nan_to_num(nan=BINS).clamp(0, BINS - 1).long()
        self._histogram.view(-1).index_add_(0, lag_N * BINS + bins_N, torch.ones_like(log_rhos_N))

    def gather(self, ranks: Ranks) -> None:
        """Sum over all ranks, on every rank; a collective."""
        all_sum(self._sums, ranks)
        all_max(self._largest, ranks)

    def moments(self) -> np.ndarray:
        """Return float64 [turns, MOMENTS] of the advantages, after `gather`."""
        return self._by_turn[:, [TURN_COLUMNS.index(name) for name in MOMENTS]].cpu().numpy()

    def metrics(self) -> dict[str, float]:
        """Return one value for each name, and NAME/lag_L, NAME/turn_T for each lag and turn that occurred. Empty
        without tokens."""
        table, turns, histogram = _parts(self._sums.cpu())
        total = dict(zip(COLUMNS, table.sum(0).tolist(), strict=True))
        if not (tokens := total["tokens"]):
            return {}
        result = {
            "loss/policy": total["policy_loss"] / tokens,
            "loss/value": 0.5 * total["error_sq"] / tokens,
            "reference/kl": total["reference_kl"] / tokens,
            "reference/hold": total["hold"] / tokens,
            "teacher/kl": total["teacher"] / tokens,
            "policy/advantage_rms": (total["advantage_sq"] / tokens) ** 0.5,
            "value/target_mean": total["vs"] / tokens,
        }
        if total["fresh"]:
            result["behaviour/engine_gap"] = total["fresh_gap"] / total["fresh"]
        result |= _split_metrics(total) | _tail(histogram.sum(0), float(self._largest.max()))
        largest = self._largest.tolist()
        for i, lag in enumerate(LAGS):
            part = dict(zip(COLUMNS, table[i].tolist(), strict=True))
            if part["tokens"]:
                result[f"tokens/lag_{lag}"] = part["tokens"]
                values = _split_metrics(part) | _tail(histogram[i], largest[i])
                result |= {f"{name}/lag_{lag}": value for name, value in values.items()}
        for turn, row in zip(TURNS, turns.tolist(), strict=True):
            part = dict(zip(TURN_COLUMNS, row, strict=True))
            if part["tokens"]:
                result |= {f"{name}/turn_{turn}": value for name, value in _turn_metrics(part).items()}
        return result


def unused_names(objective: ObjectiveConfig) -> tuple[str, ...]:
    """Return the beginnings of the names of metrics that say nothing about an objective with these settings."""
    of_rewards = ["behaviour/", "policy/advantage", "policy/clip_fraction", "groups/without_variance"]
    of_rewards += [f"rollout/{name}" for name in ("reward", "success", "ending/", "failed")]
    is_used = dict.fromkeys(of_rewards, objective.spec.learns_from_rewards) | {
        "teacher/": objective.has_teacher,
        "reference/kl": objective.has_reference,
        "reference/hold": objective.hold_coef != 0,
        "policy/masked_token": objective.mask_token_ratio is not None,
        "policy/masked_sequence": objective.mask_sequence_ratio is not None,
        "policy/masked_veto": objective.mask_veto_ratio is not None,
        "loss/value": objective.has_critic,
        "value/": objective.has_critic,
    }
    return tuple(name for name, used in is_used.items() if not used)


def with_observed(trained: dict[str, float], observed: dict[str, float], share: float) -> dict[str, float]:
    """Return the metrics of a step's trained tokens with those of a sample of the tokens in episodes that no update
    computes, which are a `share` of all.

    The entropy is that of all tokens. A step without trained tokens has the observed tokens' behaviour/* too.
    """
    name = "policy/entropy"
    if name in trained:
        return trained | {name: (1 - share) * trained[name] + share * observed[name]}
    return {key: value for key, value in observed.items() if key.startswith(("behaviour/", name))}


def _parts(sums: Tensor) -> list[Tensor]:
    """Return views of the flat sums: [lags, columns], [turns, columns], [lags, bins]."""
    parts = sums.split([rows * width for rows, width in _SHAPES])
    return [part.view(shape) for part, shape in zip(parts, _SHAPES, strict=True)]


def _rows(columns: dict[str, Tensor], names: tuple[str, ...]) -> Tensor:
    return torch.stack([columns[name].detach().double() for name in names], dim=1)


def _split_metrics(sums: dict[str, float]) -> dict[str, float]:
    """Return the metrics that are also reported for each lag."""
    tokens = sums["tokens"]
    values = {
        "behaviour/logprob_gap": sums["abs_gap"] / tokens,
        "behaviour/kl": sums["kl"] / tokens,
        "behaviour/ratio_mean": sums["ratio"] / tokens,
        "behaviour/chi_square": sums["chi_square"] / tokens,
        "behaviour/ess": sums["ratio"] ** 2 / (tokens * sums["ratio_sq"]) if sums["ratio_sq"] else 0.0,
        "policy/clip_fraction": sums["clipped"] / tokens,
        "policy/entropy": sums["entropy"] / tokens,
    }
    values |= {f"policy/masked_{why}": sums[f"masked_{why}"] / tokens for why in ("token", "sequence", "veto")}
    if sums["whole_trace"]:
        values["vtrace/trace_length"] = sums["trace"] / tokens
        values["vtrace/trace_kept"] = sums["trace"] / sums["whole_trace"]
    return values | _explained(sums)


def _turn_metrics(sums: dict[str, float]) -> dict[str, float]:
    tokens = sums["tokens"]
    values = {
        "policy/advantage": sums["advantage"] / tokens,
        "policy/advantage_rms": (sums["advantage_sq"] / tokens) ** 0.5,
    }
    return values | _explained(sums)


def _explained(sums: dict[str, float]) -> dict[str, float]:
    """Return the explained variance 1 - Var(vs - V) / Var(vs); empty if all targets are equal but for rounding."""
    if not (count := sums["value_weight"]):
        return {}
    mean_square = sums["vs_sq"] / count
    variance = mean_square - (sums["vs"] / count) ** 2
    if not variance > EQUAL_TARGETS * mean_square:
        return {}
    error_variance = sums["error_sq"] / count - (sums["error"] / count) ** 2
    return {"value/explained_variance": 1.0 - error_variance / variance}


def _tail(histogram: Tensor, largest: float) -> dict[str, float]:
    """Return the maximum and the 99th percentile of the ratios; the percentile is interpolated within its bin."""
    return {"behaviour/ratio_max": _exp(largest), "behaviour/ratio_p99": _exp(log_ratio_quantile(histogram, 0.99))}


def log_ratio_quantile(histogram: Tensor, share: float) -> float:
    """Return the log ratio below which `share` of the counted tokens lies. `histogram`: [bins]."""
    sums = histogram.cumsum(0)
    target = share * float(sums[-1])
    bin_index = min(int(torch.searchsorted(sums, target)), BINS - 1)
    inside = (target - float(sums[bin_index] - histogram[bin_index])) / float(histogram[bin_index])
    return FINE * sinh((bin_index + inside - BINS / 2) * WIDTH)


def _exp(log_ratio: float) -> float:
    return exp(log_ratio) if log_ratio < 700 else float("inf")
