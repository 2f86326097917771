"""What a checkpoint holds of a trainer."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict

from learner.distributed import Ranks, own_part
from learner.model.policy import Policy
from learner.parallel.experts import expert_stacks
from learner.trainer import Trainer

SCHEMA, SCHEMA_OF_MIXTURES = 2, 3  # a mixture's experts are a group of the optimizer's own


def fingerprint(policy: Policy) -> str:
    """Names and shapes of all parameters, as 16 hex digits: the same for any number of ranks and any values."""
    shapes = sorted(f"{name}{list(p.shape)}" for name, p in policy.named_parameters())
    return hashlib.sha256("\n".join(shapes).encode()).hexdigest()[:16]


def schema_of(policy: Policy) -> int:
    return SCHEMA_OF_MIXTURES if any(expert_stacks(policy)) else SCHEMA


def training_state(trainer: Trainer) -> dict[str, Any]:
    """Of the trainer's own tensors, wherever they lie; the optimizer's are made where no step has made them."""
    trainer.optimizer.make_states()
    model, optimizer = get_state_dict(trainer.policy, trainer.optimizer)
    state = {"model": trained(trainer.policy, model), "optimizer": optimizer}
    if trainer.config.objective.kl_reference_every:
        assert isinstance(trainer.reference, Policy)
        state["reference"] = get_model_state_dict(trainer.reference)
    return state


def trained(policy: Policy, state: dict[str, Any]) -> dict[str, Any]:
    """Of a policy's state, what a checkpoint holds: of one with adapters all that is trained, of any other all."""
    if policy.adapters is None:
        return state
    return {name: state[name] for name, p in policy.named_parameters() if p.requires_grad}


def copied(state: Any, known: dict[tuple[int, tuple[int, ...]], Tensor] | None = None) -> Any:
    """The same in the memory of the CPU, each tensor copied once; two names of one tensor stay so.

    `known`: copies of what has been met already, by its place and shape.
    """
    known = {} if known is None else known
    if isinstance(state, dict):
        return {name: copied(value, known) for name, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(copied(value, known) for value in state)
    if not isinstance(state, Tensor):
        return state
    local = own_part(state)
    place = (local.data_ptr(), tuple(state.shape))
    if place not in known or not local.numel():
        known[place] = state.detach().to("cpu", copy=True)
    return known[place]


def rng_state(ranks: Ranks) -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if ranks.device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(ranks.device)
    return state
