"""AdamW or Muon, a learning rate of its own for the value head, warm-up and decay, one gradient norm over all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.adamw import adamw

from learner.distributed import Ranks, own_part
from learner.model.policy import Policy
from learner.model.weight_files import local_part
from shared.learner_config import LearnerConfig, OptimizerConfig

MUON_MOMENTUM = 0.95
MOMENTS, MOMENTUM = ("exp_avg", "exp_avg_sq"), "momentum_buffer"  # torch's names in the states of AdamW and Muon
HEAD_GROUP = 2  # among the optimizer's groups, the value head's


def make_optimizer(policy: Policy, config: OptimizerConfig, lr: float | None = None) -> LocalAdamW:
    """Groups: matrices (with weight decay), vectors (without), value head (own rate, without), experts (with; stacks of
    matrices, which may lie on another mesh) where there are any; with Muon, the matrices of decoder layers make a last
    one. Experts, embeddings and the vision tower stay AdamW's. `lr`: of the policy, in place of `config.lr`."""
    lr = config.lr if lr is None else lr
    head = list(policy.value_head.parameters())
    body = {name: p for name, p in policy.vlm.named_parameters() if p.requires_grad}
    hidden = {name for name, p in body.items() if "language_model.layers." in name and p.ndim == 2}
    hidden = hidden if config.name == "muon" else set()
    experts = {name for name in body if ".experts." in name}
    matrices = [p for name, p in body.items() if p.ndim >= 2 and name not in hidden | experts]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "base_lr": lr, "weight_decay": config.weight_decay},
        {"params": [p for p in body.values() if p.ndim < 2], "base_lr": lr, "weight_decay": 0.0},
        {"params": head, "base_lr": config.value_lr, "weight_decay": 0.0},
    ]
    if experts:
        own = [body[name] for name in body if name in experts]
        groups.append({"params": own, "base_lr": lr, "weight_decay": config.weight_decay})
    if config.name == "adamw":
        return LocalAdamW(groups, lr=lr, betas=config.betas, fused=True)
    groups = [group | {"muon": False} for group in groups]
    moved = {"base_lr": lr, "weight_decay": config.weight_decay, "muon": True}
    groups.append({"params": [body[name] for name in body if name in hidden], **moved})
    return MuonAdamW(groups, lr=lr, betas=config.betas, fused=True)


def lr_factor(step: int, config: LearnerConfig) -> float:
    """What the base rates are multiplied by at optimizer step `step` (0 is the first)."""
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
    """`policy_factor`: of all rates but the value head's, besides `factor`."""
    for index, group in enumerate(optimizer.param_groups):
        group["lr"] = group["base_lr"] * factor * (1.0 if index == HEAD_GROUP else policy_factor)


@torch.no_grad()
def local_gradients(optimizer: Optimizer, apart: frozenset[Tensor] = frozenset()) -> list[list[Tensor]]:
    """This rank's part of every gradient; those of the parameters in `apart`, if any, in a list of their own."""
    parts: list[list[Tensor]] = [[], []] if apart else [[]]
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        if p.grad is not None:
            parts[p in apart].append(own_part(p.grad))
    return parts


def squares(parts: list[list[Tensor]], ranks: Ranks) -> Tensor:
    """Of each list of this rank's gradients its share of the whole one's squared 2-norm, float64 [lists]: the sum over
    ranks is that of the whole gradient; each replica holds all parts once."""
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
    """torch's fused AdamW (Loshchilov and Hutter, 2019, algorithm 2) of this rank's shards as plain tensors, to which
    the same happens. That of all shards as DTensors costs the host 11 ms more for a model of 2 billion parameters,
    and the GPU waits for it. State has torch's names and lies as the parameters do."""

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
        """Of all parameters, as the first gradient of each would; torch's checkpoints make them by a step without a
        gradient, which counts as one."""
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
    """AdamW, but parameters of groups with `muon` set, which are matrices, move by torch's Muon with Nesterov momentum.

    Steps have the size of AdamW's (Liu et al., 2025, "Muon is scalable for LLM training", equation 4), so that one
    learning rate and weight decay fit both. Orthogonalisation mixes all of a matrix: a sharded one is gathered for it,
    one at a time, on every rank. `step` uses up the gradients of such groups. A matrix's state is sharded as it is.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"] if group["muon"] else ():
                if p.grad is not None:
                    self._move(p, float(group["lr"]), group["weight_decay"])
                    p.grad = None  # nothing is left for AdamW
        super().step(closure)

    def _move(self, p: Tensor, lr: float, weight_decay: float) -> None:
        assert p.grad is not None
        state = self._state_of(p, (MOMENTUM,))  # AdamW looks for a step in every state that it loads
        state["step"] += 1
        momentum = state[MOMENTUM].lerp_(p.grad, 1 - MUON_MOMENTUM)
        direction = orthogonal(p.grad.lerp(momentum, MUON_MOMENTUM))
        own_part(p).mul_(1 - lr * weight_decay).add_(direction, alpha=-lr)


def orthogonal(update: Tensor) -> Tensor:
    """What torch's Muon makes of a matrix: 0.2 sqrt(longer side) times its nearest orthogonal one, nearly; of a DTensor
    this rank's part."""
    whole = update.full_tensor() if isinstance(update, DTensor) else update
    moved = nn.Parameter(torch.zeros_like(whole))
    moved.grad = whole
    Muon([moved], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False, adjust_lr_fn="match_rms_adamw").step()
    result = moved.detach().neg_()
    return result[local_part(update)[1]]  # not as a DTensor, which an offloaded matrix would leave the host for
