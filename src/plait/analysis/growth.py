"""How a neighbourhood grows hop by hop around a batch of seeds: measured on a graph, or from its degrees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral

import numpy as np
from numpy.typing import NDArray

from plait.analysis.statistics import Statistics
from plait.errors import InputError
from plait.graph import Graph
from plait.graph.partition import distinct

__all__ = ["FANOUT", "Batch", "Growth", "check_batches", "draw", "estimate", "fanouts_of", "grow", "measure"]

Ints = NDArray[np.int64]
FANOUT = 10  # the default


def fanouts_of(asked: Sequence[int | None] | None, layers: int) -> tuple[int | None, ...]:
    """One fan-out per layer: those given; if they are too few, the last one is repeated."""
    given = tuple(asked or (FANOUT,))
    return given[:layers] + given[-1:] * (layers - len(given))


@dataclass(frozen=True)
class Growth:
    """Distinct nodes reached within 0, 1, ... hops, and edges read in hop 1, 2, ...; means of a batch."""

    batch: int
    nodes: tuple[float, ...]
    edges: tuple[float, ...]
    is_measured: bool

    def rows(self, layer: int, layers: int) -> float:
        """Rows that layer 0, ... of this many computes."""
        return self.nodes[min(layers - 1 - layer, len(self.nodes) - 1)]

    def edges_of(self, layer: int, layers: int) -> float:
        """Edges that layer reads."""
        return sum(self.edges[: layers - layer])


def check_batches(batch: int, fanouts: Sequence[int | None]) -> None:
    """InputError unless batches have a seed and hops take a neighbour."""
    is_list = isinstance(fanouts, Sequence) and not isinstance(fanouts, str)
    counts = (batch, *(fanout for fanout in fanouts if fanout is not None)) if is_list else ()
    if not is_list or not all(isinstance(count, Integral) and count >= 1 for count in counts):
        raise InputError(
            f"batch_size={batch}, fanouts={fanouts!r}: give a whole number of at least 1, and a list of them"
        )


def grow(statistics: Statistics, batch: int, fanouts: Sequence[int | None], seed: int = 0) -> Growth:
    """Measured where the graph is available, else estimated; a fan-out of None takes all neighbours."""
    check_batches(batch, fanouts)
    if statistics.graph is not None and statistics.graph.is_square:
        return measure(statistics.graph, batch, fanouts, np.random.default_rng(seed))
    return estimate(statistics, batch, fanouts)


def estimate(statistics: Statistics, batch: int, fanouts: Sequence[int | None]) -> Growth:
    """From the degrees: e edges leave a node of degree δ unread with probability exp(-δ e / m)."""
    bins, total = statistics.bins, max(1, statistics.edges)
    size = min(batch, statistics.nodes)
    reached = np.full_like(bins.count, size / max(1.0, bins.nodes))
    fresh = reached * bins.count
    nodes, edges = [float(size)], []
    for fanout in fanouts:
        taken = bins.degree if fanout is None else np.minimum(bins.degree, fanout)
        read = float(fresh @ taken)
        after = 1.0 - (1.0 - reached) * np.exp(-bins.degree * read / total)
        fresh, reached = (after - reached) * bins.count, after
        edges.append(read)
        nodes.append(float(reached @ bins.count))
    return Growth(size, tuple(nodes), tuple(edges), False)


def measure(
    graph: Graph, batch: int, fanouts: Sequence[int | None], rng: np.random.Generator, batches: int = 4
) -> Growth:
    """The means over a few batches of random seeds."""
    size = min(batch, graph.num_nodes)
    runs = [_expand(graph, rng.choice(graph.num_nodes, size, False), fanouts, rng) for _ in range(batches)]
    nodes = np.mean([run[0] for run in runs], axis=0)
    edges = np.mean([run[1] for run in runs], axis=0)
    return Growth(size, tuple(map(float, nodes)), tuple(map(float, edges)), True)


@dataclass(frozen=True)
class Batch:
    """A drawn mini-batch: its nodes hop by hop, seeds first, and its edges by their places in that list."""

    nodes: Ints
    source: Ints
    target: Ints
    nodes_by_hop: tuple[int, ...]
    edges_by_hop: tuple[int, ...]


def draw(graph: Graph, seeds: Ints, fanouts: Sequence[int | None], rng: np.random.Generator) -> Batch:
    """The neighbourhood of some seeds, in one draw."""
    place = np.full(graph.num_nodes, -1, np.int64)
    place[seeds] = np.arange(len(seeds))
    hops, ends, frontier = [seeds], [], seeds
    count = len(seeds)
    for fanout in fanouts:
        positions = np.sort(_positions(graph, frontier, fanout, rng))
        source = graph.indices[positions].astype(np.int64)
        target = np.searchsorted(graph.indptr, positions, side="right") - 1
        new = distinct(source[place[source] < 0])
        place[new] = count + np.arange(len(new))
        count += len(new)
        order = np.argsort(place[target], kind="stable")
        ends.append((place[source[order]], place[target[order]]))
        hops.append(new)
        frontier = new
    return Batch(
        np.concatenate(hops),
        np.concatenate([source for source, _ in ends]),
        np.concatenate([target for _, target in ends]),
        tuple(map(len, hops)),
        tuple(len(source) for source, _ in ends),
    )


def _expand(
    graph: Graph, seeds: Ints, fanouts: Sequence[int | None], rng: np.random.Generator
) -> tuple[list[int], list[int], NDArray[np.bool_]]:
    """Distinct nodes within each hop, edges read in it, and which nodes; only new nodes read edges."""
    seen = np.zeros(graph.num_nodes, bool)
    seen[seeds] = True
    frontier, nodes, edges = seeds, [len(seeds)], []
    for fanout in fanouts:
        sources = graph.indices[_positions(graph, frontier, fanout, rng)]
        new = distinct(sources[~seen[sources]].astype(np.int64))
        seen[new] = True
        frontier = new
        edges.append(len(sources))
        nodes.append(nodes[-1] + len(new))
    return nodes, edges, seen


def _positions(graph: Graph, rows: Ints, fanout: int | None, rng: np.random.Generator) -> Ints:
    """Which edges are read: all of a row, or `fanout` of them, every choice of this many as likely."""
    starts = graph.indptr[rows].astype(np.int64)
    degrees = graph.indptr[rows + 1].astype(np.int64) - starts
    is_whole = np.full(len(rows), True) if fanout is None else degrees <= fanout
    lengths = degrees[is_whole]
    offsets = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    whole: Ints = np.repeat(starts[is_whole], lengths) + offsets
    if fanout is None:
        return whole
    chosen = starts[~is_whole, None] + _some_of(degrees[~is_whole], fanout, rng)
    return np.concatenate((whole, chosen.ravel()))


def _some_of(counts: Ints, fanout: int, rng: np.random.Generator) -> Ints:
    """`fanout` different numbers below each count, by Floyd: a number drawn before becomes the last one."""
    chosen = np.empty((len(counts), fanout), np.int64)
    for k in range(fanout):
        last = counts - fanout + k
        number = (rng.random(len(counts)) * (last + 1)).astype(np.int64)
        is_taken = (chosen[:, :k] == number[:, None]).any(axis=1)
        chosen[:, k] = np.where(is_taken, last, number)
    return chosen
