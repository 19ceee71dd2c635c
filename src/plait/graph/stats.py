"""The numbers about a graph that the cost model reads: degrees, and how soon sources come back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

__all__ = ["GraphStats", "measure"]

Ints = NDArray[Any]

FIRST_WINDOW = 2**8
WINDOW_FACTOR = 4


@dataclass(frozen=True, slots=True)
class GraphStats:
    """Degrees of the rows and the footprint of the sources, in the order a row-by-row kernel reads them."""

    num_nodes: int
    num_sources: int
    num_edges: int
    degree_mean: float
    degree_max: int
    degree_quantiles: tuple[float, float, float]
    """p50, p90, p99 of the in-degrees."""
    skew: float
    """Coefficient of variation of the in-degrees: 0 for a regular graph."""
    num_empty_rows: int
    footprint: tuple[tuple[int, float], ...]
    """(window, mean number of distinct sources in `window` consecutive edges), windows ascending; the last
    window is the whole edge list."""

    @property
    def distinct_sources(self) -> int:
        """Number of sources that appear at least once."""
        return int(self.footprint[-1][1]) if self.footprint else 0

    def miss_rate(self, cache_rows: int) -> float:
        """Share of source reads that miss a least-recently-used cache of `cache_rows` rows.

        Working-set theory (Denning 1968): such a cache holds the last w edges' sources where
        footprint(w) = cache_rows, and a read misses when it enlarges the footprint, at rate footprint'(w).
        At least the compulsory misses distinct_sources / num_edges; falls as the cache grows.
        """
        if not self.num_edges:
            return 0.0
        floor = self.distinct_sources / self.num_edges
        rate = 1.0
        window, rows = 0, 0.0
        for next_window, next_rows in self.footprint:
            slope = (next_rows - rows) / (next_window - window)
            rate = max(floor, min(rate, slope))
            if next_rows > cache_rows:
                return rate
            window, rows = next_window, next_rows
        return floor


def measure(indptr: Ints, indices: Ints, num_sources: int) -> GraphStats:
    """The statistics of a CSR; one pass over the degrees and one over the edges."""
    degrees = np.diff(indptr)
    num_nodes, num_edges = degrees.size, indices.size
    mean = num_edges / num_nodes if num_nodes else 0.0
    spread = float(degrees.std()) if num_nodes else 0.0
    p50, p90, p99 = np.quantile(degrees, (0.5, 0.9, 0.99)) if num_nodes else (0.0, 0.0, 0.0)
    return GraphStats(
        num_nodes=num_nodes,
        num_sources=num_sources,
        num_edges=num_edges,
        degree_mean=mean,
        degree_max=int(degrees.max()) if num_nodes else 0,
        degree_quantiles=(float(p50), float(p90), float(p99)),
        skew=spread / mean if mean else 0.0,
        num_empty_rows=int(num_nodes - np.count_nonzero(degrees)),
        footprint=footprint(indices, num_sources),
    )


def footprint(indices: Ints, num_sources: int) -> tuple[tuple[int, float], ...]:
    """(window, mean distinct sources over all windows of that many consecutive edges), exactly.

    A source is missing from a window iff the window lies inside one of its gaps (before its first read,
    between two reads, after the last). A gap of g edges holds max(0, g - w + 1) windows of w edges, so
    footprint(w) = distinct - sum over gaps of max(0, g - w + 1) / (num_edges - w + 1)   (Xiang et al. 2013).
    """
    num_edges = indices.size
    if not num_edges:
        return ()
    windows = [FIRST_WINDOW]
    while windows[-1] * WINDOW_FACTOR < num_edges:
        windows.append(windows[-1] * WINDOW_FACTOR)
    windows = [w for w in windows if w < num_edges]
    counts = np.zeros(len(windows) + 1, np.int64)
    totals = np.zeros(len(windows) + 1, np.int64)
    distinct = _gaps(
        indices, np.full(num_sources, -1, np.int64), np.asarray(windows, np.int64), counts, totals
    )
    points = []
    for k, window in enumerate(windows):
        missing = totals[k + 1 :].sum() - (window - 1) * counts[k + 1 :].sum()
        points.append((window, float(distinct - missing / (num_edges - window + 1))))
    return (*points, (num_edges, float(distinct)))


@njit(cache=True, nogil=True)
def _gaps(indices: Ints, last: Ints, windows: Ints, counts: Ints, totals: Ints) -> int:
    """counts[k], totals[k]: number and summed length of the gaps that hold exactly the first k windows."""
    distinct = 0
    for e in range(indices.size):
        v = indices[e]
        gap = e - last[v] - 1
        distinct += last[v] < 0
        last[v] = e
        k = 0
        while k < windows.size and gap >= windows[k]:
            k += 1
        counts[k] += 1
        totals[k] += gap
    for v in range(last.size):
        if last[v] >= 0:
            gap = indices.size - last[v] - 1
            k = 0
            while k < windows.size and gap >= windows[k]:
                k += 1
            counts[k] += 1
            totals[k] += gap
    return distinct
