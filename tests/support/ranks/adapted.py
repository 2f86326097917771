"""Computes the results that test_lora_ranks.py compares: adapters trained on one rank and on two, with different uses
of memory: OUT/1.pt, 2.pt. The cases in EXACT are computed in float64; a resumed run is not, as for users.

python -m tests.support.ranks.adapted MODEL OUT
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from learner.checkpoints.restoring import load_checkpoint
from learner.checkpoints.saver import Saver
from learner.distributed import Ranks, barrier, close_ranks, init_ranks
from learner.setup import build_trainer
from learner.training.trainer import Trainer
from learner.weights.gathering import gathered
from shared.config.recipe import Recipe
from tests.support.learner_ranks import first_gradients_noted, model_of, ranks_for, train, whole
from tests.support.ranks.doubled import in_float64
from tests.support.ranks.processes import in_processes
from tests.support.small.adapted import adapted_config, recipe_of

NUM_GROUPS = 3
EXACT = ("all",)  # cases in float64; grouped products of experts support only float32
ALL = {"targets": ("attention", "dense", "vision")}
MODES: dict[str, tuple[int, str, dict[str, Any], dict[str, Any]]] = {  # ranks, case, settings, settings of adapters
    "one": (1, "all", {"kl_coef": 0.1}, ALL),
    "experts of one": (1, "experts", {}, {"targets": ("attention", "experts")}),
    "two": (2, "all", {"kl_coef": 0.1}, ALL),
    "two, context": (2, "all", {"kl_coef": 0.1, "context": 2}, ALL),
    "two, recomputed and offloaded": (
        2,
        "all",
        {"kl_coef": 0.1, "activation_checkpointing": True, "offload": True},
        ALL,
    ),
    "experts of two": (2, "experts", {}, {"targets": ("attention", "experts")}),
}


def recipe_for(model: str, changes: dict[str, Any], lora: dict[str, Any]) -> Recipe:
    settings = {"microbatch_tokens": 90, "in_background": False}
    return recipe_of(model, adapted_config(lora=lora, **settings | changes))


def state_of(trainer: Trainer) -> dict[str, Tensor]:
    return {name: whole(p) for name, p in trainer.policy.named_parameters() if p.requires_grad}


def run(model: str, ranks: Ranks, recipe: Recipe) -> tuple[Trainer, dict[str, Any]]:
    """Train three steps; return the trainer, and the first gradients, the metrics, the trained values and the weights
    to send."""
    trainer = build_trainer(recipe, ranks_for(ranks, recipe.learner.parallel))
    start = state_of(trainer)
    with first_gradients_noted(trainer) as gradients:
        metrics = train(trainer, trainer.ranks, range(3), NUM_GROUPS)
    names = trainer.policy.adapters.of.keys() if trainer.policy.adapters else ()
    sent = {name: tensor.clone() for name, tensor in gathered(trainer.policy, names)}
    found = {"start": start, "gradients": gradients, "metrics": metrics, "trained": state_of(trainer), "sent": sent}
    return trainer, found


def resumed(trainer: Trainer, recipe: Recipe, folder: Path) -> dict[str, Any]:
    """Return the state one step after a checkpoint, with and without an interruption."""
    saver = Saver(folder, trainer, trainer.ranks, recipe)
    path = saver.save(3, {})
    train(trainer, trainer.ranks, range(3, 4), NUM_GROUPS)
    again = build_trainer(recipe, trainer.ranks)
    load_checkpoint(path, again, trainer.ranks, recipe)
    train(again, trainer.ranks, range(3, 4), NUM_GROUPS)
    return {"path": str(path), "uninterrupted": state_of(trainer), "resumed": state_of(again)}


def local_dtypes(trainer: Trainer) -> set[tuple[bool, str]]:
    """Return (trained, dtype) of this rank's shards."""
    return {(p.requires_grad, str(p.dtype)) for _, p in trainer.policy.vlm.named_parameters() if isinstance(p, DTensor)}


def compute(model: str, out: Path) -> None:
    ranks = init_ranks("cpu", timeout_s=300)
    result: dict[str, Any] = {}
    for name, (size, case, changes, lora) in MODES.items():
        if size != ranks.size:
            continue
        recipe = recipe_for(model_of(model, case), changes, lora)
        with in_float64() if case in EXACT else nullcontext():
            trainer, result[name] = run(model, ranks, recipe)
        if trainer.policy.adapters:
            result[name]["base"] = trainer.policy.adapters.base
    if ranks.size == 2:
        recipe = recipe_for(model, *MODES["two"][2:])
        trainer, _ = run(model, ranks, recipe)
        result["resume"] = resumed(trainer, recipe, out / "checkpoints")
        recipe = recipe_for(model, {}, {})
        half = recipe.model_copy(update={"model": recipe.model.model_copy(update={"dtype": "bfloat16"})})
        result["dtypes"] = local_dtypes(build_trainer(half, ranks))
    if ranks.is_main:
        torch.save(result, out / f"{ranks.size}.pt")
    barrier(ranks, timeout_s=60)
    close_ranks()


if __name__ == "__main__":
    sys.exit(in_processes(((1, 2),), compute, sys.argv[1], Path(sys.argv[2])))
