"""What the catalogue says of a metric's name, and the bound of its healthy range where it names one."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

CATALOGUE = Path(__file__).resolve().parents[2] / "learner" / "metrics" / "catalogue.toml"
_BOUND = re.compile(r"(below|at most|above|at or above) (\d[\d.e-]*)(?= a token|[;,]|$| for| most| after)")
_RANGE = re.compile(r"(?:between )?(-?\d[\d.]*) (?:to|and) (\d[\d.]*)")
LAG = re.compile(r"^(.+)/lag_(\w+)$")


@cache
def entries() -> tuple[tuple[str, str, re.Pattern[str], dict[str, Any]], ...]:
    """(section, name, pattern, what is said and its place in the catalogue), names without braces first."""
    found: list[tuple[str, str, re.Pattern[str], dict[str, Any]]] = []
    for section, metrics in tomllib.loads(CATALOGUE.read_text(encoding="utf-8")).items():
        for name, said in metrics.items():
            pattern = re.compile(re.sub(r"\\\{\w+\\\}", "[^/]+", re.escape(name)))
            found.append((section, name, pattern, {**said, **bounds(said["healthy"]), "place": len(found)}))
    return tuple(sorted(found, key=lambda entry: entry[1].count("{")))


def bounds(healthy: str) -> dict[str, float]:
    """`low` and `high` where the text begins with a plain bound or range."""
    if found := _BOUND.match(healthy):
        return {"high" if found[1] in ("below", "at most") else "low": float(found[2])}
    if found := _RANGE.match(healthy):
        return {"low": float(found[1]), "high": float(found[2])}
    return {}


def described(name: str) -> dict[str, Any]:
    """The section and the texts of a metric; of one that the catalogue lacks, empty ones."""
    for section, _, pattern, said in entries():
        if pattern.fullmatch(name):
            return {"section": section, **said}
    return {"section": "other", "meaning": "", "healthy": "", "cure": "", "place": len(entries())}
