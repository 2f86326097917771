"""Resident memory of processes as the kernel counts it, which includes the memory of libraries."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

MIB = 2**20


def resident_bytes(pid: int | str = "self", field: str = "VmRSS") -> int:
    """Return resident bytes: `VmRSS` is the present value, `VmHWM` the peak since the start or the last
    `forget_peak`."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"no {field} of process {pid}")


def forget_peak(pid: int | str = "self") -> int:
    """Reset the peak; return the resident bytes."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return resident_bytes(pid)


def growth_of(program: str, timeout_s: float = 120.0) -> float:
    """Run a program of two parts, separated by a line of three dashes, in a new process; return by how many MiB the
    peak in the second part exceeds the memory after the first part."""
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
