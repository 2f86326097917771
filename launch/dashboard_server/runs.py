"""Run folders: which there are, and what each says of itself. Nothing outside of the given folders is read."""

from __future__ import annotations

import re
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch.dashboard_server.series import MetricsFile, from_json

MARKS = ("metrics.jsonl", "recipe.json", "recordings")  # any of them makes a folder a run's
MAX_RUNS = 200
MAX_JSON_BYTES = 4 << 20
MAX_ALARMS = 500
MAX_ALARM_BYTES = 1 << 20
CHECKPOINT = re.compile(r"step_(\d{1,12})")
SECRET = re.compile(r"webhook|password|secret|(api_key|token)$")
RECENT = 10  # steps over which an overview's numbers are means
QUIET_S = 120.0  # a run that wrote nothing for so long, and for ten of its steps, is not running


class Unknown(LookupError):
    """There is no such run, step, episode or file."""


@dataclass(slots=True)
class Run:
    """One run's folder. `given` is the folder of the command line that it is, or is in."""

    name: str
    folder: Path
    given: Path
    metrics: MetricsFile = field(init=False)

    def __post_init__(self) -> None:
        self.metrics = MetricsFile(self.folder / "metrics.jsonl")

    def inside(self, path: Path) -> Path:
        """The path, if it leads to something inside of the given folder; Unknown otherwise."""
        if not path.resolve().is_relative_to(self.given):
            raise Unknown(f"{path} is outside of {self.given}")
        return path

    def file(self, path: Path) -> Path:
        """The same for a plain file alone: what else there may be could keep a reader waiting."""
        if not self.inside(path).is_file():
            raise Unknown(f"{path} is no file")
        return path

    def json(self, name: str) -> Any:
        """A small JSON file of the folder; None where there is none that can be read."""
        path = self.folder / name
        try:
            with self.file(path).open("rb") as file:
                return from_json(file.read(MAX_JSON_BYTES))
        except (OSError, ValueError, Unknown):
            return None

    def recipe(self) -> dict[str, Any]:
        said = self.json("recipe.json")
        return hushed(said) if isinstance(said, dict) else {}

    def total_steps(self) -> int:
        learner = self.recipe().get("learner")
        total = learner.get("total_steps") if isinstance(learner, dict) else None
        return total if isinstance(total, int) else 0

    def checkpoints(self) -> list[int]:
        return numbered(self.folder / "checkpoints", CHECKPOINT)

    def alarms(self) -> tuple[list[dict[str, Any]], int]:
        """The newest ones, oldest first, each with the step at which it was `over`, and how many lines are damaged."""
        path, found, damaged = self.folder / "alarms.jsonl", deque[dict[str, Any]](maxlen=MAX_ALARMS), 0
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
                    found.append(alarm | {"over": None})
                    continue
                for earlier in found:
                    if earlier.get("rule") == alarm.get("rule") and earlier["over"] is None:
                        earlier["over"] = alarm["step"]
            except ValueError:
                damaged += 1
        return list(found), damaged

    def state(self) -> str:
        """running, finished or stopped; by the times of its files, so that it can be told from any machine."""
        # Metrics come with steps and results of evaluations; who waits for one says so in the log twice a minute.
        written = max(map(modified, (self.folder / "metrics.jsonl", *self.folder.glob("logs/*.log"))))
        result = modified(self.folder / "result.json")
        if result and result + 60 >= written:
            return "finished"
        slow = 10 * (self.metrics.steps.mean("time/step_s", RECENT) or 0.0)
        return "running" if time.time() - written < max(QUIET_S, slow) else "stopped"


def hushed(section: dict[str, Any]) -> dict[str, Any]:
    """A recipe without what a page need not show: addresses and keys that let whoever has them in."""
    return {
        name: hushed(value) if isinstance(value, dict) else "(not shown)" if value and SECRET.search(name) else value
        for name, value in section.items()
    }


def numbered(folder: Path, pattern: re.Pattern[str]) -> list[int]:
    """The numbers of the names in a folder that are like `pattern`, in order."""
    try:
        found = [pattern.fullmatch(path.name) for path in folder.iterdir()]
    except OSError:
        return []
    return sorted(int(match[1]) for match in found if match)


def modified(path: Path) -> float:
    """0 where there is no such file."""
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
    """The runs in the given folders, each of which is a run's own or holds runs; new ones are found as they come."""

    def __init__(self, folders: list[Path]) -> None:
        """ValueError where a folder is none, or holds no run."""
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
        found: dict[str, Run] = {}
        for given in self._given:
            for folder in run_folders(given):
                if len(found) >= MAX_RUNS or any(run.folder == folder for run in found.values()):
                    continue
                run = known.get(folder) or Run(free_name(folder, self._runs.keys() | found.keys()), folder, given)
                found[run.name] = run
        self._runs = found
        return list(found.values())

    def get(self, name: str) -> Run:
        """The run, with all that its metrics say by now."""
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
