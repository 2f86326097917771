"""95 % confidence intervals for shares and means, as pure functions.

Episodes of one sample resemble each other, so the intervals count samples, not episodes: m = samples, n = episodes.
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
    """Return Wilson's interval (1927) of a share of `trials` independent trials, a number above 0 that need not be an
    integer."""
    z = NormalDist().inv_cdf((1 + level) / 2)
    centre = (share + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z / (1 + z * z / trials) * math.sqrt(share * (1 - share) / trials + (z / (2 * trials)) ** 2)
    return Interval(max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half)))


def share_of_samples(sums: Sequence[float], counts: Sequence[float], level: float = LEVEL) -> Interval:
    """Return the interval of a share over samples. `sums`, `counts`: successes and numbers of episodes of each sample
    [m].

    It is Wilson's interval for the number of independent trials that would vary as much as the samples do (Korn and
    Graubard, 1998), at least m and at most n. With one episode per sample it is Wilson's with m trials. Raise
    ValueError without episodes.
    """
    share, variance = ratio(sums, counts)
    least, most, spread = sum(count > 0 for count in counts), sum(counts), share * (1 - share)
    if math.isnan(variance) or not spread:
        return wilson(share, least, level)
    trials = spread / variance if variance else most
    return wilson(share, min(max(trials, least), most), level)


def mean_of_samples(sums: Sequence[float], counts: Sequence[float], level: float = LEVEL) -> Interval | None:
    """Return the interval of the mean over episodes, by Student's t with m - 1 degrees of freedom; None for a single
    sample. Raise ValueError without episodes."""
    mean, variance = ratio(sums, counts)
    degrees = sum(count > 0 for count in counts) - 1
    if not degrees:
        return None
    half = student_t((1 + level) / 2, degrees) * math.sqrt(variance)
    return Interval(mean - half, mean + half)


def ratio(sums: Sequence[float], counts: Sequence[float]) -> tuple[float, float]:
    """Return the mean over all episodes and its variance over draws of samples, linearized (Cochran, 1977, equation
    6.13).

    The variance is m / (m - 1) * sum((s_i - mean c_i)²) / n²; NaN for a single sample. Raise ValueError without
    episodes.
    """
    total, m = sum(counts), sum(count > 0 for count in counts)
    if not total:
        raise ValueError("no episode to take a mean of")
    mean = math.fsum(sums) / total
    squares = math.fsum((s - mean * c) ** 2 for s, c in zip(sums, counts, strict=True))
    return mean, (m / (m - 1) * squares / total**2 if m > 1 else math.nan)


def difference_of_shares(differences: Sequence[float], level: float = LEVEL) -> Interval:
    """Return the interval of the mean of m paired differences of shares, each in [-1, 1].

    Two pairs are added, with differences 1 and -1 (Bonett and Price, 2012), so that the interval has a width even if
    all pairs are equal. Raise ValueError without pairs.
    """
    if not differences:
        raise ValueError("no pair to compare")
    values = [*differences, 1.0, -1.0]
    mean = math.fsum(values) / len(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / len(values)
    half = NormalDist().inv_cdf((1 + level) / 2) * math.sqrt(variance / len(values))
    return Interval(max(-1.0, mean - half), min(1.0, mean + half))


@cache
def student_t(p: float, degrees: int) -> float:
    """Return the value below which a share `p` > 0.5 of Student's t distribution lies, by bisection to 1e-12."""
    low, high = 0.0, 1.0
    while student_t_share(high, degrees) < p:
        high *= 2
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if student_t_share(middle, degrees) < p else (low, middle)
    return (low + high) / 2


def student_t_share(t: float, degrees: int) -> float:
    """Return the share of Student's t distribution below `t` >= 0 (Abramowitz and Stegun, 1964, equations 26.7.3 and
    26.7.4)."""
    angle = math.atan(t / math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2
    term, total = (cosine if odd else 1.0), 0.0
    for k in range(2 + odd, degrees + 1, 2):
        total += term
        term *= cosine * cosine * (k - 1) / k
    within = (angle + sine * total) * 2 / math.pi if odd else sine * total
    return 0.5 + within / 2
