"""A step with a teacher: it reads the policy's episodes once, changes no more, and the packing changes nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from learner.batch.episodes import make_episode
from learner.batch.image_decoder import ImageDecoder
from learner.model.policy import load_policy
from learner.training import precomputed
from learner.training.precomputed import LAST_PLACE, places_in_turns, teacher_baselines
from learner.training.trainer import Trainer
from shared.config.objective_section import ObjectiveConfig
from tests.support.episodes import learner_config, on_policy, plain_logprobs, random_groups, random_trajectory
from tests.support.tiny import load_model, tiny_model_dir


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """A model of other weights."""
    return tiny_model_dir(tmp_path_factory.mktemp("teacher"), seed=7)


def stepped(folder, other, spec, ranks, **settings):
    """Return the first gradient, the metrics, and the trainer of a step on two groups."""
    own = {"objective": "grpo", "teacher": "other", "reward_weight": 0.0, "lr": 1e-12, "max_grad_norm": 1e9}
    config = learner_config(**own | settings)
    policy, teacher = load_policy(str(folder), spec), load_policy(str(other), spec).requires_grad_(False)
    trainer = Trainer(policy, config, ranks, teacher=teacher)
    found, step = {}, trainer.optimizer.step

    def noted(*args, **kwargs):
        if not found:
            found.update({name: p.grad.clone() for name, p in policy.named_weights() if p.grad is not None})
        return step(*args, **kwargs)

    trainer.optimizer.step = noted
    groups = [
        replace(group, trajectories=tuple(on_policy(policy, t, noise=0.0) for t in group.trajectories))
        for group in random_groups(spec, 2, group_size=2)
    ]
    metrics = trainer.step(groups, version=0)
    return found, metrics, trainer


def distance(one, two):
    scale = torch.cat([g.flatten() for g in one.values()]).norm()
    return max(float((one[name] - two[name]).norm()) for name in one) / float(scale)


def test_the_kl_is_that_of_transformers_logprobs(folder, other, spec, ranks):
    _, metrics, _ = stepped(folder, other, spec, ranks)
    models = [load_model(each).double() for each in (folder, other)]
    gaps = []
    for group in random_groups(spec, 2, group_size=2):
        for trajectory in group.trajectories:
            own, its = (plain_logprobs(model, trajectory, spec) for model in models)
            gaps.append(own - its)
    assert metrics["teacher/kl"] == pytest.approx(float(torch.cat(gaps).mean()), rel=1e-5)


@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_packed_and_one_by_one_the_gradient_is_the_same(folder, other, spec, ranks, direction):
    packed, together, _ = stepped(folder, other, spec, ranks, microbatch_tokens=4096, teacher_kl=direction)
    alone, apart, _ = stepped(folder, other, spec, ranks, microbatch_tokens=64, teacher_kl=direction)
    assert together["batch/microbatches"] == 1 and apart["batch/microbatches"] == 4
    assert distance(packed, alone) < 1e-5


def test_a_policy_that_is_its_own_teacher_has_nothing_to_learn(folder, other, spec, ranks):
    _, taught, _ = stepped(folder, other, spec, ranks)
    _, same, _ = stepped(folder, folder, spec, ranks)
    assert same["teacher/kl"] == pytest.approx(0.0, abs=1e-6)
    assert same["optim/grad_norm"] < 1e-5 < 0.1 < taught["optim/grad_norm"]


def test_the_baseline_of_a_token_is_the_mean_over_all_at_its_place_in_a_turn(spec):
    trajectories = [random_trajectory(spec, seed, turns=2) for seed in range(3)]
    episodes = [make_episode(t, 0.0, ImageDecoder(spec), ObjectiveConfig()) for t in trajectories]
    places = [places_in_turns(episode).tolist() for episode in episodes]
    assert places == [[place for turn in t.turns for place in range(turn.end - turn.start)] for t in trajectories]
    teacher = torch.from_numpy(np.random.default_rng(0).normal(size=sum(map(len, places))))
    baselines = teacher_baselines(episodes, teacher)
    behaviour = np.concatenate([e.behaviour_logprobs for e in episodes])
    every = np.concatenate(places)
    for place in range(max(every) + 1):
        at = every == place
        mean = (behaviour[at] - teacher.numpy()[at]).mean()
        np.testing.assert_allclose(baselines.numpy()[at], mean, rtol=1e-6)


def test_places_far_into_a_turn_share_a_baseline(spec):
    trajectory = random_trajectory(spec, 0, turns=2, turn_tokens=(3 * LAST_PLACE, 3 * LAST_PLACE + 1))
    episode = make_episode(trajectory, 0.0, ImageDecoder(spec), ObjectiveConfig())
    of_a_turn = [*range(LAST_PLACE), *[LAST_PLACE] * (2 * LAST_PLACE)]
    assert places_in_turns(episode).tolist() == 2 * of_a_turn


def test_groups_of_equal_rewards_are_learned_from(folder, other, spec, ranks):
    config = learner_config(objective="grpo", teacher="other", max_grad_norm=1e9)
    policy, teacher = load_policy(str(folder), spec), load_policy(str(other), spec).requires_grad_(False)
    (group,) = random_groups(spec, 1, group_size=2)
    alike = replace(group, trajectories=tuple(replace(t, reward=1.0) for t in group.trajectories))
    metrics = Trainer(policy, config, ranks, teacher=teacher).step([alike], version=0)
    assert metrics["optim/grad_norm"] > 0.1 and metrics["optim/rate"] == 1.0


def test_a_teacher_stays_as_it_is_and_several_passes_read_it_once(folder, other, spec, ranks, monkeypatch):
    seen, forward = [], precomputed.forward_only
    monkeypatch.setattr(
        precomputed, "forward_only", lambda m, b, *a, **k: (seen.append((m, b)), forward(m, b, *a, **k))[1]
    )
    _, _, trainer = stepped(folder, other, spec, ranks, lr=1e-2, passes=2, minibatches=2, proximal="learner")
    assert trainer.models.teacher is not None
    kept = load_policy(str(other), spec)
    for one, two in zip(trainer.models.teacher.parameters(), kept.parameters(), strict=True):
        assert torch.equal(one, two)
    read = [int(index) for model, batch in seen if model is trainer.models.teacher for index in batch.indices]
    assert sorted(read) == [0, 1, 2, 3]


def test_an_objective_and_a_trainer_agree_about_the_teacher(folder, spec, ranks):
    policy = load_policy(str(folder), spec)
    with pytest.raises(ValueError, match="the given teacher do not fit"):
        Trainer(policy, learner_config(objective="grpo", teacher="other"), ranks)
