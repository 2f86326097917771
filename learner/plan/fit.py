"""A check whether a learner fits its GPUs, only from a recipe and a model's sizes: no weights, no GPU."""

from __future__ import annotations

import json
from pathlib import Path

from learner.plan.divisors import check_deal
from learner.plan.memory_use import DTYPE_BYTES, GpuMemory, Setting, memory, usable_bytes
from learner.plan.suggestions import suggest
from shared.config.recipe import Recipe
from shared.families.model_sizes import ModelSizes
from shared.families.registry import sizes_of


def check_fits(sizes: ModelSizes, setting: Setting, gpu_bytes: float, name: str, longest: int = 0) -> GpuMemory:
    """Return the bytes of a rank. Raise ValueError, with the numbers and a suggestion, if they do not fit.

    `longest`: tokens of the longest episode, 0 if unknown.
    """
    need = memory(sizes, setting)
    room = usable_bytes(gpu_bytes)
    if need.total > room:
        raise ValueError(
            f"{name} does not fit: a rank needs {need.total / 1e9:.1f} GB ({need}), a GPU of {gpu_bytes / 1e9:.0f} GB "
            f"has room for {room / 1e9:.1f}; {suggest(sizes, setting, room, longest)}"
        )
    return need


def check_recipe(recipe: Recipe, num_ranks: int, gpu_bytes: float | None) -> None:
    """Raise ValueError, before anything is loaded, if the context is longer than the model's, the experts cannot be
    dealt as asked, or, with `gpu_bytes`, the learner does not fit. A model with unknown sizes passes."""
    file = Path(path := recipe.model.path) / "config.json"
    config = json.loads(file.read_text()) if file.exists() else {}
    sizes = sizes_of(config)
    if sizes is None:
        return
    check_context("model.max_context", recipe.model.max_context, path, sizes)
    shards = recipe.learner.parallel.shard_size or num_ranks
    check_experts(config["model_type"], sizes, recipe.learner.parallel.expert, shards)
    if gpu_bytes is not None:
        check_fits(sizes, setting_of(recipe, num_ranks, gpu_bytes), gpu_bytes, path, recipe.model.max_context)


def check_experts(name: str, sizes: ModelSizes, expert: int, shards: int) -> None:
    """Raise ValueError if the experts cannot be dealt over `expert` of the `shards` ranks that share a copy.

    A number of ranks that `expert` does not divide is refused elsewhere; then the rest is checked without that number.
    """
    if expert > 1:
        ranks = shards if shards % expert == 0 else expert
        check_deal(expert, name, sizes.num_experts, sizes.expert_rows, ranks)


def check_context(field: str, tokens: int, name: str, sizes: ModelSizes) -> None:
    """Raise ValueError if `field` asks for more tokens than the model's context has."""
    if tokens > sizes.max_context:
        raise ValueError(
            f"{field} = {tokens} is longer than the context of {name}, which is {sizes.max_context} tokens; set it to "
            f"{sizes.max_context} at most"
        )


def setting_of(recipe: Recipe, num_ranks: int, gpu_bytes: float) -> Setting:
    """Return the setting of a recipe's run on so many GPUs. A microbatch's ranks must have room for the longest
    episode."""
    objective, optimizer, parallel = recipe.learner.objective, recipe.learner.optimizer, recipe.learner.parallel
    longest = -(-recipe.model.max_context // parallel.context)
    return Setting(
        gpus=num_ranks,
        shard_size=parallel.shard_size,
        dtype_bytes=DTYPE_BYTES[recipe.model.dtype],
        context=parallel.context,
        expert=parallel.expert,
        microbatch_tokens=max(parallel.microbatch_tokens, longest),
        logits_bytes=0.1 * gpu_bytes,
        activation_checkpointing=parallel.activation_checkpointing,
        offload=parallel.offload,
        reference=objective.has_reference or bool(objective.teacher_folder),
        optimizer=optimizer.name,
        freeze=optimizer.freeze,
        freeze_layers=optimizer.freeze_layers,
        lora_rank=recipe.learner.lora.rank or 0,
        lora_targets=recipe.learner.lora.targets,
        lora_publish=recipe.learner.lora.publish,
        episodes=recipe.learner.groups_per_step * recipe.learner.group_size,
        episode_tokens=recipe.model.max_context // 2,
        passes=objective.passes,
        deals=objective.passes + 1 if objective.minibatches > 1 else 1,
        steps_held=(recipe.learner.max_staleness + 1) * recipe.learner.publish.every,
        copies_checkpoint=recipe.learner.checkpoint.in_background,
    )
