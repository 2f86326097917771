"""A plugin of SGLang's server (its entry point group `sglang.srt.plugins`): a pause in place first completes the
running forward.

SGLang's overlap scheduler launches the next forward before it processes the results of the last one. A pause in place
stops it in between: the forward continues while new weights are copied over those that it reads, and its tokens,
processed only after the pause, get the name of the new weights. With this plugin the pause processes them first, as the
mode `retract` does, so that each token is labelled with the weights that sampled it. In the queue, a batch without
requests replaces a processed one.

Without the overlap scheduler no forward is running, and nothing is done. PRONK_DRAIN_PAUSES=0 turns the plugin off.

To be removed when SGLang's own pause in place waits for the forward.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

TAKEN = SimpleNamespace(reqs=[])
"""A batch whose results were taken already."""


def drain(scheduler: Any) -> None:
    """Wait for the running forward and process its results. Called between two steps."""
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
    """Register the hooks. SGLang calls this in each of its processes, before it serves."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if not _wanted():
        return
    scheduler = "sglang.srt.managers.scheduler.Scheduler"
    HookRegistry.register(f"{scheduler}.pause_generation", pause, HookType.AROUND)
    HookRegistry.register(f"{scheduler}.process_batch_result", process, HookType.AROUND)
