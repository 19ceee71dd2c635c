"""A layer on a graph that comes once: its expression evaluated on the edges as they are listed.

Sorting the edges, planning and binding cost more than a short sum gains from them. Dense products are those
of runtime/tall.py; the matrix times x and its transpose times a gradient are one pass over the list.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from plait.errors import PlanError
from plait.ir import Add, Dense, Expr, Map, MatMul, Scalar, Scale, Sparse, formula, leaves, sort
from plait.ir.build import propagation
from plait.kernels.listed import Entries, listed_sum
from plait.runtime.adjoint import mapped
from plait.runtime.tall import linear
from plait.runtime.twice import is_vmapped

__all__ = ["Listed", "Matrix", "Program", "program_of"]


class Listed:
    """The propagation matrix p @ (A + l) @ q of one graph, as a list of entries."""

    __slots__ = ("columns", "entries", "identity", "rows")

    def __init__(self, entries: Entries, rows: int, columns: int, identity: float = 0.0):
        self.entries, self.rows, self.columns, self.identity = entries, rows, columns, identity

    @property
    def with_identity(self) -> Listed:
        """The matrix plus the identity: of square ones."""
        return Listed(self.entries, self.rows, self.columns, self.identity + 1.0)

    def __matmul__(self, x: Tensor) -> Tensor:
        """The matrix times x, differentiable in x."""
        return mapped(x, self._times, self._turned_times)

    def _times(self, x: Tensor) -> Tensor:
        if is_vmapped(x):
            return self._in_torch(x, self.entries, self.rows)
        return listed_sum(self.entries, self.rows, self.columns, x, self.identity)

    def _turned_times(self, x: Tensor) -> Tensor:
        if is_vmapped(x):
            return self._in_torch(x, self.entries.turned, self.columns)
        return listed_sum(self.entries.turned, self.columns, self.rows, x, self.identity)

    def _in_torch(self, x: Tensor, entries: Entries, rows: int) -> Tensor:
        """The same in torch's operations."""
        source, target, value, own = entries
        gathered = x.index_select(0, source.long())
        if value is not None:
            gathered = gathered * value.unsqueeze(1)
        out = x.new_zeros((rows, *x.shape[1:])).index_add(0, target.long(), gathered)
        out = out if own is None else out + x * own.unsqueeze(1)
        return out + self.identity * x if self.identity else out


# Expressions ----------------------------------------------------------------------------------------------


class Matrix(Protocol):
    """A propagation matrix that is multiplied with rows, differentiably."""

    @property
    def with_identity(self) -> Matrix: ...

    def __matmul__(self, x: Tensor, /) -> Tensor: ...


Values = Mapping[str, Tensor]
Value = Callable[[Values, Matrix], Tensor]
Spread = Callable[[Values, Matrix, Tensor], Tensor]
"""A linear map of rows: sums over neighbours, multiples and sums of them."""
Pair = Callable[[Values, Matrix], "tuple[Tensor, Tensor | None]"]
"""(left, right) of a product, (its value, None) where it is there already."""


class Program:
    """An expression as calls on its inputs and on the one matrix in it; PlanError where it is no such one."""

    def __init__(self, expr: Expr):
        found = leaves(expr)
        self.parts = frozenset("plq") & frozenset(found)
        """The diagonals of its matrix p @ (A + l) @ q."""
        if "A" not in found:
            raise PlanError(f"{formula(expr)}: there is no matrix in it")
        self._value = _value(expr)

    def __call__(self, inputs: Values, matrix: Matrix) -> Tensor:
        return self._value(inputs, matrix)


_MOST_PROGRAMS = 256
_programs: dict[int, tuple[tuple[Expr, ...], Program | None]] = {}


def program_of(forms: tuple[Expr, ...]) -> Program | None:
    """The program of the first of some equal expressions, which are known by identity; None: it has none."""
    found = _programs.get(id(forms))
    if found is None:
        if len(_programs) >= _MOST_PROGRAMS:
            _programs.clear()
        try:
            made: Program | None = Program(forms[0])
        except PlanError:
            made = None
        found = _programs[id(forms)] = (forms, made)
    return found[1]


def _value(expr: Expr) -> Value:
    match expr:
        case Dense(name) if expr.rows != 1:
            return lambda given, matrix: given[name]
        case Add(terms):
            return _total(terms)
        case MatMul(left, _) if sort(left) == "dense":
            pair = _pair(expr)
            return lambda given, matrix: _multiplied(*pair(given, matrix))
        case MatMul(left, right):
            inner = _value(right)
            _check_matrix(left)
            return lambda given, matrix: matrix @ inner(given, matrix)
        case Scale(factor, body):
            scaled = _value(body)
            return lambda given, matrix: _number(factor, given) * scaled(given, matrix)
        case Map("relu", body):
            mapped = _value(body)
            return lambda given, matrix: torch.relu(mapped(given, matrix))
    raise PlanError(f"{formula(expr)}: not evaluated on listed edges")


def _total(terms: Sequence[Expr]) -> Value:
    """The sum of terms; a bias is added with the first product."""
    biases = [term.name for term in terms if isinstance(term, Dense) and term.rows == 1]
    products = [_pair(term) for term in terms if isinstance(term, MatMul) and sort(term.left) == "dense"]
    others = [
        _value(term)
        for term in terms
        if not (isinstance(term, Dense) and term.rows == 1)
        and not (isinstance(term, MatMul) and sort(term.left) == "dense")
    ]

    def value(given: Values, matrix: Matrix) -> Tensor:
        addends = [given[name] for name in biases]
        addends += [other(given, matrix) for other in others]
        for product in products:
            left, right = product(given, matrix)
            if right is None:
                addends.append(left)
            else:
                first = addends[0] if addends else None
                addends = [_multiplied(left, right, first), *addends[1:]]
        return functools.reduce(torch.add, addends)

    return value


def _pair(product: Expr) -> Pair:
    """The operands of a product of dense matrices; sums over neighbours come where they cost less."""
    assert isinstance(product, MatMul)
    right = _value(product.right)
    found = _spread(product.left)
    if found is None:
        left = _value(product.left)
        return lambda given, matrix: (left(given, matrix), right(given, matrix))
    leaf, spread = found

    def pair(given: Values, matrix: Matrix) -> tuple[Tensor, Tensor | None]:
        x, w = given[leaf], right(given, matrix)
        if _is_cheaper_first(x, w):
            return spread(given, matrix, x), w
        return spread(given, matrix, _multiplied(x, w)), None

    return pair


def _is_cheaper_first(x: Tensor, w: Tensor) -> bool:
    """Whether A @ x before @ w sums fewer columns than A @ (x @ w), gradients included."""
    before, after = x.shape[1], w.shape[1]
    if torch.is_grad_enabled():
        before *= 1 + x.requires_grad
        after *= 1 + (x.requires_grad or w.requires_grad)
    return before <= after


def _spread(expr: Expr) -> tuple[str, Spread] | None:
    """(leaf, map) of an expression that sums rows of one leaf over neighbours; None for any other one."""
    match expr:
        case Dense(name) if expr.rows != 1:
            return name, lambda given, matrix, x: x
        case MatMul(left, right) if sort(left) != "dense" and (found := _spread(right)):
            leaf, inner = found
            _check_matrix(left)
            return leaf, lambda given, matrix, x: matrix @ inner(given, matrix, x)
        case Scale(factor, body) if found := _spread(body):
            leaf, scaled = found
            return leaf, lambda given, matrix, x: _number(factor, given) * scaled(given, matrix, x)
        case Add((MatMul(left, x), Dense(name) as own)) if x == own and sort(left) != "dense":
            _check_matrix(left)
            return name, lambda given, matrix, x: matrix.with_identity @ x
        case Add(terms):
            parts = [_spread(term) for term in terms]
            names = {part[0] for part in parts if part is not None}
            maps = [part[1] for part in parts if part is not None]
            if len(names) == 1 and len(maps) == len(terms):
                return names.pop(), lambda given, matrix, x: functools.reduce(
                    torch.add, [each(given, matrix, x) for each in maps]
                )
    return None


def _check_matrix(matrix: Expr) -> None:
    """PlanError unless this is the propagation matrix itself."""
    found = leaves(matrix)
    a = found.get("A")
    if not isinstance(a, Sparse) or matrix != propagation(
        is_weighted=a.is_weighted, left="p" in found, loops="l" in found, right="q" in found,
        rows=str(a.rows), cols=str(a.cols),
    ):  # fmt: skip
        raise PlanError(f"{formula(matrix)}: not a propagation matrix")


def _number(factor: Scalar, given: Values) -> Tensor | float:
    return given[factor.name].reshape(()) if factor.value is None else factor.value


def _multiplied(left: Tensor, right: Tensor | None, addend: Tensor | None = None) -> Tensor:
    """left @ right + addend; (value, None) stands for a product that is there already."""
    if right is None:
        return left
    # a weight comes as the transpose of what is stored: its gradient passes one node fewer this way
    base = right._base
    if base is not None and _is_turned(right, base):
        is_bias = addend is not None and addend.dim() == 1
        return linear(left, base, *((addend, None) if is_bias else (None, addend)))
    return left @ right if addend is None else torch.addmm(addend, left, right)


def _is_turned(right: Tensor, base: Tensor) -> bool:
    """Whether `right` is the transpose of the matrix it is a view of."""
    return (
        base.dim() == 2
        and right.shape == base.shape[::-1]
        and right.stride() == base.stride()[::-1]
        and right.data_ptr() == base.data_ptr()
    )
