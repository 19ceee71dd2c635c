"""Nodes with equal neighbours: their sum is computed once and copied."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from plait.graph.hag.assemble import assemble
from plait.graph.hag.hierarchy import Hag
from plait.graph.hag.rows import Rows, working_rows

if TYPE_CHECKING:
    from plait.graph.csr import Graph

__all__ = ["merge_equal_rows"]


def merge_equal_rows(graph: Graph) -> Hag:
    """The hierarchy with one partial sum per list of neighbours that several nodes have, if that pays.

    k equal rows of d entries read k*d rows and write k; merged they read d + k and write k + 1.
    """
    graph.require_int32("hag.merge_equal_rows")
    work = working_rows(graph.indptr, graph.indices)
    start, length, columns, weight = work.rows
    is_merged = (weight.astype(np.int64) - 1) * (length.astype(np.int64) - 1) > 2
    merged = np.flatnonzero(is_merged)
    parts_start = np.zeros(merged.size + 1, np.int64)
    np.cumsum(length[merged], out=parts_start[1:])
    inside = np.arange(int(parts_start[-1])) - np.repeat(parts_start[:-1], length[merged])
    parts = columns[np.repeat(start[merged], length[merged]) + inside]
    columns, length = columns.copy(), np.where(is_merged, 1, length).astype(np.int32)
    columns[start[merged]] = graph.num_sources + np.arange(merged.size, dtype=np.int32)
    shorter = work._replace(rows=Rows(start, length, columns, weight))
    return assemble(graph, shorter, parts_start, parts, "set", inline=False, is_complete=True)
