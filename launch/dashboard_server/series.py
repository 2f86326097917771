"""`metrics.jsonl` as columns, followed while a run writes it; damaged lines are counted and passed over."""

from __future__ import annotations

import json
import math
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

OF_A_STEP = "rollout/reward"  # the rows of steps have it, those of evaluations do not
MAX_METRICS = 4096
MAX_LINE_BYTES = 4 << 20
_ROW = msgspec.json.Decoder(dict[str, float | None])
_PROGRESS = ("progress/minutes", "progress/episodes")
NAN = math.nan


@dataclass(slots=True)
class Table:
    """Rows of one kind by rising step; a column for each name, NaN where a row has no value."""

    columns: dict[str, array[float]] = field(default_factory=lambda: {"step": array("d"), "time": array("d")})

    def __len__(self) -> int:
        return len(self.columns["step"])

    def add(self, row: dict[str, float | None], *, joins: bool = False) -> None:
        """A step that stands there again undoes its earlier rows and all that followed them; where it `joins` the last
        row, which is of the same step, it keeps that one's values of other names."""
        steps, step = self.columns["step"], row["step"] or 0.0
        if joins and len(steps) and steps[-1] == step:
            last: dict[str, float | None] = {name: column[-1] for name, column in self.columns.items()}
            row = last | row
        length = len(steps)
        while length and steps[length - 1] >= step:
            length -= 1
        if length < len(steps):
            for column in self.columns.values():
                del column[length:]
        for name in row.keys() - self.columns.keys():
            if len(self.columns) < MAX_METRICS:
                self.columns[name] = array("d", [NAN]) * length
        for name, column in self.columns.items():
            value = row.get(name)
            column.append(NAN if value is None else value)

    def last(self, name: str) -> float | None:
        """The newest value there is."""
        return next((value for value in reversed(self.columns.get(name, ())) if not math.isnan(value)), None)

    def mean(self, name: str, rows: int) -> float | None:
        """Over the last `rows` rows."""
        values = [value for value in self.columns.get(name, array("d"))[-rows:] if not math.isnan(value)]
        return sum(values) / len(values) if values else None

    def show(self, name: str) -> list[float | None]:
        return [clean(value) for value in self.columns[name]]


def clean(value: float) -> float | None:
    """Seven digits are enough to look at; None for what is not finite."""
    return float(f"{value:.7g}") if math.isfinite(value) else None


def from_json(text: str | bytes) -> Any:
    """ValueError for what is no JSON, or none to answer with: too deep, too large a number, half a letter."""
    try:
        value = json.loads(text)
        msgspec.json.encode(value)
    except (ValueError, OverflowError, TypeError, RecursionError) as error:
        raise ValueError(f"no JSON that can be shown: {error}") from None
    return value


class MetricsFile:
    """Follows one file; `refresh` reads what has been added since, or all of it where the file is another one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._forget(0)

    def _forget(self, inode: int) -> None:
        self._inode, self._place = inode, 0
        self._offsets = dict.fromkeys(_PROGRESS, 0.0)
        self._before = dict.fromkeys(_PROGRESS, 0.0)
        self.steps, self.evaluations = Table(), Table()
        self.resumed: list[int] = []  # steps that a restarted process made first
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
                if not line.endswith(b"\n") and len(line) < MAX_LINE_BYTES:  # it is being written
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
            self.evaluations.add(row, joins=True)  # sampled and greedy evaluations of one step are rows of their own
            return
        again = False
        for name in _PROGRESS:
            value = row.get(name) or 0.0
            if value + self._offsets[name] < self._before[name]:  # a process that has begun to count anew
                self._offsets[name], again = self._before[name], True
            self._before[name] = row[name] = value + self._offsets[name]
        if again:
            self.resumed.append(int(step))
        self.steps.add(row)

    def progress(self, step: float) -> dict[str, float | None]:
        """Minutes and episodes when `step` was made."""
        return {name: self.steps.last(name) for name in _PROGRESS} | {"step": step}
