"""The reference for the fused log-probability: torch over all logits, and the gradients of either."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor


def gradients(
    function: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], hidden: Tensor, weight: Tensor, upstream: Tensor
) -> list[Tensor]:
    """Return (logprob, entropy, gradient of hidden, gradient of weight) in float64."""
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    logprob, entropy = function(hidden, weight)
    (logprob * upstream[0] + entropy * upstream[1]).sum().backward()
    assert hidden.grad is not None and weight.grad is not None
    return [t.detach().double() for t in (logprob, entropy, hidden.grad, weight.grad)]


def full_logits(
    hidden: Tensor, weight: Tensor, target: Tensor, temperature: float = 1.0, banned_ids: Sequence[int] = ()
) -> tuple[Tensor, Tensor]:
    """Return (logprobs, entropies) as torch computes them without a fused path: the reference for accuracy."""
    logits = (hidden @ weight.t()).float() / temperature
    logits[:, list(banned_ids)] = float("-inf")
    logprobs = logits.log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs.masked_fill(logprobs == float("-inf"), 0.0)).sum(-1)
    return logprobs.gather(1, target.to(hidden.device)[:, None])[:, 0], entropy
