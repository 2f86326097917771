"""The plan in words, for a person, and as one JSON object."""

from __future__ import annotations

from math import ceil
from typing import Any

from launch.task_run.commands import chosen_fields
from launch.task_run.planning import Job, Plan, host_bytes
from learner.model.memory import memory
from learner.plan import RESERVED_FRACTION
from shared.config import Recipe


def table(task: str, job: Job, plan: Plan) -> list[str]:
    """Who has which GPUs, and what for."""
    setting, engines, machine = plan.choice.setting, plan.engines, job.machine
    share = 1 - engines.mem_fraction if plan.shared else 1.0
    need, room = memory(job.sizes, setting), share * machine.gpu_bytes * (1 - RESERVED_FRACTION)
    own = "the same" if plan.shared else _gpus(plan.gpus - plan.ranks)
    kinds = ", ".join(f"{kind} {size / 1e9:.1f}" for kind, size in need.kinds.items() if size >= 5e7)
    host, of_host = host_bytes(job.sizes, setting, plan.copies_checkpoint), machine.host_of(plan.gpus)
    each = f"{engines.tensor_parallel} GPU{'s' * (engines.tensor_parallel > 1)} each"
    weights = engines.dtype_bytes * job.sizes.parameters / engines.tensor_parallel
    cache = engines.cache_tokens(job.sizes)
    return [
        f"{task}: {job.recipe.model.path} on {_gpus(plan.gpus).strip()} ({machine}); planned, nothing of it measured",
        "",
        f"  learner  {_gpus(plan.ranks)}  {_mesh(plan)}",
        f"                     {need.total / 1e9:.1f} of {room / 1e9:.1f} GB a GPU: {kinds}",
        f"  engines  {own:>8}  {engines.count} of {each}, {plan.batch} episodes at once in each",
        f"                     {engines.mem_fraction:.0%} of its memory: weights {weights / 1e9:.1f} GB a GPU, room "
        f"for {cache:,} tokens of episodes",
        f"  host               {host / 1e9:.0f} of {of_host / 1e9:.0f} GB for the learner's ranks of one",
    ]


def _gpus(count: int) -> str:
    return f"{count:>3} GPU{'s' if count > 1 else ' '}"


def _mesh(plan: Plan) -> str:
    setting = plan.choice.setting
    parts = [f"FSDP over {setting.shards} ranks" if setting.shards > 1 else "one rank"]
    parts += [f"{setting.gpus // setting.shards} copies"] if setting.gpus > setting.shards else []
    parts += [f"{setting.context} ranks share a microbatch"] if setting.context > 1 else []
    parts += [f"experts dealt over {setting.expert}"] if setting.expert > 1 else []
    parts += ["activations computed again"] if setting.activation_checkpointing else []
    parts += ["its state offloaded to the host"] if setting.offload else []
    return ", ".join(parts)


def batch(recipe: Recipe, tokens: int, rows: int | None) -> list[str]:
    """The arithmetic of a step. `tokens`: of a mean episode, 0 where nothing is assumed."""
    learner, env = recipe.learner, recipe.env
    episodes = learner.groups_per_step * learner.group_size
    words = f"a step: {learner.groups_per_step} groups x {learner.group_size} episodes = {episodes} episodes"
    if tokens:
        words += f" x {tokens} tokens = {episodes * tokens / 1e6:.2f} M tokens (the mean episode is assumed)"
    plural = "s" * (env.max_turns > 1)
    lines = [
        words,
        f"an episode: at most {env.max_turns} turn{plural}, {env.max_tokens} sampled tokens, "
        f"{recipe.model.max_context} tokens in all",
        f"a version: {learner.publish.every} step{'s' * (learner.publish.every > 1)}; an episode is trained on at most "
        f"{learner.max_staleness} version{'s' * (learner.max_staleness != 1)} later",
    ]
    if recipe.data.source == "seeds":
        lines.append("an epoch: none, each sample is drawn from a seed")
    elif rows is None:
        lines.append("an epoch: known when the data is here")
    else:
        steps = rows / learner.groups_per_step
        lines.append(f"an epoch: {rows} samples / {learner.groups_per_step} groups = {steps:.1f} steps")
    return lines


def microbatches(plan: Plan) -> int:
    """Of a step, on each rank."""
    setting = plan.choice.setting
    return ceil(setting.episodes * setting.episode_tokens / (setting.gpus * setting.microbatch_tokens))


def times(job: Job, plan: Plan, price: float | None) -> list[str]:
    """Seconds, hours, and dollars at a price an hour and GPU."""
    steps, hours, setting = (
        job.recipe.learner.total_steps,
        plan.hours(job.recipe.learner.total_steps),
        plan.choice.setting,
    )
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


def as_record(task: str, job: Job, plan: Plan, rows: int | None, price: float | None) -> dict[str, Any]:
    """For programs: bytes, seconds, and the fields that the plan sets."""
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
        "fields": chosen_fields(job, plan),
        "notes": list(plan.notes),
    }
