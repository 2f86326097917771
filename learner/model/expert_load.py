"""How evenly the routers of a mixture of experts spread tokens, seen from outside: hooks count what they chose."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from learner.distributed import Ranks, all_sum
from learner.model.adapt import TRICKS
from learner.parallel.experts import EXPERT


class RouterLoad:
    """Counts, per layer, the tokens that each expert got since the last `metrics`, while `counting`; those of the last
    layer while `counting_last` too.

    Routers are the modules that have `num_experts` and `top_k` and whose output ends with the chosen experts
    [tokens, top_k]. A model without them has no metrics.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.counting = self.counting_last = True
        routers = [m for m in model.modules() if hasattr(m, "num_experts") and hasattr(m, "top_k") and _is_leaf(m)]
        has_experts = getattr(getattr(model, "config", None), "model_type", "").endswith("_moe")
        TRICKS["routers"].require(bool(routers) or not has_experts)
        most = max((int(m.num_experts) for m in routers), default=0)  # type: ignore[arg-type]
        self.loads_LE = torch.zeros(len(routers), most, dtype=torch.float64, device=device)
        for layer, router in enumerate(routers):
            router.register_forward_hook(lambda _m, _i, output, layer=layer: self._count(layer, output))

    @torch.compiler.disable  # a graph would be made anew for each layer's number
    def _count(self, layer: int, output: Any) -> None:
        chosen: Tensor = output[-1]
        if self.counting and (self.counting_last or layer < len(self.loads_LE) - 1):
            ones = torch.ones(chosen.numel(), dtype=torch.float64, device=chosen.device)
            self.loads_LE[layer].index_add_(0, chosen.flatten(), ones)

    def metrics(self, ranks: Ranks) -> dict[str, float]:
        """`moe/max_load`: the busiest expert's share over an even one's, mean over layers: 1 is even, the number of
        experts over top_k the worst. `moe/max_rank_load`: the same of the ranks over which experts are dealt, who wait
        for the busiest. `moe/balance`: E sum f^2 of the shares f, the same way: 1 is even. `moe/idle`: the share of
        experts without a token. A collective where there are routers."""
        if not self.loads_LE.numel():
            return {}
        loads_LE = all_sum(self.loads_LE.clone(), ranks)
        self.loads_LE.zero_()
        loads_LE = loads_LE[loads_LE.sum(1) > 0]
        if not len(loads_LE):
            return {}
        shares_LE, num_experts = loads_LE / loads_LE.sum(1, keepdim=True), loads_LE.shape[1]
        return {
            "moe/max_load": float(num_experts * shares_LE.amax(1).mean()),
            **_of_ranks(shares_LE, ranks),
            "moe/balance": float(num_experts * shares_LE.square().sum(1).mean()),
            "moe/idle": float((loads_LE == 0).double().mean()),
        }


def _of_ranks(shares_LE: Tensor, ranks: Ranks) -> dict[str, float]:
    if ranks.experts is None:
        return {}
    size = ranks.experts[EXPERT].size()
    return {"moe/max_rank_load": float(size * shares_LE.unflatten(1, (size, -1)).sum(2).amax(1).mean())}


def _is_leaf(module: nn.Module) -> bool:
    return not any(True for _ in module.children()) and any(True for _ in module.parameters(recurse=False))
