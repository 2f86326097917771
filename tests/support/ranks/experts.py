"""Compares one layer's experts dealt over ranks with the same experts computed on each rank alone."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeTextExperts

from learner.distributed import Ranks, all_sum, make_expert_mesh
from learner.model.experts import deal_experts, gathered_experts, sharding_mesh

NUM_EXPERTS, CHOSEN, HIDDEN = 8, 2, 6
SIZES = {"num_experts": NUM_EXPERTS, "hidden_size": HIDDEN, "moe_intermediate_size": 5, "hidden_act": "silu"}
# By case: each rank's number of tokens, and the number of experts to choose from. Of two ranks, rank 0 has the first
# half of the experts.
CASES: dict[str, tuple[tuple[int, ...], int]] = {
    "all experts": ((5, 7, 3, 4), NUM_EXPERTS),
    "ranks whose experts get no token": ((5, 7, 3, 4), 2),
    "a rank without tokens": ((5, 0, 3, 4), NUM_EXPERTS),
    "no tokens at all": ((0, 0, 0, 0), NUM_EXPERTS),
}


def stack() -> nn.Module:
    made = Qwen3VLMoeTextExperts(SimpleNamespace(**SIZES, _experts_implementation="eager"))
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.shape[1])))
    return made


def drawn(case: str, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return a rank's hidden states, chosen experts and their weights."""
    counts, choice = CASES[case]
    draw = torch.Generator().manual_seed(rank)
    shape = (counts[rank], CHOSEN)
    hidden = torch.randn(counts[rank], HIDDEN, generator=draw, requires_grad=True)
    chosen = torch.rand(counts[rank], choice, generator=draw).argsort(1)[:, :CHOSEN]
    return hidden, chosen.reshape(shape), torch.rand(shape, generator=draw).requires_grad_()


def computed(experts: nn.Module, inputs: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
    """Return the output, and the gradients of hidden states and weights for a loss with a different weight for each
    output."""
    out = experts(*inputs)
    if out.requires_grad:  # without tokens transformers' output has no gradient
        (out * torch.arange(1.0, 1 + out.numel()).view_as(out)).sum().backward()
    return [out.detach(), *(x.grad if x.grad is not None else torch.zeros_like(x) for x in (inputs[0], inputs[2]))]


def layer_alone(ranks: Ranks) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """Return pairs (got, expected), by case and by whether experts are gathered: of this rank's outputs and gradients,
    and of the experts' gradients summed over all ranks."""
    mesh = make_expert_mesh("cpu", ranks.size, 0, ranks.size)
    assert mesh is not None
    dealt = nn.ModuleList([stack()])
    deal_experts(dealt, mesh)
    fully_shard(dealt[0], mesh=sharding_mesh(mesh))
    dealt[0].set_gradient_divide_factor(1.0)
    dealt[0].set_force_sum_reduction_for_comms(True)
    found: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for case in CASES:
        plain = stack()
        expected = computed(plain, drawn(case, ranks.rank))
        expected += [all_sum(gradient_of(p), ranks) for p in plain.parameters()]
        for name in (case, f"{case}, gathered"):
            dealt.zero_grad()
            if name == case:
                got = computed(dealt[0], drawn(case, ranks.rank))
            else:
                with gathered_experts(dealt):
                    got = computed(dealt[0], drawn(case, ranks.rank))
            got += [p.grad.full_tensor() for p in dealt.parameters()]  # type: ignore[attr-defined]
            found[name] = list(zip(got, expected, strict=True))
    return found


def gradient_of(p: Tensor) -> Tensor:
    return p.grad if p.grad is not None else torch.zeros_like(p)
