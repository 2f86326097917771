"""Compares answers that need no algebra: plain numbers, times, dates, and names of points."""

from __future__ import annotations

import re
from fractions import Fraction
from math import gcd

FLOAT_DIGITS = 12
"""A decimal number with as many digits is a printed float: it stands for all numbers that agree with it."""
FLOAT_ERROR = Fraction(1, 10**12)
_SHORT_WORDS = (
    "no on yes not ton act cat top pot opt was saw now won own tea eat ate god dog tap pat apt nap pan rat tar art tan "
    "ant nat net ten arm mar ram bat tab but tub low owl war raw who how end den are ear era all any odd one two six"
)
SHORT_WORDS = frozenset(_SHORT_WORDS.split())
"""Words whose letters are no product: no is not on."""
_NUMBER = re.compile(r"[-+]? ?(?:\d{1,60}(?:\.\d{0,60})?|\.\d{1,60})")
_DECIMAL_COMMA = re.compile(r"([-+]?(?:0|\d{2,})),(\d{1,2}|\d{4,})")
_EUROPEAN = re.compile(r"([-+]?[1-9]\d{0,2}(?:\.\d{3})+),(\d+)")
_TIME = re.compile(r"(\d{1,2}) ?: ?(\d\d)(?: ?: ?(\d\d))? ?(?:([ap])\.? ?m\.?)?", re.IGNORECASE)
_HOUR = re.compile(r"(\d{1,2}) ?([ap])\.? ?m\.?", re.IGNORECASE)
_MONTHS = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"]
_MONTH = rf"(?P<month>{'|'.join(_MONTHS)})[a-z]{{0,6}}\.?"
_DAY = r"(?P<day>\d{1,2})(?:st|nd|rd|th)?"
_YEAR = r"(?:,? ?(?P<year>\d{4}))?"
_WRITTEN_DATES = (
    re.compile(rf"{_MONTH} {_DAY}{_YEAR}", re.IGNORECASE),
    re.compile(rf"(?:the )?{_DAY} (?:of )?{_MONTH}{_YEAR}", re.IGNORECASE),
    re.compile(r"(?:(?P<year>\d{4}) ?[年년] ?)?(?P<month>\d{1,2}) ?[月월] ?(?P<day>\d{1,2}) ?[日号일]"),
)
_DATE = re.compile(r"(\d{4})([-/])(\d{1,2})\2(\d{1,2})|(\d{1,2})([-/])(\d{1,2})\6(\d{4})")
_POINTS = re.compile(r"(?:m ?)?(\\[a-z]+)? ?\{? ?([A-Z](?: ?[A-Z]){1,4}) ?\}?")


def number_of(text: str) -> Fraction | None:
    """Return the exact value of a plain decimal number; None for any other text."""
    return Fraction(text.replace(" ", "")) if _NUMBER.fullmatch(text) else None


def is_float(text: str) -> bool:
    """Tell whether a text is a decimal number with so many digits that it must have been rounded by a computer."""
    decimal = re.fullmatch(r"[-+]? ?(\d*)\.(\d+)(?: ?\* ?10 ?\^ ?\{?[-+]?\d+\}?)?", text)
    return decimal is not None and len((decimal[1] + decimal[2]).lstrip("0")) >= FLOAT_DIGITS


def numbers_agree(one: Fraction, other: Fraction, tolerance: float | None, is_rounded: bool) -> bool:
    """Tell whether two numbers are equal; within the tolerance, if there is one; to 12 digits if one of them is a
    printed float."""
    error = FLOAT_ERROR * max(abs(one), abs(other)) if is_rounded else Fraction(0)
    if tolerance:
        error = max(error, Fraction(tolerance) + Fraction(1, 10**9))
    return abs(one - other) <= error


def values_of(text: str) -> list[str]:
    """Return the parts of a list between its commas outside of brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "([{⟨") - (character in ")]}⟩")
        if character in ",;" and depth <= 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


def with_decimal_point(text: str) -> str | None:
    """Return a number with a decimal comma, such as 60,5, with a point; None for other texts. 1,2 is a list, and 1,234
    a number with a thousands separator."""
    match = _DECIMAL_COMMA.fullmatch(text) or _EUROPEAN.fullmatch(text)
    return f"{match[1].replace('.', '')}.{match[2]}" if match else None


def same_time_or_date(answer: str, label: str) -> bool | None:
    """Tell whether two times (9:45, 21:45:00, 9:45 pm) or dates (2024-05-01) are the same; None if the label is
    neither. A label such as 3:10, which may be a ratio in lowest terms, is compared as a time only with times."""
    if (date := _date(label)) is not None:
        return _date(answer) == date
    answer, label = _with_minutes(answer), _with_minutes(label)
    goal, match = _time(label), _TIME.fullmatch(label)
    if goal is None or match is None:
        return None
    if _TIME.fullmatch(answer):
        return _time(answer) == goal
    terms = [int(term) for term in match.groups()[:3] if term]
    may_be_ratio = gcd(*terms) == 1 and terms[0] > 0 and not match[4] and all(term >= 10 for term in terms[1:])
    return None if may_be_ratio else False


def _date(text: str) -> tuple[str, ...] | None:
    for pattern in _WRITTEN_DATES:
        if match := pattern.fullmatch(text):
            month = match["month"].lower()
            number = str(_MONTHS.index(month) + 1) if month in _MONTHS else month.lstrip("0")
            return tuple(filter(None, (match["year"], number, match["day"].lstrip("0"))))
    match = _DATE.fullmatch(text)
    return tuple(part.lstrip("0") for part in match.groups() if part and part not in "-/") if match else None


def _with_minutes(text: str) -> str:
    """Return a full hour, such as 2 pm, with its minutes; any other text unchanged."""
    return f"{match[1]}:00 {match[2]}m" if (match := _HOUR.fullmatch(text)) else text


def _time(text: str) -> int | None:
    """Return the seconds since midnight; None for what is no time of a day."""
    match = _TIME.fullmatch(text)
    if match is None:
        return None
    hours, minutes, seconds = (int(part or 0) for part in match.groups()[:3])
    if half := (match[4] or "").lower():
        hours = hours % 12 + 12 * (half == "p")
    return 3600 * hours + 60 * minutes + seconds if max(minutes, seconds) < 60 and hours <= 24 else None


def same_points(answer: str, label: str) -> bool | None:
    """Tell whether two names of an angle, a segment or a figure are the same, read from either end; None if the label
    is none. AC and CA are one segment; ABC and BCA are two angles."""
    names = [_POINTS.fullmatch(text) for text in (answer, label)]
    if names[1] is None:
        return None
    if names[0] is None:
        return False if len(names[1][2]) > 2 else None
    one, other = (name[2].replace(" ", "") for name in names if name)
    kinds = {name[1] for name in names if name and name[1]}
    return len(kinds) < 2 and one in (other, other[::-1])
