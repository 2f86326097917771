"""Intervals agree with published tables, and hold what they promise where episodes of one sample are alike."""

from __future__ import annotations

import math

import numpy as np
import pytest

from learner.metrics.intervals import (
    difference_of_shares,
    mean_of_samples,
    ratio,
    share_of_samples,
    student_t,
    wilson,
)


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilsons_intervals_are_those_that_newcombe_published(successes, trials, low, high):
    assert wilson(successes / trials, trials) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize(
    ("degrees", "value"), [(1, 12.70620), (2, 4.30265), (5, 2.57058), (10, 2.22814), (30, 2.04227), (120, 1.97993)]
)
def test_students_t_is_that_of_the_tables(degrees, value):
    assert student_t(0.975, degrees) == pytest.approx(value, abs=5e-6)
    assert student_t(0.95, 7) == pytest.approx(1.89458, abs=5e-6)


def test_the_interval_of_a_mean_is_the_textbooks():
    values = [4.0, 6.0, 5.0, 9.0, 6.0]
    half = 2.776445 * np.std(values, ddof=1) / math.sqrt(5)
    assert mean_of_samples(values, [1.0] * 5) == pytest.approx((6 - half, 6 + half), abs=1e-5)
    assert mean_of_samples([3.0], [2.0]) is None  # one sample does not vary


def test_with_one_episode_a_sample_a_share_has_wilsons_interval():
    assert share_of_samples([1.0] * 7 + [0.0] * 13, [1.0] * 20) == wilson(0.35, 20)
    assert share_of_samples([1.0] * 20, [1.0] * 20) == wilson(1.0, 20)


def test_episodes_that_are_all_alike_within_a_sample_count_as_one():
    sums, counts = [8.0] * 7 + [0.0] * 13, [8.0] * 20
    assert share_of_samples(sums, counts) == pytest.approx(wilson(0.35, 20), abs=1e-3)
    assert share_of_samples([8.0] * 20, counts) == wilson(1.0, 20)
    assert share_of_samples([4.0] * 20, counts) == wilson(0.5, 160)  # samples that do not differ at all


def test_a_sample_with_more_episodes_weighs_more():
    mean, variance = ratio([3.0, 0.0, 0.0], [3.0, 1.0, 0.0])
    assert mean == 0.75 and variance == pytest.approx(2 / 1 * ((3 - 2.25) ** 2 + 0.75**2) / 16)
    with pytest.raises(ValueError, match="no episode"):
        ratio([0.0], [0.0])


@pytest.mark.parametrize(("repeats", "spread"), [(1, 0.0), (4, 0.0), (4, 2.0)])
def test_nineteen_of_twenty_intervals_hold_the_share(repeats, spread):
    """Of samples whose difficulties differ by `spread`, in the logit."""
    rng, held, m = np.random.default_rng(0), 0, 40
    truth = float(np.mean(1 / (1 + np.exp(-(0.5 + spread * rng.standard_normal(200_000))))))
    for _ in range(1000):
        chances = 1 / (1 + np.exp(-(0.5 + spread * rng.standard_normal(m))))
        low, high = share_of_samples(rng.binomial(repeats, chances).tolist(), [float(repeats)] * m)
        held += low <= truth <= high
    assert 0.92 <= held / 1000 <= 0.98


def test_the_interval_of_a_difference_adds_a_pair_for_each_way_to_differ():
    differences = [1.0] * 8 + [-1.0] * 2 + [0.0] * 20
    first, second = 9 / 32, 3 / 32
    half = 1.959964 * math.sqrt((first + second - (first - second) ** 2) / 32)
    expected = (first - second - half, first - second + half)
    assert difference_of_shares(differences) == pytest.approx(expected, abs=1e-6)
    low, high = difference_of_shares([0.0] * 30)
    assert low < 0 < high
    with pytest.raises(ValueError, match="no pair"):
        difference_of_shares([])
