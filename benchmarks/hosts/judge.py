"""Evaluates weights: exact results for all validation nodes, by the same arithmetic for every system.

Sampled answers would compare how systems sample: a batch of PyG's draws 25 neighbours of a seed for both
layers, DGL draws 10 of them again for the first.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.graph import Graph, LoadedGraph

__all__ = ["Judge", "prepare"]

Array = NDArray[Any]


def prepare(loaded: LoadedGraph, path: Path) -> None:
    """Writes what the answers for the validation nodes depend on: rows of their neighbours and of these."""
    graph, x = loaded.graph, np.asarray(loaded.x)
    nodes = np.flatnonzero(loaded.masks["val"])
    sources, counts = _sources(graph, nodes)
    rows = np.unique(np.concatenate((nodes, sources)))
    means = np.zeros((rows.size, x.shape[1]), np.float32)
    for at, node in enumerate(rows):
        near = graph.indices[graph.indptr[node] : graph.indptr[node + 1]]
        if near.size:
            means[at] = x[near].mean(axis=0)
    np.savez(
        path,
        x=x[rows],
        means=means,
        own=np.searchsorted(rows, nodes),
        sources=np.searchsorted(rows, sources),
        counts=counts,
        labels=np.asarray(loaded.y)[nodes],
    )


def _sources(graph: Graph, nodes: Array) -> tuple[Array, Array]:
    """The neighbours of the nodes one after the other, and how many each has."""
    bounds = zip(graph.indptr[nodes], graph.indptr[nodes + 1], strict=True)
    return np.concatenate([graph.indices[a:b] for a, b in bounds]), np.diff(graph.indptr)[nodes]


class Judge:
    """The validation nodes of a prepared graph."""

    def __init__(self, path: Path) -> None:
        with np.load(path) as kept:
            self._kept = {name: kept[name] for name in kept.files}

    def accuracy(self, weights: list[Array], biases: list[Array]) -> float:
        """The share of right answers of two layers of GraphSAGE; weights as `rank.first_weights` has them."""
        kept, (near_1, own_1, near_2, own_2) = self._kept, weights
        hidden = np.maximum(kept["means"] @ near_1.T + kept["x"] @ own_1.T + biases[0], 0)
        ends = np.repeat(np.arange(kept["counts"].size), kept["counts"])
        sums = np.zeros((kept["counts"].size, hidden.shape[1]), np.float32)
        np.add.at(sums, ends, hidden[kept["sources"]])
        means = sums / np.maximum(kept["counts"], 1)[:, None]
        scores = means @ near_2.T + hidden[kept["own"]] @ own_2.T + biases[1]
        return float((scores.argmax(axis=1) == kept["labels"]).mean())
