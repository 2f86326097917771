r"""Grade a mathematical answer: compare the last \boxed{} (or \fbox{}) after the model's thoughts with a label.

Options, words, plain numbers, times, dates and names of points are compared here; all other values with math-verify, in
a process that is killed after a time limit. A verdict keeps "timeout" apart from "wrong".
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from envs.math_grading.choices import has_chosen, letters_of, option_of
from envs.math_grading.normalize import boxes_of, last_box, normalize, without_thoughts, words_of
from envs.math_grading.plain_values import (
    SHORT_WORDS,
    is_float,
    number_of,
    numbers_agree,
    same_points,
    same_time_or_date,
    values_of,
)
from envs.math_grading.worker_pool import WorkerFailed, WorkerPool, WorkerTimeout

LIMIT_S = 2.0
_POOL = WorkerPool("envs.math_grading.compare", size=2)  # processes start at the first call
_SLOW = re.compile(
    r"\d{41}|! ?!|\d{4} ?\}? ?!|\\(?:sum|prod|o?i*nt|lim|bigcup|bigcap)(?![a-z])"
    r"|\^ ?(?:\{[^{}]*\}? ?|\(?\w+ ?)\^.{,3}[\^\d]{2}|\^\D{0,3}\d{4}"
)
_POWER_OF_A_NUMBER = re.compile(r"(?<![\w.)}\]])\d{1,3} ?\^ ?\{? ?\d{4} ?\}?(?! ?[\^!\d])")
_PRIMED = re.compile(r"[A-Za-z](?:'|\^ ?\{? ?\\prime)")
_OPPOSITES = {"yes": "no", "no": "yes", "true": "false", "false": "true"}


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of grading. `outcome`: right, wrong, no_answer (nothing boxed) or timeout. `score` is 1.0 for right
    and 0.0 otherwise."""

    score: float
    outcome: str


def grade(response: str, label: str, *, tolerance: float | None = None, choices: Sequence[str] = ()) -> float:
    """Return the score of `reward_function`, which is 0.0 for a timeout, too."""
    return reward_function(response, label, tolerance=tolerance, choices=choices).score


def reward_function(
    response: str,
    label: str,
    *,
    tolerance: float | None = None,
    choices: Sequence[str] = (),
    limit_s: float = LIMIT_S,
) -> Verdict:
    """Return the verdict whether the last boxed answer after the thoughts of `response` equals `label`.

    If the label is a list, boxes that follow each other, such as \\boxed{1} and \\boxed{2}, are one answer. `tolerance`
    is the allowed absolute error of a number: 0.05 allows for labels that were rounded to one decimal. None and 0.0
    require equality; 0.0 also accepts neither a rounding (36.87 ≈ 36.9) nor 60% for 60. `choices` are the texts of the
    options A, B, C, … of a multiple-choice question: the right option's letter is right, its text, and both.
    """
    boxes = boxes_of(answer_text := without_thoughts(response))
    if not boxes:
        return Verdict(0.0, "no_answer")
    boxed_label = last_box(label)
    goal = normalize(label if boxed_label is None else boxed_label)
    options = [normalize(choice) for choice in choices]
    answers = [boxes[-1][2]]
    if len(boxes) > 1:
        run = ", ".join(contents := _last_run(answer_text, boxes))
        brackets = re.fullmatch(r"(\(|\[|\\\{)(.*)(\)|\]|\\\})", goal)
        if len(contents) == len(values_of(goal)):
            answers.append(run)
        elif brackets and len(contents) == len(values_of(brackets[2])):
            answers.append(f"{brackets[1]}{run}{brackets[3]}")
    try:
        right = any(_is_right(normalize(answer), goal, options, tolerance, limit_s) for answer in answers)
    except WorkerTimeout:
        return Verdict(0.0, "timeout")
    return Verdict(float(right), "right" if right else "wrong")


def _last_run(text: str, boxes: list[tuple[int, int, str]]) -> list[str]:
    """Return the contents of the last boxes in one line, each at most 40 characters behind the one before."""
    run = [boxes[-1]]
    for box in reversed(boxes[:-1]):
        between = text[box[1] : run[0][0]]
        if box[1] > run[0][0] or len(between) > 40 or "\n" in between:
            break
        run.insert(0, box)
    return [content for _, _, content in run]


@lru_cache(maxsize=4096)
def label_problem(label: object) -> str:
    """Return what is wrong with a label, in words; "" if answers can be compared with it."""
    if not isinstance(label, str):
        return f"the label is {type(label).__name__}, not text"
    if not label.strip():
        return "the label is empty"
    if label.strip().lower() in ("nan", "null"):
        return f"the label is {label.strip()}: nothing"
    text, braces = normalize(label), re.sub(r"\\[{}]", "", label)
    if braces.count("{") != braces.count("}"):
        return f"the label {label[:40]!r} breaks off: its braces do not match"
    if number_of(text) is not None or words_of(text) is not None or option_of(text)[0] or letters_of(text):
        return ""
    if same_time_or_date(text, text):
        return ""
    try:
        readable = is_modest(text) and _POOL.call([None, text, None], LIMIT_S)
    except (WorkerFailed, WorkerTimeout):
        readable = False
    return "" if readable else f"the label {label[:40]!r} does not parse"


def _is_right(answer: str, label: str, options: list[str], tolerance: float | None, limit_s: float) -> bool:
    def equal(one: str, other: str) -> bool:
        return _equal(one, other, tolerance, limit_s)

    if _same_text(answer, label):
        return True
    chosen = has_chosen(answer, label, options, equal)
    return equal(answer, label) if chosen is None else chosen


def _same_text(answer: str, label: str) -> bool:
    return bool(answer) and re.sub(r"(?<!\d) | (?!\d)", "", answer) == re.sub(r"(?<!\d) | (?!\d)", "", label)


def _equal(answer: str, label: str, tolerance: float | None, limit_s: float) -> bool:
    if _same_text(answer, label):
        return True
    number, goal = number_of(answer), number_of(label)
    if number is not None and goal is not None:
        return numbers_agree(number, goal, tolerance, is_float(answer) or is_float(label))
    if (same := same_time_or_date(answer, label)) is not None:
        return same
    words, expected = words_of(answer), words_of(label)
    if (words and words == expected) or _opens_with(answer.lower(), expected or ""):
        return True
    if any(text and (" " in text or len(text) > 3) for text in (words, expected)):
        return False
    if words and expected and (len(words + expected) == 2 or words in SHORT_WORDS or expected in SHORT_WORDS):
        return False
    if (same := same_points(answer, label)) is not None:
        return same
    if len(_PRIMED.findall(answer)) != len(_PRIMED.findall(label)):
        return False  # B' is another point than B
    if not (is_modest(answer) and is_modest(label)):
        return False
    try:
        return bool(_POOL.call([answer, label, tolerance], limit_s))
    except WorkerFailed:
        return False  # the answer needs more memory than a worker has


def _opens_with(answer: str, word: str) -> bool:
    """Tell whether an answer is yes or no (true or false) and, after a comma or a full stop, why."""
    if word not in _OPPOSITES or not re.match(rf"{word} ?[,.;:]", answer):
        return False
    return not re.search(rf"\b{_OPPOSITES[word]}\b", answer)


def is_modest(text: str) -> bool:
    """Tell whether `text` is safe for a computer algebra system: short, not deeply nested, without tall powers and
    large sums."""
    plain = _POWER_OF_A_NUMBER.sub("1", text)
    depth = max(accumulate((character in "([{") - (character in ")]}") for character in text), default=0)
    return 0 < len(text) <= 200 and depth <= 8 and text.count("^") <= 8 and not _SLOW.search(plain)
