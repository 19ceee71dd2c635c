"""Nodes to parts of equal size with few edges between them: METIS, by way of pymetis."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from plait.errors import InputError

if TYPE_CHECKING:
    from plait.graph import Graph

__all__ = ["distinct", "has_metis", "metis"]


def has_metis() -> bool:
    """Whether pymetis is installed."""
    return find_spec("pymetis") is not None


def metis(graph: Graph, parts: int, *, recursive: bool = False) -> NDArray[np.int64]:
    """The part of every node; edges count both ways, repeats once, loops not at all."""
    if isinstance(parts, bool) or not isinstance(parts, int | np.integer) or parts < 1:
        raise InputError(f"parts={parts!r}: give a whole number of at least 1")
    if parts > max(1, graph.num_nodes):
        raise InputError(f"parts={parts}: the graph has only {graph.num_nodes} nodes; ask for fewer parts")
    if parts == 1:
        return np.zeros(graph.num_nodes, np.int64)
    if not has_metis():
        raise InputError(
            "partitioning needs pymetis, which is not installed; pip install pymetis, or bring a "
            "partition of your own"
        )
    return _part(graph, int(parts), recursive)


def distinct(codes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Each code once, ascending. numpy's unique hashes: 15.8 s for 5.4 M codes, sorted in 1.6 s."""
    ordered = np.sort(codes)
    return ordered[np.concatenate(([True], ordered[1:] != ordered[:-1]))] if ordered.size else ordered


def _part(graph: Graph, parts: int, recursive: bool) -> NDArray[np.int64]:
    import pymetis

    rows, columns = graph.edge_rows().astype(np.int64), graph.indices.astype(np.int64)
    keep = rows != columns
    rows, columns = rows[keep], columns[keep]
    code = distinct(np.concatenate((rows * graph.num_nodes + columns, columns * graph.num_nodes + rows)))
    degrees = np.bincount(code // graph.num_nodes, minlength=graph.num_nodes)
    pointer = np.concatenate(([0], np.cumsum(degrees)))
    neighbours = code % graph.num_nodes
    found: Any = pymetis.part_graph(
        parts, xadj=pointer.tolist(), adjncy=neighbours.tolist(), recursive=recursive
    )
    return np.asarray(found[1], np.int64)
