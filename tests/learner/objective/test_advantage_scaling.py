"""What is taken off a critic's advantages, what they are divided by, and when noise is no longer blown up."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from learner.objective.advantages import (
    MOMENTS,
    NUM_TURNS,
    REWARD_NOISE,
    RunningScale,
    Scaling,
    group_advantages,
    group_signal,
    moments_of_returns,
)
from learner.vtrace import turn_indices
from shared.config.objective_section import ObjectiveConfig


@dataclass
class Episode:
    rewards: np.ndarray
    turn_end: np.ndarray = field(default_factory=lambda: np.array([True]))
    advantage: float = 0.0
    signal: float = 1.0

    @property
    def advantage_size(self) -> float:
        return abs(self.advantage)


def episode(*rewards: float) -> Episode:
    """A turn of two tokens for each reward."""
    columns = np.array([[0.0, reward] for reward in rewards], dtype=np.float32)
    return Episode(columns.reshape(-1), np.array([False, True] * len(rewards)))


def moments(advantages: list[list[float]]) -> np.ndarray:
    """Sums over tokens whose advantages are listed turn by turn."""
    rows = np.zeros((NUM_TURNS, len(MOMENTS)))
    for turn, values in enumerate(advantages):
        rows[turn] = len(values), sum(values), sum(v * v for v in values)
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
    """The floor is a tenth of the returns' deviation, whatever their mean."""
    scale = RunningScale(ObjectiveConfig(advantage_floor=0.1))
    scale.follow(moments([[deviation, -deviation]]))
    found = scale([episode(52.0), episode(48.0)])
    assert (found.factor, found.rate) == (pytest.approx(factor), pytest.approx(rate))


@pytest.mark.parametrize(("spread", "rate"), [(0.0, 0.0), (0.1, 0.25), (0.4, 1.0), (4.0, 1.0)])
def test_returns_that_vary_less_than_advantages_slow_the_policy(spread, rate):
    """What goes beyond them is the critic's own error."""
    scale = RunningScale(ObjectiveConfig())
    scale.follow(moments([[0.4, -0.4]]))
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
        expected = [len(values), sum(values), sum(v * v for v in values)]
        assert found[turn].tolist() == pytest.approx(expected)
    assert not found[2:].any()


def test_rare_rewards_are_no_noise() -> None:
    rare = [episode(1.0 if i == 0 else 0.0) for i in range(400)]
    scaling = RunningScale(ObjectiveConfig())(rare)
    assert scaling.rate == 1.0 and scaling.factor == pytest.approx(1 / np.sqrt(1 / 400 - 1 / 400**2), rel=1e-3)


@pytest.mark.parametrize("explained", [0.0, 0.9, 0.95, 0.99])
@pytest.mark.parametrize("success", [0.5, 0.95])
def test_a_good_critic_does_not_slow_the_policy(explained: float, success: float) -> None:
    returns = [1.0 if i < 100 * success else 0.0 for i in range(100)]
    left = np.sqrt(1 - explained) * (np.array(returns) - success)
    scale = RunningScale(ObjectiveConfig())
    scale.follow(moments([left.tolist()]))
    assert scale([episode(r) for r in returns]).rate == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("constant", [0.0, 5.0, 20.0, 100.0, -50.0])
def test_a_constant_added_to_all_rewards_changes_no_scaling_of_a_critic(constant: float) -> None:
    scales = [RunningScale(ObjectiveConfig()) for _ in range(2)]
    scales[1].start_value = constant
    for spread in (0.5, 0.01, 0.0):
        plain, shifted = (
            scale([episode(0.5 + spread + c), episode(0.5 - spread + c)])
            for scale, c in zip(scales, (0.0, constant), strict=True)
        )
        assert shifted.rate == pytest.approx(plain.rate, abs=1e-6)
        assert shifted.factor == pytest.approx(plain.factor, rel=1e-4)
        assert plain.centres is not None and shifted.centres is not None
        assert torch.allclose(shifted.centres, plain.centres, atol=1e-5)
        for scale in scales:
            scale.follow(moments([[spread, -spread]]))


def test_without_normalising_or_without_any_reward_nothing_is_scaled():
    assert RunningScale(ObjectiveConfig(normalize_advantages=False))([episode(3.0), episode(1.0)]) == Scaling()
    assert RunningScale(ObjectiveConfig(advantage_floor=0.0))([episode(0.0), episode(0.0)]) == Scaling()
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


def rate_of(groups: list[list[float]], **settings: Any) -> float:
    """Return the rate of the first step on groups with these rewards."""
    config = ObjectiveConfig(name="grpo", **settings)
    scale = RunningScale(config)
    noise = scale.reward_noise([reward for group in groups for reward in group])
    episodes = [
        Episode(np.zeros(1), advantage=float(advantage), signal=group_signal(group, noise))
        for group in groups
        for advantage in group_advantages(group, divide_by_std=config.divide_by_std, floor=noise)
    ]
    return scale(episodes).rate


TOLD = [0.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("settings", [{}, {"divide_by_std": False}])
@pytest.mark.parametrize("constant", [0.0, 5.0, 20.0, 100.0, -50.0])
def test_a_constant_added_to_all_rewards_changes_no_rate_of_groups(constant: float, settings: dict[str, Any]) -> None:
    groups = [TOLD, [1.0] * 4, [0.9, 1.0, 1.0, 0.93], [0.5, 0.501, 0.5, 0.5]]
    shifted = [[reward + constant for reward in group] for group in groups]
    assert rate_of(shifted, **settings) == pytest.approx(rate_of(groups, **settings), rel=1e-6)
    assert rate_of([[reward + constant for reward in TOLD]] * 3, **settings) == 1.0


@pytest.mark.parametrize("settings", [{}, {"divide_by_std": False}])
def test_the_rate_is_continuous_where_a_groups_spread_goes_to_zero(settings: dict[str, Any]) -> None:
    """Beside a group that carries the gradient it goes to 1, alone to 0: as if the rewards were equal."""
    for spread, tolerance in ((0.0, 0.0), (1e-12, 1e-9), (1e-9, 1e-6), (1e-4, 0.02)):
        faint = [9 - spread, 9 + spread, 9 - spread, 9 + spread]
        assert rate_of([TOLD, faint, faint, faint], **settings) == pytest.approx(1.0, abs=tolerance)
        assert rate_of([faint, faint], **settings) == pytest.approx(0.0, abs=tolerance)


@pytest.mark.parametrize("size", [2, 4, 8, 64])
def test_groups_of_right_and_wrong_answers_train_at_the_whole_rate(size: int) -> None:
    for right in range(1, size):
        group = [1.0] * right + [0.0] * (size - right)
        assert rate_of([group]) == rate_of([group, [1.0] * size]) == rate_of([group, [0.0] * size]) == 1.0


def test_groups_weigh_by_their_part_of_the_gradient() -> None:
    scale = RunningScale(ObjectiveConfig(name="grpo"))
    told = [Episode(np.zeros(1), advantage=a, signal=s) for a, s in ((1.0, 1.0), (-0.2, 0.2), (0.0, 0.5))]
    assert scale(told).rate == pytest.approx((1.0 + 0.2 * 0.2) / 1.2)


@pytest.mark.parametrize("objective", ["grpo", "vtrace"])
def test_where_no_reward_varies_the_rate_is_zero_unless_the_floor_is_off(objective: str) -> None:
    for floor, rate in ((0.1, 0.0), (0.0, 1.0)):
        scale = RunningScale(ObjectiveConfig(name=objective, advantage_floor=floor))
        scale.reward_noise([0.9] * 4)
        assert scale([episode(0.9), episode(0.9)]).rate == rate


def test_the_noise_of_rewards_runs_with_a_memory_and_a_resumed_run_goes_on_with_it() -> None:
    scale = RunningScale(ObjectiveConfig(name="grpo", advantage_memory=0.75))
    first, second = [0.0, 8.0, 4.0], [1.0, 2.0]
    assert scale.reward_noise(first) == pytest.approx(0.1 * np.std(first))
    resumed = RunningScale(ObjectiveConfig(name="grpo", advantage_memory=0.75))
    resumed.load_state(json.loads(json.dumps(scale.state())))
    weights = [0.75] * len(first) + [0.25] * len(second)
    mean = np.average(first + second, weights=weights)
    variance = np.average((np.array(first + second) - mean) ** 2, weights=weights)
    assert scale.reward_noise(second) == pytest.approx(0.1 * np.sqrt(variance))
    resumed.reward_noise(second)
    assert resumed.rewards == scale.rewards
    assert RunningScale(ObjectiveConfig(name="grpo")).reward_noise([3.0, 3.0]) == REWARD_NOISE


def test_turns_are_counted_from_the_start_of_each_episode():
    turn_end = torch.tensor([False, True, True, False, True])
    episode_end = torch.tensor([False, False, True, False, True])
    assert turn_indices(turn_end, episode_end).tolist() == [0, 0, 1, 0, 0]


def test_moments_that_are_not_finite_change_nothing():
    scale = RunningScale(ObjectiveConfig())
    scale.follow(np.ones((NUM_TURNS, len(MOMENTS))))
    before = scale.moments.copy()
    bad = np.ones((NUM_TURNS, len(MOMENTS)))
    bad[3, 2] = np.inf
    scale.follow(bad)
    np.testing.assert_array_equal(scale.moments, before)


def test_only_turns_beyond_the_last_share_its_moments():
    """Of an episode with one token in each of ten turns: eight rows have one token, the last has two."""
    ones = np.ones(NUM_TURNS + 1, dtype=np.float32)
    assert moments_of_returns([Episode(ones, ones.astype(bool))], 1.0)[:, 0].tolist() == [1.0] * (NUM_TURNS - 1) + [2.0]


@pytest.mark.parametrize(("deviation", "rate"), [(1e-9, 0.0), (0.003, 0.1), (0.03, 1.0), (0.3, 1.0)])
def test_returns_that_hardly_vary_are_noise_to_a_critic_too(deviation: float, rate: float) -> None:
    scale = RunningScale(ObjectiveConfig())
    scale.follow(moments([[deviation, -deviation]]))
    assert scale([episode(7 + deviation), episode(7 - deviation)]).rate == pytest.approx(rate, abs=1e-3)
