r"""Grade a mathematical answer: the last \boxed{} (or \fbox{}) of what the model wrote against a label.

Plain values are compared here, by exact arithmetic with hard bounds; the rest goes to math-verify in a process that is
killed after a time limit. A verdict keeps "timeout" apart from "wrong".
"""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass
from functools import cache

from envs.math_grading.compare import equal, is_foreign, parses, worth_asking
from envs.math_grading.text import ascending, clean, last_box
from envs.math_grading.worker_pool import WorkerFailed, WorkerPool, WorkerTimeout

WORKERS = 2
LIMIT_S = 2.0
_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class Verdict:
    """`outcome`: right, wrong, no_answer (nothing boxed) or timeout. `score` is 1.0 for right and 0.0 otherwise."""

    score: float
    outcome: str


def grade(response: str, label: str, *, tolerance: float | None = None) -> float:
    """1.0 if the last boxed answer of `response` equals `label`, else 0.0 (also after a timeout; see `judge`).

    `tolerance` is the absolute error allowed to a number: None and 0.0 demand equality, 0.05 forgives labels that were
    rounded to one decimal.
    """
    return reward_function(response, label, tolerance=tolerance).score


def reward_function(response: str, label: str, *, tolerance: float | None = None, limit_s: float = LIMIT_S) -> Verdict:
    """As `grade`, with the outcome."""
    answer = last_box(response)
    if answer is None or not answer.strip():
        return Verdict(0.0, "no_answer")
    return judge_answer(answer, label, tolerance=tolerance, limit_s=limit_s)


def judge_answer(answer: str, label: str, *, tolerance: float | None = None, limit_s: float = LIMIT_S) -> Verdict:
    """The verdict on an answer that is already out of its box."""
    boxed = last_box(label)
    label = label if boxed is None else boxed
    verdict = equal(answer, label, tolerance)
    if verdict is None:
        if not (is_modest(answer) and is_modest(label) and worth_asking(answer, label)):
            return Verdict(0.0, "wrong")
        try:
            verdict = bool(_pool().call([ascending(answer), ascending(label)], limit_s))
        except WorkerTimeout:
            return Verdict(0.0, "timeout")
        except WorkerFailed:
            verdict = False  # the answer took more memory than a worker has
    return Verdict(float(verdict), "right" if verdict else "wrong")


def label_problem(label: object) -> str:
    """What is wrong with a label, in words; "" if answers can be compared with it."""
    if not isinstance(label, str):
        return f"the label is {type(label).__name__}, not text"
    if not clean(label):
        return "the label is empty"
    if not parses(label) and not (is_foreign(label) and is_modest(label)):
        return f"the label {label[:40]!r} does not parse"
    return ""


def is_modest(text: str) -> bool:
    """Whether a computer algebra system may be given `text`: short, shallow, no tall powers, no large sums."""
    if len(text) > 200 or re.search(r"\d{16}|!\s*!|\\(?:sum|prod|int|lim|oint|iint|bigcup|bigcap)(?![a-z])", text):
        return False
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    if deepest > 8 or (depth != 0 and text.count("[") == text.count("]") == 0):
        return False
    if re.search(r"\^\s*\{?[^{}]*\^|\d{4,}\s*\}?\s*!|\^\s*\{?\s*-?\s*(?:\d{3,}|[2-9]\d|1[3-9])", text):
        return False
    return len(re.findall(r"\^", text)) <= 8 and len(set(re.findall(r"(?<![a-zA-Z\\])[a-zA-Z](?![a-zA-Z])", text))) <= 5


@cache
def _make_pool() -> WorkerPool:
    return WorkerPool("envs.math_grading.library", WORKERS)


def _pool() -> WorkerPool:
    with _lock:
        return _make_pool()
