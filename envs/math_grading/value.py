"""The value of a closed mathematical expression in LaTeX, with hard bounds on the work it can cause.

Rational results are exact fractions, others have 40 digits. Variables are given numbers, so that two expressions can be
compared at several points instead of being simplified.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction

from envs.math_grading.numbers import (
    FUNCTIONS,
    TRIG,
    NotAValue,
    TooBig,
    Undefined,
    Value,
    add,
    apply,
    binomial,
    checked,
    context,
    factorial,
    number,
    over,
    power,
    real,
    times,
)

MAX_TOKENS, MAX_DEPTH = 400, 40
_TOKEN = re.compile(
    r"\s*(?:(?P<number>(?:\d+\.?\d*|\.\d+)(?:\\overline\{\d+\})?(?:[eE][+-]?\d+(?![a-zA-Z]))?)"
    r"|(?P<command>\\[a-zA-Z]+)|(?P<letter>[A-Za-z](?:_(?:\{\w{1,8}\}|\w))?'*)|(?P<sign>[-+*/:^()\[\]{}!|%°_]))"
)
_GREEK = frozenset(
    ["alpha", "beta", "gamma", "delta", "epsilon", "varepsilon", "zeta", "eta", "theta", "vartheta", "iota", "kappa",
     "lambda", "mu", "nu", "xi", "rho", "sigma", "tau", "upsilon", "phi", "varphi", "chi", "psi", "omega", "Gamma",
     "Delta", "Theta", "Lambda", "Xi", "Sigma", "Phi", "Psi", "Omega", "ell"]
)  # fmt: skip
_OPENERS = {"(": ")", "[": "]", "{": "}"}


def evaluate(text: str, variables: Mapping[str, Fraction] | None = None) -> Value:
    """The value of `text`; a variable that `variables` lacks is a NotAValue error."""
    return _Parser(text, variables or {}).result()


def variables_of(text: str) -> set[str]:
    """Names of the variables in `text`."""
    names = set()
    for kind, token in _tokens(text):
        if (kind == "letter" and token != "e") or (kind == "command" and token[1:] in _GREEK):
            names.add(token)
    return names


def _tokens(text: str) -> list[tuple[str, str]]:
    tokens, position, end = [], 0, len(text.rstrip())
    while position < end:
        match = _TOKEN.match(text, position)
        if match is None:
            raise NotAValue(f"cannot read {text[position : position + 20]!r}")
        kind = str(match.lastgroup)
        tokens.append((kind, match.group(kind)))
        position = match.end()
        if len(tokens) > MAX_TOKENS:
            raise TooBig("too many tokens")
    return tokens


class _Parser:
    """Recursive descent; each method returns a value and leaves `position` behind what it has read."""

    def __init__(self, text: str, variables: Mapping[str, Fraction]) -> None:
        self.tokens, self.variables = _tokens(text), variables
        self.position = self.depth = self.trig = 0

    def result(self) -> Value:
        value = self.sum()
        if self.position < len(self.tokens):
            raise NotAValue(f"unexpected {self.peek()!r}")
        return value

    def peek(self) -> str:
        return self.tokens[self.position][1] if self.position < len(self.tokens) else ""

    def take(self, token: str) -> bool:
        if self.peek() == token:
            self.position += 1
            return True
        return False

    def need(self, token: str) -> None:
        if not self.take(token):
            raise NotAValue(f"expected {token!r}, found {self.peek()!r}")

    def sum(self) -> Value:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise TooBig("nested too deeply")
        value = self.product()
        while self.peek() in ("+", "-"):
            sign = 1 if self.take("+") else -1
            if sign < 0:
                self.need("-")
            value = add(value, sign * self.product())
        self.depth -= 1
        return value

    def product(self) -> Value:
        value = self.signed()
        while True:
            if self.take("*"):
                value = times(value, self.signed())
            elif self.peek() in ("/", ":"):
                self.position += 1
                value = over(value, self.signed())
            elif self.starts_factor():
                if self.tokens[self.position][0] == "number" and self.tokens[self.position - 1][0] == "number":
                    raise NotAValue("two numbers side by side")
                value = times(value, self.power())
            else:
                return value

    def starts_factor(self) -> bool:
        if self.position >= len(self.tokens):
            return False
        kind, token = self.tokens[self.position]
        return kind in ("number", "letter", "command") or token in ("(", "[", "{")

    def signed(self) -> Value:
        sign = 1
        while self.peek() in ("+", "-"):
            sign = -sign if self.peek() == "-" else sign
            self.position += 1
        return sign * self.power()

    def power(self) -> Value:
        value = self.postfix()
        if not self.take("^"):
            return value
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise TooBig("nested too deeply")
        exponent = self.signed()
        self.depth -= 1
        return checked(power(value, exponent))

    def postfix(self) -> Value:
        value = self.primary()
        while True:
            if self.take("!"):
                if not isinstance(value, Fraction) or value.denominator != 1 or value < 0:
                    raise Undefined("a factorial of no natural number")
                if value > 400:
                    raise TooBig("a factorial is too large")
                value = Fraction(factorial(int(value)))
            elif self.take("%"):
                value = over(value, Fraction(100))
            elif self.take("°"):
                value = real(value) * context.pi / 180 if self.trig else value
            else:
                return checked(value)

    def primary(self) -> Value:
        if self.position >= len(self.tokens):
            raise NotAValue("the expression ends too early")
        kind, token = self.tokens[self.position]
        self.position += 1
        if kind == "number":
            return checked(number(token))
        if kind == "letter":
            return context.e if token == "e" else self.variable(token)
        if token in _OPENERS:
            value = self.sum()
            self.need(_OPENERS[token])
            return value
        if token == "|":
            value = self.sum()
            self.need("|")
            return abs(value)
        if kind == "command":
            return self.command(token[1:])
        raise NotAValue(f"unexpected {token!r}")

    def variable(self, name: str) -> Value:
        if name not in self.variables:
            raise NotAValue(f"unknown name {name!r}")
        return self.variables[name]

    def command(self, name: str) -> Value:
        if name == "frac":
            return over(self.primary(), self.primary())
        if name == "sqrt":
            degree = Fraction(2)
            if self.take("["):
                degree = self.sum()
                self.need("]")
            value = self.primary()
            return checked(power(value, over(Fraction(1), degree)))
        if name == "pi":
            return +context.pi
        if name == "binom":
            return binomial(self.primary(), self.primary())
        if name in FUNCTIONS:
            return self.function(name)
        if name in _GREEK:
            return self.variable("\\" + name)
        raise NotAValue(f"unknown command {name!r}")

    def function(self, name: str) -> Value:
        base, exponent = None, None
        if name == "log" and self.take("_"):
            base = self.primary()
        if self.take("^"):
            exponent = self.signed()
        self.trig += name in TRIG
        argument = self.argument()
        self.trig -= name in TRIG
        if exponent is not None and exponent == -1 and name in TRIG:
            name, exponent = "arc" + name, None
        value = checked(apply(name, argument, base))
        return value if exponent is None else checked(power(value, exponent))

    def argument(self) -> Value:
        """(…), {…}, or all factors that follow side by side."""
        if self.peek() in _OPENERS:
            return self.postfix()
        value = self.power()
        while self.starts_factor() and self.peek()[1:] not in FUNCTIONS and self.peek() not in _OPENERS:
            value = times(value, self.power())
        return value
