"""Constant matrices of a graph: evaluated once from expressions, kept with their transposes."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from plait.errors import PlanError
from plait.graph import Graph
from plait.ir import Add, Diagonal, Expr, Fold, MatMul, Scale, Sparse, formula, leaves, sort
from plait.kernels.csr.coalesced import torch_csr
from plait.kernels.spmm import Pattern
from plait.ops.work import Matrix, Uniform
from plait.runtime.forms import Form
from plait.runtime.placed import PlacedGraph, index_of, place_of

__all__ = ["Constants", "Objects", "SparseValue", "from_dense", "is_finite"]


class SparseValue:
    """A sparse matrix ready for kernels: pattern, values (None: all one), the same of its transpose."""

    def __init__(self, graph: Graph, weight: torch.Tensor | None):
        self.graph = graph
        self.weight = weight
        self._transposed: tuple[Any, torch.Tensor | None] | None = None
        self._pattern: Any = None
        self._torch: dict[bool, torch.Tensor] = {}

    def operands(self, is_transposed: bool) -> tuple[Any, torch.Tensor | None]:
        """(pattern for the kernels of the matrix's device, weights of its edges or None)."""
        if not is_transposed:
            if self._pattern is None:
                self._pattern = _pattern(self.graph)
            return self._pattern, self.weight
        if self._transposed is None:
            weight = self.weight
            if weight is not None:
                weight = weight[index_of(self.graph.transpose_order)]
            turned = self.graph.transpose
            pattern = self.operands(False)[0] if turned is self.graph else _pattern(turned)
            self._transposed = (pattern, weight)
        return self._transposed

    def to_dense(self) -> torch.Tensor:
        """The matrix with its zeros, which a product with something that is not finite must see."""
        weight, graph = self.weight, self.graph
        assert weight is not None
        dense = torch.zeros((graph.num_nodes, graph.num_sources), dtype=weight.dtype)
        rows, columns = (torch.from_numpy(a.astype(np.int64)) for a in (graph.edge_rows(), graph.indices))
        dense[rows, columns] = weight
        return dense

    def as_torch(self, is_transposed: bool, dtype: torch.dtype) -> torch.Tensor:
        """The matrix as torch CSR, for MKL and cuSPARSE; for MKL edges that repeat are added up."""
        if is_transposed not in self._torch:
            pattern, weight = self.operands(is_transposed)
            if isinstance(self.graph, PlacedGraph):
                self._torch[is_transposed] = _placed_csr(pattern, weight, dtype)
                return self._torch[is_transposed]
            values = torch.ones(pattern.num_edges, dtype=dtype) if weight is None else weight
            made = torch_csr(pattern.indptr, pattern.indices, values, pattern.num_columns)
            self._torch[is_transposed] = made
        return self._torch[is_transposed]


def _pattern(graph: Graph | PlacedGraph) -> Any:
    if isinstance(graph, PlacedGraph):
        return graph.rows
    return Pattern(graph.indptr, graph.indices, graph.num_sources)


def _placed_csr(rows: Any, weight: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    values = torch.ones(rows.num_edges, dtype=dtype, device=rows.indices.device) if weight is None else weight
    shape = (rows.num_rows, rows.num_columns)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "CSR support is in beta state"
        return torch.sparse_csr_tensor(rows.indptr, rows.indices, values, shape, check_invariants=False)


class Objects(Protocol):
    """Matrices beside A that a program reads, by name: what they are, their sizes, what they cost."""

    @property
    def sizes(self) -> Mapping[str, int]: ...

    def value(self, name: str, dtype: torch.dtype) -> Any:
        """A SparseValue, the vector of a diagonal, or what else a kernel reads under this name."""
        ...

    def cost(self, name: str, whole: Matrix) -> Matrix:
        """What the cost model knows of a matrix, from what it knows of A."""
        ...


@dataclass
class Constants:
    """The constant leaves of one graph under one operator, and what was folded from them."""

    graph: Graph
    weight: torch.Tensor | None
    diagonals: Mapping[str, torch.Tensor]
    dtype: torch.dtype
    rows: torch.Tensor | None = None  # the selected rows behind the leaf E
    forms: dict[str, Form] = field(default_factory=dict)  # other ways to run products with A, A + i, max
    form_text: dict[str, str] = field(default_factory=dict)  # what was said about them, for the plans
    unit_loops: bool | None = None  # whether l is all one, where that is known already
    objects: Objects | None = None  # what a program reads besides A
    _values: dict[str, Any] = field(default_factory=dict)
    _matrices: dict[str, Matrix] = field(default_factory=dict)

    def vector(self, expr: Expr) -> torch.Tensor:
        value = self.value(expr)
        assert isinstance(value, torch.Tensor)
        return value

    def matrix(self, expr: Expr) -> SparseValue:
        value = self.value(expr)
        assert isinstance(value, SparseValue)
        return value

    def value(self, expr: Expr) -> Any:
        key = formula(expr)
        if key not in self._values:
            self._values[key] = self._evaluate(expr)
        return self._values[key]

    def remember(self, key: str, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """A vector derived from constants, computed when first asked for."""
        if key not in self._values:
            self._values[key] = compute()
        value: torch.Tensor = self._values[key]
        return value

    def _evaluate(self, expr: Expr) -> Any:
        match expr:
            case Sparse(name) | Diagonal(name) if self.objects is not None and name != "A":
                return self.objects.value(name, self.dtype)
            case Sparse("E"):
                return self._selection()
            case Sparse():
                return SparseValue(self.graph, self.weight)
            case Diagonal("ones" | "i"):
                return torch.ones(self.graph.num_nodes, dtype=self.dtype, device=place_of(self.graph))
            case Diagonal(name):
                return self.diagonals[name]
            case Fold(body):
                return self.value(body)
            case Scale(factor, body):
                return self._scaled(body, float(factor.value or 0.0))
            case MatMul(left, right):
                return self._product(left, right)
            case Add(terms) if sort(expr) == "sparse":
                return self._sum(terms)
            case Add(terms):
                return torch.stack([self.vector(term) for term in terms]).sum(0)
        raise PlanError(f"{formula(expr)}: no constant is computed this way")

    def _scaled(self, body: Expr, factor: float) -> Any:
        value = self.value(body)
        if isinstance(value, torch.Tensor):
            return value * factor
        return SparseValue(value.graph, self._weights(value) * factor)

    def _weights(self, value: SparseValue) -> torch.Tensor:
        if value.weight is not None:
            return value.weight
        return torch.ones(value.graph.num_edges, dtype=self.dtype, device=place_of(value.graph))

    def _product(self, left: Expr, right: Expr) -> Any:
        if isinstance(left, Sparse) and left.name == "E":
            return self._selected(right)
        a, b = self.value(left), self.value(right)
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            return a * b
        if isinstance(a, torch.Tensor):
            return SparseValue(b.graph, self._weights(b) * a[index_of(b.graph.edge_rows())])
        if isinstance(b, torch.Tensor):
            return SparseValue(a.graph, self._weights(a) * b[index_of(a.graph.indices)])
        raise PlanError("a product of two sparse matrices fills in; it is never formed")

    def _sum(self, terms: tuple[Expr, ...]) -> SparseValue:
        """The matrix with diagonals added as loops; a loop beside an existing entry is an edge of its own."""
        sparse = [term for term in terms if sort(term) == "sparse"]
        diagonals = [term for term in terms if sort(term) == "diagonal"]
        if len(sparse) != 1:
            raise PlanError("a sum of constants holds one sparse matrix and diagonals")
        base = self.matrix(sparse[0])
        graph = base.graph
        are_ones = all(isinstance(d, Diagonal) and d.name in ("i", "ones") for d in diagonals)
        if base.weight is None and are_ones and len(diagonals) == 1 and not graph.has_self_loops:
            return SparseValue(graph.with_self_loops().with_order(None), None)
        joined, order = graph.with_more_self_loops(len(diagonals))
        if base.weight is None and are_ones:
            return SparseValue(joined, None)
        weight = torch.cat([self._weights(base), *(self.vector(d) for d in diagonals)])
        if order is not None:
            weight = weight[index_of(order)]
        return SparseValue(joined, weight)

    def _selected(self, expr: Expr) -> SparseValue:
        """The selected rows of a sparse or diagonal constant."""
        assert self.rows is not None
        value = self.value(expr)
        rows = self.rows.numpy()
        if isinstance(value, torch.Tensor):
            graph = self._selection().graph
            return SparseValue(graph, value[self.rows])
        graph = value.graph
        degrees = graph.degrees[rows].astype(np.int64)
        indptr = np.concatenate([[0], np.cumsum(degrees)])
        positions = np.repeat(graph.indptr[rows].astype(np.int64) - indptr[:-1], degrees) + np.arange(
            indptr[-1]
        )
        weight = None if value.weight is None else value.weight[torch.from_numpy(positions)]
        taken = Graph.from_csr(indptr, graph.indices[positions], graph.num_sources, validate=False)
        return SparseValue(taken, weight)

    def _selection(self) -> SparseValue:
        assert self.rows is not None
        graph = Graph.from_csr(
            np.arange(len(self.rows) + 1), self.rows.numpy(), self.graph.num_nodes, validate=False
        )
        return SparseValue(graph, None)

    def pattern(self, is_transposed: bool) -> Any:
        """The pattern of the matrix itself or of its transpose."""
        return self.matrix(Sparse("A", "N", "M")).operands(is_transposed)[0]

    @property
    def form_key(self) -> str:
        """The matrix whose form would serve the sums: with its loops inside, where they are all one."""
        return "fold(A + i)" if self.has_unit_loops and self.graph.is_square else "A"

    @functools.cached_property
    def has_unit_loops(self) -> bool:
        """Whether every node has a loop, of weight one."""
        if self.unit_loops is not None:
            return self.unit_loops
        loops = self.diagonals.get("l")
        return loops is not None and bool((loops == 1).all())

    def with_unit_loops(self) -> SparseValue:
        """The 0/1 matrix with its loops inside."""
        return self.matrix(Fold(Add((Sparse("A", "N", "N"), Diagonal("i", "N")))))

    def form_of(self, expr: Expr) -> Form | None:
        """The form of a 0/1 matrix that sums are to be run by."""
        return None if self.weight is not None else self.forms.get(formula(expr))

    def adopt(self, key: str, form: Form) -> None:
        """Price and run the products with the 0/1 matrix by this form from now on, where it gains."""
        self.forms[key] = form
        self._matrices.clear()

    def cost_matrix(self, expr: Expr) -> Matrix:
        """What the cost model needs of a constant, not computed where the graph's statistics suffice."""
        key = formula(expr)
        if key not in self._matrices:
            self._matrices[key] = self._cost_matrix(expr)
        return self._matrices[key]

    def _cost_matrix(self, expr: Expr) -> Matrix:
        graph = self.graph
        if "E" in key_names(expr):
            graph = self.matrix(expr).graph
            return Matrix(
                graph.num_nodes, graph.num_sources, graph.num_edges, self.matrix(expr).weight is not None,
                graph.stats, Uniform(graph.num_nodes),
            )  # fmt: skip
        loops = sum(1 for name in key_names(expr) if name in ("l", "i"))
        folded = isinstance(expr, Fold) and any(name not in ("i",) for name in key_names(expr) if name != "A")
        index_bytes = graph.indices.dtype.itemsize
        backward = graph.stats if graph.is_symmetric else graph.transpose.stats
        form = self.form_of(expr)
        extrema = self.forms.get("max") if isinstance(expr, Sparse) and self.weight is None else None
        return Matrix(
            graph.num_nodes, graph.num_sources, graph.num_edges + loops * graph.num_nodes,
            self.weight is not None or folded, graph.stats, backward, index_bytes, loops * graph.num_nodes,
            None if form is None else form.forward, None if form is None else form.transposed,
            None if extrema is None else extrema.forward,
        )  # fmt: skip


def key_names(expr: Expr) -> set[str]:
    return set(leaves(expr))


def is_finite(dense: torch.Tensor) -> bool:
    """False where something is NaN or infinite; a sum that overflows counts as such, which is harmless."""
    return math.isfinite(dense.sum().item())


def from_dense(x: torch.Tensor) -> SparseValue:
    """The sparse view of a dense matrix: its non-zeros."""
    rows, cols = torch.nonzero(x, as_tuple=True)
    indptr = np.concatenate([[0], np.cumsum(np.bincount(rows.numpy(), minlength=x.shape[0]))])
    graph = Graph.from_csr(indptr, cols.numpy(), x.shape[1], validate=False)
    return SparseValue(graph, x[rows, cols].contiguous())
