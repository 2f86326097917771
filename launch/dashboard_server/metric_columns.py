"""`metrics.jsonl` as columns, followed while a run writes it; damaged lines are counted and skipped."""

from __future__ import annotations

import json
import math
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

OF_A_STEP = "rollout/reward"  # rows of steps have this metric, rows of evaluations do not
MAX_METRICS = 4096
FREE_CELLS = 2_000_000  # 16 MB, which a table may take however few values it has
CELLS_PER_VALUE = 8  # further cells that it may have for each value that was read
MAX_LINE_BYTES = 4 << 20
_ROW = msgspec.json.Decoder(dict[str, float | None])
_PROGRESS = ("progress/minutes", "progress/episodes")
NAN = math.nan


@dataclass(slots=True)
class Table:
    """Rows of one kind by rising step; a column for each name, NaN where a row has no value."""

    columns: dict[str, array[float]] = field(default_factory=lambda: {"step": array("d"), "time": array("d")})
    num_values: int = 0  # read so far
    rare: set[str] = field(default_factory=set)  # names left out, since they would fill the memory with nothing

    def __len__(self) -> int:
        return len(self.columns["step"])

    def add(self, row: dict[str, float | None], *, joins: bool = False) -> None:
        """Append a row. If its step is already there, the earlier rows from that step on are removed. With `joins`, a
        row with the same step as the last one is merged with it: values of other names stay."""
        steps, step = self.columns["step"], row["step"] or 0.0
        if joins and len(steps) and steps[-1] == step:
            last: dict[str, float | None] = {name: column[-1] for name, column in self.columns.items()}
            row = last | row
        self.undo(step)
        length = len(steps)
        self.num_values += len(row)
        for name in row.keys() - self.columns.keys() - self.rare:
            if len(self.columns) < MAX_METRICS:
                self.columns[name] = array("d", [NAN]) * length
        if len(self.columns) * length > FREE_CELLS + CELLS_PER_VALUE * self.num_values:
            self._leave_out_rare()
        for name, column in self.columns.items():
            value = row.get(name)
            column.append(NAN if value is None else value)

    def _leave_out_rare(self) -> None:
        """Remove the half of the columns with the fewest values: a file of few bytes must not take much memory."""
        counts = {name: sum(value == value for value in column) for name, column in self.columns.items()}
        names = sorted(self.columns.keys() - {"step", "time"}, key=lambda name: counts[name])
        for name in names[: (len(names) + 1) // 2]:
            del self.columns[name]
            self.rare.add(name)

    def undo(self, step: float) -> None:
        """Remove the rows from a step on."""
        steps = self.columns["step"]
        length = len(steps)
        while length and steps[length - 1] >= step:
            length -= 1
        if length < len(steps):
            for column in self.columns.values():
                del column[length:]

    def last(self, name: str) -> float | None:
        """Return the column's last value that is not NaN; None if there is none."""
        return next((value for value in reversed(self.columns.get(name, ())) if not math.isnan(value)), None)

    def mean(self, name: str, rows: int) -> float | None:
        """Return the mean over the last `rows` rows, without NaN; None if there is no value."""
        values = [value for value in self.columns.get(name, array("d"))[-rows:] if not math.isnan(value)]
        return sum(values) / len(values) if values else None

    def show(self, name: str) -> list[float | None]:
        return [clean(value) for value in self.columns[name]]


def clean(value: float) -> float | None:
    """Round to seven digits, enough for display; None for a value that is not finite."""
    return float(f"{value:.7g}") if math.isfinite(value) else None


def from_json(text: str | bytes) -> Any:
    """Parse JSON. Raise ValueError if it is invalid, or cannot be encoded again: too deep, too large a number, a lone
    surrogate."""
    try:
        value = json.loads(text)
        msgspec.json.encode(value)
    except (ValueError, OverflowError, TypeError, RecursionError) as error:
        raise ValueError(f"no JSON that can be shown: {error}") from None
    return value


class MetricsFile:
    """Follows one file; `refresh` reads the lines added since, or everything if the file was replaced."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._forget(0)

    def _forget(self, inode: int) -> None:
        self._inode, self._place = inode, 0
        self._offsets = dict.fromkeys(_PROGRESS, 0.0)
        self._before = dict.fromkeys(_PROGRESS, 0.0)
        self.steps, self.evaluations = Table(), Table()
        self.resumed: list[int] = []  # first steps of restarted processes
        self.num_damaged = 0

    def refresh(self) -> None:
        try:
            file = self._path.open("rb") if self._path.is_file() else None
        except OSError:
            file = None
        if file is None:
            return self._forget(0)
        with file:
            stat = self._path.stat()
            if stat.st_ino != self._inode or stat.st_size < self._place:
                self._forget(stat.st_ino)
            file.seek(self._place)
            while line := file.readline(MAX_LINE_BYTES):
                if not line.endswith(b"\n") and len(line) < MAX_LINE_BYTES:  # the line is still being written
                    break
                self._place += len(line)
                if line.strip():
                    self._add(line)

    def _add(self, line: bytes) -> None:
        try:
            row = _ROW.decode(line)
            step = row["step"]
            if step is None or not 0 <= step < 2**53:
                raise ValueError
        except (msgspec.MsgspecError, ValueError, KeyError):
            self.num_damaged += 1
            return
        if OF_A_STEP not in row:
            self.evaluations.add(row, joins=True)  # sampled and greedy evaluations of one step are separate rows
            return
        again = False
        for name in _PROGRESS:
            value = row.get(name) or 0.0
            if value + self._offsets[name] < self._before[name]:  # a restarted process counts from 0 again
                self._offsets[name], again = self._before[name], True
            self._before[name] = row[name] = value + self._offsets[name]
        if again:
            self.resumed.append(int(step))
        self.steps.add(row)
        self.evaluations.undo(step)  # those of steps that a run has gone back before

    def progress(self, step: float) -> dict[str, float | None]:
        """Return the run's last minutes and episodes, with `step`."""
        return {name: self.steps.last(name) for name in _PROGRESS} | {"step": step}
