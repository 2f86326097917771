"""What the plan sets in the recipe, and the commands that start it: on one host, or on several."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from launch.task_run.planning import MESH, Job, Plan
from launch.task_run.tasks import value_of
from shared.config import Recipe

KEYS = "--transport.keys keys --engine.api_key_file keys/engine.key"


def chosen_fields(job: Job, plan: Plan) -> dict[str, Any]:
    """Dotted field -> value, of those that the plan chooses and the recipe does not have already."""
    setting, engines, node = plan.choice.setting, plan.engines, job.machine.gpus_per_node
    fields: dict[str, Any] = {f"learner.parallel.{name}": getattr(setting, name) for name in MESH}
    fields |= {
        "engine.count": 1 if plan.shared else min(plan.gpus - plan.ranks, node) // engines.tensor_parallel,  # of a host
        "engine.shares_gpu": plan.shared,
        "engine.tensor_parallel": engines.tensor_parallel,
        "engine.mem_fraction": engines.mem_fraction,
        "engine.max_batch": engines.max_batch,
        "learner.checkpoint.in_background": plan.copies_checkpoint,
    }
    return changed(job.recipe, fields, job.given)


def changed(recipe: Recipe, fields: Mapping[str, Any], given: frozenset[str] = frozenset()) -> dict[str, Any]:
    """The fields whose value is another one than the recipe's, without those that the user has set."""
    return {name: value for name, value in fields.items() if name not in given and value != value_of(recipe, name)}


def as_options(fields: Mapping[str, Any]) -> list[str]:
    """As the words of a command line."""
    return [
        word
        for name, value in fields.items()
        for word in (f"--{name}", value if isinstance(value, str) else json.dumps(value))
    ]


def on_one_host(config: str, ranks: int, options: Sequence[str]) -> list[str]:
    """The arguments of launch/local.py."""
    return ["--config", config, *(["--ranks", str(ranks)] if ranks > 1 else []), *options]


def one_host(config: str, ranks: int, options: Sequence[str]) -> str:
    return shlex.join(["python", "launch/local.py", *on_one_host(config, ranks, options)])


def several_hosts(job: Job, plan: Plan, config: str, options: Sequence[str]) -> list[str]:
    """As docs/tutorials/cluster.md has them, by hand or by a scheduler; HOST is the first learner host, ADDRESS each
    engine host's own."""
    node, fields = job.machine.gpus_per_node, shlex.join(["--config", config, *options])
    nodes, engine_nodes = plan.ranks // node, (plan.gpus - plan.ranks) // node
    size = f"--cluster.learner_nodes {nodes} --cluster.engine_nodes {engine_nodes} --cluster.gpus_per_node {node}"
    joined = f" --nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint HOST:29500" if nodes > 1 else ""
    return [
        "python -m shared.keys keys && python -m shared.keys keys --engine",
        f"# on each learner host ({nodes})",
        f"torchrun{joined} --nproc-per-node {node} launch/learner.py {fields} --learner.bind tcp://0.0.0.0:5555 {KEYS}",
        f"# on each engine host ({engine_nodes})",
        f"python launch/actors.py {fields} --actor.learner tcp://HOST:5555 --engine.host ADDRESS {KEYS}",
        "# or all of them by slurm, ray, kubernetes or skypilot, with keys of their own",
        f"python launch/cluster.py submit --on slurm {fields} {size}",
    ]
