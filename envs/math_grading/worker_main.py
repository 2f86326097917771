"""The main loop of a worker process: reads one JSON request per line, writes one JSON result per line."""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import sys

MEMORY_BYTES = 2 << 30


def main(module_name: str) -> None:
    """Serve until standard input closes. If the owner vanishes during a long request, timers end the process."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output that a library prints must not mix with the answers
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    handle = importlib.import_module(module_name).handle
    answers.write(b'"ready"\n')
    answers.flush()
    for line in sys.stdin.buffer:
        limit_s, request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, max(limit_s, 1e-3))  # processor time; SIGPROF ends the process
        signal.setitimer(signal.ITIMER_REAL, 20.0 * limit_s + 5.0)  # a limit on the clock, in case the owner is gone
        try:
            result = handle(request)
        except (MemoryError, RecursionError):
            result = None
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        answers.write(json.dumps(result).encode() + b"\n")
        answers.flush()
