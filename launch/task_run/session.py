"""From a request to a plan that is shown, and to the run."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch.diagnosis.hardware import Gpu, gpus_here
from launch.engines.commands import check_host
from launch.task_run import report
from launch.task_run.commands import chosen_fields, on_one_host, one_host, several_hosts
from launch.task_run.machines import ASSUMED, Machine, machine, machine_of
from launch.task_run.places import check_data, download_command, fetch
from launch.task_run.planning import Job, fewest, plan
from launch.task_run.recipe_file import save
from launch.task_run.request import SOKOBAN, Request
from shared.config import ConfigError


def on_cpu(asked: Request, options: argparse.Namespace) -> int:
    """A small task on this machine: the embedded engine beside one learner."""
    recipe, rows = asked.recipe, asked.data.num_rows()
    words = f"{asked.sizes.parameters / 1e6:.1f} M parameters, the {recipe.engine.kind} engine, no GPU"
    lines = [
        f"{asked.task}: {recipe.model.path} on this machine's CPU",
        "",
        f"  one learner, one engine, actor processes: {recipe.actor.processes}; {words}",
        "",
        *report.batch(recipe, 0, rows),
        f"the run: {recipe.learner.total_steps} steps; how long one takes is not planned on a CPU",
    ]
    record: dict[str, Any] = {
        "task": asked.task,
        "model": recipe.model.path,
        "gpus": 0,
        "steps": recipe.learner.total_steps,
    }
    _save(asked, options)
    _show(lines, record, asked.notes, options)
    return _end(asked, options, 1, [one_host(*_start(asked, options, 1))])


def on_gpus(asked: Request, options: argparse.Namespace) -> int:
    """A task on the GPUs of this machine; dry, on any number of any kind."""
    here = gpus_here()
    if not options.dry_run:
        _check_machine(asked, options, here)
    count = options.gpus or len(here)
    job = Job(asked.recipe, asked.sizes, _machine(options, here), asked.given, options.episode_tokens)
    if not count:
        least = fewest(job)
        room = f"; there is room on {least} or more ({job.machine})" if least else ""
        raise ConfigError(f"--dry-run on a machine without a GPU: say how many with --gpus N{room}")
    found = plan(job, count)
    made, rows = asked.with_fields(chosen_fields(job, found)), asked.data.num_rows()
    lines = report.table(asked.task, job, found)
    lines += ["", *report.batch(made.recipe, job.mean_tokens, rows), *report.times(job, found, options.price)]
    record = report.as_record(asked.task, job, found, rows, options.price)
    _save(made, options)
    _show(lines, record, [*asked.notes, *found.notes], options)
    config, ranks, words = _start(made, options, found.ranks)
    if count > job.machine.gpus_per_node:
        commands = several_hosts(job, found, config, words)
    else:
        commands = [one_host(config, ranks, words)]
    return _end(made, options, found.ranks, commands)


def _check_machine(asked: Request, options: argparse.Namespace, here: Sequence[Gpu]) -> None:
    """ConfigError where the run cannot be started from here."""
    if options.gpus > options.gpus_per_node:
        raise ConfigError(
            f"--gpus {options.gpus}: several hosts of {options.gpus_per_node} need a cluster, where torchrun "
            "launch/learner.py and launch/actors.py start them (docs/tutorials/cluster.md; --dry-run shows both)"
        )
    if not here:
        raise ConfigError(
            f"{asked.task} needs GPUs, and there are none here: --dry-run shows the plan, and {_tiny(asked.task)} runs "
            "without"
        )
    if options.gpus > len(here):
        raise ConfigError(f"--gpus {options.gpus}: this machine has {len(here)}")


def _tiny(task: str) -> str:
    return f"{task.removesuffix('_thinking').removesuffix('_long').removesuffix('_one_gpu')}_tiny"


def _machine(options: argparse.Namespace, here: Sequence[Gpu]) -> Machine:
    if here and not options.gpu:
        return machine_of(here, options.gpus_per_node)
    return machine(options.gpu or ASSUMED, options.gpu_memory, options.host_memory, options.gpus_per_node)


def _save(asked: Request, options: argparse.Namespace) -> None:
    if options.save:
        save(asked.recipe, Path(options.save), f"{asked.task} with {asked.model}, resolved by launch/run.py")


def _show(lines: Sequence[str], record: dict[str, Any], notes: Sequence[str], options: argparse.Namespace) -> None:
    if options.json:
        print(json.dumps(record | {"notes": list(notes)}), flush=True)
    else:
        print("\n".join([*lines, *(f"note: {note}" for note in notes)]), flush=True)


def _start(asked: Request, options: argparse.Namespace, ranks: int) -> tuple[str, int, Sequence[str]]:
    """Config, ranks and options of the command that starts the run; a saved recipe needs no options."""
    return (options.save, ranks, ()) if options.save else (asked.config, ranks, asked.options)


def _end(asked: Request, options: argparse.Namespace, ranks: int, commands: Sequence[str]) -> int:
    """Says what would run, or runs it."""
    data, place = asked.data, asked.recipe.model.path
    if options.dry_run:
        before = [] if data.is_here else [shlex.join(["python", "launch/prepare.py", *data.arguments])]
        before += [command for command in [download_command(asked.model, place)] if command]
        if not options.json:
            print(
                "\n".join(["", "without --dry-run:", *(f"  {command}" for command in [*before, *commands])]), flush=True
            )
        return 0
    check_host(asked.recipe, ranks)
    from launch import local, prepare  # what a dry run does without

    if not data.is_here and (code := prepare.main(list(data.arguments))):
        return code
    check_data(data, asked.recipe.env.module == SOKOBAN)
    fetch(asked.model, place)
    return local.main(on_one_host(*_start(asked, options, ranks)))
