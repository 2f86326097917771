"""A plugin of SGLang's server (its entry point group `sglang.srt.plugins`): a pause in place leaves no forward behind.

SGLang's overlap scheduler launches the next forward before it takes the results of the last one. A pause in place
stops it between the two: the forward goes on while new weights are copied over those that it reads, and its tokens,
taken only after the pause, are given the new weights' name. Here the pause takes them first, as the mode `retract`
does, so that each token belongs to the weights that it names. In the queue a batch without requests stands for what
was taken.

Without the overlap scheduler no forward is under way, and nothing is done. PRONK_DRAIN_PAUSES=0 turns it off.

Goes when SGLang's own pause in place waits for the forward.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

TAKEN = SimpleNamespace(reqs=[])
"""A batch whose results were taken already."""


def drain(scheduler: Any) -> None:
    """Waits for the forward under way and takes its results. Called between two steps."""
    if not _wanted() or not getattr(scheduler, "enable_overlap", False):
        return
    for place, (batch, result) in enumerate(scheduler.result_queue):
        if batch is not TAKEN:
            scheduler.process_batch_result(batch, result)
            scheduler.result_queue[place] = (TAKEN, result)


def _wanted() -> bool:
    return os.environ.get("PRONK_DRAIN_PAUSES") != "0"


def pause(original: Any, scheduler: Any, request: Any) -> Any:
    if request.mode == "in_place":
        drain(scheduler)
    return original(scheduler, request)


def process(original: Any, scheduler: Any, batch: Any, result: Any) -> Any:
    return None if batch is TAKEN else original(scheduler, batch, result)


def register() -> None:
    """Called by SGLang in each of its processes, before it serves."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if not _wanted():
        return
    scheduler = "sglang.srt.managers.scheduler.Scheduler"
    HookRegistry.register(f"{scheduler}.pause_generation", pause, HookType.AROUND)
    HookRegistry.register(f"{scheduler}.process_batch_result", process, HookType.AROUND)
