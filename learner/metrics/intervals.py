"""Confidence intervals of 95 % for shares and means, by pure functions.

Several episodes of one sample are alike, so that samples are counted and not episodes: m = samples, n = episodes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from statistics import NormalDist
from typing import NamedTuple

LEVEL = 0.95


class Interval(NamedTuple):
    low: float
    high: float


def wilson(share: float, trials: float, level: float = LEVEL) -> Interval:
    """Of a share of so many independent trials, a number above 0 that need not be whole (Wilson, 1927)."""
    z = NormalDist().inv_cdf((1 + level) / 2)
    centre = (share + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z / (1 + z * z / trials) * math.sqrt(share * (1 - share) / trials + (z / (2 * trials)) ** 2)
    return Interval(max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half)))


def share_of_samples(sums: Sequence[float], counts: Sequence[float], level: float = LEVEL) -> Interval:
    """Of a share: float [m] successes and numbers of episodes of each sample. Wilson's, of the number of independent
    trials that vary as much as the samples do (Korn and Graubard, 1998): at least m, at most n. With one episode a
    sample it is Wilson's of m trials. ValueError for no episode."""
    share, variance = ratio(sums, counts)
    least, most, spread = sum(count > 0 for count in counts), sum(counts), share * (1 - share)
    if math.isnan(variance) or not spread:
        return wilson(share, least, level)
    trials = spread / variance if variance else most
    return wilson(share, min(max(trials, least), most), level)


def mean_of_samples(sums: Sequence[float], counts: Sequence[float], level: float = LEVEL) -> Interval | None:
    """Of the mean over episodes, by Student's t with m - 1 degrees of freedom; None for one sample. ValueError for no
    episode."""
    mean, variance = ratio(sums, counts)
    degrees = sum(count > 0 for count in counts) - 1
    if not degrees:
        return None
    half = student_t((1 + level) / 2, degrees) * math.sqrt(variance)
    return Interval(mean - half, mean + half)


def ratio(sums: Sequence[float], counts: Sequence[float]) -> tuple[float, float]:
    """The mean over all episodes and its variance over draws of samples, linearized (Cochran, 1977, equation 6.13):
    m / (m - 1) * sum((s_i - mean c_i)²) / n²; nan for one sample. ValueError for no episode."""
    total, m = sum(counts), sum(count > 0 for count in counts)
    if not total:
        raise ValueError("no episode to take a mean of")
    mean = math.fsum(sums) / total
    squares = math.fsum((s - mean * c) ** 2 for s, c in zip(sums, counts, strict=True))
    return mean, (m / (m - 1) * squares / total**2 if m > 1 else math.nan)


def difference_of_shares(differences: Sequence[float], level: float = LEVEL) -> Interval:
    """Of the mean of m paired differences of shares, each in [-1, 1]: one pair is added for each way to differ (Bonett
    and Price, 2012), so that it keeps its width where all pairs are alike. ValueError for no pair."""
    if not differences:
        raise ValueError("no pair to compare")
    values = [*differences, 1.0, -1.0]
    mean = math.fsum(values) / len(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / len(values)
    half = NormalDist().inv_cdf((1 + level) / 2) * math.sqrt(variance / len(values))
    return Interval(max(-1.0, mean - half), min(1.0, mean + half))


@cache
def student_t(p: float, degrees: int) -> float:
    """The value below which a share `p` > 0.5 of Student's t lies; found to 1e-12 by bisection."""
    low, high = 0.0, 1.0
    while student_t_share(high, degrees) < p:
        high *= 2
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if student_t_share(middle, degrees) < p else (low, middle)
    return (low + high) / 2


def student_t_share(t: float, degrees: int) -> float:
    """The share of Student's t below `t` >= 0 (Abramowitz and Stegun, 1964, equations 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2
    term, total = (cosine if odd else 1.0), 0.0
    for k in range(2 + odd, degrees + 1, 2):
        total += term
        term *= cosine * cosine * (k - 1) / k
    within = (angle + sine * total) * 2 / math.pi if odd else sine * total
    return 0.5 + within / 2
