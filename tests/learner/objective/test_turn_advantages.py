"""Advantages of turns, compared within a group: against a plain reference, and through a whole step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from learner.batch.episodes import group_turn_advantages, is_uninformative, make_episodes
from learner.batch.image_decoder import ImageDecoder
from learner.batch.packer import pack
from learner.metrics.episode_metrics import group_metrics
from learner.model.policy import load_policy
from learner.objective.advantages import most_varying
from learner.training.trainer import Trainer
from shared.config.objective_section import ObjectiveConfig
from shared.types import Ending, Group, Trajectory
from tests.support.episodes import learner_config, random_groups, random_trajectory
from tests.support.objective_references import turn_advantages as reference
from tests.support.objective_references import whitened

HOW = {
    "divided": {},
    "not divided": {"divide_by_std": False},
    "leave one out": {"divide_by_std": False, "leave_one_out": True},
}


def played(spec, rewards: list[float], states: list[str], seed: int = 0, **changes) -> Trajectory:
    """Return an episode with these rewards of its turns and states before them."""
    made = random_trajectory(spec, seed, turns=len(rewards))
    turns = [replace(t, reward=r, state=s) for t, r, s in zip(made.turns, rewards, states, strict=True)]
    return replace(made, turns=tuple(turns), **{"reward": sum(rewards)} | changes)


def random_group(spec, seed: int, size: int = 4) -> tuple[list[list[float]], list[list[str]], Group]:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 7, size)
    rewards = [rng.choice([-1.0, 0.0, 0.1, 1.0], n).tolist() for n in lengths]
    states = [rng.choice(["", "a", "b", "c", "d"], n).tolist() for n in lengths]
    trajectories = [played(spec, r, s, i) for i, (r, s) in enumerate(zip(rewards, states, strict=True))]
    return rewards, states, Group(f"g{seed}", "tester", tuple(trajectories))


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", ["returns", "state"])
@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
def test_advantages_of_turns_are_those_of_a_plain_reference(spec, how, kind, gamma):
    for seed in range(20):
        rewards, states, group = random_group(spec, seed)
        config = ObjectiveConfig(name="grpo", turn_advantage=kind, turn_weight=0.7, gamma=gamma, **HOW[how])
        places = [[str(t) for t in range(len(r))] for r in rewards]
        expected = reference(
            rewards,
            states if kind == "state" else places,
            gamma=gamma,
            divide=config.divide_by_std,
            leave_one_out=config.leave_one_out,
            floor=0.2,
        )
        got = group_turn_advantages(group.trajectories, config, noise=0.2)
        for one, other in zip(got, expected, strict=True):
            np.testing.assert_allclose(one, 0.7 * np.array(other), rtol=0, atol=1e-9)


def test_each_token_gets_its_episodes_advantage_and_that_of_its_turn(spec):
    rewards, states, group = random_group(spec, 3)
    config = ObjectiveConfig(name="grpo", turn_advantage="state", turn_weight=0.5, gamma=0.9)
    decoder = ImageDecoder(spec)
    episodes = make_episodes([group], decoder, config)
    plain = make_episodes([group], decoder, ObjectiveConfig(name="grpo"))
    of_turns = reference(rewards, states, gamma=0.9)
    batch = pack(episodes, decoder, torch.device("cpu"))
    expected = []
    for index in batch.indices:
        trajectory, episode, own = group.trajectories[index], plain[index], of_turns[index]
        for turn, advantage in zip(trajectory.turns, own, strict=True):
            expected += [episode.advantage + 0.5 * advantage] * (turn.end - turn.start)
    np.testing.assert_allclose(batch.advantages.numpy(), expected, rtol=1e-6, atol=1e-6)


def test_the_penalty_of_an_episode_that_was_cut_off_is_part_of_its_returns(spec):
    cut = played(spec, [0.0, 1.0], ["a", "b"], 0, ending=Ending.OUT_OF_TOKENS)
    group = Group("g", "a", (cut, played(spec, [0.0, 1.0], ["a", "b"], 1)))
    settings = {"name": "grpo", "turn_advantage": "returns", "divide_by_std": False}
    alike = group_turn_advantages(group.trajectories, ObjectiveConfig(**settings))
    assert np.concatenate(alike).tolist() == [0.0] * 4
    punished = group_turn_advantages(group.trajectories, ObjectiveConfig(**settings, overlong="penalise"))
    assert np.concatenate(punished).tolist() == [-0.5, -0.5, 0.5, 0.5]


def test_a_group_of_equal_episodes_teaches_where_its_turns_differ(spec):
    early, late = played(spec, [1.0, 0.0], ["a", "b"], 0), played(spec, [0.0, 1.0], ["a", "c"], 1)
    group = Group("g", "a", (early, late))
    plain = ObjectiveConfig(name="grpo")
    by_turns = plain.model_copy(update={"turn_advantage": "returns"})
    assert is_uninformative(group, plain) and not is_uninformative(group, by_turns)
    by_states = {"turn_advantage": "state", "gamma": 0.5}
    assert not is_uninformative(group, plain.model_copy(update=by_states))
    assert is_uninformative(group, plain.model_copy(update=by_states | {"gamma": 1.0}))  # "a" earned 1 both times
    episodes = make_episodes([group], ImageDecoder(spec), plain.model_copy(update=by_states), noise=0.03)
    assert all(e.advantage == 0.0 and e.advantage_size > 0 and e.signal == 1.0 for e in episodes)


def test_the_share_of_turns_that_are_compared_is_measured(spec):
    group = Group("g", "a", (played(spec, [1.0, 0.0], ["a", "b"], 0), played(spec, [0.0, 1.0, 0.0], ["a", "c", ""], 1)))
    metrics = lambda **how: group_metrics([group], 0, learner_config(objective="grpo", **how))  # noqa: E731
    assert metrics(turn_advantage="state")["groups/turns_compared"] == pytest.approx(2 / 5)
    assert metrics(turn_advantage="returns")["groups/turns_compared"] == pytest.approx(4 / 5)
    assert "groups/turns_compared" not in metrics()


@pytest.mark.slow
def test_a_step_of_weight_nothing_is_that_of_grpo_to_the_last_digit_and_another_is_not(folder, spec, ranks):
    groups = random_groups(spec, 3, group_size=3)
    weights = []
    for settings in ({}, {"turn_advantage": "returns", "turn_weight": 0.0}, {"turn_advantage": "returns"}):
        policy = load_policy(str(folder), spec)
        trainer = Trainer(policy, learner_config(objective="grpo", group_size=3, lr=1e-3, **settings), ranks)
        for step in range(2):
            trainer.step(groups, step)
        weights.append([p.detach().clone() for p in policy.parameters()])
    plain, nothing, something = weights
    assert all(torch.equal(p, q) for p, q in zip(plain, nothing, strict=True))
    assert any(not torch.equal(p, q) for p, q in zip(plain, something, strict=True))


def test_a_critic_and_comparisons_of_turns_contradict_each_other():
    with pytest.raises(
        ValueError, match=r"turn_advantage = 'state' is for group-relative objectives.*vtrace has a critic"
    ):
        ObjectiveConfig(name="vtrace", turn_advantage="state")


def test_whitened_advantages_are_those_of_a_plain_reference(spec):
    groups = random_groups(spec, 3, group_size=3)
    plain = make_episodes(groups, ImageDecoder(spec), ObjectiveConfig(name="grpo", divide_by_std=False))
    for noise in (0.0, 5.0):
        found = make_episodes(groups, ImageDecoder(spec), ObjectiveConfig(name="reinforce++"), noise=noise)
        expected = whitened([e.advantage for e in plain], [e.num_sampled for e in plain], noise)
        np.testing.assert_allclose([e.advantage for e in found], expected, rtol=1e-9)


def test_equal_rewards_stay_exactly_zero_where_advantages_are_whitened(spec):
    group = random_groups(spec, 1, group_size=3)[0]
    equal = Group("g", "a", tuple(replace(t, reward=0.3) for t in group.trajectories))
    assert [e.advantage for e in make_episodes([equal], ImageDecoder(spec), ObjectiveConfig(name="reinforce++"))] == [
        0.0
    ] * 3


def test_turns_are_whitened_with_their_episodes(spec):
    groups = [random_group(spec, seed)[2] for seed in range(3)]
    config = ObjectiveConfig(name="reinforce++", turn_advantage="state")
    batch = pack(make_episodes(groups, ImageDecoder(spec), config), ImageDecoder(spec), torch.device("cpu"))
    assert float(batch.advantages.mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(batch.advantages.std(correction=0)) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize(
    ("name", "setting", "value"),
    [
        ("dr_grpo", "divide_by_std", True),
        ("dr_grpo", "aggregation", "token_mean"),
        ("reinforce++", "divide_by_std", True),
    ],
)
def test_a_setting_that_contradicts_what_the_name_means_is_refused(name, setting, value):
    assert getattr(ObjectiveConfig(name=name), setting) != value
    with pytest.raises(ValueError, match=f"{setting} = {value!r}: .* is what it is by {setting}".replace("+", r"\+")):
        ObjectiveConfig(name=name, **{setting: value})


def test_the_groups_that_vary_most_are_kept_and_the_others_teach_nothing_but_count(spec):
    spreads = [0.0, 1.0, 0.1, 2.0]
    groups = []
    for number, spread in enumerate(spreads):
        first, second = random_groups(spec, 1, group_size=2, seed=number)[0].trajectories
        groups.append(Group(f"g{number}", "a", (replace(first, reward=spread), replace(second, reward=0.0))))
    config = ObjectiveConfig(name="grpo", keep_variance=0.9)
    episodes = make_episodes(groups, ImageDecoder(spec), config)
    assert [e.advantage != 0 for e in episodes] == [False, False, True, True, False, False, True, True]
    assert len(episodes) == 8
    metrics = group_metrics(groups, 0, learner_config(objective="grpo", keep_variance=0.9))
    assert metrics["groups/kept"] == 0.5
    everything = make_episodes(groups, ImageDecoder(spec), ObjectiveConfig(name="grpo"))
    assert [e.advantage for e in everything if e.group in (1, 3)] == [
        e.advantage for e in episodes if e.group in (1, 3)
    ]


@pytest.mark.parametrize(
    ("spreads", "share", "kept"),
    [
        ([1.0, 1.0], 0.5, {0}),
        ([1.0, 1.0], 0.6, {0, 1}),
        ([0.0, 0.0], 0.9, set()),
        ([3.0, 1.0, 1.0], 0.8, {0}),
        ([], 0.5, set()),
    ],
)
def test_as_few_groups_are_kept_as_have_the_share_of_all_variance(spreads, share, kept):
    assert most_varying([[spread, 0.0] for spread in spreads], share) == kept


@pytest.mark.parametrize(
    "settings", [{"name": "vtrace"}, {"name": "reinforce++"}, {"kl_in_reward": True, "kl_coef": 0.1}]
)
def test_a_filter_by_variance_where_advantages_do_not_compare_groups_is_refused(settings):
    plain = {"name": "grpo", "divide_by_std": False} if "name" not in settings else {}
    with pytest.raises(ValueError, match=r"keep_variance = 0.9 with name"):
        ObjectiveConfig(keep_variance=0.9, **plain | settings)
