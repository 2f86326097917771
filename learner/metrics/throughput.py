"""The parts of a step's time, and its use of the hardware."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import torch

from learner.distributed import Ranks
from shared.spans import add_span, recording

# Peak of dense bfloat16 products, in operations per second, by a part of the device's name (manufacturers' data
# sheets).
PEAK_FLOPS = {"B200": 2.25e15, "H200": 9.89e14, "H100": 9.89e14, "A100": 3.12e14, "L40S": 3.62e14}


class Clock:
    """Seconds by name, and their sum. On a GPU, the times of its queue are measured and read once, at the end."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        if self._on_gpu and recording() is not None:
            torch.cuda.synchronize()  # so that the first event is of now
        self._began = time.monotonic()
        self._marks: list[tuple[str, Any]] = [("", self._now())]

    def _now(self) -> float | torch.cuda.Event:
        if not self._on_gpu:
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def lap(self, name: str) -> None:
        """Count the time since the last lap as `name`."""
        self._marks.append((name, self._now()))

    def seconds(self) -> dict[str, float]:
        """Return the seconds by name; waits for the GPU."""
        if self._on_gpu:
            torch.cuda.synchronize()
        seconds: dict[str, float] = {}
        for (_, before), (name, after) in pairwise(self._marks):
            took = before.elapsed_time(after) / 1000 if self._on_gpu else after - before
            seconds[name] = seconds.get(name, 0.0) + took
        return seconds

    def record_spans(self) -> None:
        """Record the laps as spans, if anything is recorded: those of a GPU's queue on a track of its own."""
        if recording() is None:
            return
        if self._on_gpu:
            torch.cuda.synchronize()
        first = self._marks[0][1]
        for (_, before), (name, after) in pairwise(self._marks):
            if self._on_gpu:
                begin, end = (self._began + first.elapsed_time(mark) / 1000 for mark in (before, after))
                add_span(name, begin, end, track="GPU")
            else:
                add_span(name, before, after)

    @property
    def total(self) -> float:
        return sum(self.seconds().values())

    def metrics(self) -> dict[str, float]:
        return {f"time/{name}_s": seconds for name, seconds in self.seconds().items()}


def speed(flops: float, seconds: float, ranks: Ranks) -> dict[str, float]:
    """Return TFLOP/s per rank and, for a GPU with a known peak, MFU (Chowdhery et al., 2022, appendix B).

    `flops`: products of all ranks. MFU is the share of the peak that the model's own products use; recomputation does
    not count.
    """
    rate = flops / max(seconds, 1e-9) / ranks.size
    values = {"speed/tflops_per_rank": rate / 1e12}
    if ranks.device.type == "cuda":
        name = torch.cuda.get_device_name(ranks.device)
        peak = next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)
        if peak is not None:
            values["speed/mfu"] = rate / peak
    return values
