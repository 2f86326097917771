"""Metrics: aggregation over a step, and a writer of TensorBoard events and `metrics.jsonl`.

TensorBoard is imported when the first event is written, so that this module stays light.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from shared.log import get_logger

RETRY_S = 10.0
MOST_UNWRITTEN_BYTES = 16 * 2**20


class Distribution:
    """Values since the last `drain`: their mean, 95th percentile and maximum. Holds at most `capacity` values."""

    def __init__(self, capacity: int = 1_000_000) -> None:
        self._capacity = capacity
        self._parts: list[np.ndarray] = []
        self._size = 0

    def add(self, values: float | Iterable[float] | np.ndarray) -> None:
        part = np.atleast_1d(np.asarray(values, np.float64)).ravel()[: self._capacity - self._size]
        self._parts.append(part)
        self._size += len(part)

    def drain(self, name: str) -> dict[str, float]:
        """`NAME/mean`, `NAME/p95` and `NAME/max`; nothing if there were no values. Starts anew."""
        values = np.concatenate(self._parts) if self._size else np.empty(0)
        self._parts, self._size = [], 0
        return summary(name, values)


def summary(name: str, values: Iterable[float] | np.ndarray) -> dict[str, float]:
    """`NAME/mean`, `NAME/p95` and `NAME/max` of `values`; nothing if there are none."""
    array = np.asarray(values if isinstance(values, np.ndarray) else list(values), np.float64)
    if not array.size:
        return {}
    return {
        f"{name}/mean": float(array.mean()),
        f"{name}/p95": float(np.percentile(array, 95)),
        f"{name}/max": float(array.max()),
    }


def means(rows: Iterable[Mapping[str, float]], prefix: str = "") -> dict[str, float]:
    """For each key that occurs in `rows`, the mean over the rows that have it."""
    columns: dict[str, list[float]] = {}
    for row in rows:
        for key, value in row.items():
            columns.setdefault(key, []).append(float(value))
    return {prefix + key: math.fsum(values) / len(values) for key, values in columns.items()}


class MetricLogger:
    """Writes to `RUN_DIR/metrics.jsonl` (one object a call: step, time, values) and `RUN_DIR/tensorboard/`."""

    def __init__(self, run_dir: Path | str) -> None:
        folder = Path(run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "metrics.jsonl"
        self._lines = path.open("ab", buffering=0)
        self._unwritten = b"" if path.read_bytes()[-1:] in (b"", b"\n") else b"\n"  # a kill has cut off its last line
        self._folder = folder / "tensorboard"
        self._events: Any = None
        self._retry_at = 0.0

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Values that are not finite are `null` in the file."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        numbers = {name: float(value) for name, value in values.items()}
        row = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        self._append(step, json.dumps({"step": step, "time": round(time.time(), 3), **row}) + "\n")
        self._write(step, Summary(value=[Summary.Value(tag=n, simple_value=v) for n, v in numbers.items()]))

    def _append(self, step: int, line: str) -> None:
        """What the disk refuses is written with a later line."""
        if len(self._unwritten) < MOST_UNWRITTEN_BYTES:
            self._unwritten += line.encode()
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[self._lines.write(self._unwritten) :]
        except OSError as error:
            get_logger("metrics").error("metrics.jsonl lacks step %d until the disk takes it: %s", step, error)

    def image(self, step: int, name: str, png_bytes: bytes) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        width, height = (int.from_bytes(png_bytes[i : i + 4], "big") for i in (16, 20))  # of the PNG's first chunk
        image = Summary.Image(encoded_image_string=png_bytes, width=width, height=height, colorspace=3)
        self._write(step, Summary(value=[Summary.Value(tag=name, image=image)]))

    def text(self, step: int, name: str, markdown: str) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING

        shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
        tensor = TensorProto(dtype=DT_STRING, string_val=[markdown.encode()], tensor_shape=shape)
        metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        self._write(step, Summary(value=[Summary.Value(tag=f"{name}/text_summary", tensor=tensor, metadata=metadata)]))

    def _write(self, step: int, summary: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        if self._events is None and time.monotonic() < self._retry_at:
            return
        try:
            if self._events is None:
                self._events = EventFileWriter(str(self._folder), flush_secs=5)  # has a file of its own
            self._events.add_event(Event(wall_time=time.time(), step=step, summary=summary))
        except OSError as error:  # of an earlier write, in the writer's thread, which has ended
            get_logger("metrics").error("TensorBoard lacks what is around step %d: %s", step, error)
            self._events, self._retry_at = None, time.monotonic() + RETRY_S

    def flush(self) -> None:
        if self._events is not None:
            with contextlib.suppress(OSError):
                self._events.flush()

    def close(self) -> None:
        for file in filter(None, (self._events, self._lines)):
            with contextlib.suppress(OSError):
                file.close()
