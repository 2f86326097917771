"""Engines with another NCCL than the learner are refused before they join: NCCL says so only at the first bucket."""

from __future__ import annotations

import torch

from learner.distributed import Ranks, broadcast_flag
from learner.weights.group import Members
from shared.engine_api import EngineClient
from shared.engine_messages import EngineTraits
from shared.nccl.versions import unequal_nccl


def fitting(members: Members, backend: str, ranks: Ranks) -> tuple[dict[EngineClient, EngineTraits], dict[str, str]]:
    """Those of rank 0's engines that can join, and why the others cannot. ValueError, on every rank, if none is left
    for that reason: waiting mends no version."""
    if backend != "nccl":
        return dict(members), {}
    own = nccl_version() if ranks.is_main else ""
    unfit = {engine.url: why for engine, traits in members.items() if (why := unequal_nccl(own, traits.nccl))}
    if broadcast_flag(bool(unfit) and len(unfit) == len(members), ranks):
        words = "; ".join(f"engine {url}: {why}" for url, why in unfit.items())
        raise ValueError(words or "no engine has the learner's version of NCCL: rank 0 names them")
    return {engine: traits for engine, traits in members.items() if engine.url not in unfit}, unfit


def nccl_version() -> str:
    """The one that this process's torch uses."""
    return ".".join(map(str, torch.cuda.nccl.version()))
