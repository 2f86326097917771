"""Metrics of an evaluation: means over its episodes, pass@k, their confidence intervals; comparison of two policies,
sample by sample.

Evaluations during the training and separate ones use the same functions.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import comb, fsum

import numpy as np

from learner.metrics.intervals import Interval, difference_of_shares, mean_of_samples, share_of_samples, wilson
from learner.tickets.ticket_book import EvaluationResult
from shared.metrics import ReportedMetrics, means
from shared.types import TRAINABLE_ENDINGS, Ending, Trajectory

SETS = "sets"
"""What the metrics of the held-out sets begin with."""
SUCCESS_OF_A_SET = rf"{SETS}/[^/]+/success"
Row = Mapping[str, float]
"""What one episode amounts to, by name."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean with its 95 % interval; None for the mean of a single sample that is not a share."""

    value: float
    interval: Interval | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Differences of one policy minus another on the same samples.

    `pairs`: number of samples on which both have an episode that did not fail. `better`, `worse`: samples on which the
    first succeeded more, or less, often.
    """

    differences: Mapping[str, Estimate]
    pairs: int
    better: int
    worse: int


def evaluation_metrics(result: EvaluationResult, reported: ReportedMetrics | None = None) -> dict[str, float]:
    """Return means over the evaluation's episodes, pass@k, and the number of tickets without a usable group; of several
    held-out sets also those of each, as `sets/NAME/...`. `reported`: what the run's other episodes have reported."""
    reported = reported_by(result, before=reported)
    values = _means_of(result, reported) | {"lost": float(sum(result.lost.values()))}
    for name, own in sets_of(result).items():
        values |= {f"{SETS}/{name}/{key}": value for key, value in _means_of(own, reported).items()}
    return values


def _means_of(result: EvaluationResult, reported: ReportedMetrics) -> dict[str, float]:
    played = [(ticket.sample.task, t) for ticket, group in result.groups for t in group.trajectories]
    values = episode_means([t for _, t in played], reported, [task for task, _ in played])
    return {**values, **pass_at_k(result, reported)}


def sets_of(result: EvaluationResult) -> dict[str, EvaluationResult]:
    """Return the part of each held-out set, by name; nothing if there is only the one without a name."""
    names = dict.fromkeys(ticket.sample.held_out for ticket, _ in result.groups)
    by_name = {name: tuple(pair for pair in result.groups if pair[0].sample.held_out == name) for name in names if name}
    return {name: EvaluationResult(result.name, groups, {}) for name, groups in by_name.items()}


def reported_by(*results: EvaluationResult, before: ReportedMetrics | None = None) -> ReportedMetrics:
    """Return what the episodes of evaluations have reported, added to what others have reported `before`."""
    reported = before or ReportedMetrics()
    for result in results:
        for ticket, group in result.groups:
            reported.of(ticket.sample.task).include(group.trajectories)
    return reported


def in_words(values: dict[str, float], num_samples: int) -> str:
    """Return one line of text for the log from the values of `evaluation_metrics`."""
    numbers = "  ".join(f"{key} {values[key]:.3f}" for key in ("success", "reward", "turns") if key in values)
    lost = f", {values['lost']:.0f} lost" if values["lost"] else ""
    lost += f", {100 * values['failed']:.0f} % failed" if values.get("failed") else ""
    sets = [(key.split("/")[1], value) for key, value in values.items() if re.fullmatch(SUCCESS_OF_A_SET, key)]
    by_set = "; success of " + ", ".join(f"{name} {value:.3f}" for name, value in sets) if sets else ""
    return f"{numbers} ({num_samples} samples{lost}){by_set}"


def pass_at_k(result: EvaluationResult, reported: ReportedMetrics | None = None) -> dict[str, float]:
    """Return `pass@k` for k = 1, 2, 4, ... and the number of episodes: the probability that one of k episodes of a
    sample succeeds, mean over samples. Empty if every sample is played once."""
    chances_by_k = chances_at_k(result, reported_by(result, before=reported))
    return {f"pass@{k}": sum(chances) / len(chances) for k, chances in chances_by_k.items()}


def chances_at_k(result: EvaluationResult, reported: ReportedMetrics) -> dict[int, list[float]]:
    """Return, for each k, every sample's probability that one of k of its episodes succeeds.

    The unbiased estimate from n episodes with c successes is 1 - C(n-c, k) / C(n, k) (Chen et al., 2021, equation 1).
    Samples with fewer than k sound episodes are left out.
    """
    counts = []
    for ticket, group in result.groups:
        success_of = reported.of(ticket.sample.task).success_of
        sound = [success_of(t) > 0 for t in group.trajectories if t.ending in TRAINABLE_ENDINGS]
        counts.append((len(sound), sum(sound)))
    most = max((n for n, _ in counts), default=0)
    if most < 2:
        return {}
    ks = sorted({most, *(2**i for i in range(most.bit_length()) if 2**i <= most)})
    return {k: [1 - comb(n - c, k) / comb(n, k) for n, c in counts if n >= k] for k in ks}


def row_of(t: Trajectory, reported: ReportedMetrics) -> Row | None:
    """Return an episode's metrics as they count (`ReportedMetrics`), or None if it failed."""
    if t.ending not in TRAINABLE_ENDINGS:
        return None
    derived = {"reward": t.reward, "turns": len(t.turns), "model_tokens": float(np.count_nonzero(t.loss_mask))}
    return {**reported.metrics_of(t), **derived}


def episode_means(
    episodes: Sequence[Trajectory], reported: ReportedMetrics | None = None, tasks: Sequence[str] = ()
) -> dict[str, float]:
    """Return means over the episodes that did not fail, the share `failed` of those that did, and the share of each
    ending. `reported`: what earlier episodes have reported; these are added to it. `tasks`: the task of each episode,
    in a run of several."""
    if not episodes:
        return {}
    reported = reported or ReportedMetrics()
    tasks = tasks or [""] * len(episodes)
    for t, task in zip(episodes, tasks, strict=True):
        reported.of(task).include([t])
    rows = [row for t, task in zip(episodes, tasks, strict=True) if (row := row_of(t, reported.of(task))) is not None]
    endings = Counter(t.ending.value for t in episodes)
    shares = {f"ending/{ending}": count / len(episodes) for ending, count in endings.items()}
    return means(rows) | shares | {"failed": 1 - len(rows) / len(episodes)}


# ------------------------------------------------------------------ confidence intervals


def estimates(result: EvaluationResult) -> dict[str, Estimate]:
    """Return each metric of `evaluation_metrics` except `lost` with its interval.

    Shares (success if it is 0 or 1 in every episode, endings, pass@k) have Wilson's interval, means Student's t.
    """
    reported = reported_by(result)
    intervals = _intervals_of(result, reported)
    for set_name, own in sets_of(result).items():
        intervals |= {f"{SETS}/{set_name}/{key}": value for key, value in _intervals_of(own, reported).items()}
    return {
        name: Estimate(value, intervals[name]) for name, value in evaluation_metrics(result).items() if name != "lost"
    }


def _intervals_of(result: EvaluationResult, reported: ReportedMetrics) -> dict[str, Interval | None]:
    played = [group.trajectories for _, group in result.groups]
    tasks = [reported.of(ticket.sample.task) for ticket, _ in result.groups]
    rows = [
        [row for t in episodes if (row := row_of(t, own)) is not None]
        for episodes, own in zip(played, tasks, strict=True)
    ]
    intervals: dict[str, Interval | None] = {}
    for name in {name for of_sample in rows for row in of_sample for name in row}:
        values = [[float(row[name]) for row in of_sample if name in row] for of_sample in rows]
        intervals[name] = _interval_of(values, is_share=name == "success" and _are_flags(values))
    everyone: dict[str, frozenset[Ending]] = {"failed": frozenset(Ending) - TRAINABLE_ENDINGS}
    everyone |= {f"ending/{ending.value}": frozenset({ending}) for ending in Ending}
    for name, endings in everyone.items() if played else ():
        intervals[name] = _interval_of(
            [[float(t.ending in endings) for t in episodes] for episodes in played], is_share=True
        )
    for k, chances in chances_at_k(result, reported).items():
        intervals[f"pass@{k}"] = wilson(sum(chances) / len(chances), len(chances))
    return intervals


def _are_flags(values: Iterable[Iterable[float]]) -> bool:
    return all(value in (0.0, 1.0) for of_sample in values for value in of_sample)


def _interval_of(values: Sequence[Sequence[float]], *, is_share: bool) -> Interval | None:
    """Return the interval of a share or of a mean. `values`: for each sample, the values of its episodes."""
    sums, counts = [fsum(of_sample) for of_sample in values], [len(of_sample) for of_sample in values]
    return share_of_samples(sums, counts) if is_share else mean_of_samples(sums, counts)


def compared(ours: EvaluationResult, other: EvaluationResult) -> Comparison | None:
    """Compare two evaluations of the same samples in the same order; None if no sample has an episode of both.

    Differences are those of each sample's means, for every metric that both have, except durations.
    """
    reported = reported_by(ours, other)
    own_means, other_means = _by_sample(ours, reported), _by_sample(other, reported)
    both = [(own_means[index], other_means[index]) for index in sorted(own_means.keys() & other_means.keys())]
    if not both:
        return None
    estimates, better, worse = dict[str, Estimate](), 0, 0
    for name in {name for a, b in both for name in a.keys() & b.keys() if not name.endswith("_s")}:
        pairs = [(_mean(a[name]), _mean(b[name])) for a, b in both if name in a and name in b]
        gaps = [a - b for a, b in pairs]
        is_share = name == "success" and _are_flags(values for a, b in both for values in (a[name], b[name]))
        interval = difference_of_shares(gaps) if is_share else mean_of_samples(gaps, [1] * len(gaps))
        estimates[name] = Estimate(fsum(gaps) / len(gaps), interval)
        if name == "success":
            better, worse = sum(gap > 0 for gap in gaps), sum(gap < 0 for gap in gaps)
    return Comparison(estimates, len(both), better, worse)


def _mean(values: Sequence[float]) -> float:
    return fsum(values) / len(values)


def _by_sample(result: EvaluationResult, reported: ReportedMetrics) -> dict[int, dict[str, list[float]]]:
    """Return the values of each sample that has an episode which did not fail, by the sample's index."""
    by_sample: dict[int, dict[str, list[float]]] = {}
    for ticket, group in result.groups:
        own = reported.of(ticket.sample.task)
        for row in filter(None, (row_of(t, own) for t in group.trajectories)):
            for name, value in row.items():
                by_sample.setdefault(ticket.seed, {}).setdefault(name, []).append(float(value))
    return by_sample
