"""Expressions as text and back: `parse(to_text(e)) == e`; `formula(e)` is the short form people read."""

from __future__ import annotations

import functools
import re
from typing import Any

from plait.errors import PlanError
from plait.ir.expr import (
    Add,
    Aggregate,
    Barrier,
    Concat,
    Dense,
    Diagonal,
    Expr,
    Fold,
    Map,
    MatMul,
    Scalar,
    Scale,
    Size,
    Sparse,
    leaves,
    total,
)

__all__ = ["formula", "parse", "to_text"]


@functools.lru_cache(maxsize=4096)  # constants are known by it, in every new graph
def formula(expr: Expr) -> str:
    """The expression as one writes it: `p @ (A @ (q @ (X @ W))) + b`."""
    match expr:
        case Dense(name) | Sparse(name) | Diagonal(name):
            return name
        case Scalar(name, value):
            return name if value is None else f"{value!r}"
        case MatMul(left, right):
            return f"{_factor(left)} @ {_factor(right)}"
        case Add(terms):
            return " + ".join(
                f"({formula(term)})" if isinstance(term, Add) else formula(term) for term in terms
            )
        case Scale(factor, body):
            return f"{formula(factor)} * {_factor(body)}"
        case Map(name, body):
            return f"map.{name}({formula(body)})"
        case Barrier(name, body):
            return f"barrier.{name}({formula(body)})"
        case Aggregate(reduce, graph, body):
            return f"{reduce}({formula(graph)}, {formula(body)})"
        case Concat(parts, axis):
            return f"{'hcat' if axis else 'vcat'}({', '.join(map(formula, parts))})"
        case Fold(body):
            return f"fold({formula(body)})"
    raise PlanError(f"{type(expr).__name__} cannot be printed")


def _factor(expr: Expr) -> str:
    """An operand of a product: anything that is not one word is bracketed."""
    text = formula(expr)
    return f"({text})" if isinstance(expr, MatMul | Add | Scale) else text


def to_text(expr: Expr) -> str:
    """Declarations of the leaves, then the formula: everything `parse` needs."""
    return "; ".join([*map(_declaration, leaves(expr).values()), formula(expr)])


def _declaration(leaf: Expr) -> str:
    match leaf:
        case Dense(name, rows, cols, role):
            return f"{name}: dense[{rows}, {cols}] {role}"
        case Sparse(name, rows, cols, is_weighted, role):
            return f"{name}: {'weighted' if is_weighted else 'sparse'}[{rows}, {cols}] {role}"
        case Diagonal(name, size, role):
            return f"{name}: diagonal[{size}] {role}"
        case Scalar(name, value, role):
            return f"{name}: scalar[{'' if value is None else repr(value)}] {role}"
    raise PlanError(f"{leaf!r} is not a leaf")


_LEAF = re.compile(
    r"^(?P<name>\w+): (?P<kind>dense|sparse|weighted|diagonal|scalar)\[(?P<sizes>[^\]]*)\] (?P<role>\w+)$"
)
_TOKEN = re.compile(
    r"\s*(?:(?P<number>-?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|inf|nan))(?![\w.])|(?P<word>[A-Za-z_][\w.]*)|(?P<mark>[-@+*(),]))"
)


def parse(text: str) -> Expr:
    """The expression that `to_text` wrote; PlanError where the text is not one."""
    *declarations, body = text.split("; ")
    names = {}
    for line in declarations:
        leaf = _parse_leaf(line)
        names[leaf.name] = leaf  # type: ignore[attr-defined]
    return _Parser(body, names).whole()


def _parse_leaf(line: str) -> Expr:
    found = _LEAF.match(line)
    if not found:
        raise PlanError(f"text: {line!r} does not declare a leaf; write 'X: dense[N, K] data'")
    name, kind, role = found["name"], found["kind"], found["role"]
    sizes = [_size(part) for part in found["sizes"].split(", ") if part]
    if role not in ("data", "constant", "learnable"):
        raise PlanError(f"text: {role!r} is not a role; use data, constant or learnable")
    build: dict[str, Any] = {
        "dense": lambda: Dense(name, *sizes, role=role),  # type: ignore[arg-type, misc]
        "sparse": lambda: Sparse(name, *sizes, is_weighted=False, role=role),  # type: ignore[arg-type, misc]
        "weighted": lambda: Sparse(name, *sizes, is_weighted=True, role=role),  # type: ignore[arg-type, misc]
        "diagonal": lambda: Diagonal(name, *sizes, role=role),  # type: ignore[arg-type, misc]
        "scalar": lambda: Scalar(name, float(found["sizes"]) if found["sizes"] else None, role),  # type: ignore[arg-type]
    }
    try:
        leaf: Expr = build[kind]()
    except (TypeError, ValueError) as fault:
        raise PlanError(f"text: {line!r} has the wrong sizes for a {kind} leaf") from fault
    return leaf


def _size(text: str) -> Size:
    return int(text) if text.lstrip("-").isdigit() else text


class _Parser:
    """Recursive descent: sum = product {+ product}; product = atom [(@ or *) atom]."""

    def __init__(self, text: str, names: dict[str, Expr]):
        self.text, self.names, self.at = text, names, 0
        self.values = {
            leaf.value: leaf for leaf in names.values() if isinstance(leaf, Scalar) and leaf.value is not None
        }

    def whole(self) -> Expr:
        result = self.sum()
        if self.text[self.at :].strip():
            raise self.fault("expected the end")
        return result

    def fault(self, what: str) -> PlanError:
        return PlanError(f"text: {what} at {self.text[self.at :]!r} in {self.text!r}")

    def peek(self) -> str | None:
        found = _TOKEN.match(self.text, self.at)
        return found.group().strip() if found else None

    def take(self, expected: str | None = None) -> str:
        found = _TOKEN.match(self.text, self.at)
        if not found or (expected is not None and found.group().strip() != expected):
            raise self.fault(f"expected {expected or 'a word'!r}")
        self.at = found.end()
        return found.group().strip()

    def sum(self) -> Expr:
        terms = [self.product()]
        while self.peek() == "+":
            self.take("+")
            terms.append(self.product())
        return total(*terms) if len(terms) > 1 else terms[0]

    def product(self) -> Expr:
        left = self.atom()
        if self.peek() == "@":
            self.take("@")
            return MatMul(left, self.atom())
        if self.peek() == "*":
            self.take("*")
            if not isinstance(left, Scalar):
                raise self.fault("only a scalar may stand before *")
            return Scale(left, self.atom())
        return left

    def atom(self) -> Expr:
        if self.peek() == "(":
            self.take("(")
            inner = self.sum()
            self.take(")")
            return inner
        word = self.take()
        if word in self.names:
            return self.names[word]
        if self.peek() == "(":
            return self.call(word)
        try:
            return self.values[float(word)]
        except (ValueError, KeyError):
            raise self.fault(f"{word!r} is not declared") from None

    def call(self, word: str) -> Expr:
        self.take("(")
        parts = [self.sum()]
        while self.peek() == ",":
            self.take(",")
            parts.append(self.sum())
        self.take(")")
        kind, _, name = word.partition(".")
        if kind in ("hcat", "vcat"):
            return Concat(tuple(parts), 1 if kind == "hcat" else 0)
        if kind == "fold":
            return Fold(parts[0])
        if kind == "map":
            return Map(name, parts[0])
        if kind == "barrier":
            return Barrier(name, parts[0])
        if kind in ("sum", "mean", "max", "min") and len(parts) == 2:
            return Aggregate(kind, parts[0], parts[1])  # type: ignore[arg-type]
        raise self.fault(f"{word!r} is not a function plait knows")
