"""Which model on what hardware, by the plan: writes the page docs/figures/hardware.md.

python -m launch.task_run.hardware docs/figures/hardware.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launch.diagnosis.miniature import with_values
from launch.task_run.machines import KINDS, Machine, machine
from launch.task_run.planning import Job, Plan, fits, plan
from launch.task_run.tasks import recipe_of
from learner.model.sizes import PUBLISHED, find
from shared.config import Recipe, fail, load_recipe

CARDS = ("rtx4090", "h100", "h200")
TASKS = ("geo3k_multi_turn", "geo3k_multi_turn_thinking")
ONE_GPU, SMALL = "geo3k_multi_turn_one_gpu", ("Qwen3-VL-2B", "Qwen3-VL-4B", "Qwen3-VL-8B")
COUNTS = (2, 4, 6, 8, 16, 24, 32, 48, 64)
HEAD = """# Which model on which hardware

Planned, not measured: `python -m launch.task_run.hardware docs/figures/hardware.md` writes this page, from the same
plan that [`launch/run.py`](../how-to/run-a-task.md) makes. One [step](gpu.md) has been measured.

Each line is the smallest number of GPUs on which the task fits while the learner's state stays on the GPUs, learner and
engines together; *offloaded* lines have room for it only in the host's memory, which is slow. The mesh is
the learner's; `engines` are so many, of so many GPUs each. A step trains on 512 episodes of 4,096 tokens in the first
table, on 256 of 16,384 in the second: halves of the longest context, which is assumed. More GPUs make it shorter:
`python launch/run.py TASK --model MODEL --gpus N --gpu KIND --dry-run` says how much.
"""


def page() -> str:
    parts = [HEAD]
    for task in TASKS:
        recipe = load_recipe(str(recipe_of(task)))
        parts += [f"\n## {task}: episodes of up to {recipe.model.max_context:,} tokens\n"]
        parts += ["\n| model | GPU | GPUs | learner | engines | mesh | GB a GPU | s a step |\n", f"|{'---|' * 8}\n"]
        for base in (base for base in PUBLISHED if base.startswith("Qwen3")):
            parts += [f"| {base} | {_card(kind)} | {_row(recipe, base, machine(kind))} |\n" for kind in CARDS]
    parts += _of_one_gpu()
    parts.append("\n## What is assumed of a GPU\n\n")
    parts += [
        "| | memory | TFLOP/s in bfloat16 | its own memory, GB/s | to GPUs of its host, GB/s | to others, GB/s |\n"
    ]
    parts += [f"|{'---|' * 6}\n"]
    parts += [
        f"| {kind} | {gb} GB | {speed.tflops:g} | {speed.hbm:g} | {speed.node:g} | {speed.net:g} |\n"
        for kind, (gb, _, speed) in KINDS.items()
    ]
    parts.append(
        "\nOf these a step uses 30 % of the operations and generation 40 % of the memory's speed. A host has 8 GPUs, "
        f"and for each {', '.join(f'{host} GB ({kind})' for kind, (_, host, _) in KINDS.items())} of memory.\n"
    )
    return "".join(parts)


def _of_one_gpu() -> Iterator[str]:
    """The learner and one engine share a card."""
    recipe = load_recipe(str(recipe_of(ONE_GPU)))
    yield f"\n## {ONE_GPU}: episodes of up to {recipe.model.max_context:,} tokens\n\n"
    yield "A learner and an engine [share one GPU](../tutorials/one-gpu.md). A step trains on 128 episodes of 2,048 "
    yield "tokens.\n\n"
    yield "| model | GPU | trained | learner, GB | engine, GB | episodes at once | s a step |\n"
    yield f"|{'---|' * 7}\n"
    for base in SMALL:
        for kind in ("rtx4090", "a100"):
            for rank in (None, recipe.learner.lora.rank):
                trained = f"adapters of rank {rank}" if rank else "all weights"
                fields = {"model.path": base, "learner.lora.rank": rank}
                yield f"| {base} | {_card(kind)} | {trained} | {_shared_row(recipe, fields, machine(kind))} |\n"


def _shared_row(recipe: Recipe, fields: dict[str, Any], host: Machine) -> str:
    base = fields["model.path"]
    job = Job(with_values(recipe, fields), find(base), host)
    if not fits(job, 1):
        return "does not fit | | | "
    found = plan(job, 1)
    own = f"{found.choice.bytes_of_rank / 1e9:.1f}" + (" *offloaded*" if found.choice.setting.offload else "")
    engine = f"{found.engines.mem_fraction * host.gpu_bytes / 1e9:.0f}"
    return f"{own} | {engine} | {found.batch} | {found.seconds:.0f}"


def _card(kind: str) -> str:
    return f"{KINDS[kind][0]} GB ({kind})"


def _row(recipe: Recipe, base: str, host: Machine) -> str:
    job = Job(with_values(recipe, {"model.path": base}), find(base), host)
    found = next(_fewest(job), None)
    if found is None:
        return f"not up to {COUNTS[-1]} | | | | | "
    setting, engines = found.choice.setting, found.engines
    mesh = [f"context {setting.context}"] if setting.context > 1 else []
    mesh += [f"expert {setting.expert}"] if setting.expert > 1 else []
    mesh += ["checkpointing"] if setting.activation_checkpointing else []
    mesh += ["*offloaded*"] if setting.offload else []
    parts = [
        f"{found.gpus}",
        f"{found.ranks}",
        f"{engines.count} x {engines.tensor_parallel}",
        ", ".join(mesh) or "FSDP",
    ]
    return " | ".join([*parts, f"{found.choice.bytes_of_rank / 1e9:.0f}", f"{found.seconds:.0f}"])


def _fewest(job: Job) -> Iterator[Plan]:
    for offload in (False, True):
        yield from (plan(job, gpus) for gpus in COUNTS if fits(job, gpus, offload=offload))


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    if len(words) != 1:
        return fail(ValueError("name the file to write: docs/figures/hardware.md"))
    Path(words[0]).write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
