"""Whether two normalized answers are mathematically equal, by math-verify. Runs in a worker that can be killed."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from functools import lru_cache
from typing import Any

import sympy
from math_verify import LatexExtractionConfig, parse, verify

from envs.math_grading.normalize import without_thousands
from envs.math_grading.units import Unit, factor, split_unit

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limit is off; the worker has one
_LATEX = LatexExtractionConfig(boxed_match_priority=0)
_CONFIG = (replace(_LATEX, normalization_config=replace(_LATEX.normalization_config, units=False)),)  # 3m is 3 times m
_RELATION = re.compile(r"[<>]|\\(?:le|ge|ne|infty|cup|cap|begin|pmod|equiv|mathbb|emptyset|in|to)(?![a-zA-Z])")
_NAME = re.compile(
    r"[^\W\d]\(\w\)|\([^\W\d](?:, ?[^\W\d])+\)|\\(?:sin|cos|tan) ?\(? ?(?:[A-Za-z]{1,3}|\\theta) ?\)?"
    r"|(?!\\(?:frac|sqrt|pi))\\[a-z]+|(?:m ?)?\\(?:angle|overline|widehat|overarc|triangle|odot)[ \w{}']{1,12}"
    r"|[A-Za-z][A-Za-z _'{}]{0,40}\d{0,2}"
)
_DECIMAL = re.compile(r"[-+]? ?(?=\.?\d)\d*\.?(\d*)")
_ALIKE = ({"", "()"}, {"", "{}"})  # brackets of equal lists; a set is no tuple
_POINTS = tuple(map(sympy.Rational, ("7919/1009", "-3571/1013", "88/31", "271/997")))


def handle(request: list[Any]) -> bool:
    """Whether [answer, label, tolerance] are equal; for [None, label, None] whether the label can be read."""
    answer, label, tolerance = request
    try:
        return readable(label) if answer is None else equal(answer, label, tolerance)
    except (ArithmeticError, AttributeError, NotImplementedError, TypeError, ValueError):
        return False  # math-verify and sympy raise these for what is no expression, such as 0/0


def readable(label: str) -> bool:
    """Whether each value of a label has an expression."""
    if _RELATION.search(label):
        return parsed(label) is not None
    sides = [side for item in items_of(label)[0] for _, side in sides_of(item)[1]]
    return all(parsed(split_unit(side, letters=False)[0]) is not None for side in sides)


def equal(answer: str, label: str, tolerance: float | None) -> bool:
    """Equality of two answers: relations as such, lists value by value."""
    if _RELATION.search(answer) or _RELATION.search(label):
        return not (chained(answer) and not chained(label)) and verified(ascending(answer), ascending(label))
    (answers, ends), (labels, wanted) = items_of(without_thousands(answer)), items_of(without_thousands(label))
    if len(answers) != len(labels):
        (answers, ends), (labels, wanted) = items_of(answer), items_of(label)
    if len(answers) != len(labels) or (ends != wanted and {ends, wanted} not in _ALIKE):
        return False
    ordered = not {ends, wanted} <= {"", "{}"}
    for item in answers:
        match = next((x for x in (labels[:1] if ordered else labels) if equal_values(item, x, tolerance)), None)
        if match is None:
            return False
        labels.remove(match)
    return True


def chained(text: str) -> bool:
    r"""Whether a relation goes on to further values, of which math-verify takes the last one: 61 \equiv 60."""
    before, *after = text.split(r"\equiv")
    if len(after) > 1 or (after and not _NAME.fullmatch(before.strip())):
        return True
    return r"\begin" not in text and any(item.count("=") > 1 for item in split_list(text))


def ascending(text: str) -> str:
    """A chain such as 5 > x > 2 the other way round; any other text unchanged."""
    parts = re.split(r"(<|>|\\le(?![a-zA-Z])|\\ge(?![a-zA-Z]))", text)
    if len(parts) < 3 or not all(sign in (">", "\\ge") for sign in parts[1::2]):
        return text
    turned = {">": "<", "\\ge": "\\le "}
    return "".join(turned.get(part, part) for part in reversed(parts))


def items_of(text: str) -> tuple[list[str], str]:
    r"""The values of a list, and its brackets: "" for a list, "{}" for a set, "()", "[)" and the like for a tuple."""
    items = split_list(text)
    body = re.sub(r"^(?:[^\W\d]|\([^\W\d](?:, ?[^\W\d])+\)) ?= ?(?=[(\[]|\\[{l])", "", text)
    if len(items) == 1 and (inner := re.fullmatch(r"\\\{(.*)\\\}", body)):
        parts, ends = items_of(inner[1])
        return parts, ends or "{}" * (len(parts) > 1)
    inner = re.fullmatch(r"([(\[]|\\langle)(.*)([)\]]|\\rangle)", body)
    if len(items) == 1 and inner and len(parts := split_list(inner[2])) > 1:
        return parts, inner[1] + inner[3]
    return [x.replace(r"\pm", sign) for x in items for sign in ("+", "-")[: 1 + (r"\pm" in x)]], ""


def split_list(text: str) -> list[str]:
    """Parts between the commas and semicolons that stand outside brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character in ",;" and depth <= 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


def sides_of(text: str) -> tuple[str, list[tuple[str, str]]]:
    """The name before a value's first sign, or "", and its sides, each with the sign before it: x = 14/2 = 7."""
    sign, *parts = ["=", *(part.strip() for part in re.split(r"(=|\\approx)", text))]
    sides = list(zip([sign, *parts[1::2]], parts[::2], strict=True))
    if len(sides) == 2 and _NAME.fullmatch(sides[1][1]) and not _NAME.fullmatch(sides[0][1]):
        sides.reverse()
    name = ""
    while len(sides) > 1 and (not sides[0][1] or _NAME.fullmatch(sides[0][1])):
        name = name or sides[0][1]
        sides.pop(0)
    return name, sides


def equal_values(answer: str, label: str, tolerance: float | None) -> bool:
    """As `equal`, for one value each, which may have a name, a unit, and several sides."""
    if len(items_of(answer)[0]) > 1:
        return equal(answer, label, tolerance)
    (name, sides), (wanted, expected) = sides_of(answer), sides_of(label)
    if len(name) == len(wanted) == 1 and name.lower() != wanted.lower():
        return False
    values = [(sign, *split_unit(side)) for sign, side in sides]
    goal, goal_unit = split_unit(expected[0][1], letters=False)
    units = {unit for *_, unit in values if unit.measures}
    agree = len(units) < 2 and sides_agree([(sign, value) for sign, value, _ in values])
    if len(expected) > 1 or (wanted and not agree):
        return answer.count("=") == 1 and r"\approx" not in answer and verified(answer, label)
    unit = next(iter(units), Unit())  # the unit of one side is that of all: 60 = 60° is no 60 radians
    for sign, value, _ in values if agree else ():
        scale = factor(unit, goal_unit, ("\\pi" in value, "\\pi" in goal))
        strict = tolerance == 0.0 and sign == r"\approx"
        if scale is not None and not strict and equal_percents(value, goal, scale, tolerance):
            return True
    return False


def sides_agree(sides: list[tuple[str, str]]) -> bool:
    r"""Whether all sides of a value are its first one, of which one rounding may follow: 10/2\sqrt{3} \approx 8.66."""
    (_, first), *others = sides
    if sum(sign == r"\approx" for sign, _ in others) > 1:
        return False  # 60.5 is about 60 and about 61: who gives both leaves the choice to the label
    return all(
        rounded(side, first) or rounded(first, side) if sign == r"\approx" else close(side, first, None)
        for sign, side in others
    )


def rounded(side: str, exact: str) -> bool:
    """Whether a side is a decimal number and the exact one rounded to its places; a half is rounded away from zero."""
    decimal, number, value = _DECIMAL.fullmatch(side), parsed(side), parsed(exact)
    if decimal is None or not isinstance(number, sympy.Expr) or not isinstance(value, sympy.Expr):
        return False
    if not (value.is_number and value.is_real):
        return False
    excess = (number - value) * (-1 if value < 0 else 1) * 10 ** len(decimal[1])
    return bool(-0.5 + 1e-9 < excess.evalf(20) < 0.5 + 1e-9)


def equal_percents(answer: str, label: str, scale: Any, tolerance: float | None) -> bool:
    """60% is 60 as well as 0.6, but beside another per cent, or with a tolerance of 0.0, only itself."""
    bare, goal = answer.removesuffix("%"), label.removesuffix("%")
    power = len(answer) - len(bare) - (len(label) - len(goal))
    if tolerance == 0.0:
        return close(bare, goal, None, scale / sympy.Integer(100) ** power)
    return any(close(bare, goal, tolerance, scale / sympy.Integer(100) ** each) for each in {0, power})


def close(answer: str, label: str, tolerance: float | None, scale: Any = 1) -> bool:
    """Whether answer * scale is the label: to 12 digits, or for numbers to the tolerance."""
    a, b = parsed(answer), parsed(label)
    if not isinstance(a, sympy.Expr) or not isinstance(b, sympy.Expr):
        return a is not None and b is not None and bool(verify(b, a, timeout_seconds=None))
    difference, names = a * scale - b, sorted(a.free_symbols | b.free_symbols, key=str)
    for turn in range(len(_POINTS) if names else 1):
        point = {name: _POINTS[(turn + index) % len(_POINTS)] + index for index, name in enumerate(names)}
        size = abs(b.subs(point).evalf(20))
        allowed = tolerance + 1e-9 if tolerance and not names else 1e-12 * max(1, size)
        if not size.is_finite or not abs(difference.subs(point).evalf(20)) <= allowed:
            return False
    return True


def verified(answer: str, label: str) -> bool:
    """Equality of relations, sets, intervals and matrices; two equations may differ by a constant factor."""
    a, b = parsed(answer), parsed(label)
    if isinstance(a, sympy.Eq) and isinstance(b, sympy.Eq):
        ratio = sympy.simplify((a.lhs - a.rhs) / (b.lhs - b.rhs))
        return bool(ratio.is_number and ratio.is_finite and ratio.is_nonzero)
    if isinstance(a, sympy.FiniteSet) != isinstance(b, sympy.FiniteSet):
        return False  # math-verify takes the ends 1, 2 for 1 < x < 2
    return a is not None and b is not None and bool(verify(b, a, allow_set_relation_comp=True, timeout_seconds=None))


@lru_cache(maxsize=256)
def parsed(text: str) -> Any:
    """The expression of a text in LaTeX; None if there is none."""
    if re.search(r"(?<![_^\d])\d+ \d", text):
        return None
    if re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", text):
        text = re.sub(r"(\d+(?:\.\d+)?) ?°", r"(\\frac{\1\\pi}{180})", text)
    found = parse(rf"\boxed{{{text.replace('°', '')}}}", _CONFIG, fallback_mode="no_fallback", parsing_timeout=None)
    value = found[0] if found else None
    if isinstance(value, sympy.FiniteSet) and len(value) == 1:
        return next(iter(value))
    return value


parsed(r"\frac{1}{2}")  # the first text takes a second, which is not to count against a call's time limit
