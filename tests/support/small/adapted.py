"""Small models with adapters, and their trainers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from learner.checkpoints import lora_files
from learner.distributed import Ranks
from learner.model.lora_adapters import whole
from learner.model.lora_attach import attach, fill, initialise
from learner.model.lora_base import base_hash
from learner.model.lora_reference import BasePolicy
from learner.model.policy import Policy, load_policy
from learner.model.sharding import parallelize
from learner.training.trainer import Trainer
from learner.weights.gathering import published_tensors
from shared.config.learner_section import LearnerConfig
from shared.config.lora_section import LoraConfig
from shared.config.recipe import Recipe
from shared.config.sections import EnvConfig, ModelConfig, RunConfig
from shared.vision import VisionSpec
from tests.support.checkpoints import config


def adapted_policy(folder: str | Path, *, moved: float = 0.0, spec: VisionSpec | None = None, **lora: Any) -> Policy:
    """Return a policy with adapters, for one process. `moved` is the standard deviation of B; with 0, B is 0."""
    policy = load_policy(str(folder), spec or VisionSpec.load(folder, min_pixels=1024, max_pixels=1 << 20))
    settings = LoraConfig(**{"rank": 4, **lora})
    policy.adapters = attach(policy.vlm, settings, torch.float32)
    policy.adapters.base = base_hash(policy.vlm, str(folder))
    initialise(policy.adapters, seed=0)
    if settings.adapter:
        lora_files.load(settings.adapter, policy.adapters)
    if moved:
        move_adapters(policy, moved)
    return policy


@torch.no_grad()
def move_adapters(policy: Policy, deviation: float) -> None:
    assert policy.adapters is not None
    for name, each in policy.adapters.of.items():
        b = each.factors[1]
        fill(b, whole(b) + deviation * torch.randn(b.shape, generator=torch.Generator().manual_seed(len(name))))


def sent_alone(policy: Policy) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors that a publication of adapters without weights sends, in one process."""
    return [(item.name, item.sources[0].tensor.to(item.dtype)) for item in published_tensors(policy)]


def adapted_config(*, lora: dict[str, Any] | None = None, **changes: Any) -> LearnerConfig:
    made = config(**{"weight_decay": 0.0, **changes})
    return LearnerConfig.model_validate(made.model_dump() | {"lora": {"rank": 4, **(lora or {})}})


def adapted_trainer(folder: str | Path, ranks: Ranks, learner: LearnerConfig) -> Trainer:
    torch.manual_seed(0)
    policy = adapted_policy(folder, **learner.lora.model_dump())
    parallelize(policy, ranks, learner, torch.float32)
    return Trainer(policy, learner, ranks, reference=BasePolicy(policy) if learner.objective.has_reference else None)


def recipe_of(folder: str | Path, learner: LearnerConfig, run: str = "runs") -> Recipe:
    return Recipe(
        run=RunConfig(dir=run),
        model=ModelConfig(path=str(folder)),
        env=EnvConfig(module="envs.colour"),
        learner=learner,
    )


def values_of(policy: Policy) -> dict[str, torch.Tensor]:
    """Return the values of all trained parameters."""
    return {name: p.detach().clone() for name, p in policy.named_parameters() if p.requires_grad}
