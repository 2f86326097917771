"""The plan as text and as a JSON object: for a learner only, and for learner and engines."""

from __future__ import annotations

from math import ceil
from typing import Any

from learner.plan.duration import FLOAT32_TAKES, Speed, publication_time, step_time
from learner.plan.gpu_split import RunPlan, Workload, host_bytes
from learner.plan.memory_use import FP32, Setting, host_memory, memory, usable_bytes
from learner.plan.mesh_choice import choices
from learner.plan.suggestions import suggest, suggest_for_host
from shared.config.recipe import Recipe
from shared.families.model_sizes import ModelSizes

BEST = 3  # meshes that are shown
MANY_EPOCHS = 50  # of a run: more are told


# ---------------------------------------------------------------------- a learner alone


def report_learner(
    name: str,
    sizes: ModelSizes,
    setting: Setting,
    gpu_bytes: float,
    host_bytes: float = 0.0,
    speed: Speed | None = None,
    longest: int = 0,
) -> tuple[str, bool]:
    """Return a table as text, and whether the learner fits.

    `host_bytes`: memory of a node's host; 0: not checked. `longest`: tokens of the longest episode, 0 if unknown.
    """
    need = memory(sizes, setting)
    host = host_memory(sizes, setting)
    room = usable_bytes(gpu_bytes)
    parts = {"text": sizes.text_parameters, "vision": sizes.vision_parameters, "projector": sizes.projector_parameters}
    parts = {part: count for part, count in parts.items() if count}
    parts |= {"of the text, experts": sizes.expert_parameters} if sizes.num_experts else {}
    lines = [f"{name}: {sizes.parameters / 1e9:.3f} B parameters"]
    lines[0] += f" ({', '.join(f'{part} {count / 1e9:.3f}' for part, count in parts.items())})"
    lines.append(
        f"{setting.gpus} GPUs of {gpu_bytes / 1e9:.0f} GB, {setting.shards} a copy; "
        f"{setting.microbatch_tokens * setting.context} tokens a microbatch"
        + (f", {setting.visual_share:.0%} of them images" if sizes.vision_depth else "")
    )
    if setting.context > 1:
        lines[-1] += f"; {setting.context} GPUs share each"
    if setting.lora_rank:
        count = sizes.adapter_parameters(setting.lora_rank, setting.lora_targets)
        lines.append(f"adapters of rank {setting.lora_rank} for {', '.join(setting.lora_targets)}: {count / 1e6:.1f} M")
    lines += [f"  {kind:<12}{size / 1e9:>10.2f} GB" for kind, size in need.kinds.items()]
    lines.append(f"  {'total':<12}{need.total / 1e9:>10.2f} GB a rank, of {room / 1e9:.1f} that it may use")
    fits = need.total <= room
    lines.append("  fits" if fits else f"  does not fit: {suggest(sizes, setting, room, longest)}")
    parts_of_host = ", ".join(f"{kind} {size / 1e9:.1f}" for kind, size in host.kinds.items() if size)
    lines.append(f"host: {host.total / 1e9:.1f} GB a node of {setting.ranks_of_node} ranks ({parts_of_host})")
    if 0 < host_bytes < host.total:
        fits = False
        lines[-1] += f"; does not fit into {host_bytes / 1e9:.0f} GB: {suggest_for_host(sizes, setting, host_bytes)}"
    return "\n".join([*lines, *_learner_times(sizes, setting, speed or Speed())]), fits


def _learner_times(sizes: ModelSizes, setting: Setting, speed: Speed) -> list[str]:
    step, publication = step_time(sizes, setting, speed), publication_time(sizes, setting, speed)
    slower = f"; {FLOAT32_TAKES}" if setting.dtype_bytes == FP32 else ""
    gathered = f" after gathering {publication.gathered / 1e9:.1f} GB at {speed.gather:g} GB/s"
    return [
        f"a step: about {step.seconds:.1f} s, assuming {setting.episodes} episodes of {setting.episode_tokens} tokens "
        f"({step.flops:.2g} operations) at {speed.mfu:.0%} of {speed.tflops:g} TFLOP/s a GPU in bfloat16, none of them "
        f"waiting{slower}",
        f"a publication: about {publication.seconds:.1f} s, assuming {publication.sent / 1e9:.3g} GB sent at "
        f"{speed.wire:g} GB/s{gathered if publication.gathered else ''}",
    ]


def compare_meshes(name: str, sizes: ModelSizes, setting: Setting, longest: int, gpu_bytes: float, speed: Speed) -> str:
    """Return, as text, the best few meshes for a longest episode, and plain FSDP for comparison."""
    fitting = choices(sizes, setting, longest, usable_bytes(gpu_bytes), speed)
    lines = [f"{name}: episodes of up to {longest} tokens on {setting.gpus} GPUs of {gpu_bytes / 1e9:.0f} GB"]
    lines += [f"  {choice}" for choice in fitting[:BEST]] or ["  no mesh fits: use more GPUs, or offload"]
    if plain := next((c for c in fitting[BEST:] if c.setting.context == c.setting.expert == 1), None):
        lines.append(f"  with FSDP alone: {plain}")
    elif not any(c.setting.context == c.setting.expert == 1 for c in fitting):
        lines.append("  FSDP alone does not fit")
    return "\n".join(lines)


# ---------------------------------------------------------------------- learner and engines


def split_table(task: str, job: Workload, plan: RunPlan) -> list[str]:
    """Return lines of text about the GPUs of learner and engines and their use."""
    setting, engines, machine = plan.choice.setting, plan.engines, job.machine
    share = 1 - engines.mem_fraction if plan.shared else 1.0
    need = memory(job.sizes, setting)
    room = usable_bytes(share * machine.gpu_bytes)
    engine_gpus = "the same" if plan.shared else _gpus(plan.gpus - plan.ranks)
    host, of_host = host_bytes(job.sizes, setting, plan.copies_checkpoint), machine.host_of(plan.gpus)
    each = f"{engines.tensor_parallel} GPU{'s' * (engines.tensor_parallel > 1)} each"
    weights = engines.dtype_bytes * job.sizes.parameters / engines.tensor_parallel
    cache = engines.cache_tokens(job.sizes)
    return [
        f"{task}: {job.recipe.model.path} on {_gpus(plan.gpus).strip()} ({machine}); planned, nothing of it measured",
        "",
        f"  learner  {_gpus(plan.ranks)}  {_mesh(plan)}",
        f"                     {need.total / 1e9:.1f} of {room / 1e9:.1f} GB a GPU: {need}",
        f"  engines  {engine_gpus:>8}  {engines.count} of {each}, {plan.batch} episodes at once in each",
        f"                     {engines.mem_fraction:.0%} of its memory: weights {weights / 1e9:.1f} GB a GPU, room "
        f"for {cache:,} tokens of episodes",
        f"  host               {host / 1e9:.0f} of {of_host / 1e9:.0f} GB, for the learner's ranks on one host",
    ]


def _gpus(count: int) -> str:
    return f"{count:>3} GPU{'s' if count > 1 else ' '}"


def _mesh(plan: RunPlan) -> str:
    setting = plan.choice.setting
    parts = [f"FSDP over {setting.shards} ranks" if setting.shards > 1 else "one rank"]
    parts += [f"{setting.gpus // setting.shards} copies"] if setting.gpus > setting.shards else []
    parts += [f"{setting.context} ranks share a microbatch"] if setting.context > 1 else []
    parts += [f"experts dealt over {setting.expert}"] if setting.expert > 1 else []
    parts += ["activations computed again"] if setting.activation_checkpointing else []
    parts += ["its state offloaded to the host"] if setting.offload else []
    return ", ".join(parts)


def batch_lines(recipe: Recipe, tokens: int, rows: int | None) -> list[str]:
    """Return lines of text about the sizes of a step. `tokens`: of a mean episode, 0 if none is assumed."""
    learner = recipe.learner
    episodes = learner.groups_per_step * learner.group_size
    words = f"a step: {learner.groups_per_step} groups x {learner.group_size} episodes = {episodes} episodes"
    if tokens:
        words += f" x {tokens} tokens = {episodes * tokens / 1e6:.2f} M tokens (the mean episode is assumed)"
    plural = "s" * (recipe.most_turns > 1)
    lines = [
        words,
        f"an episode: at most {recipe.most_turns} turn{plural}, {recipe.most_tokens} sampled tokens, "
        f"{recipe.model.max_context} tokens in all",
        f"a version: {learner.publish.every} step{'s' * (learner.publish.every > 1)}; an episode is trained on at most "
        f"{learner.max_staleness} version{'s' * (learner.max_staleness != 1)} later",
    ]
    if recipe.tasks:
        lines.append(f"an epoch: {len(recipe.tasks)} tasks, each with samples of its own")
    elif recipe.data.source == "seeds":
        lines.append("an epoch: none, each sample is drawn from a seed")
    elif rows is None:
        lines.append("an epoch: known when the data is here")
    else:
        steps = rows / learner.groups_per_step
        words = f"an epoch: {rows} samples / {learner.groups_per_step} groups = {steps:.1f} steps"
        epochs = learner.total_steps / max(steps, 1e-9)
        words += f", the run: {epochs:.1f} epochs"
        if epochs > MANY_EPOCHS:
            fitting = max(1, round(MANY_EPOCHS * steps))
            words += f", which is a lot for so few samples: --learner.total_steps {fitting} makes {MANY_EPOCHS}"
        lines.append(words)
    return lines


def microbatches(plan: RunPlan) -> int:
    """Return the number of microbatches of a step on each rank."""
    setting = plan.choice.setting
    return ceil(setting.episodes * setting.episode_tokens / (setting.gpus * setting.microbatch_tokens))


def time_lines(job: Workload, plan: RunPlan, price: float | None) -> list[str]:
    """Return lines of text about seconds, hours, and dollars. `price`: per hour and GPU."""
    steps = job.recipe.learner.total_steps
    hours = plan.hours(steps)
    setting = plan.choice.setting
    shared = f" over {setting.context} ranks" if setting.context > 1 else ""
    working = f"the longer of learner {plan.learning:.1f} and engines {plan.generating:.1f}"
    if plan.shared:
        working = f"learner {plan.learning:.1f} and engine {plan.generating:.1f}, which share the GPU"
    lines = [
        f"microbatches: {microbatches(plan)} a rank of {setting.microbatch_tokens * setting.context} tokens{shared}",
        f"seconds of a step: {plan.seconds:.1f} = {working}, and {plan.publishing:.1f} for new weights",
        f"the run: {steps} steps and {plan.evaluating / 3600:.1f} hours of evaluations = {hours:.1f} hours, "
        f"{hours * plan.gpus:.0f} GPU hours",
    ]
    if price is not None:
        lines.append(f"cost: {hours * plan.gpus:.0f} GPU hours x ${price:g} = ${hours * plan.gpus * price:,.0f}")
    return lines


def as_record(
    task: str, job: Workload, plan: RunPlan, fields: dict[str, Any], rows: int | None, price: float | None
) -> dict[str, Any]:
    """Return the plan as JSON values: bytes, seconds, and the `fields` of the recipe that the plan sets."""
    learner, setting = job.recipe.learner, plan.choice.setting
    hours = plan.hours(learner.total_steps)
    return {
        "task": task,
        "model": job.recipe.model.path,
        "gpus": plan.gpus,
        "gpu": job.machine.kind,
        "gpu_gb": job.machine.gpu_bytes / 1e9,
        "learner_ranks": plan.ranks,
        "engines": plan.engines.count,
        "engine_shares_gpu": plan.shared,
        "engine_tensor_parallel": plan.engines.tensor_parallel,
        "bytes_of_rank": memory(job.sizes, setting).kinds,
        "bytes_of_host": host_bytes(job.sizes, setting, plan.copies_checkpoint),
        "episodes": setting.episodes,
        "episode_tokens": setting.episode_tokens,
        "microbatches_of_rank": microbatches(plan),
        "steps_of_epoch": None if rows is None else rows / learner.groups_per_step,
        "seconds": {
            "step": plan.seconds,
            "learner": plan.learning,
            "engines": plan.generating,
            "publish": plan.publishing,
        },
        "steps": learner.total_steps,
        "hours": hours,
        "dollars": None if price is None else hours * plan.gpus * price,
        "fields": fields,
        "notes": list(plan.notes),
    }
