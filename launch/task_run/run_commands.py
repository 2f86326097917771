"""The recipe fields that a plan sets, and the commands that start a run on one host or on several."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch.catalog import RECIPES
from launch.recipe_fields import changed_fields
from learner.plan.gpu_split import RunPlan, Workload
from shared.util.own_commands import command, is_installed

LEARNER = '"$(pronk --root)/launch/learner.py"' if is_installed() else "launch/learner.py"
LEARNER = '"$(pronk --root)/launch/learner.py"' if is_installed() else "launch/learner.py"
KEYS = "--transport.keys keys --engine.api_key_file keys/engine.key"


def chosen_fields(job: Workload, plan: RunPlan) -> dict[str, Any]:
    """Return the fields, with values, that the plan changes in the recipe."""
    return changed_fields(job.recipe, plan.fields(job.machine.gpus_per_node), job.given)


def on_one_host(config: str, ranks: int, options: Sequence[str]) -> list[str]:
    """Return the arguments of launch/local.py."""
    return ["--config", config, *(["--ranks", str(ranks)] if ranks > 1 else []), *options]


def one_host(config: str, ranks: int, options: Sequence[str]) -> str:
    """Return the command that starts everything on one host."""
    return f"{command('local')} {shlex.join(on_one_host(as_given(config), ranks, options))}"


def as_given(config: str) -> str:
    """Return a recipe as a person gives it: of an installed Pronk, a shipped one by its name."""
    path = Path(config)
    return path.stem if is_installed() and path.resolve().parent == RECIPES.resolve() else config


def several_hosts(job: Workload, plan: RunPlan, config: str, options: Sequence[str]) -> list[str]:
    """Return the commands that start everything on several hosts, by hand or by a scheduler, as in
    docs/tutorials/cluster.md; HOST is the first learner host, ADDRESS each engine host's own."""
    node, fields = job.machine.gpus_per_node, shlex.join(["--config", as_given(config), *options])
    nodes, engine_nodes = plan.ranks // node, (plan.gpus - plan.ranks) // node
    size = f"--cluster.learner_nodes {nodes} --cluster.engine_nodes {engine_nodes} --cluster.gpus_per_node {node}"
    joined = f" --nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint HOST:29500" if nodes > 1 else ""
    return [
        f"{command('keys')} keys && {command('keys')} keys --engine",
        f"# on each learner host ({nodes})",
        f"torchrun{joined} --nproc-per-node {node} {LEARNER} {fields} --learner.bind tcp://0.0.0.0:5555 {KEYS}",
        f"# on each engine host ({engine_nodes})",
        f"{command('actors')} {fields} --actor.learner tcp://HOST:5555 --engine.host ADDRESS {KEYS}",
        "# or all of them by slurm, ray, kubernetes or skypilot, with keys of their own",
        f"{command('cluster')} submit --on slurm {fields} {size}",
    ]
