"""What the tensor-parallel ranks of SGLang's server do together or not at all (`pronk_staged_weights`).

Each rank receives on its own, and only the first one's answer is sent. Where one rank failed, another that went on
would wait in SGLang's next barrier, and the answer would not say so.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

AGREE_S = 60.0  # for the slowest rank, which waits for its last bytes and looks at the files that it merges with
REASON_BYTES = 500  # of a reason, that the others are told


def first_reason(group: Any, reason: str) -> str:
    """Why the first rank of `group` that has a reason cannot go on: the same on all ranks, "" if none has one.

    Every rank calls this in every case. RuntimeError if one does not: SGLang's own limit for the group is two hours, in
    which the server would stand still and call itself healthy. An exception ends it, and it can be started again."""
    import torch
    import torch.distributed as dist

    if (size := dist.get_world_size(group)) == 1:
        return reason
    padded = reason.encode()[:REASON_BYTES].ljust(REASON_BYTES, b"\0")
    own = torch.tensor(list(padded), dtype=torch.uint8, device="cpu")
    found = [torch.empty_like(own) for _ in range(size)]
    try:
        dist.all_gather(found, own, group, async_op=True).wait(timedelta(seconds=AGREE_S))
    except RuntimeError as error:
        raise RuntimeError("the tensor-parallel ranks do not tell each other whether they have the weights") from error
    reasons = [bytes(each.tolist()).rstrip(b"\0").decode(errors="replace") for each in found]
    return next((f"rank {rank}: {each}" for rank, each in enumerate(reasons) if each), "")
