"""Adapters (LoRA): a weight W [out, in] is frozen, and A [r, in] and B [out, r] are trained in W + s B A.

Forward and backward use the sum, rounded once to the dtype of W, as it is published and exported. So the learner's
logprobs agree with the engine's as closely as if all weights were trained. The gradients of A and B do not need the
gradient of the sum: for y = (W + s B A) x they are s (B' dy) x' and s dy (A x)'. The sum is computed again for the
backward, which costs r / tokens of a product, and is never kept.

Experts are stacks: W [E, out, in], A [E, r, in], B [E, out, r].
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from kernels.cpu.linear import linear
from kernels.low_rank import merged
from learner.model.adapt import stand_in

FACTORS = ("lora_A", "lora_B")
"""How the names of adapters' parameters end."""


class _MergedLinear(torch.autograd.Function):
    """x [..., in] -> [..., out] by W + scale B A; W and its bias get no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x, weight, a, b)
        ctx.scale = scale
        return _product(x, merged(weight, a, b, scale), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, a, b = ctx.saved_tensors
        for_x = for_a = for_b = None
        if ctx.needs_input_grad[0]:
            for_x = _product(grad, merged(weight, a, b, ctx.scale).mT)
        grad_T, x_T = grad.flatten(0, -2), x.flatten(0, -2)  # rows are tokens
        if ctx.needs_input_grad[3]:
            for_a = ctx.scale * ((grad_T @ b).mT @ x_T)
        if ctx.needs_input_grad[4]:
            for_b = ctx.scale * (grad_T.mT @ (x_T @ a.mT))
        return for_x, None, None, for_a, for_b, None


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return (F.linear if torch.compiler.is_compiling() else linear)(x, weight, bias)


@dataclass(slots=True)
class Switch:
    """Turns all adapters of a model on or off."""

    on: bool = True


class AdaptedLinear(nn.Linear):
    """A linear with an adapter beside its weight, made from a plain linear in place. The weight keeps its name."""

    lora_A: nn.Parameter
    lora_B: nn.Parameter
    scale: float
    switch: Switch

    def forward(self, input: Tensor) -> Tensor:
        if self.switch.on:
            return _MergedLinear.apply(input, self.weight, self.bias, self.lora_A, self.lora_B, self.scale)
        return _product(input, self.weight, self.bias)


class AdaptedStack:
    """The forward of a module that holds a layer's experts, with an adapter for each matrix of each expert.

    Autograd computes the whole gradient of the sum W + s B A to get those of A and B. The sum and everything else that
    the experts compute are recomputed in the backward: if kept, the sum would be a second copy of the model.
    """

    def __init__(self, stack: nn.Module, scale: float, switch: Switch) -> None:
        self.stack, self.kind, self.scale, self.switch = stack, type(stack), scale, switch
        self.names = [name for name, _ in stack.named_parameters(recurse=False)]

    @torch.compiler.disable
    def __call__(self, hidden_TD: Tensor, chosen_TK: Tensor, weights_TK: Tensor) -> Tensor:
        if not self.switch.on:
            return self._computed(self.stack, hidden_TD, chosen_TK, weights_TK)
        if not torch.is_grad_enabled():
            return self._adapted(hidden_TD, chosen_TK, weights_TK)
        out: Tensor = checkpoint(
            self._adapted, hidden_TD, chosen_TK, weights_TK, use_reentrant=False, preserve_rng_state=False
        )
        return out

    def _adapted(self, hidden_TD: Tensor, chosen_TK: Tensor, weights_TK: Tensor) -> Tensor:
        tensors: dict[str, Tensor] = {}
        for name in self.names:
            weight, a, b = (getattr(self.stack, each) for each in (name, *(f"{name}_{f}" for f in FACTORS)))
            tensors[name] = merged(weight, a, b, self.scale)
        return self._computed(stand_in(self.stack, self.kind, **tensors), hidden_TD, chosen_TK, weights_TK)

    def _computed(self, stack: Any, hidden_TD: Tensor, chosen_TK: Tensor, weights_TK: Tensor) -> Tensor:
        out: Tensor = self.kind.forward(stack, hidden_TD, chosen_TK, weights_TK)
        return out


@dataclass(frozen=True, slots=True)
class Adapted:
    """One weight with its adapter. `name` and the attributes `weight`, `a` and `b` of `module` are names in
    transformers' model."""

    name: str  # name of the weight
    module: nn.Module
    weight: str
    a: str
    b: str

    @property
    def factors(self) -> tuple[Tensor, Tensor]:
        return getattr(self.module, self.a), getattr(self.module, self.b)

    @property
    def shape(self) -> torch.Size:
        return getattr(self.module, self.weight).shape


@dataclass(slots=True)
class Adapters:
    """All adapters of a model, by the names of the weights that they adapt.

    `base`: the hash of the weights beneath, if it is known (`learner.model.lora_base`). `alone`: engines receive only
    the adapters, without the merged weights.
    """

    rank: int
    scale: float
    of: dict[str, Adapted]
    switch: Switch = field(default_factory=Switch)
    base: str = ""
    alone: bool = False
    _norm: float = 0.0  # norm of all adapted weights

    @contextmanager
    def off(self) -> Iterator[None]:
        """Switch the adapters off inside this context: the model then computes as without them."""
        self.switch.on = False
        try:
            yield
        finally:
            self.switch.on = True

    def merged(self, name: str, weight: Tensor) -> Tensor:
        """Return the whole weight `name` with its adapter merged, from the whole weight; a collective if the policy is
        sharded.

        As in a forward, A and B are rounded to the dtype of W first.
        """
        if name not in self.of:
            return weight
        a, b = (whole(p.detach()).to(weight.device, weight.dtype) for p in self.of[name].factors)
        return merged(weight, a, b, self.scale)

    @torch.no_grad()
    def relative_norm(self) -> float:
        """Return the norm of what all adapters add, divided by the norm of all adapted weights; a collective."""
        if not self._norm:
            weights = (whole(getattr(each.module, each.weight)) for each in self.of.values())
            self._norm = math.sqrt(sum(float(torch.linalg.vector_norm(w.float())) ** 2 for w in weights))
        total = 0.0
        for each in self.of.values():
            a, b = (whole(p).double() for p in each.factors)
            total += float(((b.mT @ b) * (a @ a.mT)).sum())  # |B A|^2 = tr(B'B A A')
        return self.scale * math.sqrt(max(total, 0.0)) / max(self._norm, 1e-30)


def is_factor(name: str) -> bool:
    """Tell whether a parameter of this name is part of an adapter."""
    return name.endswith(FACTORS)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
