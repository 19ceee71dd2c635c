"""The numbers about a graph that the cost model reads: degrees, and how soon sources are read again."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.graph.compiled import compiled

__all__ = ["GraphStats", "measure", "miss_curve"]

Ints = NDArray[Any]

# The smallest window of the footprint, 2**8 edges; they double from there. With a factor of 4 the slope
# between two windows was up to 0.19 off the miss rate of a simulated cache on a random graph, with 2 0.05.
FIRST_WINDOW_BITS = 8
# Edges whose exact reuse distance is computed (about 50 ns each); longer lists are sampled by source.
SAMPLED_EDGES = 2**18
SMALLEST_CACHE = 2**4


@dataclass(frozen=True, slots=True)
class GraphStats:
    """Degrees of the rows and the locality of the sources, in the order a row-by-row kernel reads them."""

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
    window is the whole edge list, and may be the only one. Empty without edges.

    A source is missing from a window iff the window lies inside one of its gaps (before its first read,
    between two reads, after the last). A gap of g edges holds max(0, g - w + 1) windows of w edges, so
    footprint(w) = distinct - sum over gaps of max(0, g - w + 1) / (num_edges - w + 1)   (Xiang et al. 2013).
    """
    miss_curve: tuple[tuple[int, float], ...] = ()
    """(cache rows, share of source reads that miss such a cache), rows ascending; empty: not measured."""

    @property
    def distinct_sources(self) -> int:
        """Number of sources that appear at least once."""
        return int(self.footprint[-1][1]) if self.footprint else 0

    def miss_rate(self, cache_rows: int) -> float:
        """Share of source reads that miss a least-recently-used cache of `cache_rows` rows, in 0 .. 1.

        At least the compulsory misses distinct_sources / num_edges, and never rising with cache_rows. Read
        off miss_curve; without one, off the footprint by working-set theory (Denning 1968): the cache
        holds the sources of the last w edges where footprint(w) = cache_rows, and a read misses when it
        enlarges the footprint, at rate footprint'(w). The theory assumes that all stretches of the edge list
        are alike, which does not hold for web graphs (16,384 rows on web_cnr2000: 0.08 where the truth is
        0.29).
        """
        if not self.num_edges:
            return 0.0
        floor = self.distinct_sources / self.num_edges
        if cache_rows >= self.distinct_sources:
            return floor
        curve = self.miss_curve or _footprint_slopes(self.footprint)
        return max(floor, _interpolate(curve, max(cache_rows, 0)))


def measure(indptr: Ints, indices: Ints, num_sources: int) -> GraphStats:
    """The statistics of a CSR; misses are measured, so its footprint is that of the whole list alone."""
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
        footprint=((num_edges, float(np.count_nonzero(np.bincount(indices)))),) if num_edges else (),
        miss_curve=miss_curve(indices, num_sources),
    )


def miss_curve(indices: Ints, num_sources: int) -> tuple[tuple[int, float], ...]:
    """(rows, share of reads that miss) for least-recently-used caches of 16, 32, ... rows.

    Exact up to SAMPLED_EDGES edges. Beyond, one source in 2**bits is followed and distances are scaled by
    2**bits (SHARDS, Waldspurger et al. 2015): within 0.02 of the exact curve on the real graphs tried. A hub
    that was not drawn counts as a hit, which is what a hub is.
    """
    if not indices.size:
        return ()
    bits = max(0, int(np.ceil(np.log2(indices.size / SAMPLED_EDGES))))
    reads = _followed(indices, bits)
    rows = [max(SMALLEST_CACHE, 2**bits)]
    while rows[-1] < num_sources:
        rows.append(2 * rows[-1])
    limits = np.asarray(rows, np.int64) >> bits
    last, tree = np.full(num_sources, -1, np.int32), np.zeros(reads.size + 1, np.int32)
    hits_within = np.zeros(limits.size + 1, np.int64)
    _reuse_distances(reads, last, tree, limits, hits_within)
    misses = reads.size - np.cumsum(hits_within)[:-1]
    rates = np.minimum(1.0, misses * 2.0**bits / indices.size)
    return tuple((size, float(rate)) for size, rate in zip(rows, rates, strict=True))


def _footprint_slopes(points: tuple[tuple[int, float], ...]) -> list[tuple[float, float]]:
    """(footprint, its slope there), slopes made non-increasing; taken at the middle of every segment."""
    curve: list[tuple[float, float]] = []
    window, rows, rate = 1.0, 1.0, 1.0
    for next_window, next_rows in points:
        if next_window > window:
            rate = min(rate, (next_rows - rows) / (next_window - window))
            curve.append(((rows + next_rows) / 2, rate))
        window, rows = next_window, next_rows
    return curve or [(1.0, 1.0)]


def _interpolate(curve: Any, rows: float) -> float:
    """The rate at `rows`, straight lines between the points, from (0, 1) on and level after the last."""
    k = bisect_left(curve, (rows, 0.0))
    if k == len(curve):
        return float(curve[-1][1])
    low_rows, low_rate = curve[k - 1] if k else (0.0, 1.0)
    high_rows, high_rate = curve[k]
    share = (rows - low_rows) / (high_rows - low_rows)
    return float(low_rate + share * (high_rate - low_rate))


def _followed(indices: Ints, bits: int) -> Ints:
    """The reads of the sources whose hash starts with `bits` zeros, in order."""
    if not bits:
        return indices
    reads = np.empty(_count_followed(indices, bits), indices.dtype)
    _copy_followed(indices, bits, reads)
    return reads


@compiled
def _is_followed(v: int, bits: int) -> bool:
    # Knuth's multiplicative hash: it spreads the chosen ones evenly over neighbouring node numbers
    return bool(((np.uint64(v) * np.uint64(2654435769)) & np.uint64(0xFFFFFFFF)) >> np.uint64(32 - bits) == 0)


@compiled
def _count_followed(indices: Ints, bits: int) -> int:
    total = 0
    for e in range(indices.size):
        total += _is_followed(indices[e], bits)
    return total


@compiled
def _copy_followed(indices: Ints, bits: int, reads: Ints) -> None:
    q = 0
    for e in range(indices.size):
        if _is_followed(indices[e], bits):
            reads[q] = indices[e]
            q += 1


@compiled
def _reuse_distances(reads: Ints, last: Ints, tree: Ints, limits: Ints, hits_within: Ints) -> None:
    """hits_within[k]: reads whose distance (distinct sources since the last read of the same) is below
    limits[k] but not below limits[k - 1].

    tree is a Fenwick tree over positions with a one at every source's latest read.
    """
    for e in range(reads.size):
        v = reads[e]
        if last[v] >= 0:
            distance = 0
            i = e
            j = last[v] + 1
            while i > j:
                distance += tree[i]
                i &= i - 1
            while j > i:
                distance -= tree[j]
                j &= j - 1
            k = 0
            while k < limits.size and distance >= limits[k]:
                k += 1
            hits_within[k] += 1
            i = last[v] + 1
            while i < tree.size:
                tree[i] -= 1
                i += i & -i
        last[v] = e
        i = e + 1
        while i < tree.size:
            tree[i] += 1
            i += i & -i
