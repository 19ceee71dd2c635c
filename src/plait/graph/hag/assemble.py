"""From merged rows to a Hag: single-use partial sums inlined, the rest numbered by level."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from plait.graph.compiled import compiled
from plait.graph.hag.hierarchy import Hag
from plait.graph.hag.numbering import hierarchy_csr
from plait.graph.hag.rows import WorkingRows

if TYPE_CHECKING:
    from plait.graph.csr import Graph

__all__ = ["assemble", "plain"]

Ints = NDArray[Any]


def plain(graph: Graph, order: str) -> Hag:
    """The graph itself as a hierarchy without aggregation nodes."""
    csr = graph.indptr.astype(np.int64), graph.indices.astype(np.int32), np.zeros(0, np.int32)
    return Hag.of(graph, csr, order)


def assemble(
    graph: Graph,
    work: WorkingRows,
    parts_start: Ints,
    parts: Ints,
    order: str,
    inline: bool,
    is_complete: bool,
    capacity: int | None = None,
) -> Hag:
    """The hierarchy whose column num_sources + j stands for parts[parts_start[j] : parts_start[j + 1]].

    The rows of `work` are the outputs' rows over inputs and those columns.
    """
    csr = _joined(graph.num_nodes, work, parts_start, parts)
    found = hierarchy_csr(*csr, graph.num_nodes, graph.num_sources, inline, capacity=capacity)
    return Hag.of(graph, found, order, is_complete)


def _joined(num_nodes: int, work: WorkingRows, parts_start: Ints, parts: Ints) -> tuple[Ints, Ints]:
    """One CSR: the row of every node (its layers in turn), then that of every partial sum."""
    rows = work.rows
    length = np.bincount(work.node, rows.length[work.row], num_nodes).astype(np.int64)
    indptr = np.zeros(num_nodes + parts_start.size, np.int64)
    np.cumsum(length, out=indptr[1 : num_nodes + 1])
    indptr[num_nodes:] = indptr[num_nodes] + parts_start
    indices = np.empty(int(indptr[-1]), np.int32)
    _fill_outputs(work.row, rows.start, rows.length, rows.columns, indices)
    indices[indptr[num_nodes] :] = parts
    return indptr, indices


@compiled
def _fill_outputs(row_of_layer: Ints, start: Ints, length: Ints, columns: Ints, indices: Ints) -> None:
    at = 0  # layers are ordered by node, so they follow each other
    for row in row_of_layer:
        for j in range(start[row], start[row] + length[row]):
            indices[at] = columns[j]
            at += 1
