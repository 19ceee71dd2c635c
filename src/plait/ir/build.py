"""Expressions that many layers share: a normalised propagation matrix, and polynomials in it."""

from __future__ import annotations

from collections.abc import Sequence

from plait.ir.expr import Add, Concat, Dense, Diagonal, Expr, MatMul, Scalar, Scale, Sparse, total

__all__ = ["chebyshev", "number", "polynomial", "propagation"]


def number(value: float) -> Scalar:
    """A literal scalar; its name is its value, so that equal numbers are equal leaves."""
    return Scalar(f"c{value!r}".replace("-", "m").replace(".", "_").replace("+", ""), value)


def propagation(
    *,
    is_weighted: bool = False,
    left: bool = False,
    loops: bool = False,
    right: bool = False,
    rows: str = "N",
    cols: str = "N",
) -> Expr:
    """p @ (A + l) @ q with the parts asked for: left scaling p, self loops l, right scaling q."""
    matrix: Expr = Sparse("A", rows, cols, is_weighted)
    if loops:
        matrix = Add((matrix, Diagonal("l", rows)))
    if left:
        matrix = MatMul(Diagonal("p", rows), matrix)
    if right:
        matrix = MatMul(matrix, Diagonal("q", cols))
    return matrix


def polynomial(matrix: Expr, x: Expr, weights: Sequence[Expr | None]) -> tuple[Expr, ...]:
    """Equal expressions for the sum over k of matrix^k @ x @ weights[k] (None: no such term).

    Powers first (each power formed once, then its weight), Horner (weights first, one product per power), and
    the powers side by side times the stacked weights.
    """
    powers = [x]
    for _ in weights[1:]:
        powers.append(MatMul(matrix, powers[-1]))
    terms = [MatMul(power, w) for power, w in zip(powers, weights, strict=True) if w is not None]
    forms = [total(*terms)]
    horner: Expr | None = None
    for w in reversed(weights):
        inner = None if horner is None else MatMul(matrix, horner)
        own = None if w is None else MatMul(x, w)
        horner = total(*(part for part in (own, inner) if part is not None))
    if horner is not None and horner not in forms:
        forms.append(horner)
    if len(terms) > 1:
        forms.append(
            MatMul(Concat(tuple(t.left for t in terms), 1), Concat(tuple(t.right for t in terms), 0))
        )
    return tuple(forms)


def chebyshev(matrix: Expr, x: Expr, weights: Sequence[Dense]) -> tuple[Expr, ...]:
    """Equal expressions for the sum over k of T_k(matrix) @ x @ weights[k].

    The recurrence on x, the basis side by side times the stacked weights, and Clenshaw's on the weights.
    """
    basis = [x]
    for k in range(1, len(weights)):
        step = MatMul(matrix, basis[-1])
        basis.append(step if k == 1 else total(Scale(number(2.0), step), Scale(number(-1.0), basis[-2])))
    terms = [MatMul(t, w) for t, w in zip(basis, weights, strict=True)]
    forms = [total(*terms)]
    if len(terms) > 1:
        forms.append(MatMul(Concat(tuple(basis), 1), Concat(tuple(weights), 0)))
        forms.append(_clenshaw(matrix, x, weights))
    return tuple(forms)


def _clenshaw(matrix: Expr, x: Expr, weights: Sequence[Dense]) -> Expr:
    """b_k = x @ w_k + 2 matrix @ b_{k+1} - b_{k+2}; the sum is x @ w_0 + matrix @ b_1 - b_2."""
    following: list[Expr] = []
    for k in range(len(weights) - 1, -1, -1):
        parts: list[Expr] = [MatMul(x, weights[k])]
        if following:
            step = MatMul(matrix, following[-1])
            parts.append(step if k == 0 else Scale(number(2.0), step))
        if len(following) > 1:
            parts.append(Scale(number(-1.0), following[-2]))
        following.append(total(*parts))
    return following[-1]
