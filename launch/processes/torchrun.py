"""torchrun, as launch/local.py starts it: asked to stop, it says so in one line instead of a traceback."""

from __future__ import annotations

import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

EXIT_STOPPED = 130

if __name__ == "__main__":
    try:
        main()
    except SignalException as stopped:
        print(f"torchrun: {stopped.sigval.name}: stopping", file=sys.stderr)
        sys.exit(EXIT_STOPPED)
    except ChildFailedError as failure:  # the rank has printed its reason
        rank, first = failure.get_first_failure()
        print(f"torchrun: rank {rank} ended with exit code {first.exitcode}", file=sys.stderr)
        sys.exit(first.exitcode if first.exitcode > 0 else 1)
