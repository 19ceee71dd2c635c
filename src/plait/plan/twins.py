"""Expressions on twins: which layers give twins equal rows, and the same layer on the representatives.

Row u of (A + i) @ X is the same for all twins of u, whatever X is; row-wise maps, scalings that are equal on
twins, weights and biases keep it so. A node's own row of X, or its neighbours' sum without itself, does not.
"""

from __future__ import annotations

import functools

from plait.ir import (
    Add,
    Aggregate,
    Concat,
    Dense,
    Diagonal,
    Expr,
    Fold,
    MatMul,
    Scalar,
    Sparse,
    children,
    leaves,
    rebuild,
    sort,
    total,
)

__all__ = ["closed", "is_equal_on_twins", "on_representatives"]


@functools.lru_cache(maxsize=256)
def closed(forms: tuple[Expr, ...]) -> tuple[Expr, ...]:
    """The expressions with a node and its neighbours summed by one matrix: A @ X + X == (A + i) @ X."""
    return tuple(_closed(form) for form in forms)


def _closed(expr: Expr) -> Expr:
    parts = tuple(map(_closed, children(expr)))
    expr = rebuild(expr, parts) if parts else expr
    if not isinstance(expr, Add):
        return expr
    for term in expr.terms:
        match term:
            case MatMul(Sparse("A", rows) as a, x) if x in expr.terms:
                rest = tuple(t for t in expr.terms if t is not term and t != x)
                if len(rest) == len(expr.terms) - 2:
                    return total(MatMul(Add((a, Diagonal("i", rows))), x), *rest)
    return expr


@functools.lru_cache(maxsize=256)
def is_equal_on_twins(forms: tuple[Expr, ...], is_input_equal: bool) -> bool:
    """Whether every expression's rows are equal on twins, for any X or for an X whose rows already are."""
    return all(_reads(form, is_input_equal) == _EQUAL for form in forms)


_EQUAL, _OWN = "equal", "own"  # rows: equal on twins, or a node's own


def _reads(expr: Expr, is_input_equal: bool) -> str:
    match expr:
        case Dense(name, rows, _, role):
            is_equal = role == "learnable" or rows == 1 or (is_input_equal and name == "X")
            return _EQUAL if is_equal else _OWN
        case Scalar():
            return _EQUAL
        case MatMul(left, right) if sort(left) == "sparse":
            if not _is_closed(left):
                return _OWN
            return _reads(right, True) if is_input_equal else _EQUAL
        case MatMul(left, right) if sort(left) == "diagonal":
            return _reads(right, is_input_equal)
        case Aggregate():
            return _OWN
        case Concat(_, axis) if axis == 0 and not all(_is_weight(p) for p in children(expr)):
            return _OWN
    parts = [_reads(part, is_input_equal) for part in children(expr)]
    return _EQUAL if parts and all(part == _EQUAL for part in parts) else _OWN


def _is_weight(expr: Expr) -> bool:
    return isinstance(expr, Dense) and expr.role == "learnable"


def _is_closed(matrix: Expr) -> bool:
    """Diagonals around one A + i: the only sparse matrices whose rows are equal on twins."""
    match matrix:
        case Fold(body):
            return _is_closed(body)
        case Add((Sparse("A", _, _, False), Diagonal("i"))):
            return True
        case MatMul(left, right):
            kinds = sorted((sort(left), sort(right)))
            return kinds == ["diagonal", "sparse"] and _is_closed(left if sort(left) == "sparse" else right)
    return False


@functools.lru_cache(maxsize=256)
def on_representatives(forms: tuple[Expr, ...]) -> tuple[Expr, ...]:
    """The expressions with the class sizes on the right of A + i, unless a scaling q carries them already."""
    return tuple(form if "q" in leaves(form) else _weighted(form) for form in forms)


def _weighted(expr: Expr) -> Expr:
    match expr:
        case Add((Sparse("A", _, cols), Diagonal("i"))):
            return MatMul(expr, Diagonal("q", cols))
    parts = tuple(map(_weighted, children(expr)))
    return rebuild(expr, parts) if parts else expr
