"""Units behind a value: their spellings, and what brings one to another."""

from __future__ import annotations

import re

_UNITS = {
    "": "unit units",
    "deg": "deg degree degrees", "rad": "rad radian radians",
    "mm": "mm millimeter millimeters", "cm": "cm centimeter centimeters centimetre centimetres",
    "m": "m meter meters metre metres", "km": "km kilometer kilometers",
    "in": "in inch inches", "ft": "ft foot feet", "yd": "yd yard yards", "mi": "mi mile miles",
    "s": "s sec second seconds", "min": "min minute minutes", "h": "h hr hrs hour hours",
    "kg": "kg kilogram kilograms", "g": "g gram grams", "lb": "lb lbs pound pounds", "mph": "mph",
    "$": "dollar dollars", "cent": "cent cents", "L": "L l liter liters",
    "N": "N", "J": "J", "W": "W", "V": "V", "A": "A", "K": "K", "C": "C", "F": "F",
}  # fmt: skip
UNIT_NAMES = {word: unit for unit, words in _UNITS.items() for word in words.split()}
_SIZES: tuple[dict[str, str], ...] = (
    {"mm": ".001", "cm": ".01", "m": "1", "km": "1000", "in": ".0254", "ft": ".3048", "yd": ".9144", "mi": "1609.344"},
    {"s": "1", "min": "60", "h": "3600"},
    {"g": "1", "kg": "1000"},
    {"cent": "1", "$": "100"},
)
_WORDS = re.compile(r"[A-Za-z]+(?:\s+[A-Za-z]+)*")


def unit_of(words: str, power: str | None) -> str:
    """One spelling of a unit, "?" for generic ones and unknown words, "" where the letters may be variables."""
    plain = " ".join(words.replace(".", " ").split())
    exponent = re.sub(r"\D", "", power or "")
    for prefix, size in (("square ", "2"), ("sq ", "2"), ("cubic ", "3"), ("cu ", "3")):
        if plain.lower().startswith(prefix):
            plain, exponent = plain[len(prefix) :], size
    known = UNIT_NAMES.get(plain, UNIT_NAMES.get(plain.lower()) if len(plain) > 1 else None)
    if known is not None:
        return (known + exponent) if known else "?"
    if re.fullmatch(r"[a-z]{1,3}/[a-z]{1,4}", plain):
        return plain
    return "?" if _WORDS.fullmatch(plain) and len(plain) > 2 else ""


def factor(unit: str, wanted: str, pi: tuple[bool, bool]) -> str | None:
    """What a value in `unit` is multiplied with to be in `wanted`: "" for nothing, None if they do not go together.

    `pi` says whether the value and the wanted one hold pi, which marks an angle without unit as radians.
    """
    if unit == "deg" and not wanted and pi[1]:
        return r"\frac{\pi}{180}"
    if wanted == "deg" and (unit == "rad" or (not unit and pi[0])):
        return r"\frac{180}{\pi}"
    if not unit or not wanted or "?" in (unit, wanted) or unit == wanted:
        return ""
    (name, power), (other, expected) = _split_power(unit), _split_power(wanted)
    for sizes in _SIZES:
        if power == expected and name in sizes and other in sizes:
            return f"({sizes[name]}/{sizes[other]})^{{{power}}}"
    return None


def _split_power(unit: str) -> tuple[str, int]:
    return (unit[:-1], int(unit[-1])) if unit[-1].isdigit() else (unit, 1)
