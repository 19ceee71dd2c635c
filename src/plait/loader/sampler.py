"""k-hop neighbour sampling: seeds in, the subgraph that computes them out, the same one on every replay.

A sample is a pure function of (seed, epoch, batch, node): draws are hashes of where they are used (draw.py),
so it does not matter how many threads take part, in which order batches are drawn, or how far ahead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from plait.errors import InputError
from plait.loader.expand import Expander, Space, checked_fanout, checked_ids, whole
from plait.loader.relation import Relation, per_item
from plait.loader.space import in_threads, induced

if TYPE_CHECKING:
    from plait.graph import Graph

__all__ = ["Sample", "Sampler", "directional"]

Array = NDArray[Any]
Int64s = NDArray[np.int64]

_NONE = np.empty(0, np.int64)


@dataclass(frozen=True, eq=False)
class Sample:
    """One sampled subgraph in PyG's terms.

    n_id lists global nodes: the seeds as given, then every other node in order of discovery, hop by hop. Edge
    e goes from n_id[row[e]] to n_id[col[e]] and is edge e_id[e] of the caller. A directional sample is sorted
    by target, hop by hop, so `indptr` is its CSR over the nodes that were expanded (those of the last hop
    have no in-edges); for other directions indptr and num_sampled_* are None.
    """

    n_id: Int64s
    row: Int64s
    col: Int64s
    e_id: Int64s
    num_sampled_nodes: tuple[int, ...] | None
    num_sampled_edges: tuple[int, ...] | None
    batch: Int64s | None = None
    indptr: Int64s | None = None

    @property
    def num_nodes(self) -> int:
        """Number of places in n_id."""
        return int(self.n_id.size)

    @property
    def num_edges(self) -> int:
        """Number of sampled edges."""
        return int(self.row.size)


class Sampler(Expander):
    """Draws k-hop neighbourhoods of a square graph: fanout[h] in-edges for a node of hop h (-1: all)."""

    def __init__(
        self,
        graph: Graph,
        fanout: Sequence[int],
        *,
        replace: bool = False,
        weight: ArrayLike | None = None,
        node_time: ArrayLike | None = None,
        edge_time: ArrayLike | None = None,
        temporal_strategy: str = "uniform",
        disjoint: bool = False,
        method: str = "uniform",
        batch_dependency: int = 1,
        layer_dependency: bool = False,
        direction: str = "directional",
        seed: int = 0,
    ) -> None:
        """Takes `weight` and `edge_time` by the caller's edge numbers; either time makes samples disjoint.

        Edges of weight zero are never sampled. LABOR's variates live for `batch_dependency` batches, and are
        common to all hops with `layer_dependency`.
        """
        if graph.num_nodes != graph.num_sources:
            raise InputError(
                f"graph: sampling needs one node set, this one has {graph.num_nodes} targets and "
                f"{graph.num_sources} sources; give it to HeteroSampler as a relation"
            )
        self.graph = graph
        self.fanout = checked_fanout(fanout)
        self._set_out(
            replace=replace, method=method, direction=direction, temporal_strategy=temporal_strategy,
            node_time=node_time, edge_time=edge_time, disjoint=disjoint, batch_dependency=batch_dependency,
            layer_dependency=layer_dependency, seed=seed,
        )  # fmt: skip
        self._node_time: Array | None = None
        if node_time is not None:
            self._node_time = per_item("node_time", node_time, graph.num_nodes, "node")
        dates: dict[str, Any] = {"source_time": self._node_time, "edge_time": edge_time}
        self.relations = (Relation(graph, weight=weight, **dates, **self._choice()),)
        self.ends, self.fanouts, self.node_counts = ((0, 0),), (self.fanout,), (graph.num_nodes,)

    def __repr__(self) -> str:
        return f"Sampler({self.graph!r}, fanout={list(self.fanout)}, method={self.method!r})"

    def sample(
        self,
        seeds: ArrayLike,
        epoch: int = 0,
        batch: int = 0,
        *,
        seed_time: ArrayLike | None = None,
        threads: int | None = None,
    ) -> Sample:
        """The neighbourhood of `seeds` in that epoch and batch; `threads` changes nothing but the time taken.

        Repeated seeds keep their places, each with its in-edges. Many batches are better served by
        `sample_many`: one batch has a serial part.
        """
        nodes = checked_ids("seeds", seeds, self.graph.num_nodes)
        times = self._checked_times(nodes, seed_time)
        epoch, batch = whole("epoch", epoch), whole("batch", batch)
        threads = whole("threads", 1 if threads is None else threads, least=1)
        answer: Sample = self._sampled((nodes,), times, epoch, batch, threads, self._finish)
        return answer

    def sample_many(
        self, batches: Iterable[ArrayLike], epoch: int = 0, first: int = 0, threads: int = 1
    ) -> list[Sample]:
        """One sample for every array of seeds, numbered from `first`; batches are shared out over threads."""
        seeds = list(batches)
        found: list[Sample | None] = [None] * len(seeds)

        def work(begin: int, end: int) -> None:
            for b in range(begin, end):
                found[b] = self.sample(seeds[b], epoch, first + b)

        in_threads(work, 0, len(seeds), whole("threads", threads, least=1))
        return [s for s in found if s is not None]

    def _finish(self, space: Space) -> Sample:
        nodes = space.nodes[0]
        if self.direction == "induced":
            return Sample(nodes.nodes(), *induced(self.relations[0], nodes, nodes), None, None)
        sample = directional(space)
        if self.direction == "bidirectional":
            ends = _both_ways(sample.row, sample.col, sample.e_id, nodes.found)
            return Sample(sample.n_id, *ends, None, None, sample.batch)
        return sample

    def _checked_times(self, nodes: Array, seed_time: ArrayLike | None) -> Array:
        if self._has_no_times(seed_time):
            return _NONE
        if seed_time is None:
            if self._node_time is None:
                raise InputError(
                    "seed_time is missing: edges are dated, nodes are not; pass one time per seed"
                )
            return self._node_time[nodes]
        dtype = self.relations[0].times.dtype
        return per_item("seed_time", seed_time, nodes.size, "seed").astype(dtype, copy=False)


def directional(space: Space) -> Sample:
    """The sample that was drawn in a space of one type of nodes, edges as they were drawn."""
    nodes, edges, targets = space.nodes[0], space.edges[0], space.expanded[0]
    row, col, e_id = edges.edges(targets)
    by_hop = (tuple(n for (n,) in space.nodes_by_hop), tuple(n for (n,) in space.edges_by_hop))
    return Sample(nodes.nodes(), row, col, e_id, *by_hop, nodes.trees(), edges.pointer[: targets + 1].copy())


def _both_ways(row: Int64s, col: Int64s, e_id: Int64s, found: int) -> tuple[Int64s, Int64s, Int64s]:
    """Every pair once each way, sorted by target then source, with the number of an edge that made it."""
    code = np.concatenate((col * found + row, row * found + col))
    pairs, at = np.unique(code, return_index=True)
    return pairs % found, pairs // found, np.concatenate((e_id, e_id))[at]
