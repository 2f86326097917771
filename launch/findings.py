"""The doctor's findings, as a table for people and as one JSON object for programs."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

State = Literal["ok", "warning", "failed", "not checked"]
WIDTH = 112
_GAP = 2


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. `cure` says what to do if it is not ok; for a check that was not made, how or where it
    can be made."""

    name: str
    state: State
    found: str
    cure: str = ""
    seconds: float | None = None


def ok(name: str, found: str) -> Finding:
    return Finding(name, "ok", found)


def warning(name: str, found: str, cure: str) -> Finding:
    return Finding(name, "warning", found, cure)


def failed(name: str, found: str, cure: str) -> Finding:
    return Finding(name, "failed", found, cure)


def not_checked(name: str, why: str, cure: str = "") -> Finding:
    return Finding(name, "not checked", why, cure)


def refused(name: str, error: Exception, cure: str) -> Finding:
    """Return the finding for an error of one of Pronk's own checks, whose line names the value and mostly, after a
    semicolon, the cure; `cure` is used otherwise."""
    found, _, own = " ".join(str(error).split()).partition("; ")
    return failed(name, found, own or cure)


def exit_code(findings: Sequence[Finding]) -> int:
    """Return 1 if any check failed. What could not be checked is no failure."""
    return int(any(each.state == "failed" for each in findings))


def table(findings: Sequence[Finding]) -> str:
    """Return the table: a row for each finding, with its cure below, and a summary."""
    names = max(len(each.name) for each in findings) + _GAP
    states = len("not checked") + _GAP
    indent = " " * (names + states)
    rows = []
    for each in findings:
        took = f" ({each.seconds:.1f} s)" if each.seconds is not None else ""
        begin = f"{each.name:<{names}}{each.state:<{states}}"
        rows += _wrapped(each.found + took, begin, indent)
        if each.cure:
            rows += _wrapped(f"-> {each.cure}", indent, indent + "   ")
    return "\n".join([*rows, "", summary(findings)])


def summary(findings: Sequence[Finding]) -> str:
    states = [each.state for each in findings]
    parts = [
        f"{states.count(state)} {state}" for state in ("ok", "warning", "failed", "not checked") if state in states
    ]
    return ", ".join(parts)


def as_json(findings: Sequence[Finding], seconds: float) -> str:
    """Return all findings as one line."""
    checks = [asdict(each) for each in findings]
    return json.dumps({"failed": exit_code(findings) != 0, "seconds": round(seconds, 2), "checks": checks})


def _wrapped(text: str, begin: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=begin, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
