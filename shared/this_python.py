"""Ends a command in one line if this Python is too old, or is not Pronk's environment's. The other packages import
it first; it needs nothing but Python itself."""

import importlib.util
import os
import sys

NEEDS = (3, 11)
IS_CLONE = os.path.exists(os.path.join(os.path.dirname(__file__), "..", "Makefile"))
PACKAGES = ("pydantic", "msgspec", "numpy")


def mistake():
    """Return, in one line, why Pronk cannot run in this Python; "" if it can."""
    if sys.version_info < NEEDS:
        needed, this = (".".join(map(str, version[:2])) for version in (NEEDS, sys.version_info))
        return f"Pronk needs Python {needed} or newer, and this is {this}: make env PYTHON=python3.11"
    if any(importlib.util.find_spec(name) is None for name in PACKAGES):
        cure = "make env, then . .venv/bin/activate" if IS_CLONE else "pip install pronk again, without --no-deps"
        return f"Pronk's packages are not in this Python ({sys.executable}): {cure}"
    return ""


if _why := mistake():
    print(f"error: {_why}", file=sys.stderr)
    sys.exit(2)
