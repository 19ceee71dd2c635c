"""Where nodes go: numbers under which every part's nodes are contiguous, the halos, and what a cut costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.errors import InputError
from plait.features.scores import inclusion_probability
from plait.graph import Graph, index_dtype
from plait.graph.compiled import compiled

__all__ = ["Layout", "PartStatistics", "check_assignment", "halo", "lay_out", "remote_rows", "renumbered"]

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Layout:
    """Node i is node nodes[i] of the caller; part p owns the nodes bounds[p] .. bounds[p + 1] - 1."""

    nodes: Array
    bounds: Array

    @property
    def num_parts(self) -> int:
        """How many parts there are; some may be empty."""
        return int(self.bounds.size - 1)

    def number(self) -> Array:
        """The number here of every node of the caller."""
        number = np.empty_like(self.nodes)
        number[self.nodes] = np.arange(self.nodes.size, dtype=self.nodes.dtype)
        return number


@dataclass(frozen=True)
class PartStatistics:
    """What one part holds, and what its trainer is expected to fetch from the others in one epoch.

    `edges` are the edges into its nodes, `cut_edges` those of them that come from another part, `halo` the
    distinct nodes these come from. `remote_rows` is the sum, over the batches of an epoch, of the probability
    that a batch samples a node of another part; without training nodes it is 0.
    """

    nodes: int
    edges: int
    cut_edges: int
    halo: int
    train: int
    remote_rows: float


def lay_out(part: Array, parts: int) -> Layout:
    """Nodes part by part, in the caller's order inside a part."""
    check_assignment(part, parts)
    nodes = np.argsort(part, kind="stable").astype(np.int64)
    bounds = np.concatenate(([0], np.cumsum(np.bincount(part, minlength=parts)))).astype(np.int64)
    return Layout(nodes, bounds)


def check_assignment(part: Array, parts: int) -> None:
    """InputError where these are not numbers of this many parts."""
    if part.ndim != 1 or part.dtype.kind not in "iu":
        raise InputError(
            f"assignment has shape {part.shape} and type {part.dtype}; give one part number per node"
        )
    if part.size and not 0 <= part.min() <= part.max() < parts:
        raise InputError(
            f"assignment: parts are numbered 0 to {parts - 1}, it holds {part.min()}..{part.max()}; "
            "give another number of parts, or other numbers"
        )


def renumbered(graph: Graph, layout: Layout, number: Array, begin: int, end: int) -> tuple[Array, Array]:
    """Degrees and sources of the nodes begin .. end - 1 under their new numbers, sources ascending."""
    rows = layout.nodes[begin:end]
    degrees = graph.degrees[rows].astype(np.int64)
    pointer = np.concatenate(([0], np.cumsum(degrees)))
    dtype = index_dtype(graph.num_nodes, graph.num_edges)
    sources = np.empty(int(pointer[-1]), dtype)
    _renumber(graph.indptr, graph.indices, rows, number, pointer, sources)
    return degrees, sources


def halo(sources: Array, begin: int, end: int, num_nodes: int) -> tuple[Array, int]:
    """The distinct sources outside begin .. end - 1, ascending, and how many edges come from them."""
    is_outside = np.zeros(num_nodes, np.bool_)
    cut = _mark(sources, begin, end, is_outside)
    return np.flatnonzero(is_outside), int(cut)


def remote_rows(
    graph: Graph, part: Array, rank: int, train: Array, fanout: Sequence[int], batch_size: int
) -> float:
    """Rows outside part `rank` that an epoch over its training nodes is expected to sample.

    Within 5% of what was drawn on ego_twitter in 2 parts and on a block model of 20 M edges in 4.
    """
    mine = train[part[train] == rank]
    if mine.size == 0:
        return 0.0
    batches = math.ceil(mine.size / batch_size)
    chance = inclusion_probability(graph, fanout, mine, math.ceil(mine.size / batches))
    return float(batches * chance[part != rank].sum())


@compiled
def _renumber(indptr: Any, indices: Any, rows: Any, number: Any, pointer: Any, sources: Any) -> None:
    for i in range(rows.size):
        first, last = indptr[rows[i]], indptr[rows[i] + 1]
        at = pointer[i]
        for p in range(first, last):
            sources[at + p - first] = number[indices[p]]
        sources[at : pointer[i + 1]].sort()


@compiled
def _mark(sources: Any, begin: int, end: int, is_outside: Any) -> int:
    count = 0
    for source in sources:
        if source < begin or source >= end:
            is_outside[source] = True
            count += 1
    return count
