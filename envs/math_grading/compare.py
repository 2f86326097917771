"""Whether two answers are mathematically equal: yes, no, or "not mine to say" (then the library is asked)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from envs.math_grading.numbers import NotAValue, TooBig, Undefined, Value, real, same
from envs.math_grading.text import (
    MAX_CHARS,
    Phrase,
    ascending,
    clean,
    is_name,
    phrase,
    split_list,
    without_thousands,
    words_of,
)
from envs.math_grading.units import factor
from envs.math_grading.value import evaluate, variables_of

_POINTS = ("7919/1009", "271/997", "-3571/1013", "88/31")
_FOREIGN = re.compile(r"[<>]|\\(?:le|ge|ne|neq|cup|cap|infty|begin|pmod|equiv|mathbb|emptyset|to)(?![a-zA-Z])")

_RELATION = re.compile(r"[<>=]|\\(?:le|ge|ne|neq)(?![a-zA-Z])")
_INTERVAL = re.compile(r"[(\[].*,.*[)\]]|\\(?:infty|cup|mathbb|emptyset)")


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer's values. `brackets` is "" for a list in any order, "{}" for a set, and the ends of a tuple."""

    items: tuple[str, ...]
    brackets: str = ""


def equal(answer: str, label: str, tolerance: float | None = None) -> bool | None:
    """True, False, or None where this module cannot tell. `tolerance` is the absolute error allowed to a number."""
    if len(answer) > MAX_CHARS or len(label) > MAX_CHARS:
        return answer.strip() == label.strip()
    answer, label = ascending(clean(answer)), ascending(clean(label))
    if not answer or not label:
        return False
    if max(len(answer), len(label)) > MAX_CHARS:
        return _squeezed(answer) == _squeezed(label)
    if _squeezed(answer) == _squeezed(label):
        return True
    if _letters(answer) and _letters(answer) == _letters(label):
        return True
    words, expected = words_of(answer), words_of(label)
    if expected is not None and words is not None:
        return words == expected
    if (expected is not None and len(expected) > 1) or (words is not None and len(words) > 1):
        return False
    a, b = read(without_thousands(answer)), read(without_thousands(label))
    if len(a.items) != len(b.items) and "," in answer + label:
        a, b = read(answer), read(label)
    return _equal_answers(a, b, tolerance)


def read(text: str) -> Answer:
    """The values of a cleaned answer."""
    parts = split_list(text)
    if len(parts) != 1:
        return Answer(tuple(item for part in parts for item in _both_signs(part)))
    body = phrase(parts[0]).body
    inner = re.fullmatch(r"\\\{(.*)\\\}", body)
    if inner:
        items = tuple(split_list(inner.group(1)))
        return Answer(items, "{}") if len(items) > 1 else read(inner.group(1))
    inner = re.fullmatch(r"(?:\\langle|[(\[])(.*)(?:\\rangle|[)\]])", body)
    if inner and len(split_list(inner.group(1))) > 1 and _balanced(inner.group(1)):
        return Answer(tuple(split_list(inner.group(1))), body[0].replace("\\", "(") + body[-1].replace("e", ")"))
    return Answer(_both_signs(parts[0]))


def _equal_answers(a: Answer, b: Answer, tolerance: float | None) -> bool | None:
    if len(a.items) != len(b.items):
        return None if _foreign(a) or _foreign(b) else False
    if len(a.items) == 1:
        return equal_values(a.items[0], b.items[0], tolerance)
    tuples = [x.brackets for x in (a, b) if x.brackets not in ("", "{}")]
    if tuples:
        if len(set(tuples)) > 1 or (len(tuples) == 1 and (tuples != ["()"] or "{}" in (a.brackets, b.brackets))):
            return False
        return _all(equal_values(x, y, tolerance) for x, y in zip(a.items, b.items, strict=True))
    rest = list(b.items)
    for x in a.items:
        verdicts = [equal_values(x, y, tolerance) for y in rest]
        if True not in verdicts:
            return None if None in verdicts else False
        rest.pop(verdicts.index(True))
    return True


def _all(verdicts) -> bool | None:
    found = list(verdicts)
    return False if False in found else None if None in found else True


def equal_values(answer: str, label: str, tolerance: float | None) -> bool | None:
    """As `equal`, for two single values."""
    if "," in answer and "," in label:
        inner, expected = read(answer), read(label)
        if len(inner.items) > 1 and len(expected.items) > 1:
            return _equal_answers(inner, expected, tolerance)
    a, b = phrase(answer), phrase(label, letter_units=False)
    if a.name.lower() != b.name.lower() and len(a.name) == len(b.name) == 1:
        return False
    scale = factor(a.unit, b.unit, ("\\pi" in a.body, "\\pi" in b.body))
    if scale is None:
        return False
    if _FOREIGN.search(a.body) or _FOREIGN.search(b.body):
        return None
    if "\\approx" in a.body:
        return _equal_approximation(a.body, b.body, tolerance)
    if a.name and "=" in a.body and not _FOREIGN.search(a.body):  # x = 14/2 = 7
        *before, last = (side.strip() for side in a.body.split("="))
        if not all(_compare(side, last, None) for side in before):
            return False
        a = Phrase(last, a.name, a.unit)
    if ("=" in a.body or a.name) and ("=" in b.body or b.name) and ("=" in a.body + b.body):
        return _equal_equations(_equation(a), _equation(b))
    if "=" in b.body:
        return None
    body = a.body
    if "=" in body:
        sides = [side.strip() for side in body.split("=")]
        if not all(_compare(side, sides[-1], None) for side in sides[:-1]):
            return False
        body = sides[-1]
    if scale:
        return _compare(f"({body})*{scale}", b.body, tolerance)
    return _with_percent(body, b.body, tolerance)


def _equation(part: Phrase) -> str:
    return f"{part.name}={part.body}" if part.name else part.body


def _equal_equations(answer: str, label: str) -> bool | None:
    """Equal if left minus right differs by a constant factor only."""
    differences = []
    for text in (answer, label):
        left, _, right = text.partition("=")
        differences.append(f"({left})-({right})")
    try:
        names = sorted(set().union(*(variables_of(text) for text in differences)))
        ratios = []
        for turn in range(4):
            point = {name: Fraction(_POINTS[(turn + index) % 4]) + index for index, name in enumerate(names)}
            a, b = (evaluate(text, point) for text in differences)
            if a == 0 or b == 0:
                return None
            ratios.append(real(a) / real(b))
    except (NotAValue, TooBig, Undefined):
        return None
    if len(label.split("=")) != 2 or len(answer.split("=")) != 2:
        return None
    return True if all(abs(ratio - ratios[0]) <= 1e-12 * abs(ratios[0]) for ratio in ratios) else None


def parses(label: str) -> bool:
    """Whether this module can read every value of a label."""
    label = clean(label) if len(label) <= MAX_CHARS else ""
    if words_of(label) is not None:
        return True
    for item in read(without_thousands(label)).items:
        body = phrase(item, letter_units=False).body.split("\\approx")[-1].replace("%", "")
        for side in body.split("="):
            try:
                evaluate(side, {name: Fraction(_POINTS[0]) for name in variables_of(side)})
            except ValueError:
                return False
    return bool(label)


def is_foreign(label: str) -> bool:
    """Whether a label is a relation, an interval, a matrix or the like, which the library may know."""
    return bool(_FOREIGN.search(clean(label)))


def worth_asking(answer: str, label: str) -> bool:
    """Whether an answer that this module cannot judge might be equal at all: same kind, same variables."""
    answer, label = clean(answer), clean(label)
    mine, expected = _names(answer), _names(label)
    relations = bool(_RELATION.search(answer)), bool(_RELATION.search(label))
    if relations[0] == relations[1]:
        return mine == expected
    other = label if relations[0] else answer
    return len(mine | expected) <= 1 and bool(_INTERVAL.search(other))


def _names(text: str) -> set[str]:
    return set(re.findall(r"[A-Za-z]", re.sub(r'\\[a-zA-Z]+|"[^"]*"', " ", text)))


def _with_percent(answer: str, label: str, tolerance: float | None) -> bool | None:
    percents = answer.endswith("%") + 2 * label.endswith("%")
    bare, bare_label = answer.removesuffix("%"), label.removesuffix("%")
    if percents in (0, 3):
        return _compare(bare, bare_label, tolerance)
    verdicts = [_compare(bare, bare_label, tolerance), _compare(answer, label, tolerance)]
    return True if True in verdicts else None if None in verdicts else False


def _equal_approximation(body: str, label: str, tolerance: float | None) -> bool | None:
    """An exact value with its decimals: either may be meant, but they must agree with one another."""
    sides = [phrase(side).body for side in re.split(r"\\approx|=", body) if side.strip()]
    if len(sides) > 1 and is_name(sides[0]):
        sides = sides[1:]
    for side in sides[1:]:
        decimals = re.fullmatch(r"-?\d*\.?(\d*)[°\s]*", side)
        if not _compare(side, sides[0], 0.999 / 10 ** len(decimals.group(1)) if decimals else None):
            return False
    return any(_with_percent(side, label, tolerance) for side in sides)


def _compare(answer: str, label: str, tolerance: float | None) -> bool | None:
    """Equality of two expressions, at several points if they hold variables."""
    try:
        names = sorted(variables_of(label))
        others = variables_of(answer)
    except TooBig:
        return False
    except NotAValue:
        return None
    if not others <= set(names):
        if not names and not others - set(names):
            return None
        names = sorted(set(names) | others)
    if not names:
        return _compare_at(answer, label, {}, tolerance)
    verdicts = []
    for turn in range(4):
        point = {name: Fraction(_POINTS[(turn + index) % 4]) + index for index, name in enumerate(names)}
        verdicts.append(_compare_at(answer, label, point, None))
        if verdicts[-1] is False:
            return None if "i" in names else False  # i may be the imaginary unit
    return True if verdicts.count(True) >= 2 else None


def _compare_at(answer: str, label: str, point: dict[str, Fraction], tolerance: float | None) -> bool | None:
    expected = _value(label, point)
    if expected is None:
        return None
    try:
        value = evaluate(answer, point)
    except (Undefined, TooBig):
        return False
    except NotAValue:
        return None
    if tolerance:
        return bool(abs(real(value) - real(expected)) <= tolerance + 1e-9)
    return same(value, expected)


def _value(text: str, point: dict[str, Fraction]) -> Value | None:
    try:
        return evaluate(text, point)
    except (NotAValue, Undefined, TooBig):
        return None


def _both_signs(text: str) -> tuple[str, ...]:
    if "\\pm" not in text:
        return (text,)
    return (text.replace("\\pm", "+"), text.replace("\\pm", "-"))


def _foreign(answer: Answer) -> bool:
    return any(_FOREIGN.search(item) for item in answer.items)


def _squeezed(text: str) -> str:
    """Without spaces, but for those between two digits."""
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text.replace('"', ""))


def _letters(text: str) -> str:
    plain = re.sub(r"\\(?:triangle|angle|overline|widehat|odot)(?![a-zA-Z])|[\s\"{}]", "", text)
    return plain.lower() if plain.isalpha() and len(plain) > 1 else ""


def _balanced(text: str) -> bool:
    depth = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if depth < 0:
            return False
    return depth == 0
