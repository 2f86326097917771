"""Profile one step of a rank when it was asked for: torch's profile, and on a GPU a snapshot of its memory.

RUN/profiles/step_00000012_rank_0.json.gz         opens in Perfetto and chrome://tracing
RUN/profiles/step_00000012_rank_0_memory.pickle   opens at pytorch.org/memory_viz

A profile that cannot be made or written costs itself alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from learner import profile_request
from learner.distributed import Ranks
from shared.log import get_logger

KEPT = 20  # files of one rank; the oldest go first
MEMORY_EVENTS = 100_000  # allocations that a snapshot remembers


@contextmanager
def profiled(run: Path, step: int, ranks: Ranks) -> Iterator[None]:
    """Profile the body if somebody has asked for it; `step` is its number."""
    if not profile_request.take():
        yield
        return
    on_gpu = ranks.device.type == "cuda"
    name = f"step_{step:08d}_rank_{ranks.rank}"
    log = get_logger("learner")
    log.info("step %d is profiled", step)
    if on_gpu:
        torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    try:
        with profile(activities=activities, record_shapes=True) as taken:
            yield
        written = _write(taken, run / profile_request.FOLDER, name, ranks.rank, memory=on_gpu)
        log.info("the profile of step %d is in %s", step, written)
    except OSError as error:
        log.error("the profile of step %d is not written: %s", step, error)
    finally:
        if on_gpu:
            torch.cuda.memory._record_memory_history(enabled=None)


def _write(taken: profile, folder: Path, name: str, rank: int, *, memory: bool) -> Path:
    """Write a profile; the file gets its name when it is complete. Raise OSError if the disk refuses."""
    folder.mkdir(exist_ok=True)
    for old in sorted(folder.glob(f"step_*_rank_{rank}[._]*"))[: 1 - KEPT]:
        old.unlink(missing_ok=True)
    if memory:
        torch.cuda.memory._dump_snapshot(str(folder / f"{name}_memory.pickle"))
    path, partial = folder / f"{name}.json.gz", folder / f".{name}.partial.json.gz"
    taken.export_chrome_trace(str(partial))
    partial.replace(path)
    return path
