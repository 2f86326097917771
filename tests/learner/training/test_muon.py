"""Muon moves the matrices of decoder layers as torch's does, and AdamW all the rest."""

from __future__ import annotations

import pytest
import torch
from torch.optim import AdamW, Muon

from learner.model.policy import load_policy
from learner.training.optim import make_optimizer
from learner.training.trainer import Trainer
from tests.support.episodes import learner_config, random_groups

CONFIG = learner_config(
    optimizer="muon", lr=1e-3, value_lr=1e-2, weight_decay=0.1, max_grad_norm=1e9, advantage_floor=0.0
)


def is_hidden(name: str, p: torch.Tensor) -> bool:
    return name.startswith("vlm.model.language_model.layers.") and p.ndim == 2


@pytest.mark.slow
def test_three_steps_are_those_of_torchs_muon_and_adamw_side_by_side(folder, spec, ranks):
    trainer = Trainer(load_policy(str(folder), spec), CONFIG, ranks)
    copy = load_policy(str(folder), spec)
    named = dict(copy.named_parameters())
    hidden = [p for name, p in named.items() if is_hidden(name, p)]
    rest = [p for name, p in named.items() if not is_hidden(name, p) and not name.startswith("value_head")]
    muon = Muon(hidden, lr=1e-3, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    groups = [
        {"params": [p for p in rest if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
        {"params": list(copy.value_head.parameters()), "lr": 1e-2, "weight_decay": 0.0},
    ]
    adamw = AdamW(groups, lr=1e-3, betas=CONFIG.optimizer.betas, fused=True)
    step = trainer.optimizer.step

    def beside() -> None:
        for p, q in zip(trainer.policy.parameters(), copy.parameters(), strict=True):
            q.grad = p.grad.clone()
        muon.step()
        adamw.step()
        step()

    trainer.optimizer.step = beside
    for seed in range(3):
        trainer.step(random_groups(spec, 2, seed=seed), version=0)
    assert len(hidden) == 14  # of two layers: q, k, v, o, gate, up, down
    for name, p in trainer.policy.named_parameters():
        torch.testing.assert_close(p, named[name], rtol=1e-6, atol=1e-7, msg=name)


def test_each_parameter_is_in_one_group_and_embeddings_experts_and_frozen_parts_are_not_muons(folder, spec):
    policy = load_policy(str(folder), spec)
    policy.vlm.model.visual.requires_grad_(False)
    optimizer = make_optimizer(policy, CONFIG.optimizer)
    names = {p: name for name, p in policy.named_parameters()}
    placed = [names[p] for group in optimizer.param_groups for p in group["params"]]
    assert sorted(placed) == sorted(name for name, p in policy.named_parameters() if p.requires_grad)
    muons = {names[p] for group in optimizer.param_groups if group["muon"] for p in group["params"]}
    assert muons == {name for name, p in policy.named_parameters() if is_hidden(name, p)}


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_recipes_betas_are_those_of_every_group(folder, spec, optimizer):
    config = learner_config(optimizer=optimizer, betas=(0.5, 0.75)).optimizer
    made = make_optimizer(load_policy(str(folder), spec), config)
    assert {tuple(group["betas"]) for group in made.param_groups} == {(0.5, 0.75)}
