"""Where nodes go: numbers under which every part's nodes are contiguous, the halos, and what a cut costs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from plait.errors import InputError
from plait.graph import Graph, index_dtype
from plait.loader.sampler import Sampler

__all__ = ["Layout", "PartStatistics", "halo", "lay_out", "remote_rows", "renumbered"]

Array = NDArray[Any]

# Batches per part that are drawn to estimate what an epoch fetches. The closed formula (inclusion
# probabilities) was 1.3 times too high on ego_twitter: it expands a node once for every hop that reaches it.
_DRAWN = 4


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
    distinct nodes these come from. `remote_rows` counts the nodes of other parts in the batches of an epoch,
    estimated from a few batches that were drawn; without training nodes it is 0.
    """

    nodes: int
    edges: int
    cut_edges: int
    halo: int
    train: int
    remote_rows: float


def lay_out(part: Array, parts: int) -> Layout:
    """Nodes part by part, in the caller's order inside a part."""
    if part.ndim != 1 or part.dtype.kind not in "iu":
        raise InputError(
            f"assignment has shape {part.shape} and type {part.dtype}; give one part number per node"
        )
    if part.size and not 0 <= part.min() <= part.max() < parts:
        raise InputError(
            f"assignment: parts are numbered 0 to {parts - 1}, it holds {part.min()}..{part.max()}"
        )
    nodes = np.argsort(part, kind="stable").astype(np.int64)
    bounds = np.concatenate(([0], np.cumsum(np.bincount(part, minlength=parts)))).astype(np.int64)
    return Layout(nodes, bounds)


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
    sampler: Sampler, part: Array, rank: int, train: Array, batch_size: int, seed: int = 0
) -> float:
    """Rows outside part `rank` in an epoch over its training nodes, as the first batches of it show."""
    mine = train[part[train] == rank]
    if mine.size == 0:
        return 0.0
    order = np.random.default_rng(seed).permutation(mine)
    batches = math.ceil(mine.size / batch_size)
    drawn = min(batches, _DRAWN)
    found = 0
    for number in range(drawn):
        seeds = order[number * batch_size : (number + 1) * batch_size]
        n_id = sampler.sample(seeds, 0, number).n_id
        found += int((part[n_id] != rank).sum())
    return float(found * batches / drawn)


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _renumber(indptr: Any, indices: Any, rows: Any, number: Any, pointer: Any, sources: Any) -> None:
    for i in range(rows.size):
        first, last = indptr[rows[i]], indptr[rows[i] + 1]
        at = pointer[i]
        for p in range(first, last):
            sources[at + p - first] = number[indices[p]]
        sources[at : pointer[i + 1]].sort()


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _mark(sources: Any, begin: int, end: int, is_outside: Any) -> int:
    count = 0
    for source in sources:
        if source < begin or source >= end:
            is_outside[source] = True
            count += 1
    return count
