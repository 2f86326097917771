"""The critics: what the deep one reads and fits, that it pulls on no layer of the policy, and that it is kept."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from learner.checkpoints.hf_export import export_checkpoint
from learner.checkpoints.restoring import load_checkpoint
from learner.checkpoints.saver import Saver
from learner.model.critic import DeepCritic, Listener, chosen_layers
from learner.model.policy import load_policy
from learner.model.sharding import parallelize
from learner.training.trainer import Trainer
from learner.vtrace import turn_indices
from shared.config.recipe import Recipe
from shared.config.sections import EnvConfig, ModelConfig
from tests.support.episodes import learner_config, packed, random_groups
from tests.support.tiny import load_model, tiny_model_dir


def flags(*at: int, size: int) -> torch.Tensor:
    out = torch.zeros(size, dtype=torch.bool)
    out[list(at)] = True
    return out


def test_turns_are_counted_anew_in_each_episode():
    turn_end, episode_end = flags(1, 2, 4, 6, 7, size=8), flags(2, 7, size=8)
    assert turn_indices(turn_end, episode_end).tolist() == [0, 0, 1, 0, 0, 1, 1, 2]
    assert turn_indices(turn_end[:0], episode_end[:0]).tolist() == []


def test_layers_are_spread_and_lie_below_the_last():
    assert chosen_layers(4) == [0, 1, 2]
    assert chosen_layers(28) == [8, 17, 26]
    assert chosen_layers(2) == [0]
    assert chosen_layers(1) == []


@pytest.mark.slow
def test_a_deep_critic_starts_at_0_and_fits_what_depends_on_turn_and_state():
    torch.manual_seed(0)
    critic = DeepCritic(hidden_size=8, num_states=2, width=32)
    states, turns = [torch.randn(64, 8), torch.randn(64, 8)], torch.arange(64) % 40
    assert critic(states, turns).tolist() == [0.0] * 64
    target = states[0][:, 0] * states[1][:, 1] + 0.1 * (turns.clamp(max=32) % 3)
    optimizer = torch.optim.Adam(critic.parameters(), lr=1e-2)
    for _ in range(300):
        loss = (critic(states, turns) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.05 * target.var()


def test_turns_up_to_the_32nd_are_told_apart_and_all_later_ones_count_as_it():
    torch.manual_seed(0)
    critic = DeepCritic(hidden_size=8, num_states=1, width=16)
    for parameter in critic.parameters():
        torch.nn.init.normal_(parameter)
    state = torch.randn(1, 8)
    values = [critic([state], torch.tensor([turn])).item() for turn in (0, 1, 31, 32, 33, 40)]
    assert len({*values[:4]}) == 4
    assert values[3] == values[4] == values[5]


def test_a_listener_keeps_chosen_rows_of_one_forward_without_gradient():
    layers = [nn.Linear(3, 3), nn.Linear(3, 3)]
    listener = Listener(layers)
    layers[0](torch.ones(1, 5, 3))  # nobody asked
    assert listener.take() == []
    listener.listen(torch.tensor([4, 0]))
    x = torch.randn(1, 5, 3)
    expected = layers[0](x)[0, [4, 0]]
    heard = listener.take()
    assert len(heard) == 1 and torch.equal(heard[0], expected) and not heard[0].requires_grad


def test_the_deep_critics_loss_moves_the_critic_alone_and_the_linear_ones_the_policy_too(folder, spec):
    trajectory = random_groups(spec, 1, turns=2)[0].trajectories[0]
    for width, reaches in ((16, False), (0, True)):
        policy = load_policy(str(folder), spec, width)
        nn.init.normal_(policy.value_head.leave.weight if width else policy.value_head.weight)
        values = policy(packed(policy, [trajectory]), 1.0).values
        assert values.std() > 0
        values.sum().backward()
        assert all(p.grad is not None for p in policy.value_head.parameters() if p.numel() > 0)
        assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in policy.vlm.parameters()) == reaches


def test_a_policy_without_a_deep_critic_keeps_its_parameters_names(folder, spec):
    names = {name for name, _ in load_policy(str(folder), spec).named_parameters() if not name.startswith("vlm.")}
    assert names == {"value_head.weight", "value_head.bias"}


@pytest.mark.slow
def test_the_deep_critics_gradient_is_clipped_by_itself(folder, spec, ranks):
    """However large the critic's errors: under SGD the policy moves as if they were small."""
    moves = {}
    for coef in (1e-3, 1e3):
        torch.manual_seed(0)
        policy = load_policy(str(folder), spec, 16)
        config = learner_config(critic_width=16, value_coef=coef, max_grad_norm=0.5, entropy_coef=1.0)
        trainer = Trainer(policy, config, ranks)
        trainer.optimizer = torch.optim.SGD([{"params": list(policy.parameters()), "base_lr": 0.1}], lr=0.1)
        before = nn.utils.parameters_to_vector(policy.vlm.parameters()).detach().clone()
        metrics = trainer.step(random_groups(spec, 3, turns=2), version=0)
        moves[coef] = nn.utils.parameters_to_vector(policy.vlm.parameters()).detach() - before
        assert (metrics["optim/value_grad_norm"] > 0.5) == (coef > 1)
    assert moves[1e3].norm() > 0 and torch.equal(*moves.values())


def trained(folder, spec, ranks, steps=range(3), **settings) -> Trainer:
    torch.manual_seed(0)
    policy = load_policy(str(folder), spec, 16)
    config = learner_config(lr=1e-3, value_lr=1e-2, critic_width=16, **settings)
    parallelize(policy, ranks, config, torch.float32)
    trainer = Trainer(policy, config, ranks)
    for step in steps:
        trainer.step(random_groups(spec, 3, seed=step, turns=2), version=0)
    return trainer


def weights(trainer: Trainer) -> torch.Tensor:
    parameters = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in trainer.policy.parameters()]
    return torch.nn.utils.parameters_to_vector(parameters).detach()


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"activation_checkpointing": True}, {"offload": True}, {"compile": True}])
def test_a_use_of_memory_changes_nothing_for_the_deep_critic(folder, spec, ranks, settings, monkeypatch):
    """Compiled blocks are traced, as often as ever, but not built: test_memory does that."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    got, plain = (weights(trained(folder, spec, ranks, **chosen)) for chosen in (settings, {}))
    assert float((got - plain).double().norm() / plain.double().norm()) < 1e-5


@pytest.mark.slow
def test_the_deep_critic_resumes_from_a_checkpoint_that_another_width_is_refused_and_that_exports(
    spec, ranks, tmp_path
):
    folder = tiny_model_dir(tmp_path)
    trainer = trained(folder, spec, ranks, range(2))

    def recipe(width):
        settings = learner_config(lr=1e-3, value_lr=1e-2, critic_width=width, in_background=False)
        return Recipe(model=ModelConfig(path=str(folder)), env=EnvConfig(module="envs.colour"), learner=settings)

    path = Saver(tmp_path / "checkpoints", trainer, ranks, recipe(16)).save(2, {})
    export_checkpoint(path, tmp_path / "out", model_path="", dtype=None)
    for (name, got), expected in zip(
        load_model(tmp_path / "out").named_parameters(), trainer.policy.vlm.parameters(), strict=True
    ):
        assert torch.equal(got, expected), name
    trainer.step(random_groups(spec, 3, seed=2, turns=2), version=0)
    resumed = trained(folder, spec, ranks, ())
    load_checkpoint(path, resumed, ranks, recipe(16))
    resumed.step(random_groups(spec, 3, seed=2, turns=2), version=0)
    assert torch.equal(weights(resumed), weights(trainer))
    with pytest.raises(ValueError, match=r"learner.objective.critic_width \(it: 16, now: 8\)"):
        load_checkpoint(path, resumed, ranks, recipe(8))
