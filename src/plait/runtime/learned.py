"""Sums over neighbours whose edge weights need a gradient, and expressions made of them.

`Products` are those of one graph: its pattern with values that are an input, as programs (ops/entries.py).
`Weighted` is such a matrix, multiplied as `A @ x`; `Learned` evaluates expressions with several matrices.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from plait.errors import PlanError
from plait.graph import Graph
from plait.ir import Add, Diagonal, Expr, MatMul, Sparse, formula, sort
from plait.ops.program import Program
from plait.plan.draft import Draft
from plait.plan.ways import direct
from plait.runtime import executor
from plait.runtime.buffers import Buffers
from plait.runtime.constants import Constants
from plait.runtime.entries import Normalising
from plait.runtime.evaluate import Evaluation
from plait.runtime.orders import EdgeOrders

__all__ = ["Learned", "Products", "Weighted"]


class Products:
    """Matrices of one graph's pattern whose values are inputs: their normalisation and their products."""

    def __init__(self, graph: Graph, buffers: Buffers):
        self.orders, self._buffers = EdgeOrders(graph), buffers
        self._runs: dict[tuple[object, ...], executor.Run] = {}

    def times(self, entries: Tensor, x: Tensor, has_own: bool = False, identity: float = 0.0) -> Tensor:
        """The matrix with these entries times x, differentiable in both; see ops/entries.py."""
        with_grad = torch.is_grad_enabled()
        wants = (with_grad and entries.requires_grad, with_grad and x.requires_grad)
        key = (wants, has_own, identity)
        run = self._runs.get(key)
        if run is None:
            wrt = tuple(name for name, is_wanted in zip("EX", wants, strict=True) if is_wanted)
            run = self._runs[key] = self._bound(_sum(has_own, identity), wrt)
        return executor.apply(run, {"E": entries, "X": x})

    def normalised(self, how: Normalising, weight: Tensor) -> Tensor:
        """The entries of the normalised matrix, differentiable in the weights."""
        wrt = ("w",) if weight.requires_grad and torch.is_grad_enabled() else ()
        run = self._runs.get(wrt)
        if run is None:
            run = self._runs[wrt] = self._bound(_normalisation(), wrt)
        return executor.apply(run, {"w": weight}, {"places": how})

    def _bound(self, program: Program, wrt: tuple[str, ...]) -> executor.Run:
        constants = Constants(self.orders.graph, None, {}, torch.float32)
        return executor.Run(direct(program, wrt), constants, self._buffers, orders=self.orders)


@functools.cache
def _sum(has_own: bool, identity: float) -> Program:
    draft = Draft("M")
    entries = draft.input("E", "E+N" if has_own else "E", 1)
    reads = {"matrix": draft.matrix(), "entries": entries, "x": draft.input("X", "M", "K")}
    return draft.program(draft.add("entry_sums", reads, ("N", "K"), has_own=has_own, identity=identity))


@functools.cache
def _normalisation() -> Program:
    draft = Draft("M")
    reads = {"places": draft.object("places", "E", 1), "weight": draft.input("w", "L", 1)}
    return draft.program(draft.add("normalise", reads, ("E+N", 1)))


class Weighted:
    """A matrix of a graph's pattern, and of its diagonal with `has_own`, by its entries."""

    def __init__(self, products: Products, entries: Tensor, has_own: bool, identity: float = 0.0):
        self._products, self._entries, self._has_own, self._identity = products, entries, has_own, identity
        self.wants_grad = entries.requires_grad and torch.is_grad_enabled()

    @property
    def with_identity(self) -> Weighted:
        """The matrix plus the identity."""
        return Weighted(self._products, self._entries, self._has_own, self._identity + 1.0)

    def __matmul__(self, x: Tensor) -> Tensor:
        return self._products.times(self._entries, x, self._has_own, self._identity)


class Learned(Evaluation):
    """A layer's expression evaluated under autograd: its matrix has values that need a gradient.

    `diagonals` are the leaves p, l, q, ...; they may depend on the values as the normalisation does.
    """

    def __init__(
        self,
        inputs: Mapping[str, Tensor],
        products: Products,
        values: Tensor,
        diagonals: Mapping[str, Tensor],
    ):
        super().__init__(inputs)
        self.products, self.values, self.diagonals = products, values, diagonals
        self._matrices: dict[Expr, tuple[Tensor | None, Tensor | None]] = {}

    def product(self, left: Expr, right: Expr) -> Tensor:
        """The product of two dense matrices, summed over neighbours where there are fewer columns."""
        if isinstance(left, MatMul) and sort(left.left) != "dense":
            x, w = self.value(left.right), self.value(right)
            if w.shape[1] <= x.shape[1]:
                return self.applied(left.left, x @ w)
        return super().product(left, right)

    def applied(self, matrix: Expr, x: Tensor) -> Tensor:
        """The sparse or diagonal matrix times x."""
        values, diagonal = self._matrix(matrix)
        own = None if diagonal is None else diagonal.unsqueeze(1) * x
        if values is None:
            assert own is not None
            return own
        summed = self.products.times(values.unsqueeze(1), x)
        return summed if own is None else summed + own

    def _matrix(self, matrix: Expr) -> tuple[Tensor | None, Tensor | None]:
        """(values on the edges, values on the diagonal) of a matrix, None where there are none."""
        if matrix not in self._matrices:
            self._matrices[matrix] = self._entries(matrix)
        return self._matrices[matrix]

    def _entries(self, matrix: Expr) -> tuple[Tensor | None, Tensor | None]:
        match matrix:
            case Sparse("A"):
                return self.values, None
            case Diagonal(name):
                return None, self.diagonals[name]
            case Add(terms):
                parts = [self._matrix(term) for term in terms]
                return _total(edge for edge, _ in parts), _total(loop for _, loop in parts)
            case MatMul(left, right) if sort(left) == "diagonal":
                scale, (edges, loops) = self._scale(left), self._matrix(right)
                return _times(edges, scale.index_select(0, self.products.orders.targets)), _times(
                    loops, scale
                )
            case MatMul(left, right) if sort(right) == "diagonal":
                scale, (edges, loops) = self._scale(right), self._matrix(left)
                return _times(edges, scale.index_select(0, self.products.orders.sources)), _times(
                    loops, scale
                )
        raise PlanError(f"{formula(matrix)}: no gradient of edge weights goes through this matrix")

    def _scale(self, diagonal: Expr) -> Tensor:
        scale = self._matrix(diagonal)[1]
        assert scale is not None
        return scale


def _total(parts: Iterable[Tensor | None]) -> Tensor | None:
    given = [part for part in parts if part is not None]
    return functools.reduce(torch.add, given) if given else None


def _times(values: Tensor | None, scale: Tensor) -> Tensor | None:
    return None if values is None else values * scale
