"""What both ends of the group that weights travel over agree on."""

from __future__ import annotations

DEVICES = {"gloo": "cpu", "nccl": "cuda"}
"""Where a backend's tensors lie: it takes no others."""


def watchdog_s(timeout_s: float) -> float:
    """NCCL's own limit of what is waited for `timeout_s` at most. Where NCCL's passes, torch ends the process, so that
    it is far longer: whoever waits gives up first, and breaks the group up."""
    return max(3600.0, 10 * timeout_s)
