"""The writer of a run's metrics: `metrics.jsonl`, TensorBoard events, and the services that the recipe names. A full
disk delays them but stops nothing."""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np
from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import SummaryWriter

from learner.metrics.metric_services import Service
from shared.log import get_logger

RETRY_S = 10.0
UNDONE = "metrics.undone.jsonl"
MAX_UNWRITTEN_BYTES = 16 * 2**20


class MetricLogger:
    """Writes to `RUN_DIR/metrics.jsonl` (per call one object: step, time, values), `RUN_DIR/tensorboard/` and the
    services."""

    def __init__(
        self,
        run_dir: Path | str,
        services: Sequence[Service] = (),
        *,
        tensorboard: bool = True,
        steps_done: int | None = None,
    ) -> None:
        """Continue the files of a run that goes on after `steps_done` steps: what was written of later ones, which are
        made anew, is moved to metrics.undone.jsonl and left out by TensorBoard. None: nothing is undone."""
        folder = Path(run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "metrics.jsonl"
        self._log = get_logger("metrics")
        self._purge_step = None if steps_done is None else steps_done + 1
        try:
            if steps_done is not None:
                undo_rows(path, steps_done)
        except OSError as error:
            self._log.error("metrics.jsonl keeps rows after step %d, which is undone: %s", steps_done, error)
        self._lines = path.open("ab", buffering=0)
        # a kill may have truncated the last line
        self._unwritten = b"" if path.read_bytes()[-1:] in (b"", b"\n") else b"\n"
        mute_writer_threads()
        self._folder = folder / "tensorboard"
        self._events: SummaryWriter | None = None
        self._retry_at = 0.0 if tensorboard else math.inf
        self._services = services

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write a step's values to all writers; values that are not finite are `null` in the file."""
        numbers = {name: float(value) for name, value in values.items()}
        row = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        self._append(step, json.dumps({"step": step, "time": round(time.time(), 3), **row}) + "\n")

        # All in one event: one event per value would take longer than a step of a small model.
        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()])
        self._write(step, lambda events: events.file_writer.add_summary(summary, step))  # type: ignore[attr-defined]
        for service in self._services:
            service.scalars(step, numbers)

    def image(self, step: int, name: str, pixels: np.ndarray) -> None:
        """Write an image, uint8 [height, width, 3]. Images and texts go only to TensorBoard."""
        self._write(step, lambda events: events.add_image(name, pixels, step, dataformats="HWC"))

    def text(self, step: int, name: str, markdown: str) -> None:
        self._write(step, lambda events: events.add_text(name, markdown, step))

    def _append(self, step: int, line: str) -> None:
        """Append a line; if the disk refuses, it is written with a later one."""
        if len(self._unwritten) < MAX_UNWRITTEN_BYTES:
            self._unwritten += line.encode()
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[self._lines.write(self._unwritten) :]
        except OSError as error:
            self._log.error("metrics.jsonl lacks step %d until the disk accepts it: %s", step, error)

    def _write(self, step: int, write: Callable[[SummaryWriter], None]) -> None:
        """Write to TensorBoard. A failed write is reported at the next one; after `RETRY_S` a new file of events is
        started."""
        if self._events is None and time.monotonic() < self._retry_at:
            return
        try:
            if self._events is None:
                self._events = SummaryWriter(str(self._folder), flush_secs=5, purge_step=self._purge_step)
                self._purge_step = None
            write(self._events)
        except OSError as error:
            self._log.error("TensorBoard lacks the values around step %d: %s", step, error)
            self._events, self._retry_at = None, time.monotonic() + RETRY_S

    def lost(self) -> dict[str, float]:
        """Return the number of rows that each service has not accepted."""
        return {f"writers/{service.name}/lost": float(service.lost) for service in self._services}

    def flush(self) -> None:
        if self._events is not None:
            with contextlib.suppress(OSError):
                self._events.flush()

    def close(self) -> None:
        if self._events is not None:
            with contextlib.suppress(OSError):
                self._events.close()
        self._lines.close()
        for service in self._services:
            service.close()


def undo_rows(path: Path, steps_done: int) -> None:
    """Move the rows of steps after `steps_done` from a metrics.jsonl to a file beside it. Raise OSError if the disk
    refuses."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    undone = [line for line in lines if _step_of(line) > steps_done]
    if not undone:
        return
    with path.with_name(UNDONE).open("ab") as file:
        file.writelines(undone)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(b"".join(line for line in lines if _step_of(line) <= steps_done))
    partial.replace(path)  # readers notice another file


def _step_of(line: bytes) -> float:
    """Return the step of a row; -1 if it cannot be read."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return -1.0
    return step if isinstance(step, int | float) else -1.0


@cache
def mute_writer_threads() -> None:
    """Let Python print no traceback of what TensorBoard's threads raise: its next write raises the same, and reports
    it."""
    others = threading.excepthook

    def hook(raised: threading.ExceptHookArgs) -> None:
        if not type(raised.thread).__module__.startswith("tensorboard."):
            others(raised)

    threading.excepthook = hook
