"""Units after a value: their spellings, and conversion factors between them."""

from __future__ import annotations

import re
from typing import NamedTuple

import sympy

_KNOWN = {  # a unit's words: (what it measures, its size)
    "deg degree": ("angle", 1), "rad radian": ("angle", 180 / sympy.pi),
    "mm millimeter": ("length", 1), "cm centimeter": ("length", 10), "m meter": ("length", 1000),
    "km kilometer": ("length", 10**6), "in inch inche": ("length", sympy.Rational("25.4")),
    "ft foot feet": ("length", sympy.Rational("304.8")), "yd yard": ("length", sympy.Rational("914.4")),
    "mi mile": ("length", 1609344), "s sec second": ("time", 1), "min minute": ("time", 60),
    "h hr hour": ("time", 3600), "g gram": ("mass", 1), "kg kilogram": ("mass", 1000), "cent": ("money", 1),
    "dollar": ("money", 100), **{unit: (unit, 1) for unit in ("lb pound", "L l liter", *"NJWVAKCF")},
}  # fmt: skip
_UNITS = {word: unit for words, unit in _KNOWN.items() for word in words.split()}
_LETTER_UNITS = frozenset("mghsL")  # after a space; 5m is 5 times m
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_WITH_UNIT = re.compile(
    r"(?P<value>.*(?:[\d)}°!\]]|\\pi|(?<=[\d)}\s])[a-z](?= ))) ?"
    r"(?P<words>''|°(?: ?[CF])?|[A-Za-z][A-Za-z/. ]*?)(?:(?: ?\^ ?\{? ?|(?<=[A-Za-z]))(?P<power>[23]) ?\}?)?[. ]*"
)


class Unit(NamedTuple):
    """A unit of measurement. `measures` is "" for no unit or an unknown one."""

    measures: str = ""
    size: sympy.Expr | int = 1
    power: int = 1


def split_unit(text: str, letters: bool = True) -> tuple[str, Unit]:
    """Split a text into (value, unit); the value is the whole text if no unit follows. Without `letters`, a single
    letter is taken for a variable, unless it is a common unit after a space."""
    match = _WITH_UNIT.fullmatch(text)
    if match is None or (match["words"][0] == "°" and re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", text)):
        return text, Unit()
    first, _, rest = match["words"].replace(".", " ").strip().partition(" ")
    power = _POWERS.get(first.lower(), int(match["power"] or 1))
    word = rest.strip() if rest and first.lower() in _POWERS else f"{first} {rest}".strip().replace("°", "deg")
    singular = word.lower().removesuffix("s").replace("metre", "meter") if len(word) > 1 else word
    unit = _UNITS.get(word) or _UNITS.get(singular)
    letters = letters or (text[match.start("words") - 1].isspace() and word in _LETTER_UNITS)
    if (len(word) == 1 and not letters) or (unit is None and len(word) < 3 and word != "''"):
        return text, Unit()
    measures, size = unit or (word if "/" in word else "", 1)
    return split_unit(match["value"].strip())[0], Unit(measures, size, power)


def factor(unit: Unit, wanted: Unit, pi: tuple[bool, bool]) -> sympy.Expr | int | None:
    """Return the factor that converts a value from `unit` to `wanted`; None if they measure different things. `pi`:
    whether the value and the wanted value contain pi, which marks an angle without a unit as radians.
    """
    radians = Unit(*_UNITS["rad"])
    if unit.measures == "angle" and not wanted.measures and pi[1]:
        wanted = radians
    elif wanted.measures == "angle" and not unit.measures and pi[0]:
        unit = radians
    if not unit.measures or not wanted.measures or unit == wanted:
        return 1
    same_kind = (unit.measures, unit.power) == (wanted.measures, wanted.power)
    return (sympy.Integer(1) * unit.size / wanted.size) ** unit.power if same_kind else None
