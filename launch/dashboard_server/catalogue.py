"""Looks up metrics in the catalogue: their texts, and the bounds of their healthy range if it has any."""

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
    """Return all entries as (section, name, pattern, texts with the position in the catalogue), names without braces
    first."""
    rows: list[tuple[str, str, re.Pattern[str], dict[str, Any]]] = []
    for section, metrics in tomllib.loads(CATALOGUE.read_text(encoding="utf-8")).items():
        for name, texts in metrics.items():
            pattern = re.compile(re.sub(r"\\\{\w+\\\}", "[^/]+", re.escape(name)))
            rows.append((section, name, pattern, {**texts, **bounds(texts["healthy"]), "place": len(rows)}))
    return tuple(sorted(rows, key=lambda entry: entry[1].count("{")))


def bounds(healthy: str) -> dict[str, float]:
    """Return the bounds `low` and `high` if the text begins with a plain bound or range; {} otherwise."""
    if match := _BOUND.match(healthy):
        return {"high" if match[1] in ("below", "at most") else "low": float(match[2])}
    if match := _RANGE.match(healthy):
        return {"low": float(match[1]), "high": float(match[2])}
    return {}


def described(name: str) -> dict[str, Any]:
    """Return the section and the texts of a metric; empty texts if it is not in the catalogue."""
    for section, _, pattern, texts in entries():
        if pattern.fullmatch(name):
            return {"section": section, **texts}
    return {"section": "other", "meaning": "", "healthy": "", "cure": "", "place": len(entries())}
