"""How evenly the routers of a mixture of experts distribute tokens, counted by hooks on the routers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from learner.distributed import Ranks, all_sum
from learner.model.adapt import TRICKS
from learner.model.experts import EXPERT, expert_stacks


class RouterLoad:
    """Counts, for each layer, the tokens that each expert gets inside `counting`, since the last `metrics`.

    Routers are the modules that have `num_experts` and `top_k` and whose output ends with the chosen experts [tokens,
    top_k]. A model without routers has no metrics.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._layers_counted = 0
        routers = [m for m in model.modules() if hasattr(m, "num_experts") and hasattr(m, "top_k") and _is_leaf(m)]
        has_experts = any(True for _ in expert_stacks(model))
        TRICKS["routers"].require(bool(routers) or not has_experts)
        most = max((int(m.num_experts) for m in routers), default=0)  # type: ignore[arg-type]
        self.loads_LE = torch.zeros(len(routers), most, dtype=torch.float64, device=device)
        for layer, router in enumerate(routers):
            router.register_forward_hook(lambda _m, _i, output, layer=layer: self._count(layer, output))

    @contextmanager
    def counting(self, *, on: bool = True, last_layer: bool = True) -> Iterator[None]:
        """Count in the forwards inside this context. `on` false: count nothing. `last_layer` false: leave out the last
        layer's router."""
        self._layers_counted = (len(self.loads_LE) - (not last_layer)) if on else 0
        try:
            yield
        finally:
            self._layers_counted = 0

    @torch.compiler.disable  # each layer's number would cause another compilation
    def _count(self, layer: int, output: Any) -> None:
        chosen: Tensor = output[-1]
        if layer < self._layers_counted:
            ones = torch.ones(chosen.numel(), dtype=torch.float64, device=chosen.device)
            self.loads_LE[layer].index_add_(0, chosen.flatten(), ones)

    def metrics(self, ranks: Ranks) -> dict[str, float]:
        """Return the metrics since the last call; empty for a model without routers. Otherwise a collective.

        `moe/max_load`: the busiest expert's share of tokens, as a multiple of an even share, mean over layers; 1 is
        even, (number of experts) / top_k is the worst. `moe/max_rank_load`: the same for the ranks over which experts
        are dealt, all of which wait for the busiest. `moe/balance`: E sum f^2 of the experts' shares f, mean over
        layers; 1 is even. `moe/idle`: the share of experts without a token.
        """
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
