"""The hierarchical form of a graph: partial sums as extra nodes, with its counts and its proof."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from plait.errors import GraphError, InputError
from plait.graph.compiled import compiled
from plait.graph.hag.numbering import hierarchy_csr, levels_of

if TYPE_CHECKING:
    from plait.graph.csr import Graph

__all__ = ["ORDERS", "Hag"]

Ints = NDArray[Any]

ORDERS = ("set", "idempotent")
"""set: a disjoint cover (sum); idempotent: covers may overlap."""


@dataclass(frozen=True, eq=False)
class Hag:
    """A hierarchical aggregation graph.

    Row v < num_nodes of the CSR lists what node v aggregates, row num_nodes + j what aggregation node j does.
    A column c < num_sources is the input c; c >= num_sources is aggregation node c - num_sources. Aggregation
    nodes are numbered by level, and read only inputs and lower levels.
    """

    num_nodes: int
    num_sources: int
    indptr: Ints  # int64 [num_nodes + num_aggregation_nodes + 1]
    indices: Ints  # int32 [num_edges]
    level: Ints  # int32 [num_aggregation_nodes], ascending from 1
    order: str
    num_graph_edges: int
    fingerprint: str
    is_complete: bool = True
    """False when a time budget ended the search early."""

    @classmethod
    def of(cls, graph: Graph, csr: tuple[Ints, Ints, Ints], order: str, is_complete: bool = True) -> Hag:
        """The hierarchy of a graph with these (indptr, indices, level)."""
        sizes = graph.num_nodes, graph.num_sources
        return cls(*sizes, *csr, order, graph.num_edges, graph.fingerprint, is_complete)

    @property
    def num_aggregation_nodes(self) -> int:
        """Number of partial sums."""
        return int(self.level.size)

    @property
    def num_edges(self) -> int:
        """Number of edges of the hierarchy, to outputs and to aggregation nodes."""
        return int(self.indices.size)

    @property
    def num_levels(self) -> int:
        """Longest chain of aggregation nodes; 0 for the plain graph."""
        return int(self.level[-1]) if self.level.size else 0

    @cached_property
    def num_outputs(self) -> int:
        """Number of nodes with a neighbour."""
        return int(np.count_nonzero(np.diff(self.indptr[: self.num_nodes + 1])))

    @property
    def aggregations(self) -> int:
        """Binary aggregations (additions) of rows: one less than the entries of every row that has any."""
        return self.num_edges - self.num_aggregation_nodes - self.num_outputs

    @property
    def reads(self) -> int:
        """Feature rows read."""
        return self.num_edges

    @property
    def writes(self) -> int:
        """Feature rows written."""
        return self.num_outputs + self.num_aggregation_nodes

    @property
    def traffic(self) -> int:
        """Feature rows read and written."""
        return self.reads + self.writes

    @property
    def graph_aggregations(self) -> int:
        """Additions the plain graph needs."""
        return self.num_graph_edges - self.num_outputs

    @property
    def graph_traffic(self) -> int:
        """Feature rows the plain graph reads and writes."""
        return self.num_graph_edges + self.num_outputs

    @property
    def aggregation_ratio(self) -> float:
        """How many times fewer additions than the plain graph."""
        return self.graph_aggregations / self.aggregations if self.aggregations else 1.0

    @property
    def traffic_ratio(self) -> float:
        """How many times fewer feature rows read and written than the plain graph."""
        return self.graph_traffic / self.traffic if self.traffic else 1.0

    def __repr__(self) -> str:
        return (
            f"Hag({self.num_graph_edges:,} -> {self.num_edges:,} edges, "
            f"{self.num_aggregation_nodes:,} partial sums, {self.num_levels} levels, "
            f"{self.aggregation_ratio:.2f}x fewer additions, {self.traffic_ratio:.2f}x less traffic)"
        )

    def check(self, graph: Graph) -> bool:
        """True; raises GraphError naming the first node that does not cover exactly its neighbours.

        Covers are compared with multiplicity; as sets for "idempotent".
        """
        self._check_belongs(graph)
        _check_structure(self)
        node = _first_wrong_node(self, graph.indptr.astype(np.int64), graph.indices)
        if node >= 0:
            raise GraphError(
                f"hag: node {node} does not cover exactly its neighbours ({self.order} order); search again"
            )
        return True

    def transpose(self, graph: Graph) -> Hag:
        """The hierarchy of graph.transpose with the same edges reversed, for the backward pass of sums."""
        if self.order != "set":
            raise InputError(f'hag.transpose: no gradient runs along order="{self.order}"; search with "set"')
        self._check_belongs(graph)
        return Hag.of(graph.transpose, _reversed(self), self.order, self.is_complete)

    def _check_belongs(self, graph: Graph) -> None:
        if self.fingerprint != graph.fingerprint:
            raise GraphError(
                f"hag: made for another graph (fingerprint {self.fingerprint[:12]}, this one is "
                f"{graph.fingerprint[:12]}); search this graph"
            )


def _reversed(hag: Hag) -> tuple[Ints, Ints, Ints]:
    """(indptr, indices, level) of the reversed edges; sums are numbered from the last, then by level."""
    num_sums = hag.num_aggregation_nodes
    target = np.repeat(np.arange(hag.indptr.size - 1), np.diff(hag.indptr))
    # row r of this hierarchy is column r of the other, sum j there is sum num_sums - 1 - j here
    flipped = np.where(target < hag.num_nodes, target, 2 * hag.num_nodes + num_sums - 1 - target)
    source = np.where(
        hag.indices < hag.num_sources, hag.indices, 2 * hag.num_sources + num_sums - 1 - hag.indices
    )
    order = np.lexsort((flipped, source))
    indptr = np.zeros(hag.num_sources + num_sums + 1, np.int64)
    np.cumsum(np.bincount(source, minlength=hag.num_sources + num_sums), out=indptr[1:])
    return hierarchy_csr(
        indptr, flipped[order].astype(np.int32), hag.num_sources, hag.num_nodes, inline=False
    )


def _check_structure(hag: Hag) -> None:
    """GraphError unless the arrays describe rows over inputs and lower levels."""
    num_rows = hag.num_nodes + hag.level.size
    pointer, column = hag.indptr, hag.indices
    problem = None
    if hag.order not in ORDERS:
        problem = f"order {hag.order!r} is unknown"
    elif pointer.ndim != 1 or column.ndim != 1 or hag.level.ndim != 1 or pointer.size != num_rows + 1:
        problem = "the number of rows does not fit the number of nodes"
    elif pointer[0] != 0 or pointer[-1] != column.size or (np.diff(pointer) < 0).any():
        problem = "the row pointers do not run from 0 to the number of edges"
    elif column.size and (column.min() < 0 or column.max() >= hag.num_sources + hag.level.size):
        problem = "a column is out of range"
    elif (np.diff(pointer)[hag.num_nodes :] == 0).any():
        problem = "an aggregation node is empty"
    elif not np.array_equal(levels_of(pointer, column, hag.num_nodes, hag.num_sources), hag.level):
        problem = "the levels do not follow from the edges"
    elif (np.diff(hag.level) < 0).any():
        problem = "aggregation nodes are not numbered by level"
    if problem is not None:
        raise GraphError(f"hag: {problem}; the hierarchy is damaged, search again")


def _first_wrong_node(hag: Hag, indptr: Ints, indices: Ints) -> int:
    if hag.order == "idempotent":
        size = hag.num_sources + hag.num_aggregation_nodes
        seen = np.full(size, -1, np.int64)
        wanted = np.full(hag.num_sources, -1, np.int64)
        return int(_first_wrong_set(hag.indptr, hag.indices, hag.num_nodes, indptr, indices, seen, wanted))
    counter = np.zeros(hag.num_sources, np.int32)
    return int(_first_wrong_bag(hag.indptr, hag.indices, hag.num_nodes, indptr, indices, counter))


@compiled
def _grown_stack(stack: Ints, needed: int) -> Ints:
    if needed <= stack.size:
        return stack
    larger = np.empty(2 * needed, stack.dtype)
    larger[: stack.size] = stack
    return larger


@compiled
def _first_wrong_bag(
    hag_indptr: Ints, hag_indices: Ints, num_nodes: int, indptr: Ints, indices: Ints, counter: Ints
) -> int:
    """Unfold every row; a bag is right when its size is and no source is met more often than in the graph."""
    stack = np.empty(1024, np.int64)
    for v in range(num_nodes):
        for e in range(indptr[v], indptr[v + 1]):
            counter[indices[e]] += 1
        left = indptr[v + 1] - indptr[v]
        stack[0] = v
        height = 1
        while height > 0 and left >= 0:
            height -= 1
            row = stack[height]
            stack = _grown_stack(stack, height + hag_indptr[row + 1] - hag_indptr[row])
            for e in range(hag_indptr[row], hag_indptr[row + 1]):
                child = hag_indices[e]
                if child >= counter.size:
                    stack[height] = num_nodes + child - counter.size
                    height += 1
                    continue
                left -= 1
                counter[child] -= 1
                if counter[child] < 0:
                    return v
        if left != 0:
            return v
    return -1


@compiled
def _first_wrong_set(
    hag_indptr: Ints, hag_indices: Ints, num_nodes: int, indptr: Ints, indices: Ints, seen: Ints, wanted: Ints
) -> int:
    """Unfold every row, each column once; right when all it holds is wanted and nothing is missing."""
    num_sources = wanted.size
    stack = np.empty(1024, np.int64)
    for v in range(num_nodes):
        missing = 0
        for e in range(indptr[v], indptr[v + 1]):
            if wanted[indices[e]] != v:
                wanted[indices[e]] = v
                missing += 1
        stack[0] = v
        height = 1
        while height > 0:
            height -= 1
            row = stack[height]
            stack = _grown_stack(stack, height + hag_indptr[row + 1] - hag_indptr[row])
            for e in range(hag_indptr[row], hag_indptr[row + 1]):
                child = hag_indices[e]
                if seen[child] == v:
                    continue
                seen[child] = v
                if child >= num_sources:
                    stack[height] = num_nodes + child - num_sources
                    height += 1
                elif wanted[child] == v:
                    missing -= 1
                else:
                    return v
        if missing != 0:
            return v
    return -1
