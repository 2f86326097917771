"""Finds run folders and reads their files. Nothing outside of the given folders is read."""

from __future__ import annotations

import re
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch.dashboard_server.metric_columns import MetricsFile, from_json
from shared.redaction import redact, redact_text
from shared.run_status import STATUS, TRAINING, RunStatus, read_status

MARKS = ("metrics.jsonl", "recipe.json", "recordings")  # a folder with any of these is a run's
MAX_RUNS = 200
MAX_JSON_BYTES = 4 << 20
MAX_ALARMS = 500
MAX_ALARM_BYTES = 1 << 20
CHECKPOINT = re.compile(r"step_(\d{1,12})")
RECENT = 10  # steps over which the overview averages
# A run that has written nothing for this time, and for ten of its steps, counts as stopped.
QUIET_S = 120.0
ENDED = {"complete": "finished", "stopped": "stopped", "failed": "failed"}


class Unknown(LookupError):
    """There is no such run, step, episode or file."""


@dataclass(slots=True)
class Run:
    """One run's folder. `given` is the folder from the command line: the run's own or the one that contains it."""

    name: str
    folder: Path
    given: Path
    metrics: MetricsFile = field(init=False)

    def __post_init__(self) -> None:
        self.metrics = MetricsFile(self.folder / "metrics.jsonl")

    def inside(self, path: Path) -> Path:
        """Return the path if it resolves to something inside the given folder; raise Unknown otherwise."""
        if not path.resolve().is_relative_to(self.given):
            raise Unknown(f"{path} is outside of {self.given}")
        return path

    def file(self, path: Path) -> Path:
        """Return the path if it is a regular file inside the given folder; raise Unknown otherwise (a pipe could block
        the reader)."""
        if not self.inside(path).is_file():
            raise Unknown(f"{path} is no file")
        return path

    def json(self, name: str) -> Any:
        """Read a small JSON file in the folder; None if it is missing or cannot be read."""
        path = self.folder / name
        try:
            with self.file(path).open("rb") as file:
                return from_json(file.read(MAX_JSON_BYTES))
        except (OSError, ValueError, Unknown):
            return None

    def recipe(self) -> dict[str, Any]:
        recipe = self.json("recipe.json")
        return redact(recipe) if isinstance(recipe, dict) else {}

    def total_steps(self) -> int:
        learner = self.recipe().get("learner")
        total = learner.get("total_steps") if isinstance(learner, dict) else None
        return total if isinstance(total, int) else 0

    def checkpoints(self) -> list[int]:
        return numbered(self.folder / "checkpoints", CHECKPOINT)

    def status(self) -> RunStatus | None:
        """Return what the run wrote about itself last; None if there is nothing that can be read."""
        try:
            self.file(self.folder / STATUS)
        except (OSError, Unknown):
            return None
        return read_status(self.folder)

    def words(self) -> str:
        """Return in words how the run ended, or what it is doing."""
        status = self.status()
        if status is None:
            return ""
        if status.ended:
            return "" if status.ended == "complete" else redact_text(status.reason)
        return status.in_words() if status.phase != TRAINING and self.state() == "running" else ""

    def alarms(self) -> tuple[list[dict[str, Any]], int]:
        """Return (the newest alarms, oldest first, each with the step at which it was `over`; the number of damaged
        lines)."""
        path, alarms, damaged = self.folder / "alarms.jsonl", deque[dict[str, Any]](maxlen=MAX_ALARMS), 0
        try:
            with self.file(path).open("rb") as file:
                file.seek(max(0, path.stat().st_size - MAX_ALARM_BYTES))
                lines = file.read(MAX_ALARM_BYTES).splitlines()
        except (OSError, Unknown):
            return [], 0
        for line in lines:
            try:
                alarm = from_json(line)
                if not isinstance(alarm, dict) or not isinstance(alarm.get("step"), int | float):
                    raise ValueError
                if alarm.get("level") != "cleared":
                    alarms.append(alarm | {"over": None})
                    continue
                for earlier in alarms:
                    if earlier.get("rule") == alarm.get("rule") and earlier["over"] is None:
                        earlier["over"] = alarm["step"]
            except ValueError:
                damaged += 1
        return list(alarms), damaged

    def state(self) -> str:
        """Return "running", "finished", "stopped" or "failed": what the run's status says if it has ended, else judged
        by the times of the run's files, so that this works on any machine."""
        status = self.status()
        if status is not None and status.ended:
            return ENDED.get(status.ended, "stopped")
        # Metrics are written with each step and evaluation; a learner that waits for one logs this twice a minute.
        files = (self.folder / "metrics.jsonl", self.folder / STATUS, *self.folder.glob("logs/*.log"))
        written = max(map(modified, files))
        result = modified(self.folder / "result.json")
        if result and result + 60 >= written:
            return "finished"
        slow = 10 * (self.metrics.steps.mean("time/step_s", RECENT) or 0.0)
        return "running" if time.time() - written < max(QUIET_S, slow) else "stopped"


def numbered(folder: Path, pattern: re.Pattern[str]) -> list[int]:
    """Return the sorted numbers in the names in a folder that match `pattern`."""
    try:
        matches = [pattern.fullmatch(path.name) for path in folder.iterdir()]
    except OSError:
        return []
    return sorted(int(match[1]) for match in matches if match)


def modified(path: Path) -> float:
    """Return a file's modification time; 0 if there is no such file."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


class Runs:
    """The runs in the given folders; a folder is a run's own or contains runs. New runs are found as they appear."""

    def __init__(self, folders: list[Path]) -> None:
        """Find the runs in some folders. Raise ValueError if a folder does not exist or contains no run."""
        self._given = [folder.resolve() for folder in folders]
        self._runs: dict[str, Run] = {}
        for folder, given in zip(folders, self._given, strict=True):
            if not given.is_dir():
                raise ValueError(f"{folder} is no folder; give a run's folder, or the folder that holds runs")
            if not run_folders(given):
                raise ValueError(
                    f"{folder} holds no run: neither it nor a folder in it has a metrics.jsonl or a recipe.json"
                )

    def all(self) -> list[Run]:
        known = {run.folder: run for run in self._runs.values()}
        runs: dict[str, Run] = {}
        for given in self._given:
            for folder in run_folders(given):
                if len(runs) >= MAX_RUNS or any(run.folder == folder for run in runs.values()):
                    continue
                run = known.get(folder) or Run(free_name(folder, self._runs.keys() | runs.keys()), folder, given)
                runs[run.name] = run
        self._runs = runs
        return list(runs.values())

    def get(self, name: str) -> Run:
        """Return the run, with its metrics read up to now."""
        if name not in self._runs:
            self.all()
        if name not in self._runs:
            raise Unknown(f"there is no run {name!r}")
        run = self._runs[name]
        run.metrics.refresh()
        return run


def run_folders(given: Path) -> list[Path]:
    if is_run(given):
        return [given]
    try:
        return sorted(path for path in given.iterdir() if is_run(path) and path.resolve().is_relative_to(given))
    except OSError:
        return []


def is_run(folder: Path) -> bool:
    try:
        return folder.name.isprintable() and folder.is_dir() and any((folder / mark).exists() for mark in MARKS)
    except OSError:
        return False


def free_name(folder: Path, taken: set[str]) -> str:
    names = (folder.name, f"{folder.parent.name}:{folder.name}", *(f"{folder.name}:{n}" for n in range(2, 999)))
    return next(name for name in names if name not in taken)
