"""torchrun, as launch/local.py and launch/cluster.py start it: when it is stopped, it prints one line instead of a
traceback, and gives its ranks enough time to write a checkpoint."""

from __future__ import annotations

import logging
import os
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

EXIT_STOPPED = 130
# Time for the ranks after SIGTERM; a rank without progress ends itself sooner, within learner.leave_timeout_s.
SAVE_S = "1800"

if __name__ == "__main__":
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", SAVE_S)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # a rank takes as many threads as its recipe says; this is a default
    for name in ("torch.distributed.run", "torch.distributed.elastic.multiprocessing.api"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # what they tell of a failed rank is in the line below
    try:
        main()
    except SignalException as stopped:
        print(f"torchrun: {stopped.sigval.name}: stopping", file=sys.stderr)
        sys.exit(EXIT_STOPPED)
    except ChildFailedError as failure:  # the rank has printed its reason
        rank, first = failure.get_first_failure()
        print(f"torchrun: rank {rank} ended with exit code {first.exitcode}", file=sys.stderr)
        sys.exit(first.exitcode if first.exitcode > 0 else 1)
