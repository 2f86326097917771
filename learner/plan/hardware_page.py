"""The page docs/figures/hardware.md: which model fits which hardware, by the plan."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from learner.plan.gpu_split import RunPlan, Workload, fits, plan
from learner.plan.machines import GPU_KINDS, Machine, machine
from shared.config.recipe import Recipe, load_recipe
from shared.families.registry import PUBLISHED, find_sizes

RECIPES = Path(__file__).parents[2] / "launch" / "recipes"
CARDS = ("rtx4090", "h100", "h200")
TASKS = ("geo3k_multi_turn", "geo3k_multi_turn_thinking")
ONE_GPU, SMALL = "geo3k_multi_turn_one_gpu", ("Qwen3-VL-2B", "Qwen3-VL-4B", "Qwen3-VL-8B")
COUNTS = (2, 4, 6, 8, 16, 24, 32, 48, 64)
HEAD = """# Which model on which hardware

Planned, not measured: `python -m learner.plan --page docs/figures/hardware.md` writes this page, from the same
plan that [`launch/run.py`](../how-to/run-a-task.md) makes. One [step](gpu.md) has been measured.

Each line is the smallest number of GPUs on which the task fits while the learner's state stays on the GPUs, learner and
engines together; *offloaded* lines have room for it only in the host's memory, which is slow. The mesh is
the learner's; `engines` are so many, of so many GPUs each. A step trains on 512 episodes of 4,096 tokens in the first
table, on 256 of 16,384 in the second: halves of the longest context, which is assumed. More GPUs make it shorter:
`python launch/run.py TASK --model MODEL --gpus N --gpu KIND --dry-run` says how much.
"""


def _recipe(task: str, model: str = "", rank: int | None = None) -> Recipe:
    """Return a shipped recipe, with the model and the rank of adapters replaced if `model` is given."""
    fields = ["--model.path", model, "--learner.lora.rank", str(rank or "null")] if model else []
    return load_recipe(str(RECIPES / f"{task}.toml"), fields)


def page() -> str:
    """Return the page's text, planned from the shipped recipes."""
    parts = [HEAD]
    for task in TASKS:
        recipe = _recipe(task)
        parts += [f"\n## {task}: episodes of up to {recipe.model.max_context:,} tokens\n"]
        parts += ["\n| model | GPU | GPUs | learner | engines | mesh | GB a GPU | s a step |\n", f"|{'---|' * 8}\n"]
        for base in (base for base in PUBLISHED if base.startswith("Qwen3") and PUBLISHED[base].vision_depth):
            parts += [
                f"| {base} | {_card(kind)} | {_row(_recipe(task, base), base, machine(kind))} |\n" for kind in CARDS
            ]
    parts += _of_one_gpu()
    parts.append("\n## What is assumed of a GPU\n\n")
    parts += [
        "| | memory | TFLOP/s in bfloat16 | its own memory, GB/s | to GPUs of its host, GB/s | to others, GB/s |\n"
    ]
    parts += [f"|{'---|' * 6}\n"]
    parts += [
        f"| {kind} | {gb} GB | {speed.tflops:g} | {speed.hbm:g} | {speed.node:g} | {speed.net:g} |\n"
        for kind, (gb, _, speed) in GPU_KINDS.items()
    ]
    parts.append(
        "\nOf these a step uses 30 % of the operations and generation 40 % of the memory's speed. A host has 8 GPUs, "
        f"and for each {', '.join(f'{host} GB ({kind})' for kind, (_, host, _) in GPU_KINDS.items())} of memory.\n"
    )
    return "".join(parts)


def _of_one_gpu() -> Iterator[str]:
    """Yield the page's part about one GPU that the learner and an engine share."""
    recipe = _recipe(ONE_GPU)
    yield f"\n## {ONE_GPU}: episodes of up to {recipe.model.max_context:,} tokens\n\n"
    yield "A learner and an engine [share one GPU](../tutorials/one-gpu.md). A step trains on 128 episodes of 2,048 "
    yield "tokens.\n\n"
    yield "| model | GPU | trained | learner, GB | engine, GB | episodes at once | s a step |\n"
    yield f"|{'---|' * 7}\n"
    for base in SMALL:
        for kind in ("rtx4090", "a100"):
            for rank in (None, recipe.learner.lora.rank):
                trained = f"adapters of rank {rank}" if rank else "all weights"
                row = _shared_row(_recipe(ONE_GPU, base, rank), base, machine(kind))
                yield f"| {base} | {_card(kind)} | {trained} | {row} |\n"


def _shared_row(recipe: Recipe, base: str, host: Machine) -> str:
    """Return the table cells for one GPU that a learner and an engine share."""
    job = Workload(recipe, find_sizes(base), host)
    if not fits(job, 1):
        return "does not fit | | | "
    chosen = plan(job, 1)
    learner = f"{chosen.choice.bytes_of_rank / 1e9:.1f}" + (" *offloaded*" if chosen.choice.setting.offload else "")
    engine = f"{chosen.engines.mem_fraction * host.gpu_bytes / 1e9:.0f}"
    return f"{learner} | {engine} | {chosen.batch} | {chosen.seconds:.0f}"


def _card(kind: str) -> str:
    return f"{GPU_KINDS[kind][0]} GB ({kind})"


def _row(recipe: Recipe, base: str, host: Machine) -> str:
    """Return the table cells for the fewest GPUs on which a model fits."""
    job = Workload(recipe, find_sizes(base), host)
    fewest = next(_fewest(job), None)
    if fewest is None:
        return f"not up to {COUNTS[-1]} | | | | | "
    setting, engines = fewest.choice.setting, fewest.engines
    mesh = [f"context {setting.context}"] if setting.context > 1 else []
    mesh += [f"expert {setting.expert}"] if setting.expert > 1 else []
    mesh += ["checkpointing"] if setting.activation_checkpointing else []
    mesh += ["*offloaded*"] if setting.offload else []
    parts = [
        f"{fewest.gpus}",
        f"{fewest.ranks}",
        f"{engines.count} x {engines.tensor_parallel}",
        ", ".join(mesh) or "FSDP",
    ]
    return " | ".join([*parts, f"{fewest.choice.bytes_of_rank / 1e9:.0f}", f"{fewest.seconds:.0f}"])


def _fewest(job: Workload) -> Iterator[RunPlan]:
    for offload in (False, True):
        yield from (plan(job, gpus) for gpus in COUNTS if fits(job, gpus, offload=offload))
