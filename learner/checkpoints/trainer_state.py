"""A trainer's state in a checkpoint."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict

from learner.distributed import Ranks, own_part
from learner.model.experts import expert_stacks
from learner.model.policy import Policy
from learner.training.trainer import Trainer

SCHEMA, SCHEMA_OF_MIXTURES = 2, 3  # with experts, the optimizer has a parameter group for them


def fingerprint(policy: Policy) -> str:
    """Return a hash of the names and shapes of all parameters, 16 hex digits, the same for any number of ranks and any
    values."""
    shapes = sorted(f"{name}{list(p.shape)}" for name, p in policy.named_parameters())
    return hashlib.sha256("\n".join(shapes).encode()).hexdigest()[:16]


def schema_of(policy: Policy) -> int:
    return SCHEMA_OF_MIXTURES if any(expert_stacks(policy)) else SCHEMA


def training_state(trainer: Trainer) -> dict[str, Any]:
    """Return the state of the trainer's own tensors, on whatever device; the optimizer's state is created if no step
    has done so."""
    trainer.optimizer.make_states()
    model, optimizer = get_state_dict(trainer.policy, trainer.optimizer)
    state = {"model": trained(trainer.policy, model), "optimizer": optimizer}
    if trainer.config.objective.kl_reference_every:
        assert isinstance(trainer.reference, Policy)
        state["reference"] = get_model_state_dict(trainer.reference)
    return state


def trained(policy: Policy, state: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a policy's state that a checkpoint holds: with adapters the trained parameters, otherwise
    all."""
    if policy.adapters is None:
        return state
    return {name: state[name] for name, p in policy.named_parameters() if p.requires_grad}


def copied(state: Any, copies: dict[tuple[int, tuple[int, ...]], Tensor] | None = None) -> Any:
    """Return the state with all tensors copied to the CPU. Each tensor is copied once; names that share a tensor share
    the copy.

    `copies`: the copies so far, by address and shape of the original.
    """
    copies = {} if copies is None else copies
    if isinstance(state, dict):
        return {name: copied(value, copies) for name, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(copied(value, copies) for value in state)
    if not isinstance(state, Tensor):
        return state
    local = own_part(state)
    key = (local.data_ptr(), tuple(state.shape))
    if key not in copies or not local.numel():
        copies[key] = state.detach().to("cpu", copy=True)
    return copies[key]


def rng_state(ranks: Ranks) -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if ranks.device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(ranks.device)
    return state
