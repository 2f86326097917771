"""What both ends of the group that weights travel over agree on."""

from __future__ import annotations

DEVICES = {"gloo": "cpu", "nccl": "cuda"}
"""Where a backend's tensors lie: it takes no others."""


def backend_of(learner: str, engine: str, *, shared: bool) -> str:
    """What weights travel over from a `learner` to an `engine` on these devices ("cpu" or "cuda"). NCCL has no CPU in a
    group, and joins no two processes of one GPU: where either is on a CPU, or they have a `shared` GPU, they go through
    the host's memory."""
    return "nccl" if learner == engine == "cuda" and not shared else "gloo"


def watchdog_s(timeout_s: float) -> float:
    """NCCL's own limit of what is waited for `timeout_s` at most. Where NCCL's passes, torch ends the process, so that
    it is far longer: whoever waits gives up first, and breaks the group up."""
    return max(3600.0, 10 * timeout_s)
