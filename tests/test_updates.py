"""Several updates of one step's episodes, and the floor below the scale of advantages."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from learner.advantages import RunningScale
from learner.batch import cut, make_episodes
from learner.images import ImageDecoder
from learner.model.policy import load_policy
from learner.trainer import Trainer
from shared.learner_config import ObjectiveConfig
from shared.types import Group
from tests.support.episodes import learner_config, random_groups


@pytest.mark.parametrize(("count", "passes", "minibatches"), [(7, 3, 3), (5, 2, 1), (2, 2, 4), (1, 2, 2)])
def test_every_pass_has_each_episode_once_in_minibatches_of_equal_size(count, passes, minibatches):
    updates = list(cut(count, passes, minibatches, seed=3))
    of_a_pass = min(minibatches, count)
    assert len(updates) == passes * of_a_pass
    for start in range(0, len(updates), of_a_pass):
        parts = updates[start : start + of_a_pass]
        assert sorted(i for part in parts for i in part) == list(range(count))
        assert {len(part) for part in parts} <= {count // of_a_pass, -(-count // of_a_pass)}
        assert all(part == sorted(part) for part in parts)


def test_each_pass_and_each_step_is_cut_anew_and_always_in_the_same_way():
    first, other = list(cut(20, 2, 2, seed=0)), list(cut(20, 2, 2, seed=1))
    assert first[:2] != first[2:] and first != other and first == list(cut(20, 2, 2, seed=0))
    assert list(cut(3, 1, 1, seed=5)) == [[0, 1, 2]]
    assert list(cut(0, 1, 1, seed=5)) == [[]]  # a step without episodes has an update that changes nothing


def trained(folder, spec, ranks, batches, **settings) -> tuple[torch.Tensor, dict[str, float]]:
    config = learner_config(lr=1e-3, value_lr=1e-2, normalize_advantages=False, warmup_steps=0, **settings)
    trainer = Trainer(load_policy(str(folder), spec), config, ranks)
    for groups in batches:
        metrics = trainer.step(groups, version=0)
    return torch.nn.utils.parameters_to_vector(trainer.policy.parameters()).detach(), metrics


@pytest.mark.slow
def test_several_passes_are_several_steps_on_the_same_episodes(folder, spec, ranks):
    groups = random_groups(spec, 3, turns=2)
    passed, metrics = trained(folder, spec, ranks, [groups], passes=2)
    stepped, _ = trained(folder, spec, ranks, [groups, groups])
    assert torch.equal(passed, stepped)
    assert metrics["tokens/lag_0"] == 2 * metrics["batch/sampled_tokens"]
    assert metrics["batch/episodes"] == 3.0


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["vtrace", "grpo"])
def test_minibatches_are_steps_on_parts_of_the_episodes(folder, spec, ranks, objective):
    groups = random_groups(spec, 5, turns=2, group_size=1 if objective == "vtrace" else 2)
    episodes = [t for g in groups for t in g.trajectories]
    size = len(groups[0].trajectories)
    parts = list(cut(len(episodes), 1, 2, seed=0))
    if objective == "vtrace":
        by_hand = [[groups[i] for i in part] for part in parts]
        at_once, _ = trained(folder, spec, ranks, [groups], objective=objective, minibatches=2)
        stepped, _ = trained(folder, spec, ranks, by_hand, objective=objective)
        assert torch.equal(at_once, stepped)
    else:  # a group may be cut; its advantages are those of the whole group
        policy = load_policy(str(folder), spec)
        trainer = Trainer(policy, learner_config(objective=objective, minibatches=2, group_size=size), ranks)
        seen = []
        trainer._pack = lambda chosen, pack=trainer._pack: seen.append([e.advantage for e in chosen]) or pack(chosen)
        trainer.step(groups, version=0)
        whole = make_episodes(groups, ImageDecoder(spec), ObjectiveConfig(name=objective))
        assert seen == [[whole[i].advantage for i in part] for part in parts]


@pytest.mark.slow
def test_a_bad_update_is_left_out_and_its_step_counted_once(folder, spec, ranks):
    groups = random_groups(spec, 2, turns=1)
    bad = groups[0].trajectories[0]
    turns = (replace(bad.turns[0], reward=float("nan")),)
    groups[0] = Group("bad", "tester", (replace(bad, turns=turns),))
    policy = load_policy(str(folder), spec)
    before = torch.nn.utils.parameters_to_vector(policy.parameters()).detach().clone()
    trainer = Trainer(policy, learner_config(lr=1e-3, passes=2, minibatches=2), ranks)
    metrics = trainer.step(groups, version=0)
    assert metrics["optim/skipped_steps"] == metrics["optim/bad_steps_in_a_row"] == 1.0
    after = torch.nn.utils.parameters_to_vector(policy.parameters()).detach()
    assert torch.isfinite(after).all() and not torch.equal(before, after)


def test_advantages_below_the_floor_are_not_blown_up(spec):
    episodes = make_episodes(random_groups(spec, 2, turns=1), ImageDecoder(spec), ObjectiveConfig())
    plain, floored = (RunningScale(ObjectiveConfig(advantage_floor=floor)) for floor in (0.0, 0.5))
    for moment, expected in ((0.01, 2.0), (4.0, 0.5)):
        plain.moment = floored.moment = moment
        assert plain(episodes) == pytest.approx(1 / np.sqrt(moment))
        assert floored(episodes) == pytest.approx(expected)
