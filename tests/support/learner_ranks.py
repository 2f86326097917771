"""What test_learner_ranks.py compares, computed by one rank, by two, three and four: OUT/1.pt to OUT/4.pt.

python -m tests.support.learner_ranks MODEL OUT ENGINE
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.distributed.tensor import Shard, distribute_tensor

from learner.checkpoints.saver import Saver
from learner.distributed import BACKENDS, Ranks, barrier, broadcast_groups, close_ranks, init_ranks, make_mesh
from learner.guards.finite import check_finite
from learner.model.policy import Policy, load_policy
from learner.model.sharding import parallelize
from learner.optim import MuonAdamW, clip_
from learner.recording.columns import watch
from learner.trainer import Trainer
from learner.weights.buckets import gathered
from learner.weights.publisher import Publisher, PublishSettings
from learner.weights.verify import WeightVerifier
from shared.config import Recipe
from shared.learner_config import LearnerConfig
from shared.sections import EnvConfig, ModelConfig, RecordConfig
from shared.types import Group
from shared.vision import VisionSpec
from tests.support.episodes import learner_config, random_groups
from tests.support.machine import free_port

CASES: dict[str, tuple[dict[str, Any], int]] = {
    "vtrace": ({}, 3),
    "empty_shard": ({}, 0),  # one episode of text alone, for two ranks
    "grpo": ({"objective": "grpo", "entropy_coef": 0.0, "group_size": 2}, 3),
    "uneven": ({"microbatch_tokens": 400, "max_grad_norm": 1e-3, "normalize_advantages": False}, 2),
    "muon": ({"optimizer": "muon"}, 3),
    "reference": ({"kl_coef": 0.5, "objective": "grpo"}, 3),
    "frozen": ({"freeze": ("vision", "projector"), "hold_coef": 0.5, "hold_probability": 0.6}, 2),
    "experts": ({"activation_checkpointing": True}, 2),  # of the mixture of experts beside the model
    "updates": ({"passes": 2, "minibatches": 2, "critic_width": 16, "activation_checkpointing": True}, 3),
    "ppo": ({"objective": "ppo", "proximal": "learner", "minibatches": 2, "mask_token_ratio": (0.03, 2.0)}, 3),
    "refreshed": (
        {"kl_coef": 0.5, "objective": "grpo", "kl_reference_every": 1, "kl_in_reward": True, "divide_by_std": False},
        3,
    ),
    "gspo": ({"objective": "gspo", "aggregation": "sequence_mean", "pg_rho_bar": None}, 3),
}
# A third rank shows what does not divide; the other cases differ from these in the loss of a token alone.
OF_THREE = ("vtrace", "empty_shard", "grpo", "uneven", "muon", "experts", "updates")
CASES_OF = {1: tuple(CASES), 2: tuple(CASES), 3: OF_THREE}
MODES: dict[str, tuple[int, dict[str, Any]]] = {  # (ranks, settings), each to be as the case "vtrace" on one
    "checkpointing": (2, {"activation_checkpointing": True}),
    "offload": (2, {"offload": True}),
    "replicas": (2, {"shard_size": 1}),
    "replicas_of_shards": (4, {"shard_size": 2}),
}


def trainer_of(folder: str, ranks: Ranks, **changes: Any) -> Trainer:
    torch.manual_seed(0)
    width = changes.get("critic_width", 0)
    policy = load_policy(folder, VisionSpec.load(folder, min_pixels=1024, max_pixels=1 << 20), width)
    torch.nn.init.constant_(policy.value_head.leave.weight if width else policy.value_head.weight, 0.01)
    settings = {"lr": 1e-3, "value_lr": 1e-2, "microbatch_tokens": 90, "entropy_coef": 0.01, "warmup_steps": 2}
    config = learner_config(**settings | changes)
    ranks = replace(ranks, mesh=make_mesh("cpu", ranks.size, config.parallel.shard_size))
    parallelize(policy, ranks, config, torch.float32)
    reference = reference_of(folder, ranks, config) if config.objective.has_reference else None
    return Trainer(policy, config, ranks, reference=reference)


def reference_of(folder: str, ranks: Ranks, config: LearnerConfig) -> Policy:
    """Other weights than the policy's, so that the first gradient has a part of it; sure of what it says where it is to
    hold that."""
    reference = load_policy(folder, VisionSpec.load(folder, min_pixels=1024, max_pixels=1 << 20))
    with torch.no_grad():
        for p in reference.vlm.parameters():
            p.mul_(1.1)
        if config.objective.hold_coef:
            reference.vlm.get_output_embeddings().weight.mul_(30)
    parallelize(reference, ranks, config, torch.float32)
    return reference.requires_grad_(False)


def recipe_of(config: LearnerConfig) -> Recipe:
    return Recipe(model=ModelConfig(path="none"), env=EnvConfig(module="none"), learner=config)


def groups_of_step(spec: VisionSpec, step: int, num_groups: int) -> list[Group]:
    groups = random_groups(spec, num_groups, seed=10 * step, turns=2, group_size=2)
    return groups + random_groups(spec, 1, seed=10 * step + 9, turns=1, with_images=False)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def train(trainer: Trainer, ranks: Ranks, steps: range, num_groups: int) -> list[dict[str, float]]:
    """On rank 0's groups."""
    metrics = []
    for step in steps:
        groups = groups_of_step(trainer.policy.spec, step, num_groups) if ranks.is_main else None
        metrics.append(trainer.step(broadcast_groups(groups, ranks), version=1))
    return metrics


def recorded(trainer: Trainer, ranks: Ranks, num_groups: int) -> dict[int, np.ndarray | None]:
    """What one more step would record of two of its groups, by the place of the episode."""
    made = groups_of_step(trainer.policy.spec, 3, num_groups) if ranks.is_main else None
    groups = broadcast_groups(made, ranks)
    watched = watch(groups, 4, RecordConfig(every=1, groups=2))
    assert watched is not None
    trainer.step(groups, 1, watched)
    return {place: watched.columns(place) for place in watched.places}


@contextmanager
def first_gradients_noted(trainer: Trainer) -> Iterator[dict[str, torch.Tensor]]:
    """Filled when the trainer first clips them, with the gradients as they are before."""
    found: dict[str, torch.Tensor] = {}

    def note(*arguments: Any) -> None:
        if not found:
            found.update({name: whole(p.grad) for name, p in trainer.policy.named_parameters() if p.requires_grad})
        clip_(*arguments)

    with patch("learner.trainer.clip_", note):
        yield found


def run(folder: str, ranks: Ranks, changes: dict[str, Any], num_groups: int) -> tuple[Trainer, dict[str, Any]]:
    """First gradients; weights and metrics after three steps."""
    trainer = trainer_of(folder, ranks, **changes)
    with first_gradients_noted(trainer) as gradients:
        metrics = train(trainer, ranks, range(3), num_groups)
    weights = {n: t.clone() for n, t in gathered(trainer.policy)}
    weights |= {n: whole(p) for n, p in trainer.policy.value_head.named_parameters(prefix="value_head")}
    return trainer, {"gradients": gradients, "metrics": metrics, "weights": weights}


def save_publish_and_go_on(trainer: Trainer, ranks: Ranks, model: str, folder: Path, engine: str) -> dict[str, Any]:
    """Two ranks publish, to `engine`."""
    saver = Saver(folder, trainer, ranks, recipe_of(trainer.config))
    path = saver.save(3, {"cursor": 5})
    settings = PublishSettings(bucket_bytes=100_000, timeout_s=30)
    publisher = Publisher(trainer.policy, ranks, settings, WeightVerifier(trainer.policy, model, ranks))
    published = publisher.publish(3, [engine] if ranks.is_main and ranks.size == 2 else ())
    publisher.close()
    train(trainer, ranks, range(3, 5), CASES["vtrace"][1])
    saver.wait()
    uninterrupted = {n: t.clone() for n, t in gathered(trainer.policy)}
    return {"published": published, "uninterrupted": uninterrupted, "checkpoint": str(path)}


def muon_alone(ranks: Ranks) -> list[torch.Tensor]:
    """Two matrices after three steps on gradients that are the same for any number of ranks; 37 rows divide by none."""
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
    """(experts here, of how many) of each tensor of experts."""
    experts = [p for name, p in trainer.policy.named_parameters() if "experts" in name and p.ndim == 3]
    return [(len(p.to_local() if hasattr(p, "to_local") else p), len(p)) for p in experts]


def said_of_a_number_on_the_last_rank(ranks: Ranks, number: float) -> str:
    """What this rank's check of finite weights raises."""
    weights = [("empty", torch.ones(0)), ("good", torch.ones(3)), ("other", torch.ones(2))]
    if ranks.rank == ranks.size - 1:
        weights[2][1][0] = number
    try:
        check_finite(weights, ranks)
    except ValueError as error:
        return str(error)
    return ""


def compute(folder: str, out: Path, engine: str) -> None:
    """All that is asked of as many ranks as the environment says."""
    ranks = init_ranks("cpu", timeout_s=120)
    result: dict[str, Any] = {}
    for name in CASES_OF.get(ranks.size, ()):
        changes, num_groups = CASES[name]
        model = str(Path(folder).parent / "moe") if name == "experts" else folder
        trainer, result[name] = run(model, ranks, changes, num_groups)
        if name == "experts":
            result["expert_shards"] = expert_shards(trainer)
        if name in ("grpo", "updates"):
            result[name]["recorded"] = recorded(trainer, ranks, num_groups)
        if name == "vtrace" and ranks.size < 3:
            result |= save_publish_and_go_on(trainer, ranks, folder, out / f"checkpoints_{ranks.size}", engine)
    result["finite"] = [said_of_a_number_on_the_last_rank(ranks, value) for value in (3e38, float("nan"))]
    result["muon_alone"] = muon_alone(ranks) if ranks.size < 4 else []
    for name, (size, settings) in MODES.items():
        if size == ranks.size:
            _, result[name] = run(folder, ranks, settings, CASES["vtrace"][1])
    if ranks.is_main:
        torch.save(result, out / f"{ranks.size}.pt")
    barrier(ranks, timeout_s=30)
    close_ranks()


def take_place(told: dict[str, str]) -> None:
    """This process is that rank from now on. Its default group will have a backend for each device, as on GPUs."""
    os.environ.update(told)
    BACKENDS["cpu"] = "cpu:gloo,cuda:gloo"


def as_rank(told: dict[str, str], *arguments: Any) -> None:
    take_place(told)
    compute(*arguments)


def places(size: int) -> list[dict[str, str]]:
    """What torchrun would tell each of so many ranks."""
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(size)}
    return [{**group, "RANK": str(rank)} for rank in range(size)] if size > 1 else [{}]


def main(folder: str, out: str, engine: str) -> int:
    """Exit code 1 as soon as a rank has failed; those that wait for it end with this process."""
    torch.set_num_threads(1)
    fork = multiprocessing.get_context("fork")  # ten imports of torch would take most of the time
    for sizes in ((1, 2), (3, 4)):
        told = [place for size in sizes for place in places(size)]
        ranks = [fork.Process(target=as_rank, args=(place, folder, Path(out), engine), daemon=True) for place in told]
        for rank in ranks:
            rank.start()
        while ranks:
            wait([rank.sentinel for rank in ranks])
            ended = [rank for rank in ranks if rank.exitcode is not None]
            if any(rank.exitcode for rank in ended):
                return 1
            ranks = [rank for rank in ranks if rank not in ended]
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
