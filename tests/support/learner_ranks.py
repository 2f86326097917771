"""Computes the results that test_learner_ranks.py compares, on one, two, three and four ranks: OUT/1.pt to OUT/4.pt.

python -m tests.support.learner_ranks MODEL OUT ENGINE
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.distributed.tensor import Shard, distribute_tensor

from learner.batch.delivery import broadcast_groups
from learner.checkpoints.saver import Saver
from learner.distributed import (
    Ranks,
    barrier,
    close_ranks,
    init_ranks,
    make_context,
    make_expert_mesh,
    make_mesh,
)
from learner.model.finite import check_finite
from learner.model.policy import Policy, load_policy
from learner.model.sharding import freeze, parallelize
from learner.recording.recorded_columns import watch
from learner.training.optim import MuonAdamW, clip_
from learner.training.trainer import Trainer
from learner.weights.gathering import gathered
from learner.weights.publisher import Publisher
from learner.weights.verify import WeightVerifier
from shared.config.learner_section import LearnerConfig, ParallelConfig
from shared.config.recipe import Recipe
from shared.config.sections import EnvConfig, ModelConfig, RecordConfig
from shared.types import Group
from shared.vision import VisionSpec
from tests.support.episodes import joined, learner_config, random_groups
from tests.support.publishing import publish_settings
from tests.support.ranks.cases import CASES, CASES_OF, EXACT, MODES, OTHERS
from tests.support.ranks.checks import said_by_the_check
from tests.support.ranks.cuts import CUTS, groups_of
from tests.support.ranks.doubled import in_float64
from tests.support.ranks.processes import in_processes


def trainer_of(folder: str, ranks: Ranks, **changes: Any) -> Trainer:
    torch.manual_seed(0)
    width = changes.get("critic_width", 0)
    policy = load_policy(folder, VisionSpec.load(folder, min_pixels=1024, max_pixels=1 << 20), width)
    torch.nn.init.constant_(policy.value_head.leave.weight if width else policy.value_head.weight, 0.01)
    settings = {"lr": 1e-3, "value_lr": 1e-2, "microbatch_tokens": 90, "entropy_coef": 0.01, "warmup_steps": 2}
    config = learner_config(**settings | changes)
    ranks = ranks_for(ranks, config.parallel)
    parallelize(policy, ranks, config, torch.float32)
    reference = reference_of(folder, ranks, config) if config.objective.has_reference else None
    teacher = reference_of(folder, ranks, config) if config.objective.has_teacher else None
    return Trainer(policy, config, ranks, reference=reference, teacher=teacher)


def ranks_for(ranks: Ranks, parallel: ParallelConfig) -> Ranks:
    """Return `ranks` with the groups that these settings give. A collective: all ranks must call it."""
    mesh = make_mesh("cpu", ranks.size, parallel.shard_size)
    context = make_context(ranks.rank, ranks.size, parallel.context, timedelta(seconds=60))
    experts = make_expert_mesh("cpu", ranks.size, parallel.shard_size, parallel.expert)
    return replace(ranks, mesh=mesh, context=context, experts=experts)


def reference_of(folder: str, ranks: Ranks, config: LearnerConfig) -> Policy:
    """Return a reference whose trained weights differ from the policy's, so that it contributes to the first gradient.
    With `hold_coef` its logits are scaled up, so that it is sure of its tokens."""
    reference = load_policy(folder, VisionSpec.load(folder, min_pixels=1024, max_pixels=1 << 20))
    freeze(reference, config.optimizer.freeze, config.optimizer.freeze_layers)
    with torch.no_grad():
        for p in reference.vlm.parameters():
            p.mul_(1.1 if p.requires_grad else 1.0)
        if config.objective.hold_coef:
            reference.vlm.model.language_model.norm.weight.mul_(30)
    parallelize(reference, ranks, config, torch.float32)
    return reference.requires_grad_(False)


def recipe_of(config: LearnerConfig) -> Recipe:
    return Recipe(model=ModelConfig(path="none"), env=EnvConfig(module="none"), learner=config)


def groups_of_step(spec: VisionSpec, step: int, num_groups: int) -> list[Group]:
    """Return groups of two episodes, one more whose episodes have three segments and are longer than most cases'
    microbatches, and one of text."""
    sides = (64, 96) if spec.patch_size == 16 else (56, 84, 140)  # sides of images that are not resized
    groups = random_groups(spec, num_groups, seed=10 * step, turns=2, group_size=2, sides=sides)
    parts = random_groups(spec, 2 if num_groups else 0, seed=10 * step + 5, turns=1, group_size=3, sides=sides)
    segmented = [Group("segmented", "tester", tuple(joined(part.trajectories) for part in parts))] if parts else []
    return groups + segmented + random_groups(spec, 1, seed=10 * step + 9, turns=1, with_images=False)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def train(trainer: Trainer, ranks: Ranks, steps: range, num_groups: int) -> list[dict[str, float]]:
    """Train on rank 0's groups."""
    metrics = []
    for step in steps:
        groups = groups_of_step(trainer.policy.spec, step, num_groups) if ranks.is_main else None
        metrics.append(trainer.step(broadcast_groups(groups, ranks), version=1))
    return metrics


def recorded(trainer: Trainer, ranks: Ranks, num_groups: int) -> dict[int, np.ndarray | None]:
    """Train one more step; return the columns recorded for two of its groups, by the episode's position."""
    made = groups_of_step(trainer.policy.spec, 3, num_groups) if ranks.is_main else None
    groups = broadcast_groups(made, ranks)
    watched = watch(groups, 4, RecordConfig(every=1, groups=2))
    assert watched is not None
    trainer.step(groups, 1, watched)
    return {index: watched.columns(index) for index in watched.indices}


@contextmanager
def first_gradients_noted(trainer: Trainer) -> Iterator[dict[str, torch.Tensor]]:
    """Yield a dict that is filled with the gradients when the trainer clips them for the first time, as they are before
    clipping."""
    found: dict[str, torch.Tensor] = {}

    def note(*arguments: Any) -> None:
        if not found:
            found.update({name: whole(p.grad) for name, p in trainer.policy.named_parameters() if p.requires_grad})
        clip_(*arguments)

    with patch("learner.training.update.clip_", note):
        yield found


def gradients_of(trainer: Trainer, batches: Sequence[Sequence[Group]]) -> list[dict[str, torch.Tensor]]:
    """Return, for each batch, the gradient of the last update of one step on it; change no weights."""
    found: list[dict[str, torch.Tensor]] = []
    last: dict[str, torch.Tensor] = {}

    def note(*_: object) -> None:
        last.update({name: whole(p.grad) for name, p in trainer.policy.named_parameters() if p.requires_grad})

    optimizer = trainer.config.optimizer.model_copy(update={"max_grad_norm": 1e9})
    trainer.config = trainer.config.model_copy(update={"optimizer": optimizer})
    trainer.optimizer.step = note  # type: ignore[method-assign]
    for groups in batches:
        last.clear()
        trainer.step(groups, version=1)
        found.append(dict(last))
    return found


def gradients_of_cuts(folder: str, ranks: Ranks, cuts: Sequence[str]) -> dict[str, dict[str, torch.Tensor]]:
    """Return the gradients of the cases in `cuts`: microbatches shared by all ranks, each cut in an awkward place."""
    trainer = trainer_of(folder, ranks, context=ranks.size, microbatch_tokens=4000, shard_size=0)
    batches = [groups_of(case, trainer.policy.spec) for case in cuts]
    return dict(zip(cuts, gradients_of(trainer, batches), strict=True))


def exact(folder: str, ranks: Ranks) -> dict[str, dict[str, Any]]:
    """Return results, to be computed in float64: the gradients of all cuts, and the runs in EXACT, by case on one rank
    and by mode on several."""
    found: dict[str, dict[str, Any]] = {"cuts": gradients_of_cuts(folder, ranks, [*CUTS])}
    for name, (size, case, settings) in EXACT.items():
        changes, num_groups = CASES[case]
        if ranks.size == 1:
            found[case] = run(folder, ranks, changes, num_groups)[1]
        elif ranks.size == size:
            found[name] = run(folder, ranks, changes | settings, num_groups)[1]
    return found


def run(folder: str, ranks: Ranks, changes: dict[str, Any], num_groups: int) -> tuple[Trainer, dict[str, Any]]:
    """Train three steps; return the trainer, and the first gradients, the metrics and the final weights."""
    trainer = trainer_of(folder, ranks, **changes)
    with first_gradients_noted(trainer) as gradients:
        metrics = train(trainer, ranks, range(3), num_groups)
    weights = {n: t.clone() for n, t in gathered(trainer.policy)}
    weights |= {n: whole(p) for n, p in trainer.policy.value_head.named_parameters(prefix="value_head")}
    return trainer, {
        "gradients": gradients,
        "metrics": metrics,
        "weights": weights,
        "common": trainer.models.num_common,
    }


def save_publish_and_go_on(trainer: Trainer, ranks: Ranks, model: str, folder: Path, engine: str) -> dict[str, Any]:
    """Save a checkpoint, publish (on two ranks to `engine`), and train on."""
    saver = Saver(folder, trainer, ranks, recipe_of(trainer.config))
    path = saver.save(3, {"cursor": 5})
    settings = publish_settings(bucket_bytes=100_000, timeout_s=30)
    publisher = Publisher(trainer.policy, ranks, settings, WeightVerifier(trainer.policy, model, ranks))
    published = publisher.publish(3, [engine] if ranks.is_main and ranks.size == 2 else ())
    publisher.close()
    train(trainer, ranks, range(3, 5), CASES["vtrace"][1])
    saver.wait()
    uninterrupted = {n: t.clone() for n, t in gathered(trainer.policy)}
    return {"published": published, "uninterrupted": uninterrupted, "checkpoint": str(path)}


def muon_alone(ranks: Ranks) -> list[torch.Tensor]:
    """Return two matrices after three steps with gradients that are the same for any number of ranks. 37 rows are not
    divisible by any number of ranks."""
    draw = torch.Generator().manual_seed(0)

    def drawn(rows: int) -> torch.Tensor:
        whole = torch.randn(rows, 57 - rows, generator=draw)
        return distribute_tensor(whole, ranks.mesh, [Shard(0)]) if ranks.size > 1 else whole

    matrices = [torch.nn.Parameter(drawn(rows)) for rows in (37, 20)]
    optimizer = MuonAdamW([{"params": matrices, "muon": True}], lr=0.1, weight_decay=0.1)
    for _ in range(3):
        for p in matrices:
            p.grad = drawn(len(p))
        optimizer.step()
    return [whole(p) for p in matrices]


def expert_shards(trainer: Trainer) -> list[tuple[int, int]]:
    """Return (experts on this rank, experts in all) for each tensor of experts."""
    experts = [p for name, p in trainer.policy.named_parameters() if "experts" in name and p.ndim == 3]
    return [(len(p.to_local() if hasattr(p, "to_local") else p), len(p)) for p in experts]


def said_of_a_number_on_the_last_rank(ranks: Ranks, number: float) -> str:
    """Return the error of this rank's `check_finite` if only the last rank has this number among its weights; "" if
    there is none."""
    weights = [("empty", torch.ones(0)), ("good", torch.ones(3)), ("other", torch.ones(2))]
    if ranks.rank == ranks.size - 1:
        weights[2][1][0] = number
    try:
        check_finite(weights, ranks)
    except ValueError as error:
        return str(error)
    return ""


def model_of(folder: str, case: str) -> str:
    """Return the folder of a case's model: the mixture of experts, Qwen2.5-VL, the text model, Qwen3.5 and the families
    of other makers are in folders beside `folder`."""
    other = {"experts": "moe", "windows": "windows", "text": "text", "recurrent": "recurrent"} | {
        name: f"family_{name}" for name in OTHERS
    }
    return str(Path(folder).parent / other[case]) if case in other else folder


def compute(folder: str, out: Path, engine: str) -> None:
    """Compute and save all results for the number of ranks that the environment gives."""
    ranks = init_ranks("cpu", timeout_s=120)
    result: dict[str, Any] = {}
    for name in CASES_OF.get(ranks.size, ()):
        changes, num_groups = CASES[name]
        trainer, result[name] = run(model_of(folder, name), ranks, changes, num_groups)
        if name == "experts":
            result["expert_shards"] = expert_shards(trainer)
        if name in ("grpo", "updates"):
            result[name]["recorded"] = recorded(trainer, ranks, num_groups)
        if name == "vtrace" and ranks.size < 3:
            result |= save_publish_and_go_on(trainer, ranks, folder, out / f"checkpoints_{ranks.size}", engine)
    result["finite"] = [said_of_a_number_on_the_last_rank(ranks, value) for value in (3e38, float("nan"))]
    result["muon_alone"] = muon_alone(ranks) if ranks.size < 4 else []
    for name, (size, case, settings) in MODES.items():
        if size == ranks.size:
            changes, num_groups = CASES[case]
            trainer, result[name] = run(model_of(folder, case), ranks, changes | settings, num_groups)
            if name == "context":
                result["check"] = said_by_the_check(trainer.policy, trainer.ranks)
    if ranks.size != 3:
        with in_float64():
            result["exact"] = exact(folder, ranks)
    if ranks.is_main:
        torch.save(result, out / f"{ranks.size}.pt")
    barrier(ranks, timeout_s=30)
    close_ranks()


if __name__ == "__main__":
    folder, out, engine = sys.argv[1:]
    sys.exit(in_processes(((1, 2), (3, 4)), compute, folder, Path(out), engine))
