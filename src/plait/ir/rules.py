"""The laws of the algebra as rewrite rules; one test runs every law on random matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from plait.ir.expr import (
    Add,
    Aggregate,
    Concat,
    Dense,
    Expr,
    Fold,
    MatMul,
    Scale,
    children,
    is_constant,
    rebuild,
    sort,
    total,
)

__all__ = ["ASSOCIATIONS", "RULES", "Rule", "everywhere", "split_product", "sweep"]


@dataclass(frozen=True, slots=True)
class Rule:
    """A rewrite at the root: another expression of the same matrix, or None where it does not apply."""

    name: str
    law: str
    apply: Callable[[Expr], Expr | None]


RULES: dict[str, Rule] = {}


def rule(law: str) -> Callable[[Callable[[Expr], Expr | None]], Rule]:
    """Registers a rewrite under its function's name, with the law it rests on."""

    def register(apply: Callable[[Expr], Expr | None]) -> Rule:
        RULES[apply.__name__] = Rule(apply.__name__, law, apply)
        return RULES[apply.__name__]

    return register


def everywhere(rule: Rule, expr: Expr) -> Iterator[Expr]:
    """Every expression that one application of the rule, at one place, leads to."""
    return _led_to(rule, expr, set())


def _led_to(rule: Rule, expr: Expr, barren: set[int]) -> Iterator[Expr]:
    """See `everywhere`; `barren`: parts, by id, that lead nowhere, which an expression may hold often."""
    if id(expr) in barren:
        return
    here = rule.apply(expr)
    leads = here is not None
    if here is not None:
        yield here
    parts = children(expr)
    for k, part in enumerate(parts):
        for other in _led_to(rule, part, barren):
            leads = True
            yield rebuild(expr, (*parts[:k], other, *parts[k + 1 :]))
    if not leads:
        barren.add(id(expr))


def sweep(rule: Rule, expr: Expr) -> Expr:
    """The rule applied wherever it fits, until it fits nowhere."""
    return _swept(rule, expr, {})


def _swept(rule: Rule, expr: Expr, done: dict[Expr, Expr]) -> Expr:
    """See `sweep`; `done` keeps what parts became: an expression may hold one part a thousand times."""
    found = done.get(expr)
    if found is None:
        parts = tuple(_swept(rule, part, done) for part in children(expr))
        made = rebuild(expr, parts) if parts else expr
        here = rule.apply(made)
        found = done[expr] = made if here is None else _swept(rule, here, done)
    return found


def _is_weight(expr: Expr) -> bool:
    """A small dense factor: a weight, or weights stacked."""
    return (isinstance(expr, Dense) and expr.role == "learnable") or (
        isinstance(expr, Concat) and all(map(_is_weight, expr.parts))
    )


def _is_pattern(expr: Expr) -> bool:
    return sort(expr) in ("sparse", "diagonal")


# Which factor a product forms first ------------------------------------------------------------------


@rule(law="(S @ X) @ W == S @ (X @ W)")
def update_first(expr: Expr) -> Expr | None:
    match expr:
        case MatMul(MatMul(s, x), w) if _is_pattern(s) and sort(x) == "dense" and sort(w) == "dense":
            return MatMul(s, MatMul(x, w))
    return None


@rule(law="S @ (X @ W) == (S @ X) @ W")
def aggregate_first(expr: Expr) -> Expr | None:
    match expr:
        case MatMul(s, MatMul(x, w)) if _is_pattern(s) and sort(x) == "dense" and _is_weight(w):
            return MatMul(MatMul(s, x), w)
    return None


@rule(law="(X + Y) @ W == X @ W + Y @ W")
def distribute_weight(expr: Expr) -> Expr | None:
    match expr:
        case MatMul(Add(terms), w) if all(sort(t) == "dense" for t in terms) and _is_weight(w):
            return total(*(MatMul(term, w) for term in terms))
    return None


@rule(law="X @ W + Y @ W == (X + Y) @ W")
def factor_weight(expr: Expr) -> Expr | None:
    if not isinstance(expr, Add):
        return None
    for i, first in enumerate(expr.terms):
        for j in range(i + 1, len(expr.terms)):
            second = expr.terms[j]
            match first, second:
                case MatMul(x, w), MatMul(y, v) if w == v and _is_weight(w):
                    joined = MatMul(total(x, y), w)
                    rest = (*expr.terms[:i], joined, *expr.terms[i + 1 : j], *expr.terms[j + 1 :])
                    return total(*rest)
    return None


@rule(law="(c * X) @ W == c * (X @ W)")
def scale_outwards(expr: Expr) -> Expr | None:
    match expr:
        case MatMul(Scale(c, x), w) if sort(x) == "dense" and sort(w) == "dense":
            return Scale(c, MatMul(x, w))
    return None


@rule(law="c * (X @ W) == (c * X) @ W")
def scale_inwards(expr: Expr) -> Expr | None:
    match expr:
        case Scale(c, MatMul(x, w)) if sort(x) == "dense" and _is_weight(w):
            return MatMul(Scale(c, x), w)
    return None


@rule(law="S @ X + S @ Y == S @ (X + Y)")
def factor_pattern(expr: Expr) -> Expr | None:
    """The step that turns a polynomial into Horner form."""
    if not isinstance(expr, Add):
        return None
    for i, first in enumerate(expr.terms):
        for j in range(i + 1, len(expr.terms)):
            match first, expr.terms[j]:
                case MatMul(s, x), MatMul(t, y) if s == t and _is_pattern(s):
                    joined = MatMul(s, total(x, y))
                    rest = (*expr.terms[:i], joined, *expr.terms[i + 1 : j], *expr.terms[j + 1 :])
                    return total(*rest)
    return None


@rule(law="X @ V + Y @ W == hcat(X, Y) @ vcat(V, W)")
def concatenate(expr: Expr) -> Expr | None:
    """Several products with weights as one wide product."""
    if not isinstance(expr, Add):
        return None
    products = [
        t for t in expr.terms if isinstance(t, MatMul) and _is_weight(t.right) and sort(t.left) == "dense"
    ]
    if len(products) < 2:
        return None
    wide = MatMul(Concat(tuple(p.left for p in products), 1), Concat(tuple(p.right for p in products), 0))
    rest = [term for term in expr.terms if term not in products]
    return total(wide, *rest)


# How a normalised matrix is applied -------------------------------------------------------------------


@rule(law="(p @ A) @ X == p @ (A @ X)")
def split_product(expr: Expr) -> Expr | None:
    """Scalings leave the matrix and act on rows: the pattern stays 0/1."""
    match expr:
        case MatMul(MatMul(p, a), x) if _is_pattern(p) and _is_pattern(a) and sort(x) == "dense":
            return MatMul(p, MatMul(a, x))
    return None


@rule(law="(A + l) @ X == A @ X + l @ X")
def split_loops(expr: Expr) -> Expr | None:
    """Self loops as an added term."""
    match expr:
        case MatMul(Add(terms), x) if all(map(_is_pattern, terms)) and sort(x) == "dense":
            return total(*(MatMul(term, x) for term in terms))
    return None


@rule(law="p @ (X + Y) == p @ X + p @ Y")
def distribute_scaling(expr: Expr) -> Expr | None:
    match expr:
        case MatMul(p, Add(terms)) if sort(p) == "diagonal" and all(sort(t) == "dense" for t in terms):
            return total(*(MatMul(p, term) for term in terms))
    return None


@rule(law="p @ (l @ X) == fold(p @ l) @ X")
def fold_scalings(expr: Expr) -> Expr | None:
    """Two diagonals in a row are one, computed once."""
    match expr:
        case MatMul(p, MatMul(q, x)) if sort(p) == sort(q) == "diagonal" and sort(x) == "dense":
            return MatMul(Fold(MatMul(_unfold(p), _unfold(q))), x)
    return None


@rule(law="(p @ (A + l) @ q) @ X == fold(p @ (A + l) @ q) @ X")
def fold_matrix(expr: Expr) -> Expr | None:
    """All scalings and loops become precomputed edge weights."""
    match expr:
        case MatMul(s, x) if (
            sort(s) == "sparse"
            and isinstance(s, MatMul | Add | Scale)
            and is_constant(s)
            and sort(x) == "dense"
        ):
            return MatMul(Fold(s), x)
    return None


@rule(law="(p @ (A + l)) @ X == p @ (fold(A + l) @ X)")
def fold_loops(expr: Expr) -> Expr | None:
    """Self loops inside the pattern."""
    match expr:
        case MatMul(Add(terms) as s, x) if (
            all(map(_is_pattern, terms)) and is_constant(s) and sort(x) == "dense"
        ):
            return MatMul(Fold(s), x)
    return None


@rule(law="mean(A, X) == fold(A over its row sums) @ X, and max, min stay")
def sum_is_product(expr: Expr) -> Expr | None:
    match expr:
        case Aggregate("sum", graph, x):
            return MatMul(graph, x)
    return None


def _unfold(expr: Expr) -> Expr:
    return expr.body if isinstance(expr, Fold) else expr


ASSOCIATIONS = (
    "update_first",
    "aggregate_first",
    "distribute_weight",
    "factor_weight",
    "scale_outwards",
    "scale_inwards",
)
