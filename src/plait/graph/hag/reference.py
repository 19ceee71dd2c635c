"""What a schedule means, run slowly: the specification of every executor."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from plait.errors import InputError

if TYPE_CHECKING:
    from plait.graph.csr import Graph
    from plait.graph.hag.schedule import Schedule

__all__ = ["aggregate", "run"]

_REDUCE: dict[str, Callable[..., Any]] = {"sum": np.sum, "max": np.max, "min": np.min}


def aggregate(graph: Graph, x: NDArray[Any], reduce: str = "sum") -> NDArray[Any]:
    """out[v] = reduce of x[u] over the neighbours u of v, zeros where v has none; [num_nodes, width]."""
    out = np.zeros((graph.num_nodes, x.shape[1]), x.dtype)
    for v in range(graph.num_nodes):
        neighbours = graph.indices[graph.indptr[v] : graph.indptr[v + 1]]
        if neighbours.size:
            out[v] = _REDUCE[reduce](x[neighbours], axis=0)
    return out


def run(schedule: Schedule, x: NDArray[Any], reduce: str = "sum") -> NDArray[Any]:
    """The output of every node after all steps; buffers start as NaN, so a row read too early shows."""
    if reduce not in _REDUCE:
        raise InputError(f"reduce={reduce!r} is unknown; choose one of {', '.join(_REDUCE)}")
    if reduce != "sum" and schedule.subtracted is not None:
        raise InputError(f"reduce={reduce!r}: a schedule of differences computes sums only; use another form")
    out = np.full((schedule.num_nodes, x.shape[1]), np.nan, x.dtype)
    rows = np.full((schedule.num_rows, x.shape[1]), np.nan, x.dtype)
    rows[: schedule.num_sources] = x
    for tile in range(schedule.num_tiles):
        rows[schedule.num_sources + schedule.num_shared :] = np.nan
        for step in range(schedule.tiles[tile], schedule.tiles[tile + 1]):
            value = _reduced(schedule, step, rows, reduce)
            if schedule.node[step] >= 0:
                out[schedule.node[step]] = value
            if schedule.buffer[step] >= 0:
                rows[schedule.buffer[step]] = value
    return out


def _reduced(schedule: Schedule, step: int, rows: NDArray[Any], reduce: str) -> NDArray[Any]:
    start, stop = schedule.start[step], schedule.start[step + 1]
    if start == stop:
        return np.zeros(rows.shape[1], rows.dtype)
    values = rows[schedule.operands[start:stop]]
    if schedule.subtracted is not None:
        values[schedule.subtracted[step] - start :] *= -1
    result: NDArray[Any] = _REDUCE[reduce](values, axis=0)
    return result
