"""Log-probability of the sampled token and entropy, straight from hidden states: logits exist one tile at a time.

`kernels.walk` visits the tiles; here is what a caller sees of it. A slice of the weight's gradient is summed over all
rows before the next one is begun, so it needs no float32 buffer of the weight's size.

Suffixes: N rows (tokens), H hidden size, V vocabulary, R rows of one chunk, C columns of one slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels import gemm, walk
from kernels.checks import check_shapes, check_values
from kernels.row_records import RowGrads
from kernels.tiles import plan
from kernels.upstream import RowsWithGradient


def linear_logprob(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    target_N: Tensor,
    *,
    temperature: float = 1.0,
    banned_ids: Sequence[int] = (),
    budget_bytes: int | None = None,
) -> tuple[Tensor, Tensor]:
    """(logprob_N, entropy_N) of softmax(hidden @ weight.T / temperature), float32, without the [N, V] logits.

    hidden [N, H] and weight [V, H] share a device and a dtype: float32 or bfloat16. Gradients reach both; logits are
    float32. target [N]: int64 or int32, the sampled tokens. banned_ids: tokens of probability 0. Rows whose upstream
    gradients are 0 are left out of the backward. Of bfloat16 operands on a GPU, tiles are kept from the forward for
    the backward as bfloat16, which rounds each gradient of a logit but the target's once more.

    budget_bytes bounds what exists of logits at a time, kept tiles included (64 MiB on a CPU; on a GPU a tenth of its
    memory, or half of what is free if that is less). Beyond it and the two gradients: 4 N H bytes for the gradient of
    the hidden states before it is rounded, as much for their widened copy on a CPU and for a copy of the rows with
    gradient, 12 C H for a slice of C columns of the weight (at most 2,048 on a CPU, 33,792 on a GPU), and 80 N.

    target may lie on the CPU while hidden is on a GPU: it is then checked without a synchronisation. On the GPU,
    checking it waits for it once. ValueError (before any launch): shapes, dtypes or devices that do not match, a
    target out of range or banned, all of the vocabulary banned, a temperature that is not positive, a budget below one
    tile.
    """
    check_shapes(hidden_NH, weight_VH, target_N)
    banned = check_values(len(weight_VH), target_N, temperature, banned_ids)
    device = hidden_NH.device
    half = gemm.widened(hidden_NH[:0]).dtype != torch.float32
    tracked = torch.is_grad_enabled() and (hidden_NH.requires_grad or weight_VH.requires_grad)
    tiling = plan(len(hidden_NH), len(weight_VH), budget_bytes, device, half=half, tracked=tracked)
    if target_N.device != device:  # without waiting
        target_N = target_N.pin_memory().to(device, non_blocking=True)
    job = walk.Job(target_N.long().contiguous(), float(temperature), banned, tiling)
    return _LinearLogprob.apply(hidden_NH, weight_VH, job)


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, job: walk.Job) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.job, ctx.kept = job, {}
        if not len(hidden_NH):
            ctx.save_for_backward(hidden_NH, weight_VH)
            return tuple(torch.zeros((2, 0), device=hidden_NH.device))
        with torch.autocast(hidden_NH.device.type, enabled=False):
            stats, ctx.kept = walk.forward(hidden_NH, weight_VH, job)
            logprob_N, entropy_N, log_sum_N = stats.finish(job.temperature)
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
            grads = RowGrads.of(tuple(saved), grad_logprob_N, grad_entropy_N, ctx.job.temperature)
            with_gradient = RowsWithGradient(grad_logprob_N, grad_entropy_N)
            dx_NH, dw_VH = walk.backward(hidden_NH, weight_VH, ctx.job, grads, with_gradient, ctx.kept, wanted)
        return dx_NH, dw_VH, None


def _is_zero(grad_N: Tensor) -> bool:
    """Only of a CPU's tensors: to ask a GPU would take longer than to compute with zeros."""
    return not grad_N.is_cuda and not bool(grad_N.any())
