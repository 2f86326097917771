"""What the kernels' benchmark gives its contestants, and what it makes each of them do."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.bench.kernels.peers import Contestant


def inputs(num_rows: int, hidden_size: int, device: str, dtype: torch.dtype, vocab: int) -> tuple[Tensor, ...]:
    """Peaky logits; targets and upstream gradients on the side."""
    gen = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(num_rows, hidden_size, generator=gen, device=device).to(dtype).requires_grad_()
    weight = torch.empty(vocab, hidden_size, device=device, dtype=dtype)
    weight.normal_(0, 3 / hidden_size**0.5, generator=gen).requires_grad_()
    upstream = torch.randn(2, num_rows, generator=gen, device=device)
    return hidden, weight, torch.randint(vocab, (num_rows,)), upstream


def backward(path: Contestant, hidden: Tensor, weight: Tensor, target: Tensor, upstream: Tensor) -> None:
    """Forward and backward of one contestant."""
    hidden.grad = weight.grad = None
    logprob, entropy = path(hidden, weight, target)
    loss = (logprob * upstream[0]).sum() if logprob.ndim else logprob
    (loss if entropy is None else loss + (entropy * upstream[1]).sum()).backward()


def of_rows(path: Contestant, rows: Tensor) -> Contestant:
    """The same of these rows alone, which it picks itself, as the learner does."""
    return lambda hidden, weight, target: path(hidden.index_select(0, rows), weight, target)


def loop_over_time(decay_TB: Tensor, delta_TB: Tensor) -> Tensor:
    """The scan's definition as a Python loop in the dtype of its inputs."""
    out_TB = torch.empty_like(delta_TB)
    acc_B = torch.zeros_like(delta_TB[0])
    for t in reversed(range(len(delta_TB))):
        acc_B = out_TB[t] = delta_TB[t] + decay_TB[t] * acc_B
    return out_TB
