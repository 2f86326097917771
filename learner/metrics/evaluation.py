"""What an evaluation amounts to: means over its episodes, pass@k, how sure they are; two policies, sample by sample.

An evaluation beside the training and one by itself are read by the same functions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import comb, fsum

import numpy as np

from learner.metrics.intervals import Interval, difference_of_shares, mean_of_samples, share_of_samples, wilson
from learner.tickets.book import EvaluationResult
from shared.metrics import means
from shared.types import TRAINABLE_ENDINGS, Ending, Trajectory

Row = Mapping[str, float]
"""What one episode amounts to, by name."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean with its interval of 95 %, which one sample alone does not have for what is no share."""

    value: float
    interval: Interval | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """One policy minus another on the same samples. `better`: samples on which the first succeeded more often; `pairs`:
    those on which both have an episode that did not fail."""

    differences: Mapping[str, Estimate]
    pairs: int
    better: int
    worse: int


def evaluation_metrics(result: EvaluationResult) -> dict[str, float]:
    """Means over the evaluation's episodes, and how many tickets brought nothing."""
    values = episode_means(t for _, group in result.groups for t in group.trajectories)
    return {**values, **pass_at_k(result), "lost": float(sum(result.lost.values()))}


def in_words(values: dict[str, float], num_samples: int) -> str:
    """What `evaluation_metrics` says, in one line."""
    numbers = "  ".join(f"{key} {values[key]:.3f}" for key in ("success", "reward", "turns") if key in values)
    lost = f", {values['lost']:.0f} lost" if values["lost"] else ""
    lost += f", {100 * values['failed']:.0f} % failed" if values.get("failed") else ""
    return f"{numbers} ({num_samples} samples{lost})"


def pass_at_k(result: EvaluationResult) -> dict[str, float]:
    """`pass@k` for k = 1, 2, 4, ... and all: the chance that one of k episodes of a sample succeeds, mean over samples;
    empty where every sample is played once."""
    return {f"pass@{k}": sum(chances) / len(chances) for k, chances in chances_at_k(result).items()}


def chances_at_k(result: EvaluationResult) -> dict[int, list[float]]:
    """For each k, every sample's chance that one of k of its episodes succeeds.

    Of n episodes with c successes it is 1 - C(n-c, k) / C(n, k) (Chen et al., 2021, equation 1), without bias. Samples
    with fewer than k sound episodes are left out.
    """
    counts = []
    for _, group in result.groups:
        sound = [_success(t) > 0 for t in group.trajectories if t.ending in TRAINABLE_ENDINGS]
        counts.append((len(sound), sum(sound)))
    most = max((n for n, _ in counts), default=0)
    if most < 2:
        return {}
    ks = sorted({most, *(2**i for i in range(most.bit_length()) if 2**i <= most)})
    return {k: [1 - comb(n - c, k) / comb(n, k) for n, c in counts if n >= k] for k in ks}


def _success(t: Trajectory) -> float:
    return float(t.metrics.get("success", float(t.reward > 0)))


def row_of(t: Trajectory) -> Row | None:
    """`success` is the environment's metric of that name, or 1 for a positive reward where it has none. None for an
    episode that failed."""
    if t.ending not in TRAINABLE_ENDINGS:
        return None
    own = {"success": _success(t), "reward": t.reward, "turns": len(t.turns)}
    return {**t.metrics, **own, "model_tokens": float(np.count_nonzero(t.loss_mask))}


def episode_means(episodes: Iterable[Trajectory]) -> dict[str, float]:
    """Means over the episodes that did not fail, the share `failed` of those that did, and the share of each ending."""
    episodes = list(episodes)
    if not episodes:
        return {}
    rows = [row for t in episodes if (row := row_of(t)) is not None]
    endings = Counter(t.ending.value for t in episodes)
    shares = {f"ending/{ending}": count / len(episodes) for ending, count in endings.items()}
    return means(rows) | shares | {"failed": 1 - len(rows) / len(episodes)}


# ------------------------------------------------------------------ how sure it is


def estimates(result: EvaluationResult) -> dict[str, Estimate]:
    """Each of `evaluation_metrics` but `lost` with its interval: Wilson's for shares (success where it is 0 or 1 in
    every episode, endings, pass@k), Student's t for means."""
    played = [group.trajectories for _, group in result.groups]
    rows = [[row for t in episodes if (row := row_of(t)) is not None] for episodes in played]
    found: dict[str, Interval | None] = {}
    for name in {name for of_sample in rows for row in of_sample for name in row}:
        values = [[float(row[name]) for row in of_sample if name in row] for of_sample in rows]
        found[name] = _interval_of(values, is_share=name == "success" and _are_flags(values))
    everyone: dict[str, frozenset[Ending]] = {"failed": frozenset(Ending) - TRAINABLE_ENDINGS}
    everyone |= {f"ending/{ending.value}": frozenset({ending}) for ending in Ending}
    for name, endings in everyone.items() if played else ():
        found[name] = _interval_of(
            [[float(t.ending in endings) for t in episodes] for episodes in played], is_share=True
        )
    for k, chances in chances_at_k(result).items():
        found[f"pass@{k}"] = wilson(sum(chances) / len(chances), len(chances))
    return {name: Estimate(value, found[name]) for name, value in evaluation_metrics(result).items() if name != "lost"}


def _are_flags(values: Iterable[Iterable[float]]) -> bool:
    return all(value in (0.0, 1.0) for of_sample in values for value in of_sample)


def _interval_of(values: Sequence[Sequence[float]], *, is_share: bool) -> Interval | None:
    """`values`: of each sample's episodes."""
    sums, counts = [fsum(of_sample) for of_sample in values], [len(of_sample) for of_sample in values]
    return share_of_samples(sums, counts) if is_share else mean_of_samples(sums, counts)


def compared(ours: EvaluationResult, other: EvaluationResult) -> Comparison | None:
    """Two evaluations of the same samples in the same order: differences of each sample's means, for every metric that
    both have and that is no time. None where no sample has an episode of both."""
    mine, theirs = _by_sample(ours), _by_sample(other)
    both = [(mine[place], theirs[place]) for place in sorted(mine.keys() & theirs.keys())]
    if not both:
        return None
    found, better, worse = dict[str, Estimate](), 0, 0
    for name in {name for a, b in both for name in a.keys() & b.keys() if not name.endswith("_s")}:
        pairs = [(_mean(a[name]), _mean(b[name])) for a, b in both if name in a and name in b]
        gaps = [a - b for a, b in pairs]
        is_share = name == "success" and _are_flags(values for a, b in both for values in (a[name], b[name]))
        interval = difference_of_shares(gaps) if is_share else mean_of_samples(gaps, [1] * len(gaps))
        found[name] = Estimate(fsum(gaps) / len(gaps), interval)
        if name == "success":
            better, worse = sum(gap > 0 for gap in gaps), sum(gap < 0 for gap in gaps)
    return Comparison(found, len(both), better, worse)


def _mean(values: Sequence[float]) -> float:
    return fsum(values) / len(values)


def _by_sample(result: EvaluationResult) -> dict[int, dict[str, list[float]]]:
    """The values of each sample that has an episode which did not fail, by its place."""
    found: dict[int, dict[str, list[float]]] = {}
    for ticket, group in result.groups:
        for row in filter(None, map(row_of, group.trajectories)):
            for name, value in row.items():
                found.setdefault(ticket.seed, {}).setdefault(name, []).append(float(value))
    return found
