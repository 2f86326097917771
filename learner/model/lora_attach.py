"""Adds adapters to a model of transformers, in place, and freezes all other parameters."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from learner.model.adapt import change_class, replace_forward
from learner.model.experts import expert_stacks
from learner.model.lora_adapters import FACTORS, Adapted, AdaptedLinear, AdaptedStack, Adapters, Switch
from learner.model.weight_files import local_part
from shared.config.lora_section import LoraConfig
from shared.families.registry import family_named


def attach(vlm: Any, config: LoraConfig, dtype: torch.dtype) -> Adapters:
    """Add an adapter to each weight that `config` targets; freeze all other parameters, in `dtype`.

    Adapters are float32, on the weight's device and uninitialised. Raise ValueError, before anything is changed, if a
    target matches nothing or the rank is larger than a matrix.
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
    """Draw A uniformly, as torch draws a linear's weight, and set B to zero, so that the model is unchanged at first.

    The values are the same for any number of ranks; each rank draws whole factors, one after the other.
    """
    for name, each in adapters.of.items():
        a, b = each.factors
        draw = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        bound = 1 / math.sqrt(a.shape[-1])
        fill(a, torch.empty(a.shape).uniform_(-bound, bound, generator=draw))
        fill(b, torch.zeros(b.shape))


@torch.no_grad()
def fill(parameter: Tensor, values: Tensor) -> None:
    """Write this rank's part of `values`, which are whole, into the parameter."""
    local, index = local_part(parameter)
    local.copy_(values[index])


def _linears(vlm: Any, config: LoraConfig) -> Iterator[tuple[str, nn.Linear]]:
    """Yield (name, module) of each linear that the targets match."""
    targets = _targets(vlm)
    for name, module in vlm.named_modules():
        meant = any(target in config.targets and names.search(name) for target, names in targets.items())
        if type(module) is nn.Linear and meant:
            yield name, module


def _targets(vlm: Any) -> Mapping[str, re.Pattern[str]]:
    return family_named(vlm.config.model_type, "the model").lora_targets()


def _stacks(vlm: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    stacks = {id(stack) for stack in expert_stacks(vlm)}
    yield from ((name, module) for name, module in vlm.named_modules() if id(module) in stacks)


def _check(vlm: Any, config: LoraConfig, linears: dict[str, nn.Linear], stacks: dict[str, nn.Module]) -> None:
    """Raise ValueError, in one line, if a target matches no weight or the rank is too large."""
    assert config.rank is not None
    targets = _targets(vlm)
    for target in config.targets:
        if not (stacks if target == "experts" else target in targets and any(map(targets[target].search, linears))):
            raise ValueError(
                f"learner.lora.targets: {target!r} matches nothing in this {vlm.config.model_type} model; leave it out"
            )
    weights = {f"{name}.weight": linear.weight for name, linear in linears.items()}
    weights |= {f"{name}.{own}": p for name, stack in stacks.items() for own, p in stack.named_parameters()}
    name, smallest = min(((name, min(p.shape[-2:])) for name, p in weights.items()), key=lambda pair: pair[1])
    if config.rank > smallest:
        raise ValueError(
            f"learner.lora.rank = {config.rank} is above the smallest dimension of {name}, {[*weights[name].shape]}; "
            f"set it to {smallest} at most"
        )


def _adapt_linear(linear: nn.Linear, config: LoraConfig, switch: Switch) -> None:
    change_class(linear, AdaptedLinear)
    assert isinstance(linear, AdaptedLinear) and config.rank is not None
    linear.lora_A = _factor(linear.weight, config.rank, linear.in_features)
    linear.lora_B = _factor(linear.weight, linear.out_features, config.rank)
    linear.scale, linear.switch = config.scale, switch


def _adapt_stack(stack: nn.Module, config: LoraConfig, switch: Switch) -> list[str]:
    """Adapt a stack of experts; return the names of its weights."""
    assert config.rank is not None
    forward = AdaptedStack(stack, config.scale, switch)
    for name in forward.names:
        weight = getattr(stack, name)
        experts, rows, columns = weight.shape
        for factor, shape in zip(FACTORS, ((config.rank, columns), (rows, config.rank)), strict=True):
            stack.register_parameter(f"{name}_{factor}", _factor(weight, experts, *shape))
    replace_forward(stack, forward)
    return forward.names


def _factor(weight: Tensor, *shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=torch.float32, device=weight.device))
