"""Puts adapters into a model of transformers, in place, and freezes all else."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from learner.lora.adapters import FACTORS, Adapted, AdaptedLinear, AdaptedStack, Adapters, Switch
from learner.model.weight_files import local_part
from learner.parallel.experts import expert_stacks
from shared.settings.lora import LoraConfig

LINEARS = {
    "attention": re.compile(r"language_model\.layers\.\d+\.self_attn\.\w+$"),
    "dense": re.compile(r"language_model\.layers\.\d+\.mlp\.\w+$"),
    "vision": re.compile(r"\bvisual\."),
}
"""Which linears a target means, by the names of transformers' models."""


def attach(vlm: Any, config: LoraConfig, dtype: torch.dtype) -> Adapters:
    """Gives each weight that `config` targets an adapter, float32 and without values yet, on the weight's device; all
    other parameters are frozen, in `dtype`.

    ValueError, before anything is changed: a target matches nothing, or the rank is larger than a matrix.
    """
    assert config.rank is not None
    linears = dict(_linears(vlm, config))
    stacks = dict(_stacks(vlm)) if "experts" in config.targets else {}
    _check(vlm, config, linears, stacks)
    for p in vlm.parameters():
        p.requires_grad_(False)
        p.data = p.data.to(dtype)
    adapters = Adapters(config.rank, config.scale, {}, alone=config.alone)
    for name, linear in linears.items():
        _adapt_linear(linear, config, adapters.switch)
        adapters.of[f"{name}.weight"] = Adapted(f"{name}.weight", linear, "weight", *FACTORS)
    for name, stack in stacks.items():
        for own in _adapt_stack(stack, config, adapters.switch):
            factors = (f"{own}_{factor}" for factor in FACTORS)
            adapters.of[f"{name}.{own}"] = Adapted(f"{name}.{own}", stack, own, *factors)
    return adapters


@torch.no_grad()
def initialise(adapters: Adapters, seed: int) -> None:
    """A uniform as torch draws a linear's weight, B zero, so that nothing is changed at first. The same on any number
    of ranks; each draws whole factors, one after the other."""
    for name, each in adapters.of.items():
        a, b = each.factors
        draw = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        bound = 1 / math.sqrt(a.shape[-1])
        fill(a, torch.empty(a.shape).uniform_(-bound, bound, generator=draw))
        fill(b, torch.zeros(b.shape))


@torch.no_grad()
def fill(parameter: Tensor, values: Tensor) -> None:
    """This rank's part of the whole `values`."""
    mine, index = local_part(parameter)
    mine.copy_(values[index])


def _linears(vlm: nn.Module, config: LoraConfig) -> Iterator[tuple[str, nn.Linear]]:
    for name, module in vlm.named_modules():
        meant = any(target in config.targets and names.search(name) for target, names in LINEARS.items())
        if type(module) is nn.Linear and meant:
            yield name, module


def _stacks(vlm: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    found = {id(stack) for stack in expert_stacks(vlm)}
    yield from ((name, module) for name, module in vlm.named_modules() if id(module) in found)


def _check(vlm: Any, config: LoraConfig, linears: dict[str, nn.Linear], stacks: dict[str, nn.Module]) -> None:
    """ValueError, in one line."""
    assert config.rank is not None
    for target in config.targets:
        if not (stacks if target == "experts" else any(LINEARS[target].search(name) for name in linears)):
            raise ValueError(
                f"learner.lora.targets: {target!r} matches nothing in this {vlm.config.model_type} model; leave it out"
            )
    weights = {f"{name}.weight": linear.weight for name, linear in linears.items()}
    weights |= {f"{name}.{own}": p for name, stack in stacks.items() for own, p in stack.named_parameters()}
    name, smallest = min(((name, min(p.shape[-2:])) for name, p in weights.items()), key=lambda found: found[1])
    if config.rank > smallest:
        raise ValueError(
            f"learner.lora.rank = {config.rank} is above the smallest dimension of {name}, {[*weights[name].shape]}; "
            f"set it to {smallest} at most"
        )


def _adapt_linear(linear: nn.Linear, config: LoraConfig, switch: Switch) -> None:
    vars(linear).pop("forward", None)  # `use_fast_linear`'s, which would go before the class's
    linear.__class__ = AdaptedLinear
    assert isinstance(linear, AdaptedLinear) and config.rank is not None
    linear.lora_A = _factor(linear.weight, config.rank, linear.in_features)
    linear.lora_B = _factor(linear.weight, linear.out_features, config.rank)
    linear.scale, linear.switch = config.scale, switch


def _adapt_stack(stack: nn.Module, config: LoraConfig, switch: Switch) -> list[str]:
    """The names of its weights."""
    assert config.rank is not None
    forward = AdaptedStack(stack, config.scale, switch)
    for name in forward.names:
        weight = getattr(stack, name)
        experts, rows, columns = weight.shape
        for factor, shape in zip(FACTORS, ((config.rank, columns), (rows, config.rank)), strict=True):
            stack.register_parameter(f"{name}_{factor}", _factor(weight, experts, *shape))
    stack.forward = forward
    return forward.names


def _factor(weight: Tensor, *shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=torch.float32, device=weight.device))
