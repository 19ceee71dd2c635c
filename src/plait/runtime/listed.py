"""A layer on a graph seen only once: its expression evaluated directly on the unsorted edge list.

Sorting the edges, planning and binding cost more than a short sum gains from it. A layer is one
node of torch's graph (runtime/tape.py); the matrix times x and its transpose times a gradient are one pass
over the list.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import compress
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from plait.errors import PlanError
from plait.ir import (
    Add,
    Dense,
    Expr,
    Map,
    MatMul,
    Scalar,
    Scale,
    Sparse,
    children,
    formula,
    leaves,
    sort,
    total,
)
from plait.ir.build import propagation
from plait.kernels.listed import Entries, listed_sum
from plait.runtime.adjoint import leaf_turned_by, mapped
from plait.runtime.recipe import Recipe
from plait.runtime.tape import Given, Tape, apply, is_large
from plait.runtime.twice import is_vmapped

__all__ = ["Listed", "Matrix", "Program", "program_of"]


class Listed:
    """The propagation matrix p @ (A + l) @ q of one graph, as a list of entries."""

    __slots__ = ("_turned", "entries", "identity")
    wants_grad = False

    def __init__(self, entries: Entries, identity: float = 0.0):
        self.entries, self.identity = entries, identity
        self._turned: Entries | None = None

    @property
    def turned(self) -> Entries:
        """The entries of the transpose."""
        if self._turned is None:
            self._turned = self.entries.turned
        return self._turned

    @property
    def with_identity(self) -> Listed:
        """The matrix plus the identity: of square ones."""
        return Listed(self.entries, self.identity + 1.0)

    def times(self, x: Tensor, identity: float, bias: Tensor | None) -> Tensor:
        """(matrix + identity) @ x + bias, not recorded."""
        return listed_sum(self.entries, x, identity, bias)

    def turned_times(self, x: Tensor, identity: float) -> Tensor:
        """(matrix + identity).T @ x, not recorded."""
        return listed_sum(self.turned, x, identity)

    def __matmul__(self, x: Tensor) -> Tensor:
        """The matrix times x, differentiable in x."""
        return mapped(x, self._times, self._turned_times)

    def _times(self, x: Tensor) -> Tensor:
        return self._in_torch(x, self.entries) if is_vmapped(x) else self.times(x, self.identity, None)

    def _turned_times(self, x: Tensor) -> Tensor:
        return self._in_torch(x, self.turned) if is_vmapped(x) else self.turned_times(x, self.identity)

    def _in_torch(self, x: Tensor, entries: Entries) -> Tensor:
        """The same in torch's operations."""
        rows = entries.shape[0]
        source, target, value, own = entries.source, entries.target, entries.value, entries.own
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
    def wants_grad(self) -> bool:
        """Whether its entries need a gradient: products of the rows it was multiplied with."""
        ...

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
    """An expression as calls on its inputs and on the one matrix in it; PlanError if there is none."""

    def __init__(self, expr: Expr):
        found = leaves(expr)
        self.parts = frozenset("plq") & frozenset(found)
        """The diagonals of its matrix p @ (A + l) @ q."""
        if "A" not in found:
            raise PlanError(f"{formula(expr)}: there is no matrix in it")
        self._value, self._expr = _value(expr), expr
        self._weights = frozenset(_right_operands(expr))
        self._tapes: dict[tuple[Any, ...], Tape | None] = {}

    def __call__(self, inputs: Values, matrix: Matrix) -> Tensor:
        """The value by operations that torch records one by one."""
        return self._value(inputs, matrix)

    def on_list(self, inputs: Mapping[str, Tensor | None], matrix: Listed) -> Tensor:
        """The value as one operation of torch's graph; inputs that are None are not read."""
        values: list[Tensor] = []
        key: list[tuple[str, torch.Size, bool, type[Tensor] | None]] = []
        weights, with_grad = self._weights, torch.is_grad_enabled()
        for name, value in inputs.items():
            if value is None:
                continue
            stored = _stored(value) if name in weights else None
            wants = with_grad and value.requires_grad
            if stored is None:
                values.append(value)
                key.append((name, value.shape[1:], wants, type(value)))
            else:
                values.append(stored)
                key.append((name, stored.shape, wants, None))
        tape = self._tape_of(tuple(key))
        if tape is None:
            return self._value({name: t for name, t in inputs.items() if t is not None}, matrix)
        return apply(tape, matrix, values)

    def recalled(self, recipe: Recipe, values: Sequence[Tensor], matrix: Listed) -> Tensor:
        """The same of inputs that are known to be x, a layer's parameters and numbers."""
        with_grad = torch.is_grad_enabled()
        place = (with_grad, *map(_wants_grad, values), *map(_shape, recipe.parameters))
        try:
            tape = recipe.tapes[place]
        except KeyError:
            if len(recipe.tapes) >= _MOST_TAPES:
                recipe.tapes.clear()
            tape = recipe.tapes[place] = self._tape_of_recipe(recipe, values, with_grad)
        return self.on_list(recipe.given(values), matrix) if tape is None else apply(tape, matrix, values)

    def _tape_of_recipe(self, recipe: Recipe, values: Sequence[Tensor], with_grad: bool) -> Tape | None:
        weights = self._weights
        key = tuple([
            (name, value.shape, with_grad and value.requires_grad, None)
            if is_turned and name in weights
            else (name, value.shape[1:], with_grad and value.requires_grad, type(value))
            for name, value, is_turned in zip(recipe.names, values, recipe.are_turned, strict=True)
        ])  # fmt: skip
        is_read = all(name in weights for name in compress(recipe.names, recipe.are_turned))
        return self._tape_of(key) if is_read else None

    def _tape_of(self, place: tuple[Any, ...]) -> Tape | None:
        try:
            return self._tapes[place]
        except KeyError:
            tape = self._tapes[place] = self._tape(place)
            return tape

    def _tape(self, place: tuple[Any, ...]) -> Tape | None:
        """The tape of the expression for such inputs; None where there is none."""
        if len(self._tapes) >= _MOST_TAPES:
            self._tapes.clear()
        if any(kind not in (None, Tensor, nn.Parameter) for *_, kind in place):
            return None
        given = [
            Given(name, shape[0] if kind is None else shape[-1] if shape else 1, wants, kind is None)
            for name, shape, wants, kind in place
        ]

        def again(values: Sequence[Tensor], matrix: Matrix) -> Tensor:
            named = zip(given, values, strict=True)
            return self({one.name: t.t() if one.is_turned else t for one, t in named}, matrix)

        try:
            return Tape(self._expr, given, again)
        except PlanError:
            return None


_wants_grad, _shape = operator.attrgetter("requires_grad"), operator.attrgetter("shape")
_MOST_PROGRAMS = 256
_NO_MATRIX: Any = None  # of a product of dense matrices
_MOST_TAPES = 256  # of one expression: widths, what needs gradients
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
        if _is_cheaper_first(x, w, matrix.wants_grad):
            return spread(given, matrix, x), w
        return spread(given, matrix, _multiplied(x, w)), None

    return pair


def _is_cheaper_first(x: Tensor, w: Tensor, is_learned: bool) -> bool:
    """Whether A @ x before @ w reads fewer columns per edge than A @ (x @ w), gradients included.

    `is_learned`: the gradients of A's entries are one more pass over the rows A is multiplied with.
    """
    before, after = x.shape[1], w.shape[1]
    if torch.is_grad_enabled():
        before *= 1 + x.requires_grad + is_learned
        after *= 1 + (x.requires_grad or w.requires_grad) + is_learned
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


def _right_operands(expr: Expr) -> Iterator[str]:
    """Names of the leaves that dense matrices are multiplied by."""
    if isinstance(expr, MatMul) and isinstance(expr.right, Dense) and sort(expr.left) == "dense":
        yield expr.right.name
    for part in children(expr):
        yield from _right_operands(part)


def _stored(value: Tensor) -> Tensor | None:
    """The matrix that `value` is the transpose of: itself what a gradient goes to, or without one.

    The gradient of one that is handed over as it is stored passes one node fewer and is not turned.
    """
    if value.grad_fn is None:
        base = value._base
        if base is None or value.shape != base.shape[::-1] or value.stride(1) == 1:
            return None
        return base if value.data_ptr() == base.data_ptr() else None
    found = leaf_turned_by(value.grad_fn)
    return found if found is not None and found.dim() == 2 else None


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
    stored = _stored(right)
    if stored is None:
        return left @ right if addend is None else torch.addmm(addend, left, right)
    is_bias = addend is not None and addend.dim() == 1
    made = _linear(left, stored, addend if is_bias else None)
    return made if addend is None or is_bias else made + addend


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x @ weight.T + bias, of many rows by plait's kernels."""
    given = [x, weight] if bias is None else [x, weight, bias]
    if not _are_ours(given) or not is_large(x, weight):
        return functional.linear(x, weight, bias)
    with_grad = torch.is_grad_enabled()
    wants = tuple([with_grad and value.requires_grad for value in given])
    return apply(_product(*weight.shape, wants), _NO_MATRIX, given)


def _are_ours(given: Sequence[Tensor]) -> bool:
    """Whether plait's kernels take these operands."""
    first = given[0]
    return (
        first.dtype in (torch.float32, torch.float64)
        and all(type(t) in (Tensor, nn.Parameter) and t.is_cpu and t.dtype is first.dtype for t in given)
        and first.dim() == 2
        and first.shape[1] == given[1].shape[1]
        and not is_vmapped(first)
    )


@functools.lru_cache(maxsize=_MOST_TAPES)
def _product(height: int, width: int, wants: tuple[bool, ...]) -> Tape:
    """x @ weight.T + bias as one operation of torch's graph, for a weight [height, width]."""
    expr: Expr = Dense("X", "N", "K1") @ Dense("W", "K1", "K2", "learnable")
    if len(wants) == 3:
        expr = total(expr, Dense("b", 1, "K2", "learnable"))
    shapes = (("X", width, False), ("W", height, True), ("b", height, False))
    rows = zip(shapes, wants, strict=False)
    given = [Given(name, wide, is_wanted, is_turned) for (name, wide, is_turned), is_wanted in rows]
    return Tape(expr, given, lambda values, matrix: functional.linear(*values))
