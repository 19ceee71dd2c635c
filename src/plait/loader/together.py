"""Samples of several batches drawn hop by hop together, their neighbours requested from the nodes' owners.

The samples are those of `Sampler` on the whole graph: the edges a node gets depend on (seed,
epoch, batch, hop, node) and not on which process draws them, and places follow the order of the frontier.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from plait.graph.compiled import compiled
from plait.loader.draw import stream_key
from plait.loader.expand import Space, checked_fanout, checked_ids, whole
from plait.loader.owned import Drawn, Frontier
from plait.loader.sampler import Sample, directional
from plait.loader.space import EdgeSpace, NodeSpace

__all__ = ["Neighbours", "TogetherSampler", "gathered"]

Array = NDArray[Any]

# Several samples are under way at once, each with a table of all nodes: 32 MiB, hashing beyond that.
STAMP_LIMIT = 1 << 23


class Neighbours(Protocol):
    """The interface of anything that can draw in-edges of all nodes."""

    @property
    def num_nodes(self) -> int: ...
    @property
    def node_type(self) -> Any: ...
    @property
    def edge_type(self) -> Any: ...

    def ask(self, frontiers: Sequence[Frontier]) -> Sequence[Sequence[Drawn]]:
        """The edges of every frontier, those of some of its nodes in each piece."""
        ...


class TogetherSampler:
    """Draws k-hop neighbourhoods of a graph held by others: one request per hop for a group of batches."""

    def __init__(
        self, neighbours: Neighbours, fanout: Sequence[int], *, replace: bool = False, seed: int = 0
    ) -> None:
        self.fanout, self.replace = checked_fanout(fanout), bool(replace)
        self.seed = whole("seed", seed)
        self._neighbours = neighbours
        self._spare: list[Space] = []

    def sample_many(self, seeds: Sequence[Array], epoch: int, batches: Sequence[int]) -> list[Sample]:
        """The neighbourhood of each array of seeds, in the batch of that number."""
        spaces = [self._taken() for _ in seeds]
        for space, given in zip(spaces, seeds, strict=True):
            self._begin(space, given)
        for hop, fanout in enumerate(self.fanout):
            keys = [int(stream_key(self.seed, epoch, batch, hop)) for batch in batches]
            self._hop(spaces, keys, fanout)
        samples = [directional(space) for space in spaces]
        for space in spaces:  # used again, unless an error left them half filled
            space.nodes[0].end()
        self._spare.extend(spaces)
        return samples

    def _begin(self, space: Space, seeds: Array) -> None:
        nodes = space.nodes[0]
        nodes.begin(checked_ids("seeds", seeds, self._neighbours.num_nodes), 0)
        space.edges[0].total, space.expanded = 0, [0]
        space.nodes_by_hop, space.edges_by_hop = [[nodes.found]], []

    def _hop(self, spaces: Sequence[Space], keys: Sequence[int], fanout: int) -> None:
        """Extends every sample by the neighbours of its last hop."""
        spans = [(space.expanded[0], space.nodes[0].found) for space in spaces]
        frontiers = [
            Frontier(space.nodes[0].n_id[begin:end].astype(np.int64), key, fanout, self.replace)
            for space, (begin, end), key in zip(spaces, spans, keys, strict=True)
        ]
        answers = self._neighbours.ask(frontiers)
        for space, (begin, end), pieces in zip(spaces, spans, answers, strict=True):
            nodes, edges = space.nodes[0], space.edges[0]
            gained = gathered(pieces, begin, end, edges)
            nodes.discover(edges, gained, nodes, begin, end)
            space.expanded = [end]
            space.nodes_by_hop.append([nodes.found - end])
            space.edges_by_hop.append([gained])

    def _taken(self) -> Space:
        try:
            return self._spare.pop()
        except IndexError:
            pass
        known = self._neighbours
        nodes = NodeSpace(known.num_nodes, np.result_type(known.node_type, np.int32), False, STAMP_LIMIT)
        return Space([nodes], [EdgeSpace(known.node_type, known.edge_type)], [0], [], [])


def gathered(pieces: Sequence[Drawn], begin: int, end: int, edges: EdgeSpace) -> int:
    """The number of edges of all pieces, entered into `edges` in the order of the targets begin..end."""
    counts = np.zeros(end - begin, np.int64)
    for piece in pieces:
        counts[piece.at] = piece.counts
    edges.grow("pointer", end + 1)
    np.cumsum(counts, out=counts)
    edges.pointer[begin + 1 : end + 1] = edges.total + counts
    edges.pointer[begin] = edges.total
    gained = int(counts[-1]) if counts.size else 0
    for name in ("source", "edge"):
        edges.grow(name, edges.total + gained)
    for piece in pieces:
        _enter(piece.at, piece.source, piece.edge, begin, edges.pointer, edges.source, edges.edge)
    return gained


@compiled
def _enter(at: Any, source: Any, edge: Any, begin: int, pointer: Any, out_source: Any, out_edge: Any) -> None:
    """Copies the edges of every answered target to where the pointers say."""
    read = 0
    for i in at:
        for e in range(pointer[begin + i], pointer[begin + i + 1]):
            out_source[e] = source[read]
            out_edge[e] = edge[read]
            read += 1
