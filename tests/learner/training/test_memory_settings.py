"""What a recipe may change about memory and speed changes nothing about the training, beyond rounding."""

from __future__ import annotations

import pytest
import torch

from learner.distributed import init_ranks
from learner.model.policy import load_policy
from learner.model.sharding import parallelize
from learner.training.trainer import Trainer
from shared.config.learner_section import ParallelConfig
from shared.config.sections import GuardConfig
from tests.support.episodes import learner_config, random_groups


def trained(folder, spec, ranks, *, plain_adamw=False, dtype=torch.float32, **settings) -> Trainer:
    """After three steps."""
    torch.manual_seed(0)
    policy = load_policy(str(folder), spec, settings.get("critic_width", 0))
    config = learner_config(lr=1e-3, value_lr=1e-2, **settings)
    parallelize(policy, ranks, config, dtype)
    trainer = Trainer(policy, config, ranks)
    for group in trainer.optimizer.param_groups if plain_adamw else ():
        group.update(fused=False, foreach=False)
    for step in range(3):
        trainer.step(random_groups(spec, 3, seed=step, turns=2), version=0)
    return trainer


def weights(trainer: Trainer) -> torch.Tensor:
    parameters = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in trainer.policy.parameters()]
    return torch.nn.utils.parameters_to_vector(parameters).detach()


@pytest.fixture(scope="module")
def plain(folder, spec, ranks):
    return weights(trained(folder, spec, ranks, plain_adamw=True))


def distance(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).double().norm() / expected.double().norm())


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{}, {"activation_checkpointing": True}, {"offload": True}, {"microbatch_tokens": 100}]
)
def test_a_setting_gives_the_weights_of_plain_adamw(folder, spec, ranks, plain, settings):
    assert distance(weights(trained(folder, spec, ranks, **settings)), plain) < 1e-6


@pytest.mark.slow
def test_compiled_blocks_give_the_weights_of_plain_ones(folder, spec, ranks):
    """The deep critic's too, which reads between the blocks."""
    guard = GuardConfig(max_kl=0.0)  # else there are graphs without gradients too, for its forward
    got, plain = (
        weights(trained(folder, spec, ranks, critic_width=16, guard=guard, compile=compiled))
        for compiled in (True, False)
    )
    assert distance(got, plain) < 1e-5


@pytest.mark.slow
def test_activation_checkpointing_keeps_less(folder, spec, ranks):
    def kept(**settings):
        trainer, total = trained(folder, spec, ranks, **settings), []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: total.append(t.nbytes) or t, lambda t: t):
            trainer.step(random_groups(spec, 3, turns=2), version=0)
        return sum(total)

    assert kept(activation_checkpointing=True) < 0.7 * kept()


@pytest.mark.slow
@pytest.mark.parametrize(("part", "other"), [("vision", "projector"), ("projector", "vision")])
def test_a_frozen_part_stays_as_it_was_and_the_rest_learns(folder, spec, ranks, part, other):
    before = dict(load_policy(str(folder), spec).named_parameters())
    after = dict(trained(folder, spec, ranks, freeze=(part,)).policy.named_parameters())
    moved = {"vision": False, "projector": False, "text": False}
    for name, p in after.items():
        kind = "text" if "visual" not in name else "projector" if "merger" in name else "vision"
        moved[kind] |= not torch.equal(p, before[name])
    assert moved == {part: False, other: True, "text": True}


@pytest.mark.slow
def test_frozen_layers_and_the_embeddings_stay_as_they_were_and_those_above_learn(folder, spec, ranks):
    before = dict(load_policy(str(folder), spec).named_parameters())
    after = trained(folder, spec, ranks, freeze=("vision", "projector"), freeze_layers=1).policy.named_parameters()
    moved = {name for name, p in after if not torch.equal(p, before[name])}
    layers = {
        name.split("language_model.layers.")[1].split(".")[0] for name in moved if "language_model.layers." in name
    }
    assert layers == {"1"} and not any("embed_tokens" in name for name in moved)


def test_more_frozen_layers_than_there_are_is_one_line(folder, spec, ranks):
    with pytest.raises(ValueError, match=r"freeze_layers = 3: the model has 2; lower it"):
        trained(folder, spec, ranks, freeze_layers=3)


def test_ranks_that_do_not_divide_into_shards_are_one_line():
    with pytest.raises(ValueError, match=r"learner\.parallel\.shard_size = 2 does not divide the 1 ranks"):
        init_ranks("cpu", parallel=ParallelConfig(shard_size=2))
