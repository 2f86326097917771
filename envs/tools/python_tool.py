"""A tool that runs a Python program in a process of its own, with limits of time, memory and output.

The limits keep a program from taking the machine; they are no wall against one that means harm: it runs as the user who
runs the actor. Where that matters, run the actors in a container without a network.
"""

from __future__ import annotations

import os
from functools import cache

from envs.math_grading.worker_pool import WorkerFailed, WorkerPool, WorkerTimeout
from envs.tools.tool import FAILED, MAX_RESULT_CHARACTERS, Tool, ToolFault, ToolResult, tool_of

RUNNER = "envs.tools.python_runner"
ENDED = {"time": "it did not end within {limit_s:g} s", "memory": "it needs more than {memory_mb} MiB of memory"}


def python_tool(limit_s: float = 5.0, memory_mb: int = 512, name: str = "python") -> Tool:
    """Return the tool. A program may take `limit_s` seconds and `memory_mb` MiB; each begins anew, in an empty
    folder."""

    def python(code: str) -> ToolResult:
        """Run a Python program and return what it prints, and the value of its last line. Nothing is kept from one
        program to the next.

        Args:
            code: the program
        """
        limits = {"limit_s": limit_s, "memory_mb": memory_mb, "characters": MAX_RESULT_CHARACTERS}
        try:
            ended = workers().call({"code": code, **limits}, max(1.0, limit_s))
        except (WorkerFailed, WorkerTimeout, RuntimeError) as error:
            raise ToolFault(f"no program can be run: {error}") from error
        if ended is None:
            raise ToolFault("no program can be run: the worker is out of memory")
        text = ended["text"].rstrip()
        if why := ENDED.get(ended["ended"]):
            return ToolResult(f"{text}\nError: the program was ended: {why.format(**limits)}".lstrip(), error=FAILED)
        return ToolResult(text or "(the program printed nothing)")

    return tool_of(python, name)


@cache
def workers() -> WorkerPool:
    """Return the processes in which this process runs programs: as many as there are processors."""
    return WorkerPool(RUNNER, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2)


python = python_tool()
"""The tool with 5 seconds and 512 MiB for a program."""
