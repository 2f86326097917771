"""What is taken off a critic's advantages, what they are divided by, and when noise is no longer blown up."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from learner.advantages import (
    MOMENTS,
    NUM_TURNS,
    RunningScale,
    Scaling,
    group_advantages,
    group_signal,
    moments_of_returns,
)
from learner.vtrace import turn_indices
from shared.settings.objective import ObjectiveConfig


@dataclass
class Episode:
    rewards: np.ndarray
    turn_end: np.ndarray = field(default_factory=lambda: np.array([True]))
    advantage: float = 0.0
    signal: float = 1.0


def episode(*rewards: float) -> Episode:
    """A turn of two tokens for each reward."""
    columns = np.array([[0.0, reward] for reward in rewards], dtype=np.float32)
    return Episode(columns.reshape(-1), np.array([False, True] * len(rewards)))


def moments(advantages: list[list[float]], targets: float = 1.0) -> np.ndarray:
    """Sums over tokens whose advantages are listed turn by turn."""
    rows = np.zeros((NUM_TURNS, len(MOMENTS)))
    for turn, values in enumerate(advantages):
        rows[turn] = len(values), sum(values), sum(v * v for v in values), len(values), len(values) * targets**2
    return rows


def test_each_turn_loses_its_mean_and_all_are_divided_by_the_deviation_around_it():
    scale = RunningScale(ObjectiveConfig())
    scale.follow(moments([[1.0, 3.0], [-5.0, -3.0], []]))
    found = scale([episode(9.0), episode(-9.0)])
    turns = torch.tensor([0, 0, 1, 1])
    assert found(torch.tensor([1.0, 3.0, -5.0, -3.0]), turns).tolist() == pytest.approx([-1.0, 1.0, -1.0, 1.0])
    assert found.rate == 1.0


def test_moments_run_with_a_memory_against_plain_arithmetic():
    scale = RunningScale(ObjectiveConfig(advantage_memory=0.75))
    first, second = [0.5, 1.5], [2.0, 4.0, 9.0]
    scale.follow(moments([first]))
    scale.follow(moments([second]))
    count = 0.75 * len(first) + 0.25 * len(second)
    mean = (0.75 * sum(first) + 0.25 * sum(second)) / count
    variance = (0.75 * sum(x * x for x in first) + 0.25 * sum(x * x for x in second)) / count - mean**2
    found = scale([episode(1.0)])
    assert found.centres is not None and found.centres[0].item() == pytest.approx(mean)
    assert found.factor == pytest.approx(variance**-0.5)


def test_the_first_step_starts_from_its_returns():
    scale = RunningScale(ObjectiveConfig(gamma=0.5))
    found = scale([episode(1.0, 4.0), episode(-1.0, 2.0)])
    assert found.centres is not None and found.centres[:2].tolist() == [1.5, 3.0]  # returns 3 and 0, then 4 and 2
    assert found.factor == pytest.approx(np.mean([1.5**2, 1.0]) ** -0.5)


def test_a_resumed_run_scales_the_next_step_as_the_uninterrupted_one():
    """Returns vary more and more, under a critic that errs by more than they do: both have a say in the rate."""
    scale, resumed = (RunningScale(ObjectiveConfig()) for _ in range(2))
    for spread in (0.1, 0.2):
        scale([episode(spread), episode(-spread)])
        scale.follow(moments([[0.9, -0.9]]))
    resumed.load_state(json.loads(json.dumps(scale.state())))
    expected, found = (one([episode(0.3), episode(-0.3)]) for one in (scale, resumed))
    assert 0.1 < found.rate < 0.9 and (found.factor, found.rate) == (expected.factor, expected.rate)
    assert torch.equal(found.centres, expected.centres)


def test_turns_beyond_the_last_that_is_kept_share_its_mean():
    scaling = Scaling(2.0, torch.arange(NUM_TURNS).float())
    assert scaling(torch.zeros(2), torch.tensor([NUM_TURNS - 1, 30])).tolist() == [-16.0, -16.0]


@pytest.mark.parametrize(("deviation", "factor", "rate"), [(0.4, 1 / 0.4, 1.0), (0.05, 1 / 0.2, 0.25)])
def test_a_deviation_below_the_floor_is_not_blown_up_and_slows_the_policy(deviation, factor, rate):
    scale = RunningScale(ObjectiveConfig(advantage_floor=0.1))
    scale.follow(moments([[deviation, -deviation]], targets=2.0))  # the floor is at 0.1 times 2
    found = scale([episode(1.0), episode(-1.0)])
    assert (found.factor, found.rate) == (pytest.approx(factor), pytest.approx(rate))


@pytest.mark.parametrize(("spread", "rate"), [(0.0, 0.0), (0.1, 0.25), (0.4, 1.0), (4.0, 1.0)])
def test_returns_that_vary_less_than_advantages_slow_the_policy(spread, rate):
    """What goes beyond them is the critic's own error."""
    scale = RunningScale(ObjectiveConfig())
    scale.follow(moments([[0.4, -0.4]], targets=2.0))
    found = scale([episode(-1.0 + spread), episode(-1.0 - spread)])
    assert (found.factor, found.rate) == (pytest.approx(1 / 0.4), pytest.approx(rate))
    off = RunningScale(ObjectiveConfig(advantage_floor=0.0))
    off.follow(moments([[0.4, -0.4]]))
    assert off([episode(-1.0), episode(-1.0)]).rate == 1.0


def test_returns_are_those_of_plain_arithmetic_with_the_tokens_of_their_turn():
    longer = Episode(np.array([0, 0, 2, 5], dtype=np.float32), np.array([False, False, True, True]))
    found = moments_of_returns([longer, episode(1.0)], gamma=0.5)
    returns = [[4.5] * 3 + [1.0] * 2, [5.0]]
    for turn, values in enumerate(returns):
        expected = [len(values), sum(values), sum(v * v for v in values), len(values), sum(v * v for v in values)]
        assert found[turn].tolist() == pytest.approx(expected)
    assert not found[2:].any()


def test_the_floor_has_the_rewards_unit():
    """Rare rewards of 1, or all rewards a thousandth, are as far from noise as others."""
    for unit in (1.0, 1e-3):
        rare = [episode(unit if i == 0 else 0.0) for i in range(400)]
        found = RunningScale(ObjectiveConfig())(rare)
        assert found.rate == 1.0 and found.factor == pytest.approx(unit**-1 / np.sqrt(1 / 400 - 1 / 400**2), rel=1e-3)


def test_without_normalising_or_without_any_reward_nothing_is_scaled():
    assert RunningScale(ObjectiveConfig(normalize_advantages=False))([episode(3.0), episode(1.0)]) == Scaling()
    assert RunningScale(ObjectiveConfig())([episode(0.0), episode(0.0)]) == Scaling()
    scale = RunningScale(ObjectiveConfig())
    scale.follow(moments([[1.0, -1.0]]))
    before = scale([episode(1.0)])
    for bad in (np.zeros((NUM_TURNS, len(MOMENTS))), np.full((NUM_TURNS, len(MOMENTS)), np.nan)):
        scale.follow(bad)
    assert scale([episode(1.0)]).factor == before.factor


def test_a_groups_deviation_below_the_floor_counts_as_the_floor():
    noisy = [1.0, 1.002, 0.998, 1.0]
    std = float(np.std(noisy))
    assert np.sqrt(np.mean(group_advantages(noisy, floor=0.1) ** 2)) == pytest.approx(std / 0.1, rel=1e-4)
    assert group_signal(noisy, 0.1) == pytest.approx(std / 0.1, rel=1e-4)
    assert group_signal(noisy, 0.0) == 1.0
    told = [0.0, 1.0, 0.0, 0.0]
    assert group_signal(told, 0.1) == 1.0
    assert group_advantages(told, floor=0.1).tolist() == group_advantages(told).tolist()


def test_the_rate_of_group_relative_objectives_is_the_mean_over_the_groups_that_vary():
    scale = RunningScale(ObjectiveConfig(name="grpo"))
    told = [Episode(np.zeros(1), advantage=a, signal=s) for a, s in ((1.0, 1.0), (-1.0, 0.2), (0.0, 0.5))]
    assert scale(told) == Scaling(rate=pytest.approx(0.6))
    assert scale(told[2:]) == Scaling()


def test_turns_are_counted_from_the_start_of_each_episode():
    turn_end = torch.tensor([False, True, True, False, True])
    episode_end = torch.tensor([False, False, True, False, True])
    assert turn_indices(turn_end, episode_end).tolist() == [0, 0, 1, 0, 0]
