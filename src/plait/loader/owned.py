"""The in-edges of some nodes of a graph, drawn from as a sampler of the whole graph draws."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.errors import InputError
from plait.graph import Graph
from plait.loader.draw import GOLDEN
from plait.loader.relation import Relation
from plait.loader.space import EdgeSpace, NodeSpace

__all__ = ["Drawn", "Frontier", "OwnedEdges"]

Array = NDArray[Any]

_NONE = np.empty(0, np.int64)
_MASK = (1 << 64) - 1


@dataclass(frozen=True, eq=False)
class Frontier:
    """Nodes of one hop of one sample, by their numbers in the whole graph, and the key of the hop's draws."""

    nodes: Array
    key: int
    fanout: int
    replace: bool = False


@dataclass(frozen=True, eq=False)
class Drawn:
    """The edges chosen for some nodes of a frontier: node at[i] has counts[i] of them, one after the other.

    `source` and `edge` are numbers in the whole graph.
    """

    at: Array
    counts: Array
    source: Array
    edge: Array


class OwnedEdges:
    """The in-edges of the nodes `begin` .. `end` - 1: their row pointers and their sources.

    `indptr` holds positions in the whole graph's list of edges, which are the numbers of the edges.
    """

    def __init__(self, indptr: Array, indices: Array, begin: int, num_nodes: int) -> None:
        self.begin, self.end, self.num_nodes = begin, begin + indptr.size - 1, num_nodes
        self.node_type, self.edge_type = indices.dtype, indptr.dtype
        self._first = int(indptr[0])
        self._graph = Graph(indptr - indptr[0], indices, num_nodes)
        self._relations = {replace: Relation(self._graph, replace=replace) for replace in (False, True)}

    @property
    def nbytes(self) -> int:
        """Memory of row pointers and sources."""
        return int(self._graph.indptr.nbytes + self._graph.indices.nbytes)

    @property
    def sources(self) -> Array:
        """The sources of all edges."""
        return self._graph.indices

    def choose(self, frontier: Frontier) -> tuple[Array, Array, Array]:
        """How many edges each node of the frontier is given, their sources and their numbers.

        A sampler of the whole graph chooses the same: a node's draws depend on its number and the hop's key.
        """
        nodes = frontier.nodes
        if nodes.size == 0:
            return _NONE, np.empty(0, self.node_type), np.empty(0, self.edge_type)
        if not self.begin <= int(nodes.min()) <= int(nodes.max()) < self.end:
            raise InputError(f"nodes: this rank owns the nodes {self.begin} to {self.end - 1} and no others")
        targets, space = NodeSpace(0, np.int64, False), EdgeSpace(self.node_type, self.edge_type)
        targets.n_id = nodes - self.begin
        # the key of node v is a hash of key + (v + 1) * GOLDEN: moved by `begin` it serves numbers from 0
        key = np.uint64((frontier.key + self.begin * GOLDEN) & _MASK)
        gained = self._relations[frontier.replace].choose(
            frontier.fanout, key, (np.uint64(0), 0), 0, nodes.size, _NONE, targets, space, 1
        )
        edge = space.edge[:gained]
        edge += edge.dtype.type(self._first)
        return np.diff(space.pointer[: nodes.size + 1]), space.source[:gained], edge
