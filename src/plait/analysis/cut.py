"""What a partition cuts: rows each part needs of others, and copies of nodes, counted or expected."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from plait.analysis.statistics import Statistics
from plait.errors import InputError
from plait.graph import Graph
from plait.graph.partition import distinct

__all__ = ["EdgeCut", "VertexCut", "edge_cut", "expected_edge_cut", "expected_vertex_cut", "vertex_cut"]

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class EdgeCut:
    """Nodes are owned by parts: what each owns, the edges into it, the remote rows it needs and sends."""

    nodes: tuple[float, ...]
    edges: tuple[float, ...]
    halo: tuple[float, ...]
    sent: tuple[float, ...]
    peers: tuple[int, ...]  # other parts each one talks to
    cut_edges: float
    by: str

    @property
    def parts(self) -> int:
        """The number of parts."""
        return len(self.nodes)

    @property
    def imbalance(self) -> float:
        """Edges of the largest part over the mean."""
        mean = sum(self.edges) / self.parts
        return max(self.edges) / mean if mean else 1.0

    def with_halo(self, share: float) -> EdgeCut:
        """The same parts with halos of this share of what they own, for a partition that is not at hand."""
        rows = tuple(share * count for count in self.nodes)
        return replace(self, halo=rows, sent=rows, by=f"given: halos of {share:g} of a part")


@dataclass(frozen=True)
class VertexCut:
    """Edges are owned by parts: how many each owns, the nodes it holds, and those it is the master of."""

    edges: tuple[float, ...]
    copies: tuple[float, ...]
    owned: tuple[float, ...]
    by: str

    @property
    def parts(self) -> int:
        """The number of parts."""
        return len(self.edges)

    @property
    def nodes(self) -> float:
        """The number of nodes."""
        return sum(self.owned)

    @property
    def replication(self) -> float:
        """Copies of a node on average."""
        return sum(self.copies) / self.nodes if self.nodes else 1.0


def edge_cut(graph: Graph, part: Ints, by: str = "given") -> EdgeCut:
    """What a partition of the nodes cuts, counted; part[v] is the owner of node v."""
    part = _checked(part, graph.num_nodes, "partition")
    parts = int(part.max(initial=0)) + 1
    target, source = part[graph.edge_rows()], part[graph.indices]
    is_cut = target != source
    # a remote row is needed once by a part, however many of its edges read it
    needed = distinct(target[is_cut] * graph.num_nodes + graph.indices[is_cut])
    reader, owner = needed // graph.num_nodes, part[needed % graph.num_nodes]
    talks = np.zeros((parts, parts), bool)
    talks[reader, owner] = talks[owner, reader] = True
    return EdgeCut(
        nodes=_counts(part, parts),
        edges=_counts(target, parts),
        halo=_counts(reader, parts),
        sent=_counts(owner, parts),
        peers=tuple(int(count) for count in talks.sum(axis=1)),
        cut_edges=float(is_cut.sum()),
        by=by,
    )


def vertex_cut(graph: Graph, part: Ints, by: str = "given") -> VertexCut:
    """Edges owned by the part of their end with fewer neighbours: hubs are cut, the many others are whole."""
    part = _checked(part, graph.num_nodes, "partition")
    parts = int(part.max(initial=0)) + 1
    degree = graph.degrees + graph.out_degrees
    rows, columns = graph.edge_rows().astype(np.int64), graph.indices.astype(np.int64)
    owner = np.where(degree[rows] < degree[columns], part[rows], part[columns])
    own = part * graph.num_nodes + np.arange(graph.num_nodes)
    pairs = (owner * graph.num_nodes + rows, owner * graph.num_nodes + columns, own)
    held = distinct(np.concatenate(pairs))
    copies = _counts(held // graph.num_nodes, parts)
    return VertexCut(_counts(owner, parts), copies, _counts(part, parts), by)


def expected_edge_cut(statistics: Statistics, parts: int) -> EdgeCut:
    """What a random partition cuts: a bound for a partitioner that finds structure."""
    bins, share = statistics.out_bins, 1.0 / parts
    # a node elsewhere is needed here if any of its edges ends here
    needed = float(bins.count @ (1.0 - (1.0 - share) ** bins.degree)) * (1.0 - share)
    each = (statistics.nodes * share,) * parts
    rows, edges = (needed,) * parts, (statistics.edges * share,) * parts
    cut = statistics.edges * (1.0 - share)
    return EdgeCut(each, edges, rows, rows, (parts - 1,) * parts, cut, "random, expected")


def expected_vertex_cut(statistics: Statistics, parts: int) -> VertexCut:
    """The expected copies of nodes if edges are placed at random: one wherever a node has an edge."""
    share = 1.0 / parts
    ends = statistics.bins.degree * 2.0
    copies = float(statistics.bins.count @ np.maximum(share, 1.0 - (1.0 - share) ** ends))
    each = (statistics.edges * share,) * parts
    owned = (statistics.nodes * share,) * parts
    return VertexCut(each, (copies,) * parts, owned, "random, expected")


def _checked(part: Ints, nodes: int, name: str) -> Ints:
    found = np.asarray(part)
    if found.shape != (nodes,) or not np.issubdtype(found.dtype, np.integer):
        raise InputError(f"{name}: {found.dtype} of shape {found.shape}; give one whole number for each node")
    if found.size and found.min() < 0:
        raise InputError(f"{name}: part {int(found.min())} is negative; parts are numbered from 0")
    return found.astype(np.int64)


def _counts(owners: Ints, parts: int) -> tuple[float, ...]:
    return tuple(float(count) for count in np.bincount(owners, minlength=parts))
