"""How a policy lies in memory: frozen parts, recomputed activations, compiled blocks, shards over ranks (FSDP2).

None of it changes what is computed, beyond rounding; what is frozen is simply not trained.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

from learner.batch import Microbatch
from learner.distributed import Ranks, all_sum, own_part
from learner.lora.reference import BasePolicy
from learner.model.adapt import adapt_to_compile
from learner.model.policy import Below, Policy, PolicyOutput
from learner.parallel.experts import check_experts, deal_experts, expert_stacks, sharding_mesh
from shared.learner_config import LearnerConfig


def parallelize(policy: Policy, ranks: Ranks, config: LearnerConfig, dtype: torch.dtype) -> None:
    """Makes `policy` as the recipe wants it, in place, on the ranks' device; before an optimizer is made. An empty one
    is loaded afterwards.

    It is sharded where there are several ranks, a dtype other than float32, or an offload.
    """
    freeze(policy, config.optimizer.freeze, config.optimizer.freeze_layers)
    if ranks.experts is not None:
        check_experts(policy.vlm, ranks.experts)
        deal_experts(policy.vlm, ranks.experts)
    if config.parallel.compile:
        compile_blocks(policy)
    if config.parallel.activation_checkpointing:  # around what is compiled: a graph cannot hold what leaves it
        for block in _blocks(policy):
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    if ranks.size > 1 or dtype != torch.float32 or config.parallel.offload:
        shard(policy, ranks, dtype, offload=config.parallel.offload)
    elif not any(p.is_meta for p in policy.parameters()):
        policy.to(ranks.device)


@torch.no_grad()
def forward_only(
    policy: Policy | BasePolicy,
    batch: Microbatch,
    temperature: float,
    below: Below | None = None,
    *,
    keep: int | None = None,
    sure: float | None = None,
) -> PolicyOutput:
    """A forward that no backward follows, which would leave a sharded policy's own parameters gathered, in `dtype`."""
    output: PolicyOutput = policy(batch, temperature, below, keep=keep, sure=sure)
    model = policy.policy if isinstance(policy, BasePolicy) else policy
    if isinstance(model, FSDPModule):
        model.reshard()
    return output


def freeze(policy: Policy, parts: tuple[str, ...], layers: int = 0) -> None:
    """Takes `vision` (the tower), `projector` (what merges its patches into tokens) or the first `layers` decoder
    layers, with the embeddings, out of training."""
    text = policy.vlm.model.language_model
    if layers > len(text.layers):
        raise ValueError(f"learner.optimizer.freeze_layers = {layers}: the model has {len(text.layers)}; lower it")
    for module in (text.embed_tokens, *text.layers[:layers]) if layers else ():
        module.requires_grad_(False)
    visual = policy.vlm.model.visual
    mergers = {id(p) for name, p in visual.named_parameters() if "merger" in name}
    for p in visual.parameters():
        if ("projector" if id(p) in mergers else "vision") in parts:
            p.requires_grad_(False)


def compile_blocks(policy: Policy) -> None:
    """torch.compile of each decoder layer and vision block; attention and dealt experts stay outside of the graphs."""
    adapt_to_compile(policy.vlm)
    for block in _blocks(policy):
        block.forward = torch.compile(block.forward, dynamic=True)


def shard(policy: Policy, ranks: Ranks, dtype: torch.dtype, *, offload: bool = False) -> None:
    """FSDP2 in place: each decoder layer and vision block, the value head (float32), and the rest.

    Parameters and gradients are float32 (what adapters freeze is in `dtype`), forward and backward run in `dtype`.
    Gradients are summed over ranks. A mesh of two dimensions replicates over the first and shards over the second.
    `offload`: what is sharded, its gradients and its optimizer state rest in the memory of the CPU. Experts that are
    dealt over ranks are each cut by their rows, over the ranks that hold the same ones.
    """
    mesh = ranks.mesh
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    pinned = mesh.device_type == "cuda"
    place = CPUOffloadPolicy(pin_memory=pinned) if offload else OffloadPolicy()
    if ranks.experts is not None:
        cut = partial(fully_shard, mesh=sharding_mesh(ranks.experts), shard_placement_fn=lambda _: Shard(1))
        for stack in expert_stacks(policy.vlm):
            cut(stack, mp_policy=precision, offload_policy=place)
    for block in _blocks(policy):
        fully_shard(block, mesh=mesh, mp_policy=precision, offload_policy=place)
    whole = MixedPrecisionPolicy(cast_forward_inputs=False)
    fully_shard(policy.value_head, mesh=mesh, mp_policy=whole, offload_policy=place)
    fully_shard(policy, mesh=mesh, mp_policy=precision, offload_policy=place)
    policy.dtype = policy.vlm.model.visual.patch_embed.compute_dtype = dtype
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def add_up_replicas(policy: Policy, ranks: Ranks, *, now: bool) -> None:
    """Before a backward: whether replicas add up their gradients in it, with those that they have kept since they last
    did. Their shards are summed in every backward."""
    if ranks.replicas > 1 and isinstance(policy, FSDPModule):
        policy.set_requires_all_reduce(now)


@torch.no_grad()
def copy_weights(source: Policy, target: Policy) -> None:
    """The language-vision model's weights into a policy that lies on the ranks in the same way."""
    _reshard(source, target)
    for theirs, mine in zip(source.vlm.parameters(), target.vlm.parameters(), strict=True):
        mine.copy_(theirs)


@torch.no_grad()
def layers_alike(policy: Policy, reference: Policy | BasePolicy, ranks: Ranks) -> int | None:
    """How many of the first decoder layers both have in common whatever is trained: with the embeddings and the tower
    they are frozen, and equal in every bit. 0: the tower alone; None: not even the tower. A collective.

    The last layer is never among them. Of a policy with adapters it is the tower alone, and of one with experts, whose
    loads are counted as the policy computes them.
    """
    visual, text = policy.vlm.model.visual, policy.vlm.model.language_model
    _reshard(policy, reference)
    parts: list[list[nn.Module]] = [[visual]]
    if isinstance(reference, Policy) and not any(True for _ in expert_stacks(policy.vlm)):
        parts += [[text.embed_tokens, layer] if not index else [layer] for index, layer in enumerate(text.layers[:-1])]
    theirs = dict(reference.vlm.named_parameters()) if isinstance(reference, Policy) else {}
    names = {id(p): name for name, p in policy.vlm.named_parameters()}

    def differs(p: Tensor) -> bool:
        return p.requires_grad or bool(theirs and not torch.equal(own_part(p), own_part(theirs[names[id(p)]])))

    found = [any(differs(p) for module in modules for p in module.parameters()) for modules in parts]
    differing = all_sum(torch.tensor(found, dtype=torch.float32, device=ranks.device), ranks).tolist()
    common = next((number for number, count in enumerate(differing) if count), len(differing)) - 1
    return None if common < 0 else common


def _reshard(*policies: Policy | BasePolicy) -> None:
    """A forward without gradient leaves the outermost parameters gathered."""
    for policy in policies:
        if isinstance(policy, FSDPModule):
            policy.reshard()


def _blocks(policy: Policy) -> Iterator[nn.Module]:
    yield from policy.vlm.model.visual.blocks
    yield from policy.vlm.model.language_model.layers
