"""The reference policy that the KL holds on to."""

from __future__ import annotations

import pytest
import torch

from learner.checkpoints.restoring import load_checkpoint
from learner.checkpoints.saver import Saver
from learner.model.policy import load_policy
from learner.training.trainer import Trainer
from shared.config.recipe import Recipe
from shared.config.sections import EnvConfig, ModelConfig
from tests.support.episodes import learner_config, random_groups


@pytest.mark.slow
def test_the_kl_counts_tokens_by_the_references_own_entropy(folder, spec, ranks):
    """The reference, whose head is 0, is sure of nothing: ln V nats of each token."""

    def found(limit: float | None) -> float:
        torch.manual_seed(0)
        policy, reference = load_policy(str(folder), spec), load_policy(str(folder), spec)
        torch.nn.init.zeros_(reference.vlm.get_output_embeddings().weight)
        config = learner_config(kl_coef=0.5, kl_max_entropy=limit, lr=1e-3)
        return Trainer(policy, config, ranks, reference=reference).step(random_groups(spec, 3), 0)["reference/kl"]

    assert found(0.1) == 0.0 < abs(found(None))
    assert found(20.0) == found(None)  # more than any distribution over so few tokens has


@pytest.mark.slow
def test_the_reference_becomes_the_policy_every_so_many_steps_and_is_resumed(folder, spec, ranks, tmp_path):
    settings = {"objective": "grpo", "kl_coef": 0.1, "kl_reference_every": 2, "lr": 1e-3}
    config = learner_config(**settings, in_background=False)
    recipe = Recipe(model=ModelConfig(path="m"), env=EnvConfig(module="envs.colour"), learner=config)
    new = lambda: Trainer(*(load_policy(str(folder), spec), config, ranks), reference=load_policy(str(folder), spec))  # noqa: E731
    flat = lambda policy: torch.nn.utils.parameters_to_vector(policy.vlm.parameters()).detach().clone()  # noqa: E731
    trainer, after = new(), []
    start = flat(trainer.policy)
    for step in range(3):
        trainer.step(random_groups(spec, 2, seed=step, turns=1, group_size=2), version=0)
        after.append((flat(trainer.policy), flat(trainer.reference)))
    assert torch.equal(after[0][1], start)
    assert torch.equal(after[1][1], after[1][0]) and torch.equal(after[2][1], after[1][0])
    path = Saver(tmp_path, trainer, ranks, recipe).save(3, {})
    resumed = new()
    load_checkpoint(path, resumed, ranks, recipe)
    assert torch.equal(flat(resumed.reference), after[1][0])
    for t in (trainer, resumed):
        t.step(random_groups(spec, 2, seed=3, turns=1, group_size=2), version=0)
    assert torch.equal(flat(resumed.policy), flat(trainer.policy))
