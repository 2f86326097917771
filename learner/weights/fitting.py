"""Engines that cannot be sent what will be sent are refused before they join: those with another NCCL than the learner,
which says so only at the first bucket, and those that take no adapters alone."""

from __future__ import annotations

import torch

from learner.distributed import Ranks, broadcast_flag
from learner.weights.group import Members
from shared.engine_api import EngineClient
from shared.engine_messages import EngineTraits
from shared.nccl.versions import unequal_nccl


def fitting(
    members: Members, backend: str, ranks: Ranks, *, adapters: bool = False, hopeful: bool = False
) -> tuple[dict[EngineClient, EngineTraits], dict[str, str]]:
    """Those of rank 0's engines that can join, and why the others cannot. ValueError, on every rank, if none is left
    for that reason: waiting mends none. `adapters`: they are sent these alone. `hopeful`, of rank 0: an engine that is
    silent now, or that has taken weights before, may yet take these, so that the others are only left out."""
    if backend != "nccl" and not adapters:
        return dict(members), {}
    own = nccl_version() if backend == "nccl" and ranks.is_main else ""
    why = {engine: _why(traits, own, adapters) for engine, traits in members.items()}
    unfit = {engine.url: reason for engine, reason in why.items() if reason}
    if broadcast_flag(bool(unfit) and len(unfit) == len(members) and not hopeful, ranks):
        words = "; ".join(f"engine {url}: {reason}" for url, reason in unfit.items())
        raise ValueError(words or "no engine can be sent this learner's weights: rank 0 says why")
    return {engine: traits for engine, traits in members.items() if engine.url not in unfit}, unfit


def _why(traits: EngineTraits, nccl: str, adapters: bool) -> str:
    if adapters and not traits.takes_adapters:
        return "takes no adapters alone; set learner.lora.publish = 'merged', or start SGLang with Pronk's plugin"
    return unequal_nccl(nccl, traits.nccl) if nccl else ""


def nccl_version() -> str:
    """The one that this process's torch uses."""
    return ".".join(map(str, torch.cuda.nccl.version()))
