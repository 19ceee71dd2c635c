"""Sums over neighbours whose edge weights want a gradient, and expressions made of them.

With A(v) the matrix of a pattern with values v, and dots(g, x)[e] = g[i] . x[j] on every edge j -> i:
    y = A(v) @ x          dx = A(v)^T @ dy      dv = dots(dy, x)
    s = dots(g, x)        dg = A(ds) @ x        dx = A(ds)^T @ g
so the two are closed under differentiation, and derivatives of any order follow. `Weighted` is A(v) with a
diagonal beside it, as one function; `Learned` evaluates expressions whose matrices are neither.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plait.errors import PlanError
from plait.graph import Graph
from plait.ir import Add, Concat, Dense, Diagonal, Expr, Map, MatMul, Scale, Sparse, formula, sort
from plait.kernels.spmm import Pattern, spmm, weight_gradient
from plait.runtime.segments import segment_sum
from plait.runtime.twice import differentiable, is_batched

__all__ = ["Learned", "Structure", "Weighted", "structure_of", "weighted_sum"]


class Structure:
    """A graph's edges as the two functions read them; kept with the graph."""

    def __init__(self, graph: Graph):
        self.graph = weakref.ref(graph)  # it is found by the graph, which it must not keep
        self.pattern = Pattern(graph.indptr, graph.indices, graph.num_sources)
        self.rows = torch.from_numpy(graph.edge_rows().astype(np.int64))
        self.columns = torch.from_numpy(graph.indices.astype(np.int64))

    @functools.cached_property
    def turned(self) -> Pattern:
        """The pattern of the transpose."""
        graph = self._graph().transpose
        return Pattern(graph.indptr, graph.indices, graph.num_sources)

    @functools.cached_property
    def turned_order(self) -> Tensor:
        """Where an edge of the transpose is among those of the rows."""
        return torch.from_numpy(np.asarray(self._graph().transpose_order, np.int64))

    def _graph(self) -> Graph:
        graph = self.graph()
        assert graph is not None, "whoever runs a layer holds its graph"
        return graph


_STRUCTURES: weakref.WeakKeyDictionary[Graph, Structure] = weakref.WeakKeyDictionary()


def structure_of(graph: Graph) -> Structure:
    """The edges of a graph, made when first asked for."""
    found = _STRUCTURES.get(graph)
    if found is None:
        found = _STRUCTURES[graph] = Structure(graph)
    return found


def weighted_sum(structure: Structure, values: Tensor, x: Tensor, is_transposed: bool = False) -> Tensor:
    """A(values) @ x, or the transpose's; values are in the order of the rows. Differentiable in both."""
    if is_batched(values) or is_batched(x):
        return _sum_in_torch(structure, values, x, is_transposed)
    result: Tensor = _Sum.apply(structure, is_transposed, values, x)  # type: ignore[no-untyped-call]
    return result


def _sum_in_torch(structure: Structure, values: Tensor, x: Tensor, is_transposed: bool) -> Tensor:
    """The same in torch's own operations, as gradients of several directions at once ask for."""
    ends = (structure.columns, structure.rows) if is_transposed else (structure.rows, structure.columns)
    count = structure.pattern.num_columns if is_transposed else structure.pattern.num_rows
    return segment_sum(values.unsqueeze(-1) * x.index_select(0, ends[1]), ends[0], count)


def _dots(structure: Structure, g: Tensor, x: Tensor) -> Tensor:
    """g[i] . x[j] on every edge j -> i."""
    if is_batched(g) or is_batched(x):
        return (g.index_select(0, structure.rows) * x.index_select(0, structure.columns)).sum(dim=-1)
    result: Tensor = _Dots.apply(structure, g, x)  # type: ignore[no-untyped-call]
    return result


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, structure: Structure, is_transposed: bool, values: Tensor, x: Tensor) -> Tensor:
        # its transpose is asked for in the backward pass, when the model may have dropped it for others
        ctx.structure, ctx.graph, ctx.is_transposed = structure, structure.graph(), is_transposed
        ctx.save_for_backward(values, x)
        pattern = structure.turned if is_transposed else structure.pattern
        listed = values[structure.turned_order] if is_transposed else values.contiguous()
        out = torch.empty((pattern.num_rows, x.shape[1]), dtype=x.dtype)
        return spmm(pattern, _by_rows(x), out, edge=listed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        values, x = ctx.saved_tensors
        of_values = of_x = None
        if ctx.needs_input_grad[2]:
            of_values = _dots(ctx.structure, *((x, grad) if ctx.is_transposed else (grad, x)))
        if ctx.needs_input_grad[3]:
            of_x = weighted_sum(ctx.structure, values, grad, not ctx.is_transposed)
        return None, None, of_values, of_x


class _Dots(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, structure: Structure, g: Tensor, x: Tensor) -> Tensor:
        ctx.structure, ctx.graph = structure, structure.graph()
        ctx.save_for_backward(g, x)
        out = torch.empty(structure.pattern.num_edges, dtype=x.dtype)
        return weight_gradient(structure.pattern, _by_rows(x), _by_rows(g), out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        g, x = ctx.saved_tensors
        of_g = of_x = None
        if ctx.needs_input_grad[1]:
            of_g = weighted_sum(ctx.structure, grad, x)
        if ctx.needs_input_grad[2]:
            of_x = weighted_sum(ctx.structure, grad, g, is_transposed=True)
        return None, of_g, of_x


def _by_rows(x: Tensor) -> Tensor:
    """Kernels want rows of contiguous elements."""
    return x.detach() if x.stride(1) == 1 and x.stride(0) >= x.shape[1] else x.detach().contiguous()


class Weighted:
    """A(values) + diag(own) of a graph, both differentiable."""

    def __init__(self, structure: Structure, values: Tensor, own: Tensor | None):
        self.structure, self.values, self.own = structure, values, own

    @property
    def with_identity(self) -> Weighted:
        """The matrix plus the identity."""
        rows = self.structure.pattern.num_rows
        own = torch.ones(rows, dtype=self.values.dtype) if self.own is None else self.own + 1
        return Weighted(self.structure, self.values, own)

    def __matmul__(self, x: Tensor) -> Tensor:
        result: Tensor = _Product.apply(self.structure, self.values, self.own, x)  # type: ignore[no-untyped-call]
        return result


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, structure: Structure, values: Tensor, own: Tensor | None, x: Tensor) -> Tensor:
        ctx.structure, ctx.graph = structure, structure.graph()
        ctx.save_for_backward(values, own, x)
        out = torch.empty((structure.pattern.num_rows, x.shape[1]), dtype=x.dtype)
        by_rows = _by_rows(x)
        addend = None if own is None else by_rows
        return spmm(structure.pattern, by_rows, out, edge=values, addend=addend, addend_scale=own)

    @staticmethod
    @differentiable(lambda ctx, grad, saved: _product_in_parts(ctx, saved))
    def backward(ctx: Any, grad: Tensor) -> Any:
        structure: Structure = ctx.structure
        values, own, x = ctx.saved_tensors
        _, wants_values, wants_own, wants_x = ctx.needs_input_grad
        grad, x = _by_rows(grad), _by_rows(x)
        of_values = of_own = of_x = None
        if wants_values:
            of_values = torch.empty_like(values)
            weight_gradient(structure.pattern, x, grad, of_values)
        if wants_own:
            of_own = torch.linalg.vecdot(grad, x)
        if wants_x:
            of_x = torch.empty_like(x)
            addend = None if own is None else grad
            turned = values[structure.turned_order]
            spmm(structure.turned, grad, of_x, edge=turned, addend=addend, addend_scale=own)
        return None, of_values, of_own, of_x


def _product_in_parts(ctx: Any, saved: Any) -> tuple[Tensor, tuple[Any, ...]]:
    """(the product by functions that can be differentiated again, the inputs it was computed from)."""
    values, own, x = saved
    out = weighted_sum(ctx.structure, values, x)
    return out if own is None else out + own.unsqueeze(1) * x, (None, values, own, x)


class Learned:
    """A layer's expression evaluated under autograd: its matrix has values that want a gradient.

    `diagonals` are the leaves p, l, q, ...; they may depend on the values as the normalisation does.
    """

    def __init__(self, graph: Graph, values: Tensor, diagonals: Mapping[str, Tensor]):
        self.graph, self.structure = graph, structure_of(graph)
        self.values, self.diagonals = values, diagonals
        self._matrices: dict[Expr, tuple[Tensor | None, Tensor | None]] = {}

    def value(self, expr: Expr, inputs: Mapping[str, Tensor]) -> Tensor:
        """The expression's value on these inputs."""
        return self._value(expr, inputs, {})

    def _value(self, expr: Expr, inputs: Mapping[str, Tensor], done: dict[Expr, Tensor]) -> Tensor:
        if expr not in done:
            done[expr] = self._made(expr, inputs, done)
        return done[expr]

    def _made(self, expr: Expr, inputs: Mapping[str, Tensor], done: dict[Expr, Tensor]) -> Tensor:
        match expr:
            case Dense(name):
                return inputs[name]
            case Add(terms):
                return functools.reduce(torch.add, [self._value(term, inputs, done) for term in terms])
            case Scale(factor, body):
                number = inputs[factor.name] if factor.value is None else factor.value
                return number * self._value(body, inputs, done)
            case MatMul(left, right) if sort(left) != "dense":
                return self.spread(left, self._value(right, inputs, done))
            case MatMul(MatMul(matrix, x), w) if sort(matrix) != "dense":
                return self._narrower(matrix, self._value(x, inputs, done), self._value(w, inputs, done))
            case MatMul(left, right):
                return self._value(left, inputs, done) @ self._value(right, inputs, done)
            case Map("relu", body):
                return torch.relu(self._value(body, inputs, done))
            case Concat(parts, axis):
                return torch.cat([self._value(part, inputs, done) for part in parts], dim=axis)
        raise PlanError(f"{formula(expr)}: no gradient of edge weights goes through {type(expr).__name__}")

    def _narrower(self, matrix: Expr, x: Tensor, w: Tensor) -> Tensor:
        """matrix @ x @ w, summed over neighbours where there are fewer columns."""
        return self.spread(matrix, x @ w) if w.shape[1] <= x.shape[1] else self.spread(matrix, x) @ w

    def spread(self, matrix: Expr, x: Tensor) -> Tensor:
        """The sparse or diagonal matrix times x."""
        values, diagonal = self._matrix(matrix)
        own = None if diagonal is None else diagonal.unsqueeze(1) * x
        if values is None:
            assert own is not None
            return own
        summed = weighted_sum(self.structure, values, x)
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
                return _sum(edge for edge, _ in parts), _sum(loop for _, loop in parts)
            case MatMul(left, right) if sort(left) == "diagonal":
                scale, (edges, loops) = self._scale(left), self._matrix(right)
                return _times(edges, scale[self.structure.rows]), _times(loops, scale)
            case MatMul(left, right) if sort(right) == "diagonal":
                scale, (edges, loops) = self._scale(right), self._matrix(left)
                return _times(edges, scale[self.structure.columns]), _times(loops, scale)
        raise PlanError(f"{formula(matrix)}: no gradient of edge weights goes through this matrix")

    def _scale(self, diagonal: Expr) -> Tensor:
        scale = self._matrix(diagonal)[1]
        assert scale is not None
        return scale


def _sum(parts: Iterable[Tensor | None]) -> Tensor | None:
    given = [part for part in parts if part is not None]
    return functools.reduce(torch.add, given) if given else None


def _times(values: Tensor | None, scale: Tensor) -> Tensor | None:
    return None if values is None else values * scale
