"""Equality by math-verify, for what is no plain value: equations, inequalities, sets, matrices. Runs in a worker."""

from __future__ import annotations

import logging

from math_verify import LatexExtractionConfig, parse, verify

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limit is off; the worker has one
_CONFIG = (LatexExtractionConfig(boxed_match_priority=0),)


def handle(request: list[str]) -> bool:
    """Whether [answer, label] are equal."""
    answer, label = (_parsed(text) for text in request)
    return bool(answer and label and verify(label, answer, allow_set_relation_comp=True, timeout_seconds=None))


def _parsed(text: str) -> list:
    parsed = parse(rf"\boxed{{{text}}}", _CONFIG, fallback_mode="no_fallback", parsing_timeout=None)
    return list(parsed)
