"""A policy's layout in memory: frozen parts, recomputed activations, compiled blocks, shards over ranks (FSDP2).

None of it changes the results, beyond rounding; frozen parts are simply not trained.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

from learner.batch.microbatch import Microbatch
from learner.distributed import Ranks, all_sum, own_part
from learner.model.adapt import adapt_to_compile, replace_forward
from learner.model.experts import check_experts, deal_experts, expert_stacks, sharding_mesh
from learner.model.lora_reference import BasePolicy
from learner.model.policy import LowerActivations, Policy, PolicyOutput
from shared.config.learner_section import LearnerConfig


def parallelize(policy: Policy, ranks: Ranks, config: LearnerConfig, dtype: torch.dtype) -> None:
    """Freeze, compile and shard `policy` as the recipe says, in place, on the ranks' device. Call it before the
    optimizer is made.

    The weights of an empty policy are loaded afterwards. The policy is sharded if there are several ranks, a dtype
    other than float32, or an offload.
    """
    if policy.family.is_recurrent and ranks.context.size > 1:
        raise ValueError(
            f"learner.parallel.context = {ranks.context.size}: the layers of {policy.family.title} hand a state from "
            "token to token, so that no rank could compute its part of an episode before the others; set it to 1"
        )
    freeze(policy, config.optimizer.freeze, config.optimizer.freeze_layers)
    if ranks.experts is not None:
        check_experts(policy.vlm, ranks.experts)
        deal_experts(policy.vlm, ranks.experts)
    if config.parallel.compile:
        compile_blocks(policy)
    # Around the compiled block: a graph cannot contain a checkpoint whose code leaves the graph.
    if config.parallel.activation_checkpointing:
        for block in _blocks(policy):
            replace_forward(block, partial(checkpoint, block.forward, use_reentrant=False))
    if ranks.size > 1 or dtype != torch.float32 or config.parallel.offload:
        shard(policy, ranks, dtype, offload=config.parallel.offload)
    elif not any(p.is_meta for p in policy.parameters()):
        policy.to(ranks.device)


@torch.no_grad()
def forward_only(
    policy: Policy | BasePolicy,
    batch: Microbatch,
    temperature: float,
    lower: LowerActivations | None = None,
    *,
    return_lower: int | None = None,
    label_threshold: float | None = None,
) -> PolicyOutput:
    """Run a forward that no backward follows, then free the gathered parameters: the outermost ones of a sharded policy
    would stay gathered, in `dtype`."""
    output: PolicyOutput = policy(batch, temperature, lower, return_lower=return_lower, label_threshold=label_threshold)
    model = policy.policy if isinstance(policy, BasePolicy) else policy
    if isinstance(model, FSDPModule):
        model.reshard()
    return output


def freeze(policy: Policy, parts: tuple[str, ...], layers: int = 0) -> None:
    """Exclude parts from training: `vision` (the tower), `projector` (which merges its patches into tokens), or the
    first `layers` decoder layers with the embeddings."""
    text = policy.decoder
    if layers > len(text.layers):
        raise ValueError(f"learner.optimizer.freeze_layers = {layers}: the model has {len(text.layers)}; lower it")
    for module in (text.embed_tokens, *text.layers[:layers]) if layers else ():
        module.requires_grad_(False)
    visual = policy.tower
    if visual is None:
        if parts:
            why = f"{policy.family.title} models have no vision tower"
            raise ValueError(f"learner.optimizer.freeze = {[*parts]}: {why}; leave it out")
        return
    mergers = {id(p) for name, p in visual.named_parameters() if policy.family.is_projector(name)}
    for p in visual.parameters():
        if ("projector" if id(p) in mergers else "vision") in parts:
            p.requires_grad_(False)


def compile_blocks(policy: Policy) -> None:
    """Compile each decoder layer and vision block; attention and dealt experts stay outside of the graphs."""
    adapt_to_compile(policy.vlm)
    for block in _blocks(policy):
        replace_forward(block, torch.compile(block.forward, dynamic=True))


def shard(policy: Policy, ranks: Ranks, dtype: torch.dtype, *, offload: bool = False) -> None:
    """Shard by FSDP2, in place: each decoder layer and vision block, the value head (float32), and the rest.

    Parameters and gradients are float32 (parameters that adapters freeze are in `dtype`); forward and backward run in
    `dtype`. Gradients are summed over ranks. A mesh of two dimensions replicates over the first and shards over the
    second. `offload`: sharded parameters, their gradients and their optimizer state are in CPU memory. Of experts that
    are dealt over ranks, each one's rows are sharded over the ranks that hold the same experts.
    """
    mesh = ranks.mesh
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    pinned = mesh.device_type == "cuda"
    offload_policy = CPUOffloadPolicy(pin_memory=pinned) if offload else OffloadPolicy()
    if ranks.experts is not None:
        cut = partial(fully_shard, mesh=sharding_mesh(ranks.experts), shard_placement_fn=lambda _: Shard(1))
        for stack in expert_stacks(policy.vlm):
            cut(stack, mp_policy=precision, offload_policy=offload_policy)
    for block in _blocks(policy):
        fully_shard(block, mesh=mesh, mp_policy=precision, offload_policy=offload_policy)
    in_float32 = MixedPrecisionPolicy(cast_forward_inputs=False)
    fully_shard(policy.value_head, mesh=mesh, mp_policy=in_float32, offload_policy=offload_policy)
    fully_shard(policy, mesh=mesh, mp_policy=precision, offload_policy=offload_policy)
    policy.dtype = dtype
    if policy.tower is not None:
        policy.tower.patch_embed.compute_dtype = dtype
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def add_up_replicas(policy: Policy, ranks: Ranks, *, now: bool) -> None:
    """Set, before a backward, whether replicas sum their gradients in it, including those accumulated since their last
    sum. Gradients are summed over the shards of a replica in every backward."""
    if ranks.replicas > 1 and isinstance(policy, FSDPModule):
        policy.set_requires_all_reduce(now)


@torch.no_grad()
def copy_weights(source: Policy, target: Policy) -> None:
    """Copy the language model's weights into a policy that is sharded over the ranks in the same way."""
    _reshard(source, target)
    for source_weight, target_weight in zip(source.vlm.parameters(), target.vlm.parameters(), strict=True):
        target_weight.copy_(source_weight)


@torch.no_grad()
def layers_alike(policy: Policy, reference: Policy | BasePolicy, ranks: Ranks) -> int | None:
    """Return how many first decoder layers the policy and its reference share for the whole training. A collective.

    Shared layers, and with them the embeddings and the tower, are frozen and bitwise equal. 0: only the tower is
    shared; None: nothing is. The last layer is never shared. Of a policy with adapters, at most the tower is shared;
    likewise if it has experts, whose loads are counted while the policy computes them.
    """
    visual, text = policy.tower, policy.decoder
    _reshard(policy, reference)
    parts: list[list[nn.Module]] = [[] if visual is None else [visual]]
    if isinstance(reference, Policy) and not any(True for _ in expert_stacks(policy.vlm)):
        parts += [[text.embed_tokens, layer] if not index else [layer] for index, layer in enumerate(text.layers[:-1])]
    theirs = dict(reference.vlm.named_parameters()) if isinstance(reference, Policy) else {}
    names = {id(p): name for name, p in policy.vlm.named_parameters()}

    def differs(p: Tensor) -> bool:
        return p.requires_grad or bool(theirs and not torch.equal(own_part(p), own_part(theirs[names[id(p)]])))

    differing_parts = [any(differs(p) for module in modules for p in module.parameters()) for modules in parts]
    differing = all_sum(torch.tensor(differing_parts, dtype=torch.float32, device=ranks.device), ranks).tolist()
    common = next((number for number, count in enumerate(differing) if count), len(differing)) - 1
    return None if common < 0 else common


def _reshard(*policies: Policy | BasePolicy) -> None:
    """Free the outermost parameters, which a forward without gradient leaves gathered."""
    for policy in policies:
        if isinstance(policy, FSDPModule):
            policy.reshard()


def _blocks(policy: Policy) -> Iterator[nn.Module]:
    yield from () if policy.tower is None else policy.tower.blocks
    yield from policy.decoder.layers
