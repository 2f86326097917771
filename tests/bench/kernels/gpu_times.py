"""Times on a GPU, by its own events."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping

import torch

Tasks = Mapping[str, Callable[[], object]]


def gpu_times(tasks: Tasks, repeats: int, launches: int = 1) -> dict[str, float]:
    """Median milliseconds of each task, all of them taken in turns, since the clock falls as the chip heats up. So many
    launches in a row are one measurement: several hide what the host needs for each."""
    times: dict[str, list[float]] = {name: [] for name in tasks}
    for turn in range(repeats + 2):
        for name, task in tasks.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(launches):
                task()
            end.record()
            end.synchronize()
            if turn >= 2:
                times[name].append(start.elapsed_time(end) / launches)
    return {name: statistics.median(values) for name, values in times.items()}
