"""The writer of a run's metrics: `metrics.jsonl`, TensorBoard events, and the services that the recipe names. A full
disk delays them and stops nothing."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import SummaryWriter

from learner.metrics.services import Service
from shared.log import get_logger

RETRY_S = 10.0
MAX_UNWRITTEN_BYTES = 16 * 2**20


class MetricLogger:
    """Writes to `RUN_DIR/metrics.jsonl` (one object a call: step, time, values), `RUN_DIR/tensorboard/`, services."""

    def __init__(self, run_dir: Path | str, services: Sequence[Service] = (), *, tensorboard: bool = True) -> None:
        folder = Path(run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "metrics.jsonl"
        self._log = get_logger("metrics")
        self._lines = path.open("ab", buffering=0)
        self._unwritten = b"" if path.read_bytes()[-1:] in (b"", b"\n") else b"\n"  # a kill has cut off its last line
        self._folder = folder / "tensorboard"
        self._events: SummaryWriter | None = None
        self._retry_at = 0.0 if tensorboard else math.inf
        self._services = services

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Values that are not finite are `null` in the file."""
        numbers = {name: float(value) for name, value in values.items()}
        row = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        self._append(step, json.dumps({"step": step, "time": round(time.time(), 3), **row}) + "\n")

        # All in one event: an event a value takes longer than a step of a small model.
        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()])
        self._write(step, lambda events: events.file_writer.add_summary(summary, step))  # type: ignore[attr-defined]
        for service in self._services:
            service.scalars(step, numbers)

    def image(self, step: int, name: str, pixels: np.ndarray) -> None:
        """`pixels`: uint8 [height, width, 3]. Images and texts are for TensorBoard alone."""
        self._write(step, lambda events: events.add_image(name, pixels, step, dataformats="HWC"))

    def text(self, step: int, name: str, markdown: str) -> None:
        self._write(step, lambda events: events.add_text(name, markdown, step))

    def _append(self, step: int, line: str) -> None:
        """Lines that the disk refuses are written with a later one."""
        if len(self._unwritten) < MAX_UNWRITTEN_BYTES:
            self._unwritten += line.encode()
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[self._lines.write(self._unwritten) :]
        except OSError as error:
            self._log.error("metrics.jsonl lacks step %d until the disk accepts it: %s", step, error)

    def _write(self, step: int, write: Callable[[SummaryWriter], None]) -> None:
        """TensorBoard reports a failed write at the next one; a new file of events is begun after `RETRY_S`."""
        if self._events is None and time.monotonic() < self._retry_at:
            return
        try:
            if self._events is None:
                self._events = SummaryWriter(str(self._folder), flush_secs=5)
            write(self._events)
        except OSError as error:
            self._log.error("TensorBoard lacks the values around step %d: %s", step, error)
            self._events, self._retry_at = None, time.monotonic() + RETRY_S

    def lost(self) -> dict[str, float]:
        """Calls that services have not taken."""
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
