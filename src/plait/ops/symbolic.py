"""Costs as formulas: exact polynomials in n, m, d, k, ... and their logarithms, to print and to evaluate.

Written here rather than taken from sympy: a cost needs sums, products, whole or symbolic powers and log2,
which is this file; sympy takes half a second to import and is not a dependency of plait.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeAlias

from plait.errors import InputError

__all__ = ["Formula", "Log", "ceil_log2", "log2", "parse", "symbol"]

Number: TypeAlias = "int | float | Fraction"
Exponent: TypeAlias = "int | str"


@dataclass(frozen=True)
class Log:
    """The binary logarithm of a formula; rounded up where it is the height of a tree of sums."""

    argument: Formula
    is_ceiling: bool = False

    def __str__(self) -> str:
        inner = str(self.argument)
        plain = f"log {inner}" if re.fullmatch(r"\w+", inner) else f"log({inner})"
        return f"⌈{plain}⌉" if self.is_ceiling else plain


Atom: TypeAlias = "str | Log"
Monomial: TypeAlias = "tuple[tuple[Atom, Exponent], ...]"


@dataclass(frozen=True)
class Formula:
    """A sum of monomials with exact coefficients; calling it with values for its symbols evaluates it."""

    terms: Mapping[Monomial, Fraction]

    def __hash__(self) -> int:
        return hash(frozenset(self.terms.items()))

    def __add__(self, other: Formula | Number) -> Formula:
        total = dict(self.terms)
        for monomial, factor in _formula(other).terms.items():
            total[monomial] = total.get(monomial, Fraction(0)) + factor
        return Formula({monomial: factor for monomial, factor in total.items() if factor})

    __radd__ = __add__

    def __neg__(self) -> Formula:
        return self * -1

    def __sub__(self, other: Formula | Number) -> Formula:
        return self + _formula(other) * -1

    def __rsub__(self, other: Number) -> Formula:
        return -self + other

    def __mul__(self, other: Formula | Number) -> Formula:
        result = Formula({})
        for left, a in self.terms.items():
            for right, b in _formula(other).terms.items():
                result += Formula({_product(left, right): a * b})
        return result

    __rmul__ = __mul__

    def __pow__(self, exponent: int) -> Formula:
        result = _formula(1)
        for _ in range(exponent):
            result *= self
        return result

    def __call__(self, **values: Any) -> Any:
        """The value of the formula: integers stay integers, log is to base 2 (and 0 below 1)."""
        total: Any = sum((_value(m, values) * factor for m, factor in self.terms.items()), Fraction(0))
        is_whole = isinstance(total, Fraction) and total.denominator == 1
        return int(total) if is_whole else float(total)

    @property
    def symbols(self) -> frozenset[str]:
        """The names it needs values for."""
        return frozenset(_symbols(self))

    def __str__(self) -> str:
        if not self.terms:
            return "0"
        text = " + ".join(_monomial_text(monomial, factor) for monomial, factor in self.terms.items())
        return text.replace("+ -", "- ")


def symbol(name: str) -> Formula:
    """The formula that is one symbol."""
    return Formula({((name, 1),): Fraction(1)})


def log2(argument: Formula | Number) -> Any:
    """log2 of a formula as a formula, of a number as a number."""
    return _atom(Log(argument)) if isinstance(argument, Formula) else math.log2(max(1.0, float(argument)))


def ceil_log2(argument: Formula | Number) -> Any:
    """The height of a balanced tree with that many leaves: 0 for none and for one."""
    if isinstance(argument, Formula):
        return _atom(Log(argument, True)) if argument.symbols else ceil_log2(argument())
    return max(0, math.ceil(argument) - 1).bit_length()


def _formula(value: Formula | Number) -> Formula:
    if isinstance(value, Formula):
        return value
    return Formula({(): Fraction(value)} if value else {})


def _atom(atom: Atom) -> Formula:
    return Formula({((atom, 1),): Fraction(1)})


def _product(left: Monomial, right: Monomial) -> Monomial:
    powers: dict[Atom, Exponent] = dict(left)
    for atom, exponent in right:
        before = powers.get(atom, 0)
        if isinstance(before, str) or isinstance(exponent, str):
            if before:
                raise InputError(f"{atom}^{before} times {atom}^{exponent}: symbolic powers are not added up")
            powers[atom] = exponent
        else:
            powers[atom] = before + exponent
    return tuple(sorted(powers.items(), key=lambda power: _order(power[0])))


def _order(atom: Atom) -> tuple[int, str]:
    """Layers and counts before widths, as the tables write them: L m k, then logarithms."""
    if isinstance(atom, Log):
        return 9, str(atom)
    place = "LTsKcnmd".find(atom)
    return (place if place >= 0 else 8), atom


def _value(monomial: Monomial, values: Mapping[str, Any]) -> Any:
    result: Any = Fraction(1)
    for atom, exponent in monomial:
        power = values[exponent] if isinstance(exponent, str) else exponent
        result = result * _atom_value(atom, values) ** power
    return result


def _atom_value(atom: Atom, values: Mapping[str, Any]) -> Any:
    if isinstance(atom, Log):
        inner = atom.argument(**values)
        return ceil_log2(inner) if atom.is_ceiling else log2(inner)
    if atom not in values:
        raise InputError(f"{atom}: no value given; known are {', '.join(sorted(values))}")
    value = values[atom]
    return Fraction(value) if isinstance(value, int) else value


def _symbols(formula: Formula) -> Iterator[str]:
    for monomial in formula.terms:
        for atom, exponent in monomial:
            if isinstance(exponent, str):
                yield exponent
            if isinstance(atom, Log):
                yield from _symbols(atom.argument)
            else:
                yield atom


_RAISED = str.maketrans("0123456789L", "⁰¹²³⁴⁵⁶⁷⁸⁹ᴸ")


def _monomial_text(monomial: Monomial, factor: Fraction) -> str:
    parts = [f"{atom}{'' if e == 1 else str(e).translate(_RAISED)}" for atom, e in monomial]
    if abs(factor) != 1 or not parts:
        parts.insert(0, str(abs(factor)))
    return ("-" if factor < 0 else "") + " ".join(parts)


# Reading the tables' own notation ---------------------------------------------------------------------------

_TOKEN = re.compile(r"\s*(?:(W_pre|D_pre|log|[A-Za-z])|(\d+)|([-+^()]))")


def parse(text: str) -> Formula:
    """A formula as the tables print it: "Lmk + Lnk^2", "L log k + log s log d", "c^L n k^2", "log^2 n"."""
    tokens, at = [], 0
    while at < len(text.rstrip()):
        match = _TOKEN.match(text, at)
        if match is None:
            raise InputError(f"formula {text!r}: cannot read {text[at:]!r}")
        tokens.append(match[match.lastindex or 0])
        at = match.end()
    reader = _Reader(tokens)
    formula = reader.sum()
    if reader.tokens:
        raise InputError(f"formula {text!r}: cannot read {''.join(reader.tokens)!r}")
    return formula


@dataclass
class _Reader:
    """A recursive descent over the tokens that are left."""

    tokens: list[str]

    def next_is(self, *wanted: str) -> bool:
        return bool(self.tokens) and self.tokens[0] in wanted

    def sum(self) -> Formula:
        total = self.product()
        while self.next_is("+", "-"):
            sign = 1 if self.tokens.pop(0) == "+" else -1
            total += self.product() * sign
        return total

    def product(self) -> Formula:
        result = self.factor()
        while self.tokens and not self.next_is("+", "-", ")"):
            result *= self.factor()
        return result

    def factor(self) -> Formula:
        token = self.tokens.pop(0)
        if token == "(":
            inner = self.sum()
            self.tokens.pop(0)
            return inner
        if token == "log":
            exponent = self.exponent()
            return _atom(Log(self.factor())) ** int(exponent)
        if token.isdigit():
            return _formula(int(token))
        return Formula({((token, self.exponent()),): Fraction(1)})

    def exponent(self) -> Exponent:
        if not self.next_is("^"):
            return 1
        self.tokens.pop(0)
        token = self.tokens.pop(0)
        return int(token) if token.isdigit() else token
