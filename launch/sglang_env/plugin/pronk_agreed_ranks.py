"""Agreement of the tensor-parallel ranks of SGLang's server: all do a step, or none does (`pronk_staged_weights`).

Each rank receives weights on its own, and only the first rank's answer is sent. If one rank failed and the others went
on, they would wait in SGLang's next barrier, and the answer would not report it.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

AGREE_S = 60.0  # time for the slowest rank, which waits for its last bytes and reads the files that it merges with
REASON_BYTES = 500  # length limit of a reason sent to the other ranks


def first_reason(group: Any, reason: str) -> str:
    """Exchange the ranks' reasons why they cannot go on; return the first one, the same on all ranks, or "" if none has
    any. Every rank must call this in every case. Raise RuntimeError if one does not within AGREE_S: SGLang's own limit
    for the group is two hours, during which the server would stand still and report itself healthy. The exception ends
    the server, so that it can be restarted."""
    import torch
    import torch.distributed as dist

    if (size := dist.get_world_size(group)) == 1:
        return reason
    padded = reason.encode()[:REASON_BYTES].ljust(REASON_BYTES, b"\0")
    own = torch.tensor(list(padded), dtype=torch.uint8, device="cpu")
    gathered = [torch.empty_like(own) for _ in range(size)]
    try:
        dist.all_gather(gathered, own, group, async_op=True).wait(timedelta(seconds=AGREE_S))
    except RuntimeError as error:
        raise RuntimeError("the tensor-parallel ranks do not tell each other whether they have the weights") from error
    reasons = [bytes(each.tolist()).rstrip(b"\0").decode(errors="replace") for each in gathered]
    return next((f"rank {rank}: {each}" for rank, each in enumerate(reasons) if each), "")
