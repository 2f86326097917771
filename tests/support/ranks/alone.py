"""Computes the results that test_lora_alone_ranks.py compares: one rank and two send adapters without weights to
running engines, and send them again after resuming: OUT/1.pt, 2.pt.

python -m tests.support.ranks.alone MODEL OUT SIZE=DTYPE=URL...
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from learner.checkpoints.restoring import load_checkpoint
from learner.checkpoints.saver import Saver
from learner.distributed import Ranks, barrier, close_ranks, init_ranks
from learner.setup import build_publisher, build_trainer
from learner.training.trainer import Trainer
from learner.weights.gathering import gathered
from shared.config.recipe import Recipe
from tests.support.learner_ranks import ranks_for, train
from tests.support.ranks.adapted import ALL, NUM_GROUPS, recipe_for
from tests.support.ranks.processes import in_processes


def published(trainer: Trainer, recipe: Recipe, url: str, version: int) -> dict[str, Any]:
    """Publish an adapter; return the metrics, and the weights that a publication of merged weights would have sent
    instead."""
    publisher = build_publisher(recipe, trainer, "run")
    metrics = publisher.publish(version, [url] if trainer.ranks.is_main else ())
    publisher.close()
    assert trainer.policy.adapters is not None
    sums = {name: p.to(trainer.policy.dtype) for name, p in gathered(trainer.policy, trainer.policy.adapters.of.keys())}
    return {"metrics": metrics, "sums": sums}


def interrupted(ranks: Ranks, model: str, folder: Path, dtype: str, url: str) -> list[dict[str, Any]]:
    """Return the results of a publication, and of the next one by a trainer that has resumed from a checkpoint."""
    recipe = recipe_for(model, {}, {**ALL, "publish": "adapter"})
    recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"dtype": dtype})})
    trainer = build_trainer(recipe, ranks_for(ranks, recipe.learner.parallel))
    train(trainer, trainer.ranks, range(2), NUM_GROUPS)
    first = published(trainer, recipe, url, 1)
    path = Saver(folder, trainer, trainer.ranks, recipe).save(2, {})
    again = build_trainer(recipe, trainer.ranks)
    load_checkpoint(path, again, trainer.ranks, recipe)
    return [first, published(again, recipe, url, 2)]


def compute(model: str, out: Path, urls: dict[tuple[int, str], str]) -> None:
    ranks = init_ranks("cpu", timeout_s=120)
    result = {
        dtype: interrupted(ranks, model, out / f"{size}-{dtype}", dtype, url)
        for (size, dtype), url in urls.items()
        if size == ranks.size
    }
    if ranks.is_main:
        torch.save(result, out / f"{ranks.size}.pt")
    barrier(ranks, timeout_s=60)
    close_ranks()


def parsed(argument: str) -> tuple[tuple[int, str], str]:
    size, dtype, url = argument.split("=")
    return (int(size), dtype), url


if __name__ == "__main__":
    every = dict(map(parsed, sys.argv[3:]))
    sys.exit(in_processes(((1,), (2,)), compute, sys.argv[1], Path(sys.argv[2]), every))
