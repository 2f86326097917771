"""Teaches a recipe's model by demonstrations, then plays the held-out samples with what it was and what it is now:

    python launch/sft.py --config launch/recipes/R.toml --data FILE [--epochs E] [--ranks N] [--section.key VALUE ...]

FILE is a dataset of chats (.jsonl or .parquet, a folder or a pattern; see envs/chat_rows.py). The loss is the cross
entropy of the assistant's tokens, in the tokens of rollouts. A step takes as many demonstrations as the recipe's steps
take episodes. The run's folder, metrics, checkpoints and resuming are those of a run; each checkpoint has the model as
a folder hf, for the next recipe's model.path. The last line is one JSON object. --eval.samples 0 plays nothing.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
if __name__ == "__main__":  # a Ctrl-C amid these imports waits: as an exception there it leaves a traceback or is lost
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))

import argparse
import json
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from actor.chat_episode import TooLong, chat_episode
from actor.render import Renderer
from envs.chat_rows import chat_of
from envs.row_files import dataset_files, read_rows
from envs.row_prompts import BadImage
from launch.local import SAVE_S, script, starter
from launch.processes.children import Stopped, cpu_env, run_program, start, stop_all, wait_for_any
from launch.processes.run_folder import check_run_folder, prepare_run_folder, take_run_folder
from launch.recipe_fields import save_recipe
from launch.task_samples import check_data, ready, renderer_of
from learner.checkpoints.checkpoint_folder import EXPORT, check_resume, list_checkpoints
from shared.config.objective_section import ObjectiveConfig
from shared.config.recipe import ConfigError, Recipe, fail, parse, recipe_parser
from shared.config.sections import GuardConfig
from shared.log import get_logger
from shared.recordings.group_files import GroupWriter
from shared.types import Group
from shared.wire.codec import WireError, frames_of

LOG = get_logger("sft")
SHOWN = "demonstrations"  # the folder in the run's folder with the demonstrations as groups
LESSON = "sft.toml"  # the recipe of the training, in the run's folder
MAX_LISTED = 5
MISTAKES = (
    (TooLong, "too long"),
    (BadImage, "with an image that cannot be read"),
    (WireError, "too large for a group"),
    (Exception, "unusable"),
)


def main(argv: list[str] | None = None) -> int:
    parser = recipe_parser(__doc__)
    parser.add_argument("--data", required=True, metavar="FILE", help="demonstrations: a file, a folder, a pattern")
    parser.add_argument("--epochs", type=float, default=1.0, metavar="E", help="times that each one is learned")
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="ranks of the learner")
    recipe, options = parse(parser, argv)
    try:
        if options.ranks < 1:
            raise ConfigError(f"--ranks {options.ranks}: at least 1")
        if not options.epochs > 0:
            raise ConfigError(f"--epochs {options.epochs:g}: above 0")
        dataset_files(options.data)
        recipe = ready(recipe)
        check_resume(recipe.learner.resume)
        check_data(recipe)
        check_run_folder(recipe)
        learned = prepare(recipe, options)
    except (ValueError, OSError) as error:
        return fail(error)
    code, loss = learn(learned, options.ranks)
    if code:
        return code
    code, result = played(learned, options)
    if code:
        return code
    print(json.dumps(learned.as_record() | {"loss": loss} | result), flush=True)
    return 0


# ------------------------------------------------------------------ the demonstrations


@dataclass(slots=True)
class ShownRows:
    """Counts of the rows read and, by reason, left out; `examples` name the first few of each reason."""

    rows: int = 0
    used: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)

    def note(self, kind: str, place: str, reason: str) -> None:
        """Count a row that is left out."""
        self.left_out[kind] += 1
        if self.left_out[kind] <= MAX_LISTED:
            self.examples.append(f"{place}: {reason}")

    def summary(self) -> str:
        """Return the counts and examples as one line."""
        counts = "".join(f", {count} {kind}" for kind, count in self.left_out.items())
        examples = f" ({'; '.join(self.examples)})" if self.examples else ""
        return f"{self.used} of {self.rows} demonstrations{counts}{examples}"


def write_demonstrations(data: str, renderer: Renderer, max_context: int, folder: Path) -> ShownRows:
    """Write each usable row of a dataset as a group of one episode into an empty folder.

    A row that is no chat, has no answer to learn, an image that cannot be read or too many tokens is left out, counted,
    and named by its file and line (of Parquet: row). Raise ValueError if none is left.
    """
    writer, report = GroupWriter(folder), ShownRows()
    for file in dataset_files(data):
        word = "line" if file.suffix == ".jsonl" else "row"

        def refuse(number: int, reason: str, file: Path = file, word: str = word) -> None:
            report.rows += 1
            report.note("unreadable", f"{file}, {word} {number + 1}", reason.removeprefix(f"line {number + 1} "))

        for number, row in read_rows(file, refuse):
            report.rows += 1
            try:
                group = Group(
                    f"{number}-{SHOWN}", SHOWN, (chat_episode(chat_of(row, file.parent), renderer, max_context),)
                )
                frames_of(group)  # raises what is too large for a group
            except Exception as error:  # noqa: BLE001 - a chat template may raise anything; the others are still read
                kind = next(words for mistake, words in MISTAKES if isinstance(error, mistake))
                report.note(kind, f"{file}, {word} {number + 1}", " ".join(str(error).split())[:200])
                continue
            writer.add(group)
            report.used += 1
    if not report.used:
        raise ValueError(f"--data {data} holds no usable demonstration: {report.summary()}")
    return report


# ------------------------------------------------------------------ the training


@dataclass(frozen=True, slots=True)
class Learned:
    """A run by demonstrations: its recipe, that of the training, and what was read."""

    recipe: Recipe
    lesson: Recipe
    report: ShownRows

    @property
    def folder(self) -> Path:
        return Path(self.recipe.run.dir) / self.recipe.run.name

    @property
    def checkpoint(self) -> Path:
        """The last checkpoint."""
        return list_checkpoints(self.folder / "checkpoints")[-1]

    def as_record(self) -> dict[str, Any]:
        """Return what was learned from, and where the model is."""
        return {
            "demonstrations": self.report.used,
            "left_out": sum(self.report.left_out.values()),
            "steps": self.lesson.learner.total_steps,
            "model": str(self.checkpoint / EXPORT),
        }


def lesson_of(recipe: Recipe, count: int, epochs: float) -> Recipe:
    """Return the recipe of a training on `count` demonstrations: the recipe's, with the objective `sft` at temperature
    1, as many demonstrations a step as it has episodes, and steps for so many epochs."""
    learner = recipe.learner
    objective = learner.objective
    if objective.spec.learns_from_rewards:
        objective = ObjectiveConfig(name="sft", aggregation=objective.aggregation)
    batch = learner.groups_per_step * learner.group_size
    own = {
        "objective": objective,
        "group_size": 1,
        "groups_per_step": batch,
        "total_steps": max(1, ceil(count * epochs / batch)),
        "resume": "auto" if learner.resume == "never" else learner.resume,  # the folder is new: prepare_run_folder
        "guard": GuardConfig(max_kl=0.0),
        "checkpoint": learner.checkpoint.model_copy(update={"export": True}),
    }
    sampling = recipe.sampling.model_copy(update={"temperature": 1.0})
    return recipe.model_copy(update={"learner": learner.model_copy(update=own), "sampling": sampling})


def prepare(recipe: Recipe, options: argparse.Namespace) -> Learned:
    """Make the run's folder with the demonstrations as groups and the recipe of the training. Raise ValueError if no
    demonstration can be used."""
    renderer, folder = renderer_of(recipe), Path(recipe.run.dir) / recipe.run.name
    with prepare_run_folder(recipe, take_run_folder(recipe)):
        shown = folder / SHOWN
        shutil.rmtree(shown, ignore_errors=True)
        report = write_demonstrations(options.data, renderer, recipe.model.max_context, shown)
        (LOG.warning if report.left_out else LOG.info)("%s", report.summary())
        lesson = lesson_of(recipe, report.used, options.epochs)
        (folder / LESSON).unlink(missing_ok=True)
        save_recipe(lesson, folder / LESSON, f"{recipe.run.name}: the training by demonstrations")
    return Learned(recipe, lesson, report)


def learn(learned: Learned, ranks: int) -> tuple[int, float | None]:
    """Train on the demonstrations in a process of its own; return its exit code and the last step's loss, None if the
    run has all its steps already."""
    folder = learned.folder
    words = ["--config", str(folder / LESSON), "--from-recording", str(folder / SHOWN), "--shuffle"]
    env = cpu_env(learned.lesson.learner.threads)
    code, said = ended("the training", [*starter(ranks), script("learner"), *words], env)
    return code, json.loads(said.splitlines()[-1]).get("loss/policy") if code == 0 else None


def played(learned: Learned, options: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    """Play the held-out samples with the model that was learned and the one before; return the exit code, and both
    successes with the difference and where the episodes are."""
    recipe = learned.recipe
    if not recipe.eval.samples:
        return 0, {}
    words = ["--config", options.config, *options.overrides, "--model", str(learned.checkpoint)]
    words += ["--against", recipe.model.path, *(["--greedy"] if recipe.eval.greedy else [])]
    code, said = ended("the evaluation", [sys.executable, script("evaluate"), *words], {})
    if code:
        return code, {}
    found = json.loads(said.splitlines()[-1])
    difference = found["difference"] or {}
    record = {"success_before": found["against"]["success"], "success_after": found["success"]}
    record |= {f"difference_{end}": difference.get(end) for end in ("low", "high")}
    return 0, record | {"played": str(Path(found["folder"]).parent)}


def ended(name: str, command: Sequence[str], env: dict[str, str]) -> tuple[int, str]:
    """Run a command, which messages call `name`, to its end; return its exit code and what it printed. If this process
    is stopped, so is the command."""
    child = start(name, command, env=env, stdout=subprocess.PIPE, leave_s=SAVE_S)
    try:
        assert child.process.stdout is not None
        said = child.process.stdout.read().decode(errors="replace")
        wait_for_any([child], lambda: None)
    except Stopped:
        stop_all([child])
        return 130, ""
    code = child.process.returncode
    return (128 - code if code < 0 else code), said


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    run_program(main)
