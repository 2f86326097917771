"""Numbers of the math grader: exact fractions where possible, otherwise 40 digits, never too large to compute."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import mpmath

MAX_BITS, MAX_SIZE = 4096, 10**60
Value = Any  # Fraction or mpmath.mpf
TRIG = frozenset(("sin", "cos", "tan", "cot", "sec", "csc"))
INVERSE = {"arcsin": "asin", "arccos": "acos", "arctan": "atan"}
FUNCTIONS = frozenset((*TRIG, *INVERSE, "ln", "log", "exp", "lg"))

context = mpmath.mp.clone()
context.dps = 40


class NotAValue(ValueError):
    """The text is no expression that the grader knows."""


class Undefined(ValueError):
    """The expression has no real value, such as 1/0."""


class TooBig(ValueError):
    """The expression, or a value on the way, is larger than any answer could be."""


def same(a: Value, b: Value) -> bool:
    """Equality of two values: exact for fractions, to 25 digits otherwise."""
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a == b
    a, b = real(a), real(b)
    return bool(abs(a - b) <= context.mpf("1e-25") * max(1, abs(a)))


def add(a: Value, b: Value) -> Value:
    return checked(a + b if isinstance(a, Fraction) and isinstance(b, Fraction) else real(a) + real(b))


def times(a: Value, b: Value) -> Value:
    return checked(a * b if isinstance(a, Fraction) and isinstance(b, Fraction) else real(a) * real(b))


def over(a: Value, b: Value) -> Value:
    if b == 0:
        raise Undefined("division by zero")
    return checked(a / b if isinstance(a, Fraction) and isinstance(b, Fraction) else real(a) / real(b))


def real(value: Value) -> Any:
    return context.mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value


def checked(value: Value) -> Value:
    if isinstance(value, Fraction):
        if value.numerator.bit_length() > MAX_BITS or value.denominator.bit_length() > MAX_BITS:
            raise TooBig("a number has too many digits")
        return value
    if not context.isfinite(value):
        raise Undefined("not a finite number")
    if abs(value) > MAX_SIZE:
        raise TooBig("a number is too large")
    return value


def power(base: Value, exponent: Value) -> Value:
    if isinstance(base, Fraction) and isinstance(exponent, Fraction) and exponent.denominator == 1:
        size = max(base.numerator.bit_length(), base.denominator.bit_length())
        if base == 0 and exponent < 0:
            raise Undefined("division by zero")
        if size > 1 and abs(exponent) * size > MAX_BITS:
            raise TooBig("a power is too large")
        return base ** int(exponent) if size > 1 else base ** (int(exponent) % 2 + 2 * (exponent != 0))
    if base < 0:
        return -_root(-base, exponent) if _odd_root(exponent) else _undefined("a power of a negative number")
    return _root(base, exponent)


def _odd_root(exponent: Value) -> bool:
    return isinstance(exponent, Fraction) and exponent.denominator % 2 == 1 and exponent.numerator % 2 == 1


def _root(base: Value, exponent: Value) -> Value:
    """base ** exponent for base >= 0, exact where both the base and the result are fractions."""
    if base == 0:
        return Fraction(0) if exponent > 0 else _undefined("zero to a power that is not positive")
    if isinstance(base, Fraction) and isinstance(exponent, Fraction) and exponent.denominator in (2, 3):
        top, bottom = (_integer_root(part, exponent.denominator) for part in (base.numerator, base.denominator))
        if top is not None and bottom is not None:
            return power(Fraction(top, bottom), Fraction(exponent.numerator))
    size = abs(context.log(real(base)) * real(exponent))
    if size > 150:
        raise TooBig("a power is too large")
    return context.power(real(base), real(exponent))


def _integer_root(number: int, degree: int) -> int | None:
    guess = int(context.nint(context.power(number, Fraction(1, degree)))) if number.bit_length() < 120 else -1
    return guess if guess >= 0 and guess**degree == number else None


def _undefined(reason: str) -> Value:
    raise Undefined(reason)


def number(token: str) -> Fraction:
    """A decimal, with an exponent or with an overlined period."""
    if len(token) > 400:
        raise TooBig("a number has too many digits")
    text, _, period = token.partition("\\overline{")
    mantissa, letter, exponent = text.replace("E", "e").partition("e")
    if letter and abs(int(exponent)) > 400:
        raise TooBig("an exponent is too large")
    value = Fraction(text if not text.endswith(".") else text[:-1])
    if period:
        digits = period.rstrip("}")
        places = len(mantissa.partition(".")[2])
        value += Fraction(int(digits), (10 ** len(digits) - 1) * 10**places)
    return value


def apply(name: str, x: Value, base: Value | None) -> Value:
    x = real(x)
    if abs(x) > 10**20:
        raise TooBig("an argument is too large")
    if name in TRIG:
        value = getattr(context, name)(x) if name in ("sin", "cos", "tan") else None
        if value is None:
            below = {"cot": context.tan, "sec": context.cos, "csc": context.sin}[name](x)
            value = _undefined("division by zero") if abs(below) < context.mpf("1e-35") else 1 / below
        return value
    if name in INVERSE:
        if name != "arctan" and abs(x) > 1:
            raise Undefined("outside the domain")
        return getattr(context, INVERSE[name])(x)
    if name == "exp":
        return _root(+context.e, x)
    if name not in ("ln", "log", "lg"):
        raise NotAValue(f"unknown function {name!r}")
    if x <= 0 or (base is not None and (base <= 0 or base == 1)):
        raise Undefined("a logarithm outside its domain")
    return (
        context.log(x) if name == "ln" else context.log(x) / context.log(real(Fraction(10) if base is None else base))
    )


def factorial(n: int) -> int:
    product = 1
    for factor in range(2, n + 1):
        product *= factor
    return product


def binomial(n: Value, k: Value) -> Value:
    if not all(isinstance(x, Fraction) and x.denominator == 1 and 0 <= x <= 1000 for x in (n, k)):
        raise NotAValue("a binomial coefficient of no small natural numbers")
    result = Fraction(1)
    for i in range(int(k)):
        result = result * (n - i) / (i + 1)
    return checked(result)
