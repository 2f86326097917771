"""A learner that shares its GPU with an engine: what it may use of the memory, and that it keeps to it."""

from __future__ import annotations

import torch

from learner.distributed import Ranks, gpu_bytes
from shared.config import Recipe


def learner_bytes(recipe: Recipe, ranks: Ranks) -> float | None:
    """Bytes of its GPU that each rank may use; None on a CPU. ValueError where a GPU cannot be shared."""
    if why := recipe.engine.unshareable(ranks.device.type, ranks.size):
        raise ValueError(why)
    num_bytes = gpu_bytes(ranks)
    return None if num_bytes is None else recipe.engine.learner_fraction * num_bytes


def keep_to_share(recipe: Recipe, ranks: Ranks) -> None:
    """From now on this process runs out of memory where its share ends, and the engine never does on its account."""
    if recipe.engine.shares_gpu:
        torch.cuda.set_per_process_memory_fraction(recipe.engine.learner_fraction, ranks.device)
