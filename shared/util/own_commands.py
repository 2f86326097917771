"""Names Pronk's commands as the user can give them: `pronk local` where Pronk is installed, else
`python launch/local.py`."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CALLED = "pronk "  # the beginning of sys.argv[0] in a program that the command `pronk` runs
MODULES = {"check": "envs.check", "export": "learner.export", "keys": "shared.keys"}


def is_installed() -> bool:
    """Tell whether this Pronk is an installed one, not a clone."""
    return not (ROOT / "Makefile").is_file()


def command(name: str) -> str:
    """Return the command that runs a program of Pronk's, by its name after `pronk`."""
    if is_installed() or sys.argv[0].startswith(CALLED):
        return CALLED + name
    return f"python -m {MODULES[name]}" if name in MODULES else f"python launch/{name.replace('-', '_')}.py"


def called_as(otherwise: str) -> str:
    """Return how this program was called, for its usage: by the command `pronk`, or `otherwise`."""
    return sys.argv[0] if sys.argv[0].startswith(CALLED) else otherwise
