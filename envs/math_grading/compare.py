"""Compares two normalized answers mathematically, with math-verify. Runs in a worker process that can be killed."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from functools import lru_cache
from typing import Any

import sympy
from math_verify import LatexExtractionConfig, parse, verify

from envs.math_grading.normalize import without_thousands
from envs.math_grading.plain_values import is_float, values_of, with_decimal_point
from envs.math_grading.units import Unit, factor, split_unit

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it would warn that its own time limit is off
_LATEX = LatexExtractionConfig(boxed_match_priority=0)
# Units are off, since 3m is 3 times m.
_CONFIG = (replace(_LATEX, normalization_config=replace(_LATEX.normalization_config, units=False)),)
_RELATION = re.compile(r"[<>]|\\(?:le|ge|ne|infty|cup|cap|begin|pmod|equiv|mathbb|emptyset|in|to)(?![a-zA-Z])")
_NAME = re.compile(
    r"[^\W\d]\(\w\)|\([^\W\d](?:, ?[^\W\d])+\)|\\(?:sin|cos|tan) ?\(? ?(?:[A-Za-z]{1,3}|\\theta) ?\)?"
    r"|(?!\\(?:frac|sqrt|pi))\\[a-z]+|(?:m ?)?\\(?:angle|overline|widehat|overarc|triangle|odot)[ \w{}']{1,12}"
    r"|[A-Za-z][A-Za-z _'{}]{0,40}\d{0,2}"
)
_UNKNOWN = re.compile(r"(?<![A-Za-z])[a-df-hj-zA-Z](?![A-Za-z(])")
_INTERVAL = re.compile(r"[(\[][^,;()\[\]]+[,;][^,;()\[\]]+[)\]]|\\emptyset|\\mathbb ?\{R\}")
_BASE = re.compile(r"(-?)([0-9A-Z]{1,30})_ ?\{? ?(\d{1,2}) ?\}?")
_DECIMAL = re.compile(r"[-+]? ?(?=\.?\d)\d*\.?(\d*)")
_COLUMN = re.compile(r"\\begin ?\{[pbv]?matrix\}((?:(?!&|\\begin).)*)\\end ?\{[pbv]?matrix\}")
_BUILT_SET = re.compile(r"^\\?\{ ?[A-Za-z](?: ?\\in ?\\mathbb ?\{? ?R ?\}?)? ?(?:\||\\mid|:) ?(.*?) ?\\?\}$")
_ALIKE = ({"", "()"}, {"", "{}"})  # kinds of brackets that count as equal
_WITH_LETTERS = ("length", "time", "mass")  # an answer in cm makes 5 m, its label, a length and no product
_POINTS = tuple(map(sympy.Rational, ("7919/1009", "-3571/1013", "88/31", "271/997")))


def handle(request: list[Any]) -> bool:
    """Tell whether [answer, label, tolerance] are equal; for [None, label, None] whether the label can be read."""
    answer, label, tolerance = request
    try:
        return readable(label) if answer is None else equal(answer, label, tolerance)
    except (ArithmeticError, AttributeError, NotImplementedError, TypeError, ValueError):
        return False  # math-verify and sympy raise these for invalid expressions, such as 0/0


def readable(label: str) -> bool:
    """Tell whether each value of a label can be parsed."""
    if _RELATION.search(label):
        return parsed(label) is not None or bool(as_union(label))
    sides = [side for item in items_of(label)[0] for _, side in sides_of(item)[1]]
    values = [parsed(split_unit(side, letters=False)[0]) for side in sides]
    return not any(value is None or value in (sympy.zoo, sympy.nan) for value in values)


def equal(answer: str, label: str, tolerance: float | None) -> bool:
    """Tell whether two answers are equal: relations are compared as a whole, lists value by value."""
    if _RELATION.search(answer) or _RELATION.search(label):
        answer, label = (as_pair(answer), as_pair(label)) if is_column(answer) != is_column(label) else (answer, label)
        if names_differ(answer, label):
            return False
        if (union := as_union(answer)) and (expected := as_union(label)):
            answer, label = union, expected
        return not (chained(answer) and not chained(label)) and verified(ascending(answer), ascending(label))
    points = {name for text in (answer, label) for name in re.findall(r"^([A-Z]) ?= ?[(\[]", text)}
    if len(points) == 2:
        return False  # A(1, 2) is not B(1, 2)
    if (same := same_ratio(answer, label)) is not None:
        return same
    if (pointed := with_decimal_point(label)) and equal_values(answer, pointed, tolerance):
        return True
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


def same_ratio(answer: str, label: str) -> bool | None:
    """Tell whether two ratios such as 1:2:3 and 2:4:6 are proportional; a ratio of two may also be written as a
    fraction. None if neither is a ratio."""
    terms, expected = terms_of(answer), terms_of(label)
    if len(expected) > 1 and len(terms) == 1:
        terms = terms_of(re.sub(r"(?<=[\d)}]) to (?=[\d(\\])", ":", answer))
    if len(terms) < 2 and len(expected) < 2:
        return None
    if len(terms) == 1 and len(expected) == 2:
        return equal_values(terms[0], rf"\frac{{{expected[0]}}}{{{expected[1]}}}", None)
    if len(terms) == 2 and len(expected) == 1:
        return equal_values(rf"\frac{{{terms[0]}}}{{{terms[1]}}}", expected[0], None)
    if len(terms) != len(expected):
        return False
    return all(
        close(f"({terms[0]})*({b})", f"({a})*({expected[0]})", None) for a, b in zip(terms, expected, strict=True)
    )


def terms_of(text: str) -> list[str]:
    """Return the terms of a ratio; the text alone if it is none. What stands before an equals sign is its name."""
    name, _, value = text.rpartition("=")
    text = text if re.search(r"\d", name) else value.strip()
    terms = [split_unit(term.strip())[0] for term in text.split(":")]
    is_ratio = len(terms) > 1 and all(terms) and any(re.search(r"\d|\\sqrt|\\pi", term) for term in terms)
    return terms if is_ratio else [text]


def names_differ(answer: str, label: str) -> bool:
    r"""Tell whether two relations speak of different unknowns, as x \ge 2 and m \ge 2 do. A set without an unknown fits
    both."""
    names = [set(_UNKNOWN.findall(re.sub(r"\\mathbb ?\{?[A-Z]\}?|\\[a-zA-Z]+", " ", text))) for text in (answer, label)]
    return bool(names[0] and names[1]) and not names[0] & names[1]


def as_union(text: str) -> str:
    r"""Return inequalities of one unknown, such as 1<x<2 or x \ne 3, as a union of intervals; "" for other texts.
    Intervals stay as they are."""
    body = re.sub(r"^[A-Za-z] ?\\in(?![a-zA-Z]) ?", "", _BUILT_SET.sub(r"\1", text))
    if r"\land" in body:
        body = both_of(*body.split(r"\land", 1))
    parts = [
        part.strip()
        for item in values_of(re.sub(r"\\(?:lor|vee)(?![a-zA-Z])", ",", body))
        for part in item.split(r"\cup")
    ]
    intervals = [part if _INTERVAL.fullmatch(part) else _interval(part) for part in parts]
    return r"\cup ".join(intervals) if intervals and all(intervals) else ""


def both_of(one: str, other: str) -> str:
    """Return two inequalities joined by "and", such as 2 < x and x < 5, as one interval; as a list, if they have no
    number in common: then "and" joins two parts of an answer."""
    ends = sorted((_interval(one.strip()), _interval(other.strip())), key=lambda text: text.startswith(r"(-\infty"))
    if ends[0].endswith(r",\infty)") and ends[1].startswith(r"(-\infty,"):
        lower, upper = ends[0].removesuffix(r",\infty)"), ends[1].removeprefix(r"(-\infty,")
        low, high = parsed(lower[1:]), parsed(upper[:-1])
        if isinstance(low, sympy.Expr) and isinstance(high, sympy.Expr) and (low < high) == True:  # noqa: E712 - of sympy
            return f"{lower},{upper}"
    return f"{one}, {other}"


def is_column(text: str) -> bool:
    r"""Tell whether a text is a column vector, \begin{pmatrix} 1 \\ 2 \end{pmatrix}."""
    return _COLUMN.fullmatch(text) is not None


def as_pair(text: str) -> str:
    """Return a column vector as a tuple, (1, 2); any other text unchanged."""
    match = _COLUMN.fullmatch(text)
    return f"({match[1].strip().removesuffix(chr(92) * 2).replace(chr(92) * 2, ', ')})" if match else text


def _interval(text: str) -> str:
    """Return the set of one inequality as an interval; "" if the text is none."""
    sides = [
        part.strip() for part in re.split(r"(<|>|\\le(?![a-zA-Z])|\\ge(?![a-zA-Z])|\\ne(?![a-zA-Z]))", ascending(text))
    ]
    signs = sides[1::2]
    if len(sides) == 3 and not re.fullmatch("[A-Za-z]", sides[0]):
        sides = [sides[2], {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le"}.get(sides[1], sides[1]), sides[0]]
        signs = [sides[1]]
    if len(sides) == 3 and re.fullmatch("[A-Za-z]", sides[0]) and sides[2]:
        end = sides[2]
        return {
            "<": rf"(-\infty,{end})",
            ">": rf"({end},\infty)",
            r"\le": rf"(-\infty,{end}]",
            r"\ge": rf"[{end},\infty)",
            r"\ne": rf"(-\infty,{end})\cup ({end},\infty)",
        }[signs[0]]
    if len(sides) == 5 and re.fullmatch("[A-Za-z]", sides[2]) and set(signs) <= {"<", r"\le"}:
        return f"{'(['[signs[0] != '<']}{sides[0]},{sides[4]}{')]'[signs[1] != '<']}"
    return ""


def chained(text: str) -> bool:
    r"""Tell whether a relation is a chain of several values, such as 61 \equiv 60, of which math-verify would take the
    last one."""
    before, *after = text.split(r"\equiv")
    if len(after) > 1 or (after and not _NAME.fullmatch(before.strip())):
        return True
    return r"\begin" not in text and any(item.count("=") > 1 for item in values_of(text))


def ascending(text: str) -> str:
    """Return a descending chain such as 5 > x > 2 in ascending order; any other text unchanged."""
    parts = re.split(r"(<|>|\\le(?![a-zA-Z])|\\ge(?![a-zA-Z]))", text)
    if len(parts) < 3 or not all(sign in (">", "\\ge") for sign in parts[1::2]):
        return text
    mirrored = {">": "<", "\\ge": "\\le "}
    return "".join(mirrored.get(part, part) for part in reversed(parts))


def items_of(text: str) -> tuple[list[str], str]:
    r"""Return the values of a list, and its brackets: "" for a list, "{}" for a set, "()", "[)" and the like for a
    tuple."""
    items = values_of(text)
    body = re.sub(r"^(?:[^\W\d]|\([^\W\d](?:, ?[^\W\d])+\)) ?= ?(?=[(\[⟨]|\\\{)", "", text)
    if len(items) == 1 and (inner := re.fullmatch(r"\\?\{(.*?)\\?\}", body)):
        parts, ends = items_of(inner[1])
        return parts, ends or "{}" * (len(parts) > 1)
    inner = re.fullmatch(r"([(\[⟨])(.*)([)\]⟩])", body)
    if len(items) == 1 and inner and len(parts := values_of(inner[2])) > 1:
        return parts, inner[1] + inner[3]
    return [x.replace(r"\pm", sign) for x in items for sign in ("+", "-")[: 1 + (r"\pm" in x)]], ""


def sides_of(text: str) -> tuple[str, list[tuple[str, str]]]:
    """Split a value such as x = 14/2 = 7; return the name before its first sign, or "", and its sides, each with the
    sign before it."""
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
    """Compare two single values as `equal` does; a value may have a name, a unit, and several sides."""
    if len(items_of(answer)[0]) > 1:
        return equal(answer, label, tolerance)
    (name, sides), (wanted, expected) = sides_of(answer), sides_of(label)
    if len(name) == len(wanted) == 1 and name.lower() != wanted.lower():
        return False
    values = [(sign, *split_unit(side)) for sign, side in sides]
    units = {unit for *_, unit in values if unit.measures}
    goal, goal_unit = split_unit(expected[0][1], letters=any(unit.measures in _WITH_LETTERS for unit in units))
    agree = len(units) < 2 and sides_agree([(sign, value) for sign, value, _ in values])
    if len(expected) > 1 or (wanted and not agree):
        return answer.count("=") == 1 and r"\approx" not in answer and verified(answer, label)
    unit = next(iter(units), Unit())  # one side's unit holds for all: 60 = 60° is not 60 radians
    for sign, value, _ in values if agree else ():
        scale = factor(unit, goal_unit, (in_radians(value), in_radians(goal)))
        strict = tolerance == 0.0 and sign == r"\approx"
        if scale is not None and not strict and equal_percents(value, goal, scale, tolerance):
            return True
    return False


def in_radians(text: str) -> bool:
    """Tell whether an angle without a unit is one in radians."""
    return "\\pi" in text or "\\arc" in text


def sides_agree(sides: list[tuple[str, str]]) -> bool:
    r"""Tell whether all sides of a value equal its first one; one of them may be a rounding of it, as in 10/2\sqrt{3}
    \approx 8.66."""
    (_, first), *others = sides
    if sum(sign == r"\approx" for sign, _ in others) > 1:
        return False  # 60.5 is about 60 and about 61: giving both would leave the choice to the label
    return all(
        rounded(side, first) or rounded(first, side) if sign == r"\approx" else close(side, first, None)
        for sign, side in others
    )


def rounded(side: str, exact: str) -> bool:
    """Tell whether `side` is a decimal number that equals `exact` rounded to as many places; halves are rounded away
    from zero."""
    decimal, number, value = _DECIMAL.fullmatch(side), parsed(side), parsed(exact)
    if decimal is None or not isinstance(number, sympy.Expr) or not isinstance(value, sympy.Expr):
        return False
    if not (value.is_number and value.is_real):
        return False
    excess = (number - value) * (-1 if value < 0 else 1) * 10 ** len(decimal[1])
    return bool(-0.5 + 1e-9 < excess.evalf(20) < 0.5 + 1e-9)


def equal_percents(answer: str, label: str, scale: Any, tolerance: float | None) -> bool:
    """Compare percentages: 60% equals 60 as well as 0.6. If both have a per cent sign, or with a tolerance of 0.0, only
    equal percentages are equal."""
    bare, goal = answer.removesuffix("%"), label.removesuffix("%")
    power = len(answer) - len(bare) - (len(label) - len(goal))
    if tolerance == 0.0:
        return close(bare, goal, None, scale / sympy.Integer(100) ** power)
    return any(close(bare, goal, tolerance, scale / sympy.Integer(100) ** each) for each in {0, power})


def close(answer: str, label: str, tolerance: float | None, scale: Any = 1) -> bool:
    """Tell whether answer * scale equals the label: to 12 digits, or for numbers within the tolerance.
    Rational numbers must be equal, unless one is a printed float."""
    a, b = parsed(answer), parsed(label)
    if not isinstance(a, sympy.Expr) or not isinstance(b, sympy.Expr):
        return a is not None and b is not None and bool(verify(b, a, timeout_seconds=None))
    names = sorted(a.free_symbols | b.free_symbols, key=str)
    if not names and not tolerance and a.is_rational and b.is_rational and not (is_float(answer) or is_float(label)):
        return bool((a * scale - b).equals(0))
    if _agree(a * scale, b, names, tolerance):
        return True
    if [name.name for name in names] != ["i"]:
        return False
    a, b = (value.xreplace({names[0]: sympy.I}) for value in (a, b))
    return _agree(a * scale, b, [], None)


def _agree(a: Any, b: Any, names: list[Any], tolerance: float | None) -> bool:
    """Tell whether two expressions have the same value, at a few points if they have unknowns, the `names`."""
    difference = a - b
    for turn in range(len(_POINTS) if names else 1):
        point = {name: _POINTS[(turn + index) % len(_POINTS)] + index for index, name in enumerate(names)}
        size = abs(b.subs(point).evalf(20))
        allowed = tolerance + 1e-9 if tolerance and not names else 1e-12 * size + sympy.Float("1e-60")
        if not size.is_finite or not abs(difference.subs(point).evalf(20)) <= allowed:
            return False
    return True


def verified(answer: str, label: str) -> bool:
    """Tell whether relations, sets, intervals or matrices are equal; two equations may differ by a constant factor."""
    a, b = parsed(answer), parsed(label)
    if isinstance(a, sympy.Eq) and isinstance(b, sympy.Eq):
        ratio = sympy.simplify((a.lhs - a.rhs) / (b.lhs - b.rhs))
        return bool(ratio.is_number and ratio.is_finite and ratio.is_nonzero)
    if isinstance(a, sympy.FiniteSet) != isinstance(b, sympy.FiniteSet):
        return False  # math-verify takes the set of the ends 1, 2 as equal to 1 < x < 2
    return a is not None and b is not None and bool(verify(b, a, allow_set_relation_comp=True, timeout_seconds=None))


@lru_cache(maxsize=256)
def parsed(text: str) -> Any:
    """Parse LaTeX to a sympy expression; return None if it has none."""
    if re.search(r"(?<![_^\d])\d+ \d", text):
        return None
    if (match := _BASE.fullmatch(text)) and 2 <= int(match[3]) <= 36:
        try:
            return sympy.Integer(int(match[1] + match[2], int(match[3])))
        except ValueError:  # a digit that the base does not have: a name with an index
            pass
    if re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", text):
        text = re.sub(r"(\d+(?:\.\d+)?) ?°", r"(\\frac{\1\\pi}{180})", text)
    text = re.sub(r"(\\log ?_ ?\{[^{}]*\}) (?=\d)", r"\1", text)
    text = re.sub(r"(?<=[)}]) (?=\d)", "*", text)  # math-verify reads 2^{3} 13^2 as 2^3 * 1 * 3^2
    expressions = parse(
        rf"\boxed{{{text.replace('°', '')}}}", _CONFIG, fallback_mode="no_fallback", parsing_timeout=None
    )
    value = expressions[0] if expressions else None
    if isinstance(value, sympy.Basic):  # a written decimal is exact
        value = value.xreplace({number: sympy.Rational(str(number)) for number in value.atoms(sympy.Float)})
    if isinstance(value, sympy.FiniteSet) and len(value) == 1:
        return next(iter(value))
    return value


parsed(r"\frac{1}{2}")  # the first call takes a second; not within a time limit
