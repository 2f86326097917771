"""Resident memory of processes, as the kernel counts it: what libraries hold is in it, too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

MIB = 2**20


def resident_bytes(pid: int | str = "self", field: str = "VmRSS") -> int:
    """`VmRSS` is what a process has now, `VmHWM` its highest since it began or `forget_peak`."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"no {field} of process {pid}")


def forget_peak(pid: int | str = "self") -> int:
    """The highest value begins anew; returns what is resident."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return resident_bytes(pid)


def growth_of(program: str, timeout_s: float = 120.0) -> float:
    """How many MiB more than after its first part a process has at its peak in the second part of a program; the parts
    are separated by a line of dashes. A process of its own: nothing else is in the number."""
    before, after = program.split("\n---\n")
    lines = [before, "from tests.support.hostile import memory as m", "start = m.forget_peak()", after]
    lines.append("print('GREW', m.resident_bytes(field='VmHWM') - start)")
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=True,
        cwd=Path(__file__).parents[3],
    )
    return int(done.stdout.split("GREW ")[1]) / MIB
