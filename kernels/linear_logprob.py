"""Log-probability of the sampled token and entropy, directly from hidden states: only one tile of logits exists at a
time.

`kernels.tile_passes` processes the tiles; this module has the interface for callers. A slice of the weight's gradient
is summed over all rows before the next slice starts, so no float32 buffer of the weight's size is needed.

Suffixes: N rows (tokens), H hidden size, V vocabulary, R rows of one chunk, C columns of one slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels import gemm, tile_passes
from kernels.checks import check_shapes, check_values
from kernels.row_records import RowGrads, RowsWithGradient
from kernels.tiles import plan


def linear_logprob(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    target_N: Tensor,
    *,
    temperature: float = 1.0,
    banned_ids: Sequence[int] = (),
    budget_bytes: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (logprob_N, entropy_N) of softmax(hidden @ weight.T / temperature), float32, without the [N, V] logits.

    hidden [N, H] and weight [V, H] have the same device and dtype: float32 or bfloat16. Both get gradients; logits are
    float32. target [N]: int64 or int32, the sampled tokens. banned_ids: tokens with probability 0. Rows whose upstream
    gradients are 0 are left out of the backward. For bfloat16 operands on a GPU, tiles are kept for the backward in
    bfloat16, which rounds each logit's gradient, except the target's, once more.

    budget_bytes bounds the memory for logits at any time, including kept tiles (default: 64 MiB on a CPU; on a GPU a
    tenth of its memory, or half of the free memory if that is less). Besides it and the two gradients, a call needs:
    4 N H bytes for the gradient of the hidden states before it is rounded, as much for their float32 copy on a CPU and
    for a copy of the rows with gradient, 12 C H for a slice of C columns of the weight (at most 2,048 on a CPU, 33,792
    on a GPU), and 80 N.

    target may be on the CPU while hidden is on a GPU; then its check needs no synchronisation. If target is on the GPU,
    the host waits once for the check. Raise ValueError, before any launch, for shapes, dtypes or devices that do not
    match, a target that is out of range or banned, a ban of the whole vocabulary, a temperature that is not positive,
    or a budget below one tile.
    """
    check_shapes(hidden_NH, weight_VH, target_N)
    banned = check_values(len(weight_VH), target_N, temperature, banned_ids)
    device = hidden_NH.device
    half = gemm.widened(hidden_NH[:0]).dtype != torch.float32
    tracked = torch.is_grad_enabled() and (hidden_NH.requires_grad or weight_VH.requires_grad)
    tiling = plan(len(hidden_NH), len(weight_VH), budget_bytes, device, half=half, tracked=tracked)
    if target_N.device != device:  # does not wait
        target_N = target_N.pin_memory().to(device, non_blocking=True)
    task = tile_passes.LogprobTask(target_N.long().contiguous(), float(temperature), banned, tiling)
    return _LinearLogprob.apply(hidden_NH, weight_VH, task)


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, task: tile_passes.LogprobTask) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.task, ctx.kept = task, {}
        if not len(hidden_NH):
            ctx.save_for_backward(hidden_NH, weight_VH)
            return tuple(torch.zeros((2, 0), device=hidden_NH.device))
        with torch.autocast(hidden_NH.device.type, enabled=False):
            stats, ctx.kept = tile_passes.forward(hidden_NH, weight_VH, task)
            logprob_N, entropy_N, log_sum_N = stats.finish(task.temperature)
        ctx.save_for_backward(hidden_NH, weight_VH, stats.largest, log_sum_N, entropy_N, stats.target_logit)
        return logprob_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprob_N: Tensor | None, grad_entropy_N: Tensor | None) -> tuple[Any, Any, None]:
        hidden_NH, weight_VH, *saved = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:2]
        if not saved:
            return hidden_NH if wanted[0] else None, torch.zeros_like(weight_VH) if wanted[1] else None, None
        if grad_logprob_N is None:
            grad_logprob_N = torch.zeros(len(hidden_NH), device=hidden_NH.device)
        if grad_entropy_N is not None and _is_zero(grad_entropy_N):
            grad_entropy_N = None
        with torch.autocast(hidden_NH.device.type, enabled=False):
            grads = RowGrads.of(tuple(saved), grad_logprob_N, grad_entropy_N, ctx.task.temperature)
            with_gradient = RowsWithGradient(grad_logprob_N, grad_entropy_N)
            dx_NH, dw_VH = tile_passes.backward(hidden_NH, weight_VH, ctx.task, grads, with_gradient, ctx.kept, wanted)
        return dx_NH, dw_VH, None


def _is_zero(grad_N: Tensor) -> bool:
    """Tell whether a gradient on the CPU is 0; False on a GPU, where the check would take longer than computing with
    zeros."""
    return not grad_N.is_cuda and not bool(grad_N.any())
