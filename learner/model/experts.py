"""Expert parallelism: each rank of a group holds some experts of every layer, and tokens are sent to them and back.

Shape suffixes: T = tokens of this rank, K = experts of a token, D = hidden size, E = experts, P = ranks of the group, C
= T K choices, R = rows that this rank's experts receive.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

from learner.model.adapt import replace_forward, stand_in
from learner.plan.divisors import check_deal

EXPERT, EXPERT_SHARD, REPLICATE = "expert", "expert_shard", "replicate"
"""Dimensions of the experts' mesh: experts are dealt over the first, and the rows of each are cut over the second."""


def expert_stacks(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that hold all experts of a layer: matrices [E, rows, columns]."""
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        if hasattr(module, "num_experts") and own and all(p.ndim == 3 for p in own):
            yield module


def check_experts(model: nn.Module, mesh: DeviceMesh) -> None:
    """Raise ValueError if the model's experts cannot be dealt and cut over the mesh's ranks."""
    expert, stacks = mesh[EXPERT].size(), list(expert_stacks(model))
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    rows = sorted({p.shape[1] for stack in stacks for p in stack.parameters(recurse=False)})
    check_deal(expert, kind, _count(stacks[0]) if stacks else 0, rows, expert * mesh[EXPERT_SHARD].size())


def deal_experts(model: nn.Module, mesh: DeviceMesh) -> None:
    """Deal the experts over ranks in place, before they are sharded further.

    Rank p of the mesh's dimension `expert` holds the E / P experts from number p E / P on. Tokens are sent to the ranks
    that hold their experts: each forward and each backward is a collective.
    """
    for stack in expert_stacks(model):
        for name, p in list(stack.named_parameters(recurse=False)):
            dealt = distribute_tensor(p.detach(), mesh[EXPERT], [Shard(0)], src_data_rank=None)
            stack.register_parameter(name, nn.Parameter(dealt, requires_grad=p.requires_grad))
        replace_forward(stack, _Dealt(stack, mesh[EXPERT].get_group()))


def sharding_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the part of the experts' mesh over which FSDP shards them, with the dimension over which it replicates
    them if there is one."""
    return mesh[REPLICATE, EXPERT_SHARD] if REPLICATE in (mesh.mesh_dim_names or ()) else mesh[EXPERT_SHARD]


@contextmanager
def gathered_experts(model: nn.Module) -> Iterator[None]:
    """Let each rank compute its own tokens inside this context, with all experts of a layer gathered on it."""
    dealt = [stack.forward for stack in expert_stacks(model) if isinstance(stack.forward, _Dealt)]
    for forward in dealt:
        forward.alone = True
    try:
        yield
    finally:
        for forward in dealt:
            forward.alone = False


class _Dealt:
    """The forward of a stack whose experts are dealt over the ranks of a group."""

    def __init__(self, stack: nn.Module, group: dist.ProcessGroup) -> None:
        self.stack, self.kind, self.group = stack, type(stack), group  # its class before FSDP replaces it
        self.alone = False

    @torch.compiler.disable
    def __call__(self, hidden_TD: Tensor, chosen_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Return the stack's output for these tokens [T, D], computed by the experts of all ranks of the group."""
        if self.alone:
            return self._computed(self._experts(whole=True), hidden_TD, chosen_TK, weights_TK)
        num_chosen, num_ranks = chosen_TK.shape[1], self.group.size()
        chosen_C = chosen_TK.flatten()
        order_C = chosen_C.argsort(stable=True)  # puts the rows for each rank next to each other
        sent_PE = torch.bincount(chosen_C, minlength=_count(self.stack)).view(num_ranks, -1)
        got_PE = torch.empty_like(sent_PE)
        dist.all_to_all_single(got_PE, sent_PE, group=self.group)
        sent, got = sent_PE.sum(1).tolist(), got_PE.sum(1).tolist()
        rows_RD = _Exchanged.apply(hidden_TD.index_select(0, order_C // num_chosen), sent, got, self.group)
        own_E = torch.arange(got_PE.shape[1], device=got_PE.device).repeat(num_ranks)
        own_R1 = own_E.repeat_interleave(got_PE.flatten())[:, None]
        out_RD = self._computed(
            self._experts(whole=False), rows_RD, own_R1, torch.ones_like(own_R1, dtype=rows_RD.dtype)
        )
        back_CD = _Exchanged.apply(out_RD, got, sent, self.group)
        weighted_CD = back_CD * weights_TK.flatten()[order_C, None]
        by_token = torch.empty_like(weighted_CD).index_copy(0, order_C, weighted_CD)
        return by_token.unflatten(0, (-1, num_chosen)).sum(1).to(hidden_TD.dtype)

    def _computed(self, experts: Any, rows_RD: Tensor, chosen_RK: Tensor, weights_RK: Tensor) -> Tensor:
        """Compute the experts as transformers does.

        If there is no row, a row of zeros keeps the experts in the graph, so that their gradients are reduced in step
        with the other ranks'.
        """
        count = len(rows_RD)
        if not count:
            rows_RD, chosen_RK, weights_RK = (
                torch.cat((x, x.new_zeros(1, x.shape[1]))) for x in (rows_RD, chosen_RK, weights_RK)
            )
        out: Tensor = self.kind.forward(experts, rows_RD, chosen_RK, weights_RK)
        return out if count else out[:0].clone()  # a copy: FSDP needs an output that is not a view

    def _experts(self, *, whole: bool) -> Any:
        """Return a stand-in for the stack with this rank's experts, or with all experts if `whole`, as plain tensors
        through which gradients flow."""
        tensors: dict[str, Tensor] = {}
        for name, p in self.stack.named_parameters(recurse=False):
            assert isinstance(p, DTensor)
            tensors[name] = p.full_tensor(grad_placements=[Partial()]) if whole else p.to_local()
        some = next(iter(tensors.values()))
        return stand_in(self.stack, self.kind, **tensors, num_experts=len(some))


class _Exchanged(torch.autograd.Function):
    """Sends rows [sum(sent), D], those for rank 0 first, and returns the rows that all ranks sent here; gradients are
    sent back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], got: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sizes = sent, got, group
        return _exchange(rows, sent, got, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        sent, got, group = ctx.sizes
        return _exchange(grad, got, sent, group), None, None, None


def _exchange(rows: Tensor, sent: list[int], got: list[int], group: dist.ProcessGroup) -> Tensor:
    out = rows.new_empty(sum(got), rows.shape[1])
    dist.all_to_all_single(out, rows.contiguous(), got, sent, group=group)
    return out


def _count(stack: nn.Module) -> int:
    return int(stack.num_experts)  # type: ignore[arg-type]
