"""A graph divided among ranks: nodes numbered rank by rank, halos, and what each rank lends the others.

A `Division` is all of it, for one process that looks at all ranks; a `Portion` what one of the ranks holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.graph import Graph

__all__ = ["Division", "Place", "Portion", "column_shares", "divide", "edges_into", "portion"]

Array = NDArray[Any]


@dataclass(frozen=True)
class Division:
    """Numbers for all nodes under which every rank's are contiguous, and the graph by these numbers.

    Node i is node nodes[i] of the caller; rank r owns bounds[r] .. bounds[r + 1] - 1, of which the first
    `inner[r]` have no neighbour elsewhere.
    """

    nodes: Array
    bounds: Array
    inner: Array
    graph: Graph
    source: Array
    target: Array

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return int(self.bounds.size - 1)

    def edges_of(self, rank: int) -> Array:
        """The edges into a rank's nodes, by their numbers in the caller's order."""
        begin, end = self.bounds[rank], self.bounds[rank + 1]
        return np.flatnonzero((self.target >= begin) & (self.target < end))

    def halo_of(self, rank: int) -> Array:
        """Nodes of other ranks with an edge into this one's, ascending."""
        sources = self.source[self.edges_of(rank)]
        begin, end = self.bounds[rank], self.bounds[rank + 1]
        return np.unique(sources[(sources < begin) | (sources >= end)])

    def local_edges(self, rank: int) -> Array:
        """[2, E]: the edges into a rank's nodes, these numbered from 0 and the halo behind them."""
        edges, begin = self.edges_of(rank), int(self.bounds[rank])
        count, halo = int(self.bounds[rank + 1]) - begin, self.halo_of(rank)
        place = np.empty(self.nodes.size, np.int64)
        place[begin : begin + count] = np.arange(count)
        place[halo] = count + np.arange(halo.size)
        return np.stack((place[self.source[edges]], place[self.target[edges]]))

    @cached_property
    def places(self) -> tuple[Place, ...]:
        """Every rank as the planner sees it."""
        halos = [self.halo_of(rank) for rank in range(self.size)]
        lent = np.sum([np.diff(np.searchsorted(halo, self.bounds)) for halo in halos], axis=0)
        return tuple(Place(self.bounds, rank, halos[rank], int(lent[rank])) for rank in range(self.size))


@dataclass(frozen=True)
class Place:
    """One rank of a division: its nodes, the rows it lacks, and how many it lends to others."""

    bounds: Array
    rank: int
    halo: Array
    num_shared: int

    @property
    def size(self) -> int:
        return int(self.bounds.size - 1)

    @property
    def begin(self) -> int:
        return int(self.bounds[self.rank])

    @property
    def num_rows(self) -> int:
        return int(self.bounds[self.rank + 1]) - self.begin

    @property
    def num_nodes(self) -> int:
        return int(self.bounds[-1])

    @cached_property
    def columns(self) -> Array:
        """The nodes whose rows a product here reads: this rank's own, then its halo, by number."""
        own = np.arange(self.begin, self.begin + self.num_rows)
        return np.concatenate((own, self.halo)).astype(np.int64)

    def share_of(self, width: int) -> int:
        """How many of this many columns are this rank's."""
        return column_shares(width, self.size)[self.rank]


def column_shares(width: int, size: int) -> list[int]:
    """How many of this many columns each rank takes."""
    return [width // size + (rank < width % size) for rank in range(size)]


def divide(source: Array, target: Array, part: Array, size: int) -> Division:
    """The nodes rank by rank, inner ones first, in the caller's order beyond that; part[v] is v's rank."""
    is_outer = np.zeros(part.size, np.uint8)
    is_outer[target[part[source] != part[target]]] = 1
    nodes, number, bounds = _numbered(part, is_outer, size)
    inner = np.bincount(part[is_outer == 0], minlength=size)
    graph = Graph.from_edge_index(number[source], number[target], part.size, validate=False)
    return Division(nodes, bounds, inner, graph, number[source], number[target])


def _numbered(part: Array, is_outer: Array, size: int) -> tuple[Array, Array, Array]:
    """The nodes in their new order, the new number of each, and where the ranks begin."""
    nodes = np.argsort(2 * part + is_outer, kind="stable")
    number = np.empty_like(nodes)
    number[nodes] = np.arange(nodes.size)
    bounds = np.concatenate(([0], np.cumsum(np.bincount(part, minlength=size)))).astype(np.int64)
    return nodes, number, bounds


@dataclass(frozen=True)
class Portion:
    """What one rank holds of a divided graph: its numbers for all nodes, and the edges into its own.

    `edges` are these edges by their numbers in the caller's order; `local_edges` is [2, E] of them, the
    rank's nodes numbered from 0 and its halo, which ascends, behind them.
    """

    rank: int
    nodes: Array
    bounds: Array
    halo: Array
    edges: Array
    local_edges: Array


def portion(
    edges: tuple[Array, Array, Array],
    part: Array,
    size: int,
    rank: int,
    over_ranks: Callable[[Array], Array],
) -> Portion:
    """The rank's portion of the division that `divide` finds, from the edges into its own nodes alone.

    `edges` are their numbers, sources and targets, in the caller's order; part[v] is the rank of every node.
    `over_ranks` adds an array up over the ranks: which nodes have neighbours elsewhere is known to their own.
    """
    numbers, source, target = edges
    is_outer = np.zeros(part.size, np.uint8)
    is_outer[target[part[source] != rank]] = 1
    nodes, number, bounds = _numbered(part, over_ranks(is_outer), size)
    begin, count = int(bounds[rank]), int(bounds[rank + 1] - bounds[rank])
    sources = number[source]
    is_far = (sources < begin) | (sources >= begin + count)
    halo = np.unique(sources[is_far])
    sources[~is_far] -= begin
    sources[is_far] = count + np.searchsorted(halo, sources[is_far])
    return Portion(rank, nodes, bounds, halo, numbers, np.stack((sources, number[target] - begin)))


_AT_ONCE = 1 << 20  # edges looked at together, so that nothing as long as all of them is made


def edges_into(source: Array, target: Array, part: Array, rank: int) -> tuple[Array, Array, Array]:
    """The edges into a rank's nodes: their numbers, sources and targets."""
    found = [
        begin + np.flatnonzero(part[target[begin : begin + _AT_ONCE]] == rank)
        for begin in range(0, target.size, _AT_ONCE)
    ]
    numbers = np.concatenate(found) if found else np.empty(0, np.int64)
    return numbers, source[numbers], target[numbers]
