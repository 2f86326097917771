"""Times on a GPU, by its own events and its own profiler."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping

import torch
from torch.profiler import ProfilerActivity, profile

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


def busy_times(tasks: Tasks, launches: int) -> dict[str, float]:
    """Milliseconds for which each task keeps the GPU busy, the mean of so many launches: what the host needs to launch
    a kernel does not count, as in a step where the GPU is behind it."""
    times: dict[str, float] = {}
    for name, task in tasks.items():
        for _ in range(3):
            task()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            for _ in range(launches):
                task()
            torch.cuda.synchronize()
        times[name] = sum(event.self_device_time_total for event in profiled.key_averages()) / launches / 1000
    return times
