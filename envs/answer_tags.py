"""Finds the answer and the thoughts in what a model writes: `<think>…</think><answer>…</answer>`."""

from __future__ import annotations

import re

from shared.families.marks import THOUGHT

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.IGNORECASE | re.DOTALL)
_THOUGHT = re.compile(THOUGHT.around("(.*?)"), re.DOTALL)


def answer_in(text: str) -> str | None:
    """Return what stands in the first <answer>; None without one."""
    found = _ANSWER.search(text)
    return found.group(1) if found else None


def thinks(text: str, words: str) -> bool:
    """Tell whether the first <think> holds these words, however they are spaced."""
    found = _THOUGHT.search(text)
    return found is not None and found.group(1).split() == words.split()
