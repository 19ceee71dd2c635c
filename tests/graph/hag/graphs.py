"""Graphs the hag tests share: random small ones, odd ones, and real ones where the data is at hand."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from plait.graph import Graph


def graph_of(rows: list[list[int]], num_sources: int | None = None) -> Graph:
    """The graph whose node v has the neighbours rows[v]."""
    indptr = np.cumsum([0] + [len(r) for r in rows])
    indices = np.array([u for r in rows for u in sorted(r)], np.int64)
    return Graph.from_csr(indptr, indices, len(rows) if num_sources is None else num_sources)


def rows_of(graph: Graph) -> list[list[int]]:
    """The neighbour list of every node."""
    pointer = graph.indptr
    return [graph.indices[pointer[v] : pointer[v + 1]].tolist() for v in range(graph.num_nodes)]


def random_graph(rng: np.random.Generator, repeats: bool = False) -> Graph:
    """A small graph with empty rows, self loops, shared neighbours, sometimes bipartite or with repeats."""
    num_nodes, num_sources = (int(n) for n in rng.integers(1, 14, 2))
    patterns = [rng.random(num_sources) < rng.random() for _ in range(3)]
    rows = []
    for _ in range(num_nodes):
        mask = patterns[rng.integers(3)] ^ (rng.random(num_sources) < 0.1)
        row = np.flatnonzero(mask).tolist()
        if repeats and row:
            row += rng.choice(row, rng.integers(0, 5)).tolist()
        rows.append(row if rng.random() < 0.9 else [])
    return graph_of(rows, num_sources)


ODD_GRAPHS = {
    "no nodes": graph_of([]),
    "no sources": graph_of([[], []], 0),
    "one isolated node": graph_of([[]]),
    "no edges": graph_of([[], [], []]),
    "one self loop": graph_of([[0]]),
    "self loops": graph_of([[0, 1], [0, 1], [0, 1]]),
    "one hub": graph_of([list(range(1, 9))] + [[0]] * 8),
    "repeated edges": graph_of([[0, 0, 1, 1], [0, 0, 1, 1], [0, 0, 1, 1], [0, 1, 1, 1]]),
    "clique": graph_of([[u for u in range(9) if u != v] for v in range(9)]),
    "equal rows": graph_of([[0, 1, 2, 3]] * 5),
    "path": graph_of([[1], [0, 2], [1, 3], [2]]),
    "more sources than nodes": graph_of([[0, 5, 9], [0, 5, 9], [0, 5, 9]], 10),
    "more nodes than sources": graph_of([[0, 1]] * 7, 2),
}


def real_graph(name: str) -> Graph:
    """A graph of the data folder, rows being in-neighbours; skips the test when the file is absent."""
    folder = Path(os.environ.get("PLAIT_DATA", Path(__file__).parents[3].parent / "shared" / "data"))
    path = folder / f"{name}.npz"
    if not path.exists():
        pytest.skip(f"{name}.npz is not at hand; set PLAIT_DATA to the folder of the real graphs")
    with np.load(path, allow_pickle=False) as file:
        indptr, targets = file["indptr"], file["indices"]
    sources = np.repeat(np.arange(indptr.size - 1), np.diff(indptr))
    return Graph.from_edge_index(sources, targets, indptr.size - 1)
