"""Plans a request, shows the plan, and starts the run."""

from __future__ import annotations

import argparse
import difflib
import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch.catalog import tasks
from launch.doctor_checks.hardware import Gpu, available_bytes, gpus_here
from launch.engines.host_engines import check_host
from launch.engines.kinds.sglang_engine import setup_command, sglang_folder
from launch.recipe_fields import save_recipe
from launch.task_run.downloads import check_data, download_command, fetch
from launch.task_run.run_commands import chosen_fields, on_one_host, one_host, several_hosts
from launch.task_run.run_request import SOKOBAN, RunRequest
from learner.plan import plan_report
from learner.plan.gpu_split import Workload, fewest, plan
from learner.plan.machines import ASSUMED_KIND, Machine, machine, machine_like
from shared.config.recipe import ConfigError
from shared.util.own_commands import command


def run_on_cpu(request: RunRequest, options: argparse.Namespace) -> int:
    """Run a small task on this machine's CPU: one engine beside one learner; return the exit code."""
    recipe = request.recipe
    words = f"{request.sizes.parameters / 1e6:.1f} M parameters, the {recipe.engine.kind} engine, no GPU"
    lines = [
        f"{request.task}: {recipe.model.path} on this machine's CPU",
        "",
        f"  one learner, one engine, actor processes: {recipe.actor.processes}; {words}",
        "",
        *plan_report.batch_lines(recipe, 0, request.data.num_rows()),
        f"the run: {recipe.learner.total_steps} steps; how long one takes is not planned on a CPU",
    ]
    record: dict[str, Any] = {
        "task": request.task,
        "model": recipe.model.path,
        "gpus": 0,
        "steps": recipe.learner.total_steps,
    }
    _save(request, options)
    _show(lines, record, request.notes, options)
    return _finish(request, options, 1, [one_host(*_start(request, options, 1))])


def run_on_gpus(request: RunRequest, options: argparse.Namespace) -> int:
    """Run a task on this machine's GPUs, or only plan it for any number and kind of GPUs; return the exit code."""
    here = gpus_here()
    if not options.dry_run:
        _check_machine(request, options, here)
    count = options.gpus or len(here)
    job = Workload(request.recipe, request.sizes, _machine(options, here), request.given, options.episode_tokens)
    if not count:
        least = fewest(job)
        room = f"; there is room on {least} or more ({job.machine})" if least else ""
        raise ConfigError(f"--dry-run on a machine without a GPU: say how many with --gpus N{room}")
    chosen = plan(job, count)
    fields = chosen_fields(job, chosen)
    made = request.with_fields(fields)
    rows = request.data.num_rows()
    lines = plan_report.split_table(request.task, job, chosen)
    lines += ["", *plan_report.batch_lines(made.recipe, job.mean_tokens, rows)]
    lines += plan_report.time_lines(job, chosen, options.price)
    record = plan_report.as_record(request.task, job, chosen, fields, rows, options.price)
    _save(made, options)
    _show(lines, record, [*request.notes, *chosen.notes], options)
    config, ranks, words = _start(made, options, chosen.ranks)
    if count > job.machine.gpus_per_node:
        commands = several_hosts(job, chosen, config, words)
    else:
        commands = [one_host(config, ranks, words)]
    return _finish(made, options, chosen.ranks, commands)


def _check_machine(request: RunRequest, options: argparse.Namespace, here: Sequence[Gpu]) -> None:
    """Raise ConfigError if the run cannot be started from this machine."""
    if options.gpus > options.gpus_per_node:
        raise ConfigError(
            f"--gpus {options.gpus}: several hosts of {options.gpus_per_node} need a cluster, where torchrun "
            "launch/learner.py and launch/actors.py start them (docs/tutorials/cluster.md; --dry-run shows both)"
        )
    if not here:
        raise ConfigError(
            f"{request.task} needs GPUs, and there are none here: --dry-run shows the plan, and "
            f"{_tiny(request.task)} runs without"
        )
    if options.gpus > len(here):
        raise ConfigError(f"--gpus {options.gpus}: this machine has {len(here)}")


def _tiny(task: str) -> str:
    """Return the small task whose name is nearest."""
    stem = re.sub("_(thinking|long|one_gpu|vagen)$", "", task)
    small = [name for name in tasks() if name.endswith("_tiny")]
    return difflib.get_close_matches(f"{stem}_tiny", small, n=1, cutoff=0.0)[0]


def _machine(options: argparse.Namespace, here: Sequence[Gpu]) -> Machine:
    """Return the description of this machine, or of the one that the options describe."""
    if here and not options.gpu:
        smallest = min(gpu.num_bytes for gpu in here)
        return machine_like(here[0].name, smallest, available_bytes() or 0, options.gpus_per_node)
    return machine(options.gpu or ASSUMED_KIND, options.gpu_memory, options.host_memory, options.gpus_per_node)


def _save(request: RunRequest, options: argparse.Namespace) -> None:
    if options.save:
        save_recipe(
            request.recipe, Path(options.save), f"{request.task} with {request.model}, resolved by launch/run.py"
        )


def _show(lines: Sequence[str], record: dict[str, Any], notes: Sequence[str], options: argparse.Namespace) -> None:
    if options.json:
        print(json.dumps(record | {"notes": list(notes)}), flush=True)
    else:
        print("\n".join([*lines, *(f"note: {note}" for note in notes)]), flush=True)


def _start(request: RunRequest, options: argparse.Namespace, ranks: int) -> tuple[str, int, Sequence[str]]:
    """Return config, ranks and options of the command that starts the run; with a saved recipe there are no options."""
    return (options.save, ranks, ()) if options.save else (request.config, ranks, request.options)


def lacks_sglang(request: RunRequest) -> bool:
    """Tell whether the run needs SGLang's environment, which is not here."""
    engine = request.recipe.engine
    return engine.kind == "sglang" and not engine.urls and not sglang_folder(request.recipe).exists()


def _finish(request: RunRequest, options: argparse.Namespace, ranks: int, commands: Sequence[str]) -> int:
    """Print the commands of a dry run, or prepare data and model and run."""
    data, model = request.data, request.recipe.model.path
    if options.dry_run:
        before = [setup_command(request.recipe)] if lacks_sglang(request) else []
        before += [] if data.is_here else [f"{command('prepare')} {shlex.join(data.arguments)}"]
        before += [fetching for fetching in [download_command(request.model, model)] if fetching]
        if not options.json:
            print(
                "\n".join(["", "without --dry-run:", *(f"  {command}" for command in [*before, *commands])]), flush=True
            )
        return 0
    check_host(request.recipe, ranks)
    from launch import local, prepare  # not needed for a dry run

    if not data.is_here and (code := prepare.main(list(data.arguments))):
        return code
    check_data(data, request.recipe.env.module == SOKOBAN, request.recipe.data.columns)
    fetch(request.model, model)
    return local.main(on_one_host(*_start(request, options, ranks)))
