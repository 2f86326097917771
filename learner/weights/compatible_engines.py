"""The check, before engines join, that they can receive what will be sent.

Two kinds of engine are refused: those with another NCCL version than the learner, which would fail only at the first
bucket, and those that cannot receive adapters without the merged weights.
"""

from __future__ import annotations

from learner.distributed import Ranks, broadcast_flag
from learner.weights.weight_group import Members
from shared.engine.engine_api import EngineClient
from shared.engine.engine_messages import ServerInfo
from shared.engine.nccl_versions import loaded_nccl, unequal_nccl


def select_compatible(
    members: Members, backend: str, ranks: Ranks, *, adapters: bool = False, others_may_join: bool = False
) -> tuple[dict[EngineClient, ServerInfo], dict[str, str]]:
    """Return the engines of rank 0 that can join, and URL -> reason for each that cannot. A collective.

    Raise ValueError, on every rank, if all engines are refused: waiting would not help. `adapters`: only the adapters
    are sent. `others_may_join`, on rank 0: some engine is silent now or has taken weights before, so it may still take
    these; then the refused engines are only left out and no error is raised.
    """
    if backend != "nccl" and not adapters:
        return dict(members), {}
    nccl = loaded_nccl() if backend == "nccl" and ranks.is_main else ""
    reasons = {engine.url: _refusal(info, nccl, adapters) for engine, info in members.items()}
    refused = {url: reason for url, reason in reasons.items() if reason}
    if broadcast_flag(bool(refused) and len(refused) == len(members) and not others_may_join, ranks):
        message = "; ".join(f"engine {url}: {reason}" for url, reason in refused.items())
        raise ValueError(message or "no engine can be sent this learner's weights: rank 0 says why")
    return {engine: info for engine, info in members.items() if engine.url not in refused}, refused


def _refusal(info: ServerInfo, nccl: str, adapters: bool) -> str:
    if adapters and not info.takes_adapters:
        return "takes no adapters alone; set learner.lora.publish = 'merged', or start SGLang with Pronk's plugin"
    return unequal_nccl(nccl, info.nccl) if nccl else ""
