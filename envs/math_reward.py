r"""Grade a mathematical answer: the last \boxed{} (or \fbox{}) of what the model wrote against a label.

Equal texts and plain numbers are compared here; the rest goes to math-verify in a process that is killed after a time
limit. A verdict keeps "timeout" apart from "wrong".
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from envs.math_grading.normalize import last_box, normalize, words_of
from envs.math_grading.worker_pool import WorkerFailed, WorkerPool, WorkerTimeout

LIMIT_S = 2.0
_POOL = WorkerPool("envs.math_grading.compare", size=2)  # its processes start at the first call
_NUMBER = re.compile(r"[-+]?\d{1,15}(?:\.\d{0,15})?")
_SLOW = re.compile(
    r"\d{16}|! ?!|\d{4} ?\}? ?!|\\(?:sum|prod|o?i*nt|lim|bigcup|bigcap)(?![a-z])|\^[^^]*\^.{,3}[\^\d]{2}|\^\D{0,3}\d{4}"
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """`outcome`: right, wrong, no_answer (nothing boxed) or timeout. `score` is 1.0 for right and 0.0 otherwise."""

    score: float
    outcome: str


def grade(response: str, label: str, *, tolerance: float | None = None) -> float:
    """The score of `reward_function`: 0.0 for a timeout too."""
    return reward_function(response, label, tolerance=tolerance).score


def reward_function(response: str, label: str, *, tolerance: float | None = None, limit_s: float = LIMIT_S) -> Verdict:
    """Whether the last boxed answer of `response` equals `label`.

    `tolerance` is the absolute error allowed to a number: 0.05 forgives labels that were rounded to one decimal. None
    and 0.0 demand equality; 0.0 is strict beyond that, and takes neither a rounding (36.87 ≈ 36.9) nor 60% for 0.6.
    """
    answer, boxed_label = last_box(response), last_box(label)
    if answer is None or not answer.strip():
        return Verdict(0.0, "no_answer")
    try:
        right = _equal(normalize(answer), normalize(label if boxed_label is None else boxed_label), tolerance, limit_s)
    except WorkerTimeout:
        return Verdict(0.0, "timeout")
    return Verdict(float(right), "right" if right else "wrong")


@lru_cache(maxsize=4096)
def label_problem(label: object) -> str:
    """What is wrong with a label, in words; "" if answers can be compared with it."""
    if not isinstance(label, str):
        return f"the label is {type(label).__name__}, not text"
    if not label.strip():
        return "the label is empty"
    text = normalize(label)
    if _NUMBER.fullmatch(text) or words_of(text) is not None:
        return ""
    try:
        readable = is_modest(text) and _POOL.call([None, text, None], LIMIT_S)
    except (WorkerFailed, WorkerTimeout):
        readable = False
    return "" if readable else f"the label {label[:40]!r} does not parse"


def _equal(answer: str, label: str, tolerance: float | None, limit_s: float) -> bool:
    if re.sub(r"(?<!\d) | (?!\d)", "", answer) == re.sub(r"(?<!\d) | (?!\d)", "", label):
        return bool(answer)
    if _NUMBER.fullmatch(answer) and _NUMBER.fullmatch(label):
        return abs(float(answer) - float(label)) <= (tolerance + 1e-9 if tolerance else 0.0)
    words, expected = words_of(answer), words_of(label)
    if words and words == expected:
        return True
    if any(text and (" " in text or len(text) > 3) for text in (words, expected)):
        return False
    if (words and expected and len(words + expected) == 2) or not (is_modest(answer) and is_modest(label)):
        return False
    try:
        return bool(_POOL.call([answer, label, tolerance], limit_s))
    except WorkerFailed:
        return False  # the answer took more memory than a worker has


def is_modest(text: str) -> bool:
    """Whether a computer algebra system may be given `text`: short, shallow, no tall powers, no large sums."""
    depth = max(accumulate((character in "([{") - (character in ")]}") for character in text), default=0)
    return 0 < len(text) <= 200 and depth <= 8 and text.count("^") <= 8 and not _SLOW.search(text)
