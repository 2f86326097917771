"""Pronk's programs as functions: each starts the processes of a command, and waits for their end."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pronk.rooms import ROOT, ours
from pronk.run_files import RunFiles

Settings = Mapping[str, Any]
EXIT_STOPPED = 130


class ProgramFailed(RuntimeError):
    """A program of Pronk's ended with an error. The message is its own line; `stderr` all that it wrote there, if it
    was not shown."""

    def __init__(self, message: str, stderr: str = "") -> None:
        super().__init__(message)
        self.stderr = stderr


def train(recipe: str | Path, settings: Settings | None = None, *, ranks: int = 1, show: bool = True) -> RunFiles:
    """Train a recipe on this machine, as `pronk local` does, and return the run's files.

    Args:
        recipe: a recipe's path, or the name of a shipped one, such as "colour_tiny".
        settings: fields of the recipe that are set to other values, by dotted name: {"learner.total_steps": 20}.
        ranks: processes of the learner.
        show: write progress to this program's stderr; otherwise it is kept for the error, if there is one.

    Raises:
        ValueError: a mistake in the recipe or in the settings, in one line.
        ProgramFailed: the run ended with an error; the message says which, in one line.
    """
    words = ["--config", str(recipe), *(["--ranks", str(ranks)] if ranks != 1 else []), *_options(settings)]
    found = ours("shared.config.recipe").load_recipe(str(recipe), _options(settings))
    _run("launch/local.py", words, show)
    return RunFiles(Path(found.run.dir) / found.run.name)


def evaluate(
    recipe: str | Path,
    model: str | Path = "",
    settings: Settings | None = None,
    *,
    against: str | Path = "",
    samples: int | None = None,
    repeats: int | None = None,
    greedy: bool = False,
    show: bool = True,
) -> dict[str, Any]:
    """Play a model or a checkpoint without training it, as `pronk evaluate` does, and return what was measured:
    "success" with its 95 % interval "low" and "high", and all else.

    Args:
        recipe: a recipe's path, or the name of a shipped one.
        model: a checkpoint's folder, a model's, or a hub name; left out: the recipe's model.
        settings: fields of the recipe that are set to other values, by dotted name.
        against: a second model or checkpoint, which plays the same samples.
        samples: how many to play; left out: the recipe's.
        repeats: episodes of each sample; left out: the recipe's.
        greedy: the likeliest token always, instead of sampling.
        show: write progress to this program's stderr.

    Raises:
        ProgramFailed: it ended with an error; the message says which, in one line.
    """
    values = {"--model": model, "--against": against, "--samples": samples, "--repeats": repeats}
    words = [word for name, value in values.items() if value not in ("", None) for word in (name, str(value))]
    words = ["--config", str(recipe), *words, *(["--greedy"] if greedy else []), *_options(settings)]
    result: dict[str, Any] = json.loads(_run("launch/evaluate.py", words, show).splitlines()[-1])
    return result


def _options(settings: Settings | None) -> list[str]:
    """Return settings as the command line writes them."""
    return [word for name, value in (settings or {}).items() for word in (f"--{name}", _text(value))]


def _text(value: Any) -> str:
    if isinstance(value, bool | dict | list | tuple):
        return json.dumps(value)
    return str(value)


def _run(program: str, words: Sequence[str], show: bool) -> str:
    """Run a program of Pronk's to its end and return its stdout. An exception here, such as that of Ctrl-C, first ends
    the program in order."""
    process = subprocess.Popen(
        [sys.executable, str(ROOT / program), *words],
        stdout=subprocess.PIPE,
        stderr=None if show else subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C reaches this program alone, which then ends that one
    )
    try:
        stdout, stderr = process.communicate()
    except BaseException:
        process.send_signal(signal.SIGINT)
        process.wait()
        raise
    if process.returncode:
        lines = [line for line in (stderr or "").splitlines() if line.startswith("error: ")]
        why = lines[-1].removeprefix("error: ") if lines else f"exit code {process.returncode}; its reason is on stderr"
        raise ProgramFailed(why, stderr or "")
    return stdout
