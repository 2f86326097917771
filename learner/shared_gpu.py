"""A learner that shares its GPU with an engine: the learner's share of the memory, and its enforcement."""

from __future__ import annotations

import torch

from learner.distributed import Ranks, gpu_bytes
from shared.config.recipe import Recipe


def learner_bytes(recipe: Recipe, ranks: Ranks) -> float | None:
    """Return the bytes of its GPU that each rank may use; None on a CPU. Raise ValueError if the GPU cannot be
    shared."""
    if why := recipe.engine.unshareable(ranks.device.type, ranks.size):
        raise ValueError(why)
    num_bytes = gpu_bytes(ranks)
    return None if num_bytes is None else recipe.engine.learner_fraction * num_bytes


def keep_to_share(recipe: Recipe, ranks: Ranks) -> None:
    """Limit this process's GPU memory to its share, so that the learner runs out of memory instead of the engine."""
    if recipe.engine.shares_gpu:
        torch.cuda.set_per_process_memory_fraction(recipe.engine.learner_fraction, ranks.device)
