"""The input of a search: an expression or a program on a graph, with sizes, prices and what is constant."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from plait.cost.price import uniform_matrix
from plait.errors import InputError, TypesError
from plait.graph import Graph
from plait.ir import Dense, Diagonal, Expr, Scalar, Sparse, children, formula, leaves, rebuild
from plait.kernels import launch
from plait.ops.work import Matrix
from plait.plan.candidates import restrict
from plait.plan.search import Problem
from plait.runtime.constants import Constants, Objects, SparseValue
from plait.runtime.machine import machine_in_use
from plait.runtime.placed import PlacedGraph

if TYPE_CHECKING:
    from plait.runtime.dial import Dial

__all__ = ["DENSEST", "Asked", "Signature", "known_leaves", "of_program", "with_identity_loops"]

DENSEST = 0.4  # non-zeros above this share are never worth a sparse view, whatever the machine
_MOST_EXPRESSIONS = 512

Signature = tuple[tuple[str, torch.Size, bool], ...]
"""The inputs of a call: name, shape, whether it needs a gradient."""


@dataclass(frozen=True, slots=True)
class Asked:
    """An expression of a layer as one call asks for it."""

    layer: str
    constants: Constants  # of the rows asked for, once they are known
    forms: tuple[Expr, ...]
    given: Mapping[str, torch.Tensor]
    signature: Signature
    sparse: SparseValue | None = None  # a view of X that plans may use
    fixed: frozenset[str] = frozenset()  # inputs that are the same at every call

    def problem(self, dial: Dial, calls: int) -> Problem:
        """What is to be searched, where what is hoisted serves this many calls."""
        constants, x = self.constants, self.given["X"]
        expressions = with_identity_loops(self.forms, constants)
        if constants.rows is not None:
            expressions = _restrict(expressions)
        wrt = tuple(name for name, _, wants in self.signature if wants) or None
        return Problem(
            forms=expressions,
            sizes=_sizes(expressions[0], self.given, constants, self.layer),
            matrices=constants.cost_matrix,
            machine=machine_in_use(x.device),
            wrt=wrt,
            constant=self.fixed,
            features={} if self.sparse is None else _feature_matrices(self.sparse, constants, calls != 1),
            float_bytes=x.element_size(),
            threads=launch.num_threads() if x.is_cpu else None,
            allowance=dial.share(self.layer, wrt is not None),
            calls=calls,
            layer=self.layer,
            may_chain=not isinstance(constants.graph, PlacedGraph),
        )


def of_program(
    layer: str,
    graph: Graph,
    x: torch.Tensor,
    wrt: tuple[str, ...] | None,
    objects: Objects | None,
    sizes: Mapping[str, int],
    dial: Dial,
) -> Problem:
    """What is to be chosen from for a layer that is a program; `wrt`: what needs gradients, None for none."""
    backward = graph.stats if graph.is_symmetric else graph.transpose.stats
    matrix = Matrix(
        graph.num_nodes, graph.num_sources, graph.num_edges, True, graph.stats, backward,
        graph.indices.dtype.itemsize,
    )  # fmt: skip
    return Problem(
        forms=(),
        sizes={"N": graph.num_nodes, "M": graph.num_sources, "E": graph.num_edges, **sizes},
        matrices=lambda expr: matrix if objects is None else _known(expr, matrix, objects),
        machine=machine_in_use(x.device),
        wrt=wrt,
        float_bytes=x.element_size(),
        threads=launch.num_threads() if x.is_cpu else None,
        allowance=dial.share(layer, wrt is not None),
        layer=layer,
        may_chain=not isinstance(graph, PlacedGraph),
    )


def _known(expr: Expr, whole: Matrix, objects: Objects) -> Matrix:
    """What the cost model knows of a program's matrix."""
    name = formula(expr)
    return whole if name == "A" else objects.cost(name, whole)


def _feature_matrices(sparse: SparseValue, constants: Constants, may_spread: bool) -> dict[str, Matrix]:
    """The cost model's view of sparse features and, if wanted, of the features one propagation further."""
    graph = sparse.graph
    views = {"X": uniform_matrix(graph.num_nodes, graph.num_sources, graph.num_edges, True)}
    if not may_spread:
        return views
    spread = _spread_estimate(graph, constants.graph)
    if spread <= DENSEST * graph.num_nodes * graph.num_sources:
        views["S^1 X"] = uniform_matrix(graph.num_nodes, graph.num_sources, spread, True)
    return views


def _spread_estimate(features: Graph, graph: Graph) -> int:
    """Non-zeros of the adjacency times the features, from the union of columns over a few sampled rows."""
    if graph.num_sources != features.num_nodes or graph.num_nodes == 0:
        return features.num_nodes * features.num_sources
    rows = np.unique(np.linspace(0, graph.num_nodes - 1, 64).astype(np.int64))
    count = 0
    for v in rows:
        nodes = np.append(graph.indices[graph.indptr[v] : graph.indptr[v + 1]][:256], v % features.num_nodes)
        count += len(
            np.unique(
                np.concatenate([features.indices[features.indptr[u] : features.indptr[u + 1]] for u in nodes])
            )
        )
    return int(count / len(rows) * graph.num_nodes)


@functools.lru_cache(maxsize=512)
def _identity_loops(forms: tuple[Expr, ...]) -> tuple[Expr, ...]:
    return tuple(_renamed(form) for form in forms)


def _renamed(expr: Expr) -> Expr:
    """Leaf l as i: loops that are all one, which keep a 0/1 matrix 0/1."""
    if isinstance(expr, Diagonal) and expr.name == "l":
        return Diagonal("i", expr.size, expr.role)
    parts = children(expr)
    return rebuild(expr, tuple(map(_renamed, parts))) if parts else expr


def with_identity_loops(forms: tuple[Expr, ...], constants: Constants) -> tuple[Expr, ...]:
    """The expressions with loops of ones named `i`: they keep a 0/1 matrix 0/1."""
    return _identity_loops(forms) if constants.weight is None and constants.has_unit_loops else forms


@functools.lru_cache(maxsize=128)
def _restrict(forms: tuple[Expr, ...]) -> tuple[Expr, ...]:
    rows = next(leaf.rows for leaf in leaves(forms[0]).values() if isinstance(leaf, Sparse))
    selection = Sparse("E", "Nr", rows)
    return tuple(restrict(form, selection) for form in forms)


_FEATURES = {"the width of X": "x", "the width of R": "x of the targets"}  # as the caller knows them
_found_leaves: dict[int, tuple[Expr, dict[str, Any]]] = {}


def known_leaves(expr: Expr) -> dict[str, Any]:
    """The leaves by name; found once for an expression, which is known by its identity: hashing walks it."""
    found = _found_leaves.get(id(expr))
    if found is None:
        if len(_found_leaves) >= _MOST_EXPRESSIONS:
            _found_leaves.clear()
        found = _found_leaves[id(expr)] = (expr, dict(leaves(expr)))
    return found[1]


def _disagreement(sizes: Mapping[str, int]) -> str:
    """Two sizes that should be equal, described in terms of x and the layer."""
    features = next((what for what in sizes if what in _FEATURES), None)
    if features is None:
        said = ", but ".join(f"{what} is {value}" for what, value in sizes.items())
    else:
        taken = next(value for what, value in sizes.items() if what != features)
        said = f"{_FEATURES[features]} has {sizes[features]} columns, the layer takes {taken}"
    return f"{said}; check the widths of x and the layer"


def _sizes(expr: Expr, given: Mapping[str, torch.Tensor], constants: Constants, layer: str) -> dict[str, int]:
    """Numbers for the symbolic sizes, read off the tensors; InputError where two of them disagree."""
    sizes: dict[str, int] = {}
    first: dict[str, str] = {}  # what a size was read off

    def bind(symbol: str | int, value: int, what: str) -> None:
        if isinstance(symbol, int):
            known, other = symbol, "the layer's"
        else:
            known, other = sizes.setdefault(symbol, value), first.setdefault(symbol, what)
        if known != value:
            raise InputError(f"{layer}: {_disagreement({what: value, other: known})}")

    for name, value in given.items():
        if value.dtype != given["X"].dtype:
            raise TypesError(
                f"{layer}: x is {given['X'].dtype} but {name} is {value.dtype}; "
                "convert the model with .to(x.dtype), or x"
            )
    for name, leaf in known_leaves(expr).items():
        if isinstance(leaf, Sparse) and name == "A":
            bind(leaf.rows, constants.graph.num_nodes, "the number of targets")
            bind(leaf.cols, constants.graph.num_sources, "the number of sources")
        elif isinstance(leaf, Sparse):
            assert constants.rows is not None
            bind(leaf.rows, len(constants.rows), "the number of selected rows")
        elif isinstance(leaf, Dense) and leaf.rows == 1:
            bind(leaf.cols, given[name].numel(), f"the width of {name}")
        elif isinstance(leaf, Dense):
            bind(leaf.rows, given[name].shape[0], f"the number of rows of {name}")
            bind(leaf.cols, given[name].shape[1], f"the width of {name}")
        elif isinstance(leaf, Scalar) and leaf.value is None and name not in given:
            raise InputError(f"{layer}: the scalar {name} is missing")
    return sizes
