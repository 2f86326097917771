"""torchrun, as launch/local.py and launch/cluster.py start it: asked to stop, it says so in one line instead of a
traceback, and leaves its ranks the time that they take to write a checkpoint."""

from __future__ import annotations

import os
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

EXIT_STOPPED = 130
SAVE_S = "1800"  # after SIGTERM; a rank that makes no progress ends itself sooner, within learner.leave_timeout_s

if __name__ == "__main__":
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", SAVE_S)
    try:
        main()
    except SignalException as stopped:
        print(f"torchrun: {stopped.sigval.name}: stopping", file=sys.stderr)
        sys.exit(EXIT_STOPPED)
    except ChildFailedError as failure:  # the rank has printed its reason
        rank, first = failure.get_first_failure()
        print(f"torchrun: rank {rank} ended with exit code {first.exitcode}", file=sys.stderr)
        sys.exit(first.exitcode if first.exitcode > 0 else 1)
