"""What policy and reference have in common is computed once a microbatch, and that changes nothing."""

from __future__ import annotations

import pytest
import torch

import learner.training.trainer
from learner.distributed import Ranks
from learner.model.lora_reference import BasePolicy
from learner.model.policy import Policy, load_policy
from learner.model.sharding import layers_alike, parallelize
from learner.training.trainer import Trainer
from shared.config.sections import GuardConfig
from shared.vision import VisionSpec
from tests.support.episodes import learner_config, packed, random_groups
from tests.support.small.adapted import adapted_policy
from tests.support.small.families import qwen25
from tests.support.tiny import mixture_dir, tiny_model_dir

FROZEN = {"freeze": ("vision", "projector"), "freeze_layers": 2}
HELD = {"hold_coef": 0.5, "hold_probability": 0.6}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of a model of four decoder layers, two of which get the deepstack's features."""
    return tiny_model_dir(tmp_path_factory.mktemp("common"), layers=4)


def of_folder(folder, spec, ranks: Ranks, **settings) -> Policy:
    policy = load_policy(str(folder), spec, settings.get("critic_width", 0))
    parallelize(policy, ranks, learner_config(**settings), torch.float32)
    return policy


def trainer_of(folder, spec, ranks, **settings) -> Trainer:
    torch.manual_seed(0)
    policy, reference = (of_folder(folder, spec, ranks, **settings) for _ in range(2))
    with torch.no_grad():
        for each in (policy, reference):  # so that they are sure of something
            each.vlm.model.language_model.norm.weight.mul_(6)
    config = learner_config(lr=1e-3, value_lr=1e-2, **settings)
    return Trainer(policy, config, ranks, reference=reference.requires_grad_(False))


def after_steps(trainer: Trainer, steps: int = 2) -> dict[str, torch.Tensor]:
    for step in range(steps):
        groups = random_groups(trainer.policy.spec, 3, seed=step, turns=2, group_size=trainer.config.group_size)
        metrics = trainer.step(groups, version=0)
        assert (metrics.get("reference/hold", 0.0) > 0.0) == (trainer.config.objective.hold_coef > 0.0)
    return {name: p.detach().clone() for name, p in trainer.policy.named_parameters()}


def unshared(monkeypatch) -> None:
    monkeypatch.setattr(learner.training.trainer, "layers_alike", lambda *_: None)


SETTINGS = [
    {**FROZEN, **HELD, "critic_width": 16},
    {**FROZEN, **HELD, "critic_width": 16, "activation_checkpointing": True, "minibatches": 2},
    {**FROZEN, **HELD, "freeze_layers": 1, "microbatch_tokens": 100},
    {**FROZEN, **HELD, "freeze_layers": 4},
    {"freeze": ("vision", "projector"), **HELD},
    HELD,
    {**FROZEN, "kl_coef": 0.5, "kl_in_reward": True, "divide_by_std": False, "objective": "grpo"},
    {**FROZEN, **HELD, "kl_reference_every": 1},
]


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS)
def test_weights_trained_with_what_is_in_common_are_those_trained_without_in_every_bit(
    folder, spec, ranks, settings, monkeypatch
):
    got = after_steps(trainer_of(folder, spec, ranks, **settings))
    unshared(monkeypatch)
    expected = after_steps(trainer_of(folder, spec, ranks, **settings))
    assert all(torch.equal(got[name], p) for name, p in expected.items())


@pytest.mark.slow
@pytest.mark.timeout(900)  # it compiles two models
def test_compiled_blocks_have_it_in_common_too(spec, ranks, tmp_path, monkeypatch):
    guard = GuardConfig(max_kl=0.0)  # else there are graphs for its forward too
    settings = {**FROZEN, **HELD, "freeze_layers": 1, "critic_width": 16, "compile": True, "guard": guard}
    got = after_steps(trainer_of(tiny_model_dir(tmp_path), spec, ranks, **settings), steps=1)
    unshared(monkeypatch)
    expected = after_steps(trainer_of(tiny_model_dir(tmp_path), spec, ranks, **settings), steps=1)
    assert all(torch.equal(got[name], p) for name, p in expected.items())


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixture", "windows"])
def test_models_of_other_families_train_to_the_same_weights_too(ranks, tmp_path, family, monkeypatch):
    folder = mixture_dir(tiny_model_dir(tmp_path)) if family == "mixture" else qwen25(tmp_path / "windows")
    spec, settings = VisionSpec.load(folder), {**FROZEN, **HELD, "freeze_layers": 1, "critic_width": 16}
    got = after_steps(trainer_of(folder, spec, ranks, **settings))
    unshared(monkeypatch)
    expected = after_steps(trainer_of(folder, spec, ranks, **settings))
    assert all(torch.equal(got[name], p) for name, p in expected.items())


def test_outputs_and_gradients_upon_known_layers_are_those_of_the_whole_policy(folder, spec, ranks):
    policy = of_folder(folder, spec, ranks, **FROZEN, critic_width=16)
    batch = packed(policy, [t for group in random_groups(spec, 3) for t in group.trajectories])
    trained = [p for p in policy.parameters() if p.requires_grad]
    with torch.no_grad():
        lower = policy(batch, 1.0, return_lower=2).lower
    gradients = []
    for known in (None, lower):
        said = policy(batch, 1.0, known)
        total = said.logprobs.sum() + 0.1 * said.entropies.sum() + said.values.square().sum()
        gradients.append([said.logprobs, said.entropies, *torch.autograd.grad(total, trained, allow_unused=True)])
    for got, expected in zip(*gradients, strict=True):
        assert (got is None) == (expected is None)
        assert got is None or torch.equal(got, expected)


def test_frozen_layers_are_computed_once_a_microbatch_and_keep_nothing_for_a_backward(folder, spec, ranks):
    trainer, counts, tracked = trainer_of(folder, spec, ranks, **FROZEN, **HELD), {}, []
    for who, policy in (("policy", trainer.policy), ("reference", trainer.reference)):
        for index, layer in enumerate(policy.vlm.model.language_model.layers):

            def count(_module, _inputs, output, key=(who, index)):
                counts[key] = counts.get(key, 0) + 1
                if key[1] < 2:
                    tracked.append(output.requires_grad)

            layer.register_forward_hook(count)
    trainer.step(random_groups(spec, 3), version=0)
    of = lambda who: [counts.get((who, index), 0) for index in range(4)]  # noqa: E731
    extra = of("policy")[0]  # the guard's own forward of the last microbatch
    assert of("reference") == [1, 1, 1, 1] and of("policy") == [extra, extra, 1 + extra, 1 + extra] and extra <= 1
    assert not any(tracked)


CASES = [
    ({}, "", None),
    ({"freeze": ("vision",)}, "", None),
    ({"freeze_layers": 2}, "", None),
    ({"freeze": ("vision", "projector")}, "", 0),
    (FROZEN, "", 2),
    ({**FROZEN, "freeze_layers": 4}, "", 3),
    (FROZEN, "visual.merger.norm.weight", None),
    (FROZEN, "language_model.embed_tokens.weight", 0),
    (FROZEN, "language_model.layers.0.mlp.down_proj.weight", 0),
    (FROZEN, "language_model.layers.1.self_attn.k_norm.weight", 1),
    (FROZEN, "language_model.layers.2.self_attn.k_norm.weight", 2),
]


@pytest.mark.parametrize(("settings", "changed", "expected"), CASES)
def test_in_common_is_what_is_frozen_and_equal_in_every_bit(folder, spec, ranks, settings, changed, expected):
    policy, reference = (of_folder(folder, spec, ranks, **settings) for _ in range(2))
    for name, p in reference.vlm.named_parameters():
        if changed and name.endswith(changed):
            p.data.view(-1)[0] += 1e-3
    assert layers_alike(policy, reference, ranks) == expected


def test_a_policy_with_adapters_has_its_tower_in_common_with_its_base_unless_that_is_adapted(folder, ranks):
    for targets, expected in ((("attention",), 0), (("attention", "vision"), None)):
        policy = adapted_policy(folder, targets=targets)
        assert layers_alike(policy, BasePolicy(policy), ranks) == expected


def test_what_is_in_common_is_found_anew_after_weights_were_loaded(folder, spec, ranks):
    trainer, groups = trainer_of(folder, spec, ranks, **FROZEN, **HELD), random_groups(spec, 2)
    trainer.step(groups, version=0)
    assert trainer.models.num_common == 2
    with torch.no_grad():  # as a checkpoint of another start would
        trainer.policy.vlm.model.language_model.layers[0].mlp.down_proj.weight.mul_(1.5)
    trainer.load_state(trainer.state())
    trainer.step(groups, version=0)
    assert trainer.models.num_common == 0
