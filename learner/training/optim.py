"""Optimizers and learning rates: AdamW or Muon, a separate rate for the value head, warm-up and decay, one gradient
norm over all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.adamw import adamw

from learner.distributed import Ranks, own_part
from learner.model.policy import Policy
from learner.model.weight_files import local_part
from shared.config.learner_section import LearnerConfig, OptimizerConfig

MUON_MOMENTUM = 0.95
MOMENTS, MOMENTUM = ("exp_avg", "exp_avg_sq"), "momentum_buffer"  # torch's names in the states of AdamW and Muon
HEAD_GROUP = 2  # index of the value head's group in the optimizer


def make_optimizer(policy: Policy, config: OptimizerConfig, lr: float | None = None) -> LocalAdamW:
    """Return the optimizer that the recipe names, over groups of the policy's trained parameters.

    Groups: matrices (with weight decay), vectors (without), value head (own rate, without decay) and, if there are any,
    experts (with decay; stacks of matrices, which may be on another mesh). If the optimizer has a special group of
    matrices, those of decoder layers are in it, as the last group; experts, embeddings and the vision tower never are.
    `lr`: the policy's rate instead of `config.lr`.
    """
    spec = config.spec
    lr = config.lr if lr is None else lr
    body = {name: p for name, p in policy.vlm.named_parameters() if p.requires_grad}
    experts = {name for name in body if ".experts." in name}
    separate: set[str] = set()
    if spec.has_matrix_group:
        separate = {name for name, p in body.items() if "language_model.layers." in name and p.ndim == 2}

    def group(names: Iterable[str], weight_decay: float) -> dict[str, Any]:
        return {"params": [body[name] for name in names], "base_lr": lr, "weight_decay": weight_decay}

    head = {"params": list(policy.value_head.parameters()), "base_lr": config.value_lr, "weight_decay": 0.0}
    matrices = [name for name, p in body.items() if p.ndim >= 2 and name not in separate | experts]
    vectors = [name for name, p in body.items() if p.ndim < 2]
    groups = [group(matrices, config.weight_decay), group(vectors, 0.0), head]
    if experts:
        groups.append(group((name for name in body if name in experts), config.weight_decay))
    if spec.has_matrix_group:
        groups = [each | {"muon": False} for each in groups]
        groups.append(group((name for name in body if name in separate), config.weight_decay) | {"muon": True})
    optimizer: LocalAdamW = spec.load_optimizer()(groups, lr=lr, betas=config.betas, fused=True)
    return optimizer


def lr_factor(step: int, config: LearnerConfig) -> float:
    """Return the factor of the base rates at optimizer step `step` (0 is the first)."""
    warmup_steps = config.optimizer.warmup_steps
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    decay_steps = max(1.0, config.optimizer.decay_share * (config.total_steps - warmup_steps))
    done = min(max(1.0 - (config.total_steps - step) / decay_steps, 0.0), 1.0)
    match config.optimizer.schedule:
        case "linear":
            left = 1.0 - done
        case "cosine":
            left = 0.5 * (1.0 + math.cos(math.pi * done))
        case _:
            return 1.0
    return config.optimizer.final_share + (1.0 - config.optimizer.final_share) * left


def set_learning_rates(optimizer: Optimizer, factor: float, policy_factor: float = 1.0) -> None:
    """Set each group's rate to its base rate times `factor`, and times `policy_factor` except for the value head."""
    for index, group in enumerate(optimizer.param_groups):
        group["lr"] = group["base_lr"] * factor * (1.0 if index == HEAD_GROUP else policy_factor)


@torch.no_grad()
def local_gradients(optimizer: Optimizer, separate: frozenset[Tensor] = frozenset()) -> list[list[Tensor]]:
    """Return this rank's parts of all gradients; those of parameters in `separate`, if any, in a second list."""
    parts: list[list[Tensor]] = [[], []] if separate else [[]]
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        if p.grad is not None:
            parts[p in separate].append(own_part(p.grad))
    return parts


def squares(parts: list[list[Tensor]], ranks: Ranks) -> Tensor:
    """Return this rank's share of each list's squared gradient norm, float64 [lists].

    The sum over ranks is the squared 2-norm of the whole gradients. It is divided by the number of replicas, each of
    which holds all parts.
    """
    totals = torch.zeros(len(parts), dtype=torch.float64, device=ranks.device)
    for number, gradients in enumerate(parts):
        norms = torch._foreach_norm([g for g in gradients if g.numel()]) if gradients else []
        if norms:
            totals[number] = torch.stack(list(norms)).double().square().sum().to(totals.device)
    return totals / ranks.replicas


def clip_(gradients: list[Tensor], norm: float, max_norm: float) -> None:
    if norm > max_norm:
        torch._foreach_mul_(gradients, max_norm / (norm + 1e-6))


class LocalAdamW(AdamW):
    """torch's fused AdamW (Loshchilov and Hutter, 2019, algorithm 2) on this rank's shards as plain tensors; the result
    is the same.

    With the shards as DTensors the host takes 11 ms longer for a model of 2 billion parameters, and the GPU waits for
    it. The state has torch's names and is sharded like the parameters.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            states = [self._state_of(p, MOMENTS) for p in params]
            adamw(
                [own_part(p) for p in params],
                [own_part(p.grad) for p in params],
                [own_part(state["exp_avg"]) for state in states],
                [own_part(state["exp_avg_sq"]) for state in states],
                [],
                [state["step"] for state in states],
                fused=True,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )

    def make_states(self) -> None:
        """Create the states of all parameters, as the first gradient of each would. torch's checkpoints would do it by
        a step without gradients, which counts as a step."""
        for group in self.param_groups:
            for p in group["params"]:
                self._state_of(p, (MOMENTUM,) if group.get("muon") else MOMENTS)

    def _state_of(self, p: Tensor, moments: tuple[str, ...]) -> dict[str, Tensor]:
        if not self.state[p]:
            self.state[p] = {"step": torch.zeros((), device=p.device)} | {name: torch.zeros_like(p) for name in moments}
        state: dict[str, Tensor] = self.state[p]
        return state


# ---------------------------------------------------------------------- Muon (Jordan et al., 2024)


class MuonAdamW(LocalAdamW):
    """AdamW, except for parameters of groups with `muon` set: these matrices use torch's Muon with Nesterov momentum.

    Muon's steps have the size of AdamW's (Liu et al., 2025, "Muon is scalable for LLM training", equation 4), so that
    one learning rate and weight decay fit both. Orthogonalisation needs the whole matrix, so sharded matrices are
    gathered on every rank, one at a time. `step` deletes the gradients of these groups. A matrix's state is sharded
    like the matrix.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"] if group["muon"] else ():
                if p.grad is not None:
                    self._move(p, float(group["lr"]), group["weight_decay"])
                    p.grad = None  # so that AdamW does not apply it too
        super().step(closure)

    def _move(self, p: Tensor, lr: float, weight_decay: float) -> None:
        assert p.grad is not None
        state = self._state_of(p, (MOMENTUM,))  # AdamW expects a step in every state that it loads
        state["step"] += 1
        momentum = state[MOMENTUM].lerp_(p.grad, 1 - MUON_MOMENTUM)
        direction = orthogonal(p.grad.lerp(momentum, MUON_MOMENTUM))
        own_part(p).mul_(1 - lr * weight_decay).add_(direction, alpha=-lr)


def orthogonal(update: Tensor) -> Tensor:
    """Return torch's Muon update of a matrix: 0.2 sqrt(longer side) times its nearest orthogonal matrix, approximately.
    Of a DTensor, return this rank's part."""
    matrix = update.full_tensor() if isinstance(update, DTensor) else update
    moved = nn.Parameter(torch.zeros_like(matrix))
    moved.grad = matrix
    Muon([moved], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False, adjust_lr_fn="match_rms_adamw").step()
    result = moved.detach().neg_()
    # A plain tensor: as a DTensor, the result would make an offloaded matrix leave the host.
    return result[local_part(update)[1]]
