"""Why a module could not be imported, in one line."""

from __future__ import annotations

import traceback


def import_failure(error: Exception) -> str:
    """Return the type and the message of what a module raised while it was imported, and where it did."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    if isinstance(error, SyntaxError) or error.__traceback__ is None:  # its message names the line
        return text
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{text}; {last.filename}, line {last.lineno}"
