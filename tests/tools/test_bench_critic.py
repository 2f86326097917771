"""The benchmark that measures a checkpoint's critic beside a perceptron fitted afterwards."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from learner.checkpoints.saver import Saver
from learner.model.policy import load_policy
from learner.model.sharding import parallelize
from learner.training.trainer import Trainer
from shared.config.objective_section import ObjectiveConfig
from shared.config.recipe import Recipe
from shared.config.sections import EnvConfig, ModelConfig
from shared.recordings.group_files import GroupWriter, files
from tests.bench.sokoban.critic import Seen, explained, fitted, measure, seen
from tests.support.episodes import learner_config, random_groups


def made_up(count: int, noise: float, seed: int) -> Seen:
    torch.manual_seed(seed)
    final, turns = torch.randn(count, 8), torch.arange(count) % 5
    returns = (final[:, 0] > final[:, 1]) + 0.5 * turns + noise * torch.randn(count)
    return Seen(final, turns, torch.zeros(count), returns, torch.ones(count, dtype=torch.bool))


@pytest.mark.slow
def test_the_perceptron_explains_what_states_and_turns_tell_and_no_noise():
    held_out = made_up(2000, 0.0, seed=2)
    values = fitted(made_up(4000, 0.5, seed=0), made_up(1000, 0.5, seed=1))([held_out.final], held_out.turns).detach()
    assert explained(values, held_out.returns) > 0.9
    assert explained(torch.full((2000,), 3.0), held_out.returns) == 0.0
    rows = torch.randperm(2000)
    assert explained(values[rows], held_out.returns) < 0.1


def test_returns_are_discounted_from_turn_to_turn(folder, spec, ranks, tmp_path):
    recorder = GroupWriter(tmp_path)
    group = random_groups(spec, 1, turns=3)[0]
    recorder.add(group)
    policy = load_policy(str(folder), spec, 16).eval()
    found = seen(files(tmp_path), policy, ObjectiveConfig(gamma=0.5, critic_width=16), ranks)
    rewards = np.array([turn.reward for turn in group.trajectories[0].turns], dtype=np.float64)
    rewards[-1] += group.trajectories[0].reward - rewards.sum()
    expected = [sum(0.5**k * reward for k, reward in enumerate(rewards[turn:])) for turn in found.turns.tolist()]
    assert found.returns.tolist() == pytest.approx(expected, abs=1e-5)
    assert found.first.sum() == 3 and found.first[0]


@pytest.mark.slow
def test_a_checkpoints_critic_is_measured_on_recorded_groups(folder, spec, ranks, tmp_path):
    settings = learner_config(critic_width=16, lr=1e-3, value_lr=1e-2, in_background=False)
    policy = load_policy(str(folder), spec, 16)
    parallelize(policy, ranks, settings, torch.float32)
    trainer = Trainer(policy, settings, ranks)
    trainer.step(random_groups(spec, 3, turns=2), version=0)
    recipe = Recipe(model=ModelConfig(path=str(folder)), env=EnvConfig(module="envs.colour"), learner=settings)
    checkpoint = Saver(tmp_path / "checkpoints", trainer, ranks, recipe).save(1, {})
    recorder = GroupWriter(tmp_path / "groups")
    for group in random_groups(spec, 8, seed=7, turns=2):
        recorder.add(group)
    found = measure(checkpoint, tmp_path / "groups", ranks)
    assert found["groups"] == 8 and set(found["tokens"]) == set(found["turns"]) == {"critic", "fitted"}
    with pytest.raises(ValueError, match="holds 0 groups"):
        measure(checkpoint, tmp_path / "none", ranks)
