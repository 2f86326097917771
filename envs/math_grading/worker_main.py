"""What runs inside a worker process: one JSON request a line in, one JSON result a line out."""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import sys

MEMORY_BYTES = 2 << 30


def main(module_name: str) -> None:
    """Serve until standard input closes. The process ends itself should its owner vanish during a long request."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not reach the answers
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    handle = importlib.import_module(module_name).handle
    answers.write(b'"ready"\n')
    answers.flush()
    for line in sys.stdin.buffer:
        limit_s, request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, max(limit_s, 1e-3))  # processor time; its signal ends the process
        signal.setitimer(signal.ITIMER_REAL, 20.0 * limit_s + 5.0)  # likewise, should nobody be left to do it
        try:
            result = handle(request)
        except (MemoryError, RecursionError):
            result = None
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        answers.write(json.dumps(result).encode() + b"\n")
        answers.flush()
