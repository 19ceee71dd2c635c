"""Training schemes on a graph: what an epoch of each really computes, next to the paper's bound (Table 2).

Shares of the planned layers: a layer's work on edges scales with the edges a scheme reads for it, its work on
rows with the rows it computes. An epoch has every node as a target once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.analysis.cut import EdgeCut
from plait.analysis.growth import Growth, grow
from plait.analysis.layers import Layer
from plait.analysis.published import SCHEMES, Row
from plait.analysis.statistics import Statistics
from plait.analysis.work import Phase
from plait.graph import Graph

__all__ = ["Scheme", "drawn_rows", "edges_between", "schemes_of", "walked"]

Mask = NDArray[np.bool_]

_WALK = 2  # steps of GraphSAINT's walks


@dataclass(frozen=True)
class Scheme:
    """An epoch of one scheme: operations, the longest chain of one step, steps, and the paper's row."""

    row: Row
    work: float
    depth: int
    steps: int
    published: float
    note: str

    def to_dict(self) -> dict[str, Any]:
        """The scheme as plain data."""
        return {
            "scheme": self.row.model,
            "work": self.work,
            "depth": self.depth,
            "steps": self.steps,
            "published": self.published,
            "formula": str(self.row.work),
            "executed_by": self.row.executed_by,
            "note": self.note,
        }


def schemes_of(
    layers: Sequence[Layer], statistics: Statistics, growth: Growth, fanout: int, cut: EdgeCut, width: int
) -> list[Scheme]:
    """Full batch, GraphSAGE, FastGCN, Cluster-GCN and GraphSAINT on these layers."""
    counted = [layer for layer in layers if not layer.is_black_box]
    nodes, edges = max(1, statistics.nodes), max(1, statistics.edges)
    L = len(counted)
    batches = math.ceil(nodes / max(1, growth.batch))
    degree = max(1, statistics.bins.largest)
    values = {"n": nodes, "m": edges, "d": degree, "k": width, "L": L, "c": fanout, "W_pre": 0, "D_pre": 0}
    found = []

    def add(name: str, work: float, most: int, steps: int, note: str) -> None:
        row = next(row for row in SCHEMES if row.model == name)
        depth = sum(_depth(layer, most) for layer in counted)
        found.append(Scheme(row, work, depth, steps, float(row.work(**values)), note))

    add("Full batch", sum(_work(layer, 1.0, 1.0, False) for layer in counted), degree, 1, "")
    sampled = sum(
        _work(layer, growth.edges_of(k, L) / edges, growth.rows(k, L) / nodes, True)
        for k, layer in enumerate(counted)
    )
    reached = growth.nodes[-1] / max(1, growth.batch)
    how = "measured" if growth.is_measured else "estimated"
    add("GraphSAGE", batches * sampled, fanout, batches, f"{reached:.1f} nodes per target, {how}")
    drawn, between = _layerwise(statistics, growth.batch, L)  # as many vertices of every layer as targets
    layerwise = sum(
        _work(layer, read / edges, drawn / nodes, True) for layer, read in zip(counted, between, strict=True)
    )
    add("FastGCN", batches * layerwise, fanout, batches, f"{drawn} vertices per layer and batch")
    kept = 1.0 - cut.cut_edges / edges
    clustered = sum(_work(layer, kept, 1.0, False) for layer in counted)
    add(
        "Cluster-GCN",
        clustered,
        degree,
        cut.parts,
        f"{kept:.0%} of the edges lie inside {cut.parts} clusters",
    )
    visited, inside = _walked(statistics, growth.batch)
    rounds = math.ceil(nodes / max(1.0, visited))
    saint = rounds * sum(_work(layer, inside / edges, visited / nodes, True) for layer in counted)
    add("GraphSAINT", saint, degree, rounds, f"walks visit {visited:,.0f} nodes with {inside:,.0f} edges")
    return found


def _work(layer: Layer, edges: float, rows: float, again: bool) -> float:
    """A layer's operations for shares of its edges and rows; `again`: what is done once is done each time."""
    total = 0.0
    for name, phase in layer.phases.items():
        if name == "once" and not again:
            continue
        on_rows = phase.kernels.get("vertex update", 0)
        total += on_rows * rows + (phase.work - on_rows) * edges
    return total


def _depth(layer: Layer, most: int) -> int:
    """Of a forward and a backward pass where no row has more than `most` edges."""
    return sum(_limited(phase, most) for name, phase in layer.phases.items() if name != "once")


def _limited(phase: Phase, most: int) -> int:
    formula = phase.formulas.get("depth")
    if formula is None:
        return phase.depth
    capped = {
        name: min(value, most) if name in ("d", "d_out") else value for name, value in phase.values.items()
    }
    return int(formula(**capped))


def _layerwise(statistics: Statistics, size: int, layers: int) -> tuple[int, list[float]]:
    """How many vertices FastGCN draws for every layer of a batch, and the edges it reads for each."""
    graph, drawn = statistics.graph, min(size, statistics.nodes)
    if graph is None or not graph.is_square:
        return drawn, [statistics.edges * (drawn / max(1, statistics.nodes)) ** 2] * layers
    rng = np.random.default_rng(0)
    sets = [drawn_rows(graph.num_nodes, drawn, rng) for _ in range(layers + 1)]
    return drawn, [float(edges_between(graph, *pair).sum()) for pair in itertools.pairwise(sets)]


def drawn_rows(nodes: int, count: int, rng: np.random.Generator) -> Mask:
    """Which nodes are drawn, every choice of this many as likely."""
    chosen = np.zeros(nodes, bool)
    chosen[rng.choice(nodes, count, False)] = True
    return chosen


def edges_between(graph: Graph, sources: Mask, targets: Mask) -> Mask:
    """Which edges run from one set of nodes to another."""
    return targets[graph.edge_rows()] & sources[graph.indices]


def _walked(statistics: Statistics, roots: int) -> tuple[float, float]:
    """Nodes that short walks from random roots visit, and the edges between them."""
    graph = statistics.graph
    if graph is None or not graph.is_square:
        found = grow(statistics, max(1, roots), (1,) * _WALK)
        bins = statistics.bins
        # popular nodes are visited more often, and so are the ends of an edge
        rate = found.nodes[-1] / max(1.0, bins.nodes)
        read = sum(found.edges) / max(1, statistics.edges)
        visited = 1.0 - (1.0 - min(1.0, found.nodes[0] / max(1.0, bins.nodes))) * np.exp(-bins.degree * read)
        share = float((bins.degree * bins.count) @ visited) / max(1.0, bins.edges)
        return rate * bins.nodes, statistics.edges * share**2
    seen = walked(graph, roots, np.random.default_rng(0))
    return float(seen.sum()), float(edges_between(graph, seen, seen).sum())


def walked(graph: Graph, roots: int, rng: np.random.Generator) -> Mask:
    """Which nodes GraphSAINT's walks from random roots visit."""
    at = rng.choice(graph.num_nodes, min(roots, graph.num_nodes), False)
    seen = np.zeros(graph.num_nodes, bool)
    seen[at] = True
    for _ in range(_WALK):
        degrees = graph.degrees[at]
        at, degrees = at[degrees > 0], degrees[degrees > 0]
        places = graph.indptr[at] + (rng.random(at.size) * degrees).astype(np.int64)
        at = graph.indices[places].astype(np.int64)
        seen[at] = True
    return seen
