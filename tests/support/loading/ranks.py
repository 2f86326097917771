"""Loads models on each rank under torchrun, and checks which parameters differ from those that transformers loads, and
how much anonymous memory loading a large model takes. Rank 0 prints JSON."""

from __future__ import annotations

import gc
import json
import sys
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from learner.distributed import Ranks, close_ranks, init_ranks
from learner.model.policy import Policy
from learner.setup import build_policy
from shared.config.recipe import Recipe
from shared.config.sections import EnvConfig, ModelConfig
from tests.support.loading.models import auto_class


def load(folder: str, ranks: Ranks, dtype: str = "float32") -> Policy:
    recipe = Recipe(model=ModelConfig(path=folder, dtype=dtype), env=EnvConfig(module="none"))
    return build_policy(recipe, ranks)


def differing(folder: str, ranks: Ranks, dtype: str) -> list[str]:
    """Return the names of the parameters and buffers that are not bit for bit equal to those of `from_pretrained`."""
    policy = load(folder, ranks, dtype)
    wanted = auto_class(folder).from_pretrained(folder, dtype=torch.float32)
    found: dict[str, Any] = dict(policy.vlm.state_dict(keep_vars=True)) | dict(policy.vlm.named_buffers())
    wrong = []
    for name, expected in (wanted.state_dict() | dict(wanted.named_buffers())).items():
        got = found[name].detach()
        whole = got.full_tensor() if isinstance(got, DTensor) else got
        if whole.dtype != expected.dtype or not torch.equal(whole, expected):
            wrong.append(f"{Path(folder).name}: {name}")
    tied = policy.vlm.lm_head.weight is policy.decoder.embed_tokens.weight
    return wrong if tied == wanted.config.tie_word_embeddings else [*wrong, f"{folder}: tied {tied}"]


class AnonymousMemory:
    """Measures the peak of this process's anonymous memory (without mapped files) above its value at the start."""

    def __init__(self) -> None:
        gc.collect()
        self._start = self._most = self._now()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    @staticmethod
    def _now() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))

    def _watch(self) -> None:
        while not self._done.wait(0.001):
            self._most = max(self._most, self._now())

    def peak(self) -> int:
        self._done.set()
        self._thread.join()
        return max(self._most, self._now()) - self._start


def memory(folder: str, ranks: Ranks) -> dict[str, int]:
    """Measure the memory of a load. Another model must have been loaded before, so that all imports are done."""
    watched = AnonymousMemory()
    policy = load(folder, ranks)
    peak = watched.peak()
    parameters = list(policy.parameters())
    shards = sum(p.to_local().nbytes if isinstance(p, DTensor) else p.nbytes for p in parameters)
    largest, total = max(p.numel() for p in parameters) * 4, sum(p.numel() for p in parameters)
    return {"peak": peak, "shards": shards, "largest": largest, "parameters": total}


def main(large: str, *folders: str) -> None:
    torch.set_num_threads(1)
    ranks = init_ranks(timeout_s=120)
    mine: Any = {"differing": [wrong for folder in folders for wrong in differing(folder, ranks, "bfloat16")]}
    mine["memory"] = memory(large, ranks)
    everyone: list[Any] = [None] * ranks.size
    dist.all_gather_object(everyone, mine)
    if ranks.is_main:
        print(json.dumps(everyone))
    close_ranks()


if __name__ == "__main__":
    main(*sys.argv[1:])
