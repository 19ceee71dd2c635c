"""Slow, obvious graphs to compare with: a dictionary of lists, and an edge list from a seed."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from plait.graph import Graph


def as_lists(src, dst, num_nodes):
    """Target -> its sources in ascending order, repeats kept."""
    lists = {v: [] for v in range(num_nodes)}
    for u, v in zip(src, dst, strict=True):
        lists[int(v)].append(int(u))
    return {v: sorted(sources) for v, sources in lists.items()}


def lists_of(graph):
    """The same of a Graph, read off indptr and indices."""
    return {v: graph.indices[graph.indptr[v] : graph.indptr[v + 1]].tolist() for v in range(graph.num_nodes)}


def dense(graph):
    """[targets, sources]: how often each edge is stored."""
    counts = np.zeros((graph.num_nodes, graph.num_sources), int)
    for v, sources in lists_of(graph).items():
        for u in sources:
            counts[v, u] += 1
    return counts


def footprint(reads, first):
    """(window, mean number of distinct reads in so many consecutive ones) for first, 2 first, ... and all."""
    windows = [first << k for k in range(64) if first << k < len(reads)]
    return tuple((w, _mean_distinct(reads.tolist(), w)) for w in [*windows, len(reads)] if w)


def _mean_distinct(reads, window):
    starts = range(len(reads) - window + 1)
    return float(np.mean([len(set(reads[start : start + window])) for start in starts]))


@st.composite
def edge_lists(draw, square=True, max_nodes=9, max_edges=40):
    """(src, dst, num_nodes, num_sources) with self loops, repeats, isolated nodes, sometimes presorted."""
    rows = draw(st.integers(1, max_nodes))
    columns = rows if square else draw(st.integers(1, max_nodes))
    edges = st.tuples(st.integers(0, columns - 1), st.integers(0, rows - 1))
    pairs = draw(st.lists(edges, max_size=max_edges))
    key = draw(st.sampled_from([None, lambda e: (e[1], e[0]), lambda e: e, lambda e: e[0], lambda e: e[1]]))
    if key is not None:
        pairs.sort(key=key)
    src = np.array([u for u, _ in pairs], draw(st.sampled_from([np.int32, np.int64])))
    dst = np.array([v for _, v in pairs], draw(st.sampled_from([np.int32, np.int64])))
    return src, dst, rows, columns


def random_graph(seed, num_nodes=50, num_edges=400):
    rng = np.random.default_rng(seed)
    return Graph.from_edge_index(*rng.integers(0, num_nodes, (2, num_edges)), num_nodes)
