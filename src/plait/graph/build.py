"""Kernels that turn an edge list into CSR by destination, transpose it, and edit its self loops."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from plait.errors import GraphError
from plait.graph.compiled import compiled

__all__ = [
    "INT32_LIMIT", "EdgeScan", "build_both", "build_csr", "index_dtype", "require_int32", "scan",
    "transpose_csr",
]  # fmt: skip

Ints = NDArray[Any]

INT32_LIMIT = 2**31
"""Counts from here on do not fit the 32-bit indices the kernels prefer."""

# 10 M random edges over 1 M nodes: 2**7 and 2**8 buckets within 4 %, 2**9 already 25 % slower (more write
# heads than the first-level TLB and cache hold), 2**5 15 % slower (a bucket outgrows the second-level cache).
BUCKET_BITS = 8
# Below this many edges a thread costs more than it saves; above four, memory bandwidth is what is left.
EDGES_PER_THREAD = 2**19
MAX_THREADS = 4
# Up to this many edges and nodes one kernel call without buckets is faster: 0.6 of the time at 400,000 edges,
# 1.5 at a million, when rows no longer stay in cache.
FEW = 2**19


def index_dtype(num_nodes: int, num_edges: int) -> np.dtype[Any]:
    """int32 when node numbers and edge positions (0 .. num_edges inclusive) fit it, else int64."""
    fits = num_nodes < INT32_LIMIT and num_edges < INT32_LIMIT
    return np.dtype(np.int32 if fits else np.int64)


def require_int32(num_nodes: int, num_edges: int, path: str) -> None:
    """Raise GraphError when a graph of this size is handed to `path`, which indexes with 32 bits."""
    if index_dtype(num_nodes, num_edges) != np.int32:
        raise GraphError(
            f"{path}: {num_nodes:,} nodes and {num_edges:,} edges do not fit 32-bit indices "
            f"(limit {INT32_LIMIT - 1:,}); use a 64-bit path, or partition the graph first"
        )


@dataclass(frozen=True, slots=True)
class EdgeScan:
    """What one pass over an edge list tells: ranges of both ends, the order it is already in, its loops."""

    min_src: int
    max_src: int
    min_dst: int
    max_dst: int
    is_csr_order: bool
    """Sorted by (dst, src): already the CSR by destination."""
    is_source_order: bool
    """Sorted by src, as PyG's coalesce leaves it: one stable pass by dst is enough."""
    num_loops: int = 0


def scan(src: Ints, dst: Ints) -> EdgeScan:
    """The ranges and the order of an edge list; an empty one has maxima of -1."""
    if not src.size:
        return EdgeScan(0, -1, 0, -1, True, True)
    low_src, high_src, low_dst, high_dst, by_dst, by_src, loops = _scan(src, dst)
    ranges = int(low_src), int(high_src), int(low_dst), int(high_dst)
    return EdgeScan(*ranges, bool(by_dst), bool(by_src), int(loops))


def build_csr(
    src: Ints, dst: Ints, num_nodes: int, num_sources: int, facts: EdgeScan, dtype: Any = None, parts: int = 0
) -> tuple[Ints, Ints, Ints | None]:
    """(indptr, indices, order): rows are destinations, sources ascend in a row, ties keep the caller's order.

    order[p] is the caller's number of the edge at position p; None when that is p everywhere. The ends must
    be in range (`facts` tells). Two stable sorts, by source and then by destination; the first is skipped
    when the list is in source order, both when it is in CSR order.
    """
    dtype = dtype or index_dtype(max(num_nodes, num_sources), src.size)
    if facts.is_csr_order:
        indptr = np.zeros(num_nodes + 1, dtype)
        count_rows(dst, indptr)
        return indptr, src.astype(dtype), None
    if not parts and max(src.size, num_nodes, num_sources) <= FEW:
        return _few_to_csr(src, dst, num_nodes, num_sources, facts.is_source_order, dtype)
    parts = parts or _threads(src.size)
    near, out = _columns(src.size, dtype), _columns(src.size, dtype)
    ids = None
    if not facts.is_source_order:
        _stable_sort(src, dst, None, num_sources, near, out, parts)
        src, dst, ids = out
    indptr = _stable_sort(dst, src, ids, num_nodes, near, out._replace(keys=out.keys[:0]), parts)
    return indptr, out.others, out.ids


def build_both(source: Ints, pointer: Ints, num_nodes: int) -> tuple[Ints, ...]:
    """(indptr, indices, order) of a square graph and the same of its transpose, as `transpose_csr` gives it.

    The edges come target by target: those of v have the sources source[pointer[v] : pointer[v + 1]], in any
    order; targets from pointer.size - 1 on have none. Sorting by source gives the transpose, sorting that by
    target gives rows with ascending sources.
    """
    size, dtype = source.size, index_dtype(num_nodes, source.size)
    indptr, turned_indptr = np.empty((2, num_nodes + 1), dtype)
    indices, order, turned_indices, turned_order = np.empty((4, size), dtype)
    made = (indptr, indices, order, turned_indptr, turned_indices, turned_order)
    _both(source, pointer, *made, np.empty(num_nodes, dtype))
    return made


def _few_to_csr(
    src: Ints, dst: Ints, num_nodes: int, num_sources: int, is_source_order: bool, dtype: Any
) -> tuple[Ints, Ints, Ints]:
    indptr = np.empty(num_nodes + 1, dtype)
    indices, order = np.empty((2, src.size), dtype)
    cursor = np.empty(max(num_nodes, num_sources) + 1, dtype)
    by_source = np.empty(0 if is_source_order else src.size, dtype)
    _few(src, dst, num_sources, is_source_order, cursor, by_source, indptr, indices, order)
    return indptr, indices, order


def transpose_csr(indptr: Ints, indices: Ints, num_sources: int, parts: int = 0) -> tuple[Ints, Ints, Ints]:
    """(indptr, indices, order) of the transpose; order[p] is the position here of its entry p.

    Entries are visited by ascending row, so one stable sort by source leaves every transposed row sorted.
    """
    size, dtype = indices.size, indices.dtype
    if not parts and max(size, indptr.size, num_sources) <= FEW:
        turned, cursor = np.empty(num_sources + 1, dtype), np.empty(num_sources, dtype)
        rows, order = np.empty((2, size), dtype)
        _turn(indptr, indices, turned, rows, order, cursor)
        return turned, rows, order
    edge_rows = np.repeat(np.arange(indptr.size - 1, dtype=dtype), np.diff(indptr))
    near, out = _columns(size, dtype), _columns(size, dtype)
    out = out._replace(keys=out.keys[:0])
    indptr = _stable_sort(indices, edge_rows, None, num_sources, near, out, parts or _threads(size))
    return indptr, out.others, out.ids


class Columns(NamedTuple):
    """Edges on their way: the end they are sorted by, the other end, the caller's number."""

    keys: Ints
    others: Ints
    ids: Ints


def _columns(size: int, dtype: Any) -> Columns:
    return Columns(np.empty(size, dtype), np.empty(size, dtype), np.empty(size, dtype))


def _stable_sort(
    keys: Ints, others: Ints, ids: Ints | None, num_keys: int, near: Columns, out: Columns, parts: int
) -> Ints:
    """The row pointers of `out`, filled with the edges sorted stably by key; ids None stands for 0, 1, 2, ...

    First into at most 2**BUCKET_BITS buckets of consecutive keys (`near`), so that writes have few heads,
    then inside each bucket, where everything is in cache. Threads own ranges of edges, then of buckets; each
    knows where its output starts, so the result does not depend on their number. `out` may be the input:
    it is written when everything is in `near`. An empty out.keys is left alone.
    """
    size = keys.size
    shift = max(int(num_keys - 1).bit_length() - BUCKET_BITS, 0)
    buckets = (max(num_keys, 1) - 1 >> shift) + 1
    cuts = [size * part // parts for part in range(parts + 1)]
    counts = np.zeros((parts, buckets), np.int64)
    _each(parts, lambda part: _count(keys[cuts[part] : cuts[part + 1]], shift, counts[part]))
    starts = np.zeros(buckets + 1, np.int64)
    np.cumsum(counts.sum(axis=0), out=starts[1:])
    heads = starts[:-1] + np.cumsum(counts, axis=0) - counts
    _each(
        parts,
        lambda part: _to_buckets(keys, others, ids, shift, heads[part], cuts[part], cuts[part + 1], near),
    )
    indptr = np.zeros(num_keys + 1, near.keys.dtype)
    shares = np.searchsorted(starts, cuts)
    shares[0], shares[-1] = 0, buckets
    _each(
        parts, lambda part: _inside_buckets(near, shift, starts, shares[part], shares[part + 1], indptr, out)
    )
    return indptr


def _threads(num_edges: int) -> int:
    """How many threads to give a pass over this many edges."""
    return max(1, min(MAX_THREADS, os.cpu_count() or 1, num_edges // EDGES_PER_THREAD))


def _each(parts: int, work: Callable[[int], None]) -> None:
    """work(0), ..., work(parts - 1), at once when there are several."""
    if parts == 1:
        return work(0)
    with ThreadPoolExecutor(parts) as pool:
        for done in [pool.submit(work, part) for part in range(parts)]:
            done.result()
    return None


@compiled
def _scan(src: Ints, dst: Ints) -> tuple[int, int, int, int, bool, bool, int]:
    low_s = high_s = src[0]
    low_d = high_d = dst[0]
    by_dst = True
    by_src = True
    loops = int(low_s == low_d)
    for e in range(1, src.size):
        s = src[e]
        d = dst[e]
        loops += s == d
        low_s = min(low_s, s)
        high_s = max(high_s, s)
        low_d = min(low_d, d)
        high_d = max(high_d, d)
        by_src &= s >= src[e - 1]
        by_dst &= (d > dst[e - 1]) | ((d == dst[e - 1]) & (s >= src[e - 1]))
    return low_s, high_s, low_d, high_d, by_dst, by_src, loops


@compiled
def _count(keys: Ints, shift: int, counts: Ints) -> None:
    for e in range(keys.size):
        counts[keys[e] >> shift] += 1


@compiled
def _to_buckets(
    keys: Ints, others: Ints, ids: Ints | None, shift: int, heads: Ints, begin: int, end: int, near: Columns
) -> None:
    for e in range(begin, end):
        k = keys[e]
        p = heads[k >> shift]
        heads[k >> shift] = p + 1
        near.keys[p] = k
        near.others[p] = others[e]
        near.ids[p] = e if ids is None else ids[e]


@compiled
def _inside_buckets(
    near: Columns, shift: int, starts: Ints, first: int, last: int, indptr: Ints, out: Columns
) -> None:
    """Sort the buckets first .. last - 1 and write their row pointers."""
    cursor = np.empty(1 << shift, np.int64)
    for b in range(first, last):
        base = b << shift
        width = min(cursor.size, indptr.size - 1 - base)
        cursor[:width] = 0
        for i in range(starts[b], starts[b + 1]):
            cursor[near.keys[i] - base] += 1
        total = starts[b]
        for k in range(width):
            count = cursor[k]
            cursor[k] = total
            total += count
            indptr[base + k + 1] = total
        for i in range(starts[b], starts[b + 1]):
            k = near.keys[i]
            p = cursor[k - base]
            cursor[k - base] = p + 1
            if out.keys.size:
                out.keys[p] = k
            out.others[p] = near.others[i]
            out.ids[p] = near.ids[i]


@compiled
def _starts(keys: Ints, indptr: Ints, cursor: Ints) -> None:
    """Row pointers of `keys`, and a copy of the row starts to write from."""
    indptr[:] = 0
    for e in range(keys.size):
        indptr[keys[e] + 1] += 1
    for r in range(indptr.size - 1):
        cursor[r] = indptr[r]
        indptr[r + 1] += indptr[r]


@compiled
def _turn(pointer: Ints, source: Ints, indptr: Ints, indices: Ints, order: Ints, cursor: Ints) -> None:
    """The transpose of rows `pointer` of `source`; order tells where an entry was."""
    _starts(source, indptr, cursor)
    for v in range(pointer.size - 1):
        for e in range(pointer[v], pointer[v + 1]):
            u = source[e]
            p = cursor[u]
            cursor[u] = p + 1
            indices[p] = v
            order[p] = e


@compiled
def _both(
    source: Ints, pointer: Ints, indptr: Ints, indices: Ints, order: Ints,
    turned_indptr: Ints, turned_indices: Ints, turned_order: Ints, cursor: Ints,
) -> None:  # fmt: skip
    """See `build_both`."""
    _turn(pointer, source, turned_indptr, turned_indices, turned_order, cursor)
    targets = pointer.size - 1
    indptr[0] = 0
    for v in range(indptr.size - 1):
        cursor[v] = indptr[v]
        indptr[v + 1] = pointer[min(v + 1, targets)]
    for u in range(turned_indptr.size - 1):
        for p in range(turned_indptr[u], turned_indptr[u + 1]):
            v = turned_indices[p]
            q = cursor[v]
            cursor[v] = q + 1
            indices[q] = u
            order[q] = turned_order[p]
            turned_order[p] = q


@compiled
def _few(
    src: Ints, dst: Ints, num_sources: int, is_source_order: bool, cursor: Ints, by_source: Ints,
    indptr: Ints, indices: Ints, order: Ints,
) -> None:  # fmt: skip
    """Two stable counting sorts, by source (skipped in source order) and by destination."""
    if not is_source_order:
        cursor[: num_sources + 1] = 0
        for e in range(src.size):
            cursor[src[e] + 1] += 1
        for u in range(num_sources):
            cursor[u + 1] += cursor[u]
        for e in range(src.size):
            u = src[e]
            by_source[cursor[u]] = e
            cursor[u] += 1
    _starts(dst, indptr, cursor)
    for i in range(src.size):
        e = i if is_source_order else by_source[i]
        p = cursor[dst[e]]
        cursor[dst[e]] = p + 1
        indices[p] = src[e]
        order[p] = e


@compiled
def count_rows(keys: Ints, indptr: Ints) -> None:
    """indptr (zeros, [rows + 1]) becomes the row pointers of `keys`."""
    for e in range(keys.size):
        indptr[keys[e] + 1] += 1
    for r in range(indptr.size - 1):
        indptr[r + 1] += indptr[r]


@compiled
def rows_are_sorted(indptr: Ints, indices: Ints) -> bool:
    """True when sources ascend (repeats allowed) inside every row."""
    for r in range(indptr.size - 1):
        for p in range(indptr[r] + 1, indptr[r + 1]):
            if indices[p] < indices[p - 1]:
                return False
    return True


@compiled
def matches_transpose(indptr: Ints, indices: Ints, cursor: Ints) -> bool:
    """True when A == A^T with multiplicities; cursor starts as the row starts.

    Visiting rows in ascending order meets the entries of each transposed row in ascending order, so a visit
    to v from row r must find r at the cursor of row v: nothing is written, and the first mismatch ends it.
    """
    for r in range(indptr.size - 1):
        for e in range(indptr[r], indptr[r + 1]):
            v = indices[e]
            p = cursor[v]
            if p == indptr[v + 1] or indices[p] != r:
                return False
            cursor[v] = p + 1
    return True


@compiled
def count_self_loops(indptr: Ints, indices: Ints) -> int:
    """Number of entries with row == source."""
    total = 0
    for r in range(indptr.size - 1):
        for p in range(indptr[r], indptr[r + 1]):
            total += indices[p] == r
    return total


@compiled
def drop_self_loops(
    indptr: Ints, indices: Ints, out_indptr: Ints, out_indices: Ints, out_order: Ints
) -> None:
    """CSR without loops; out_order[q] = the position the entry q had before."""
    q = 0
    for r in range(indptr.size - 1):
        for p in range(indptr[r], indptr[r + 1]):
            if indices[p] != r:
                out_indices[q] = indices[p]
                out_order[q] = p
                q += 1
        out_indptr[r + 1] = q


@compiled
def one_loop_per_row(
    indptr: Ints, indices: Ints, out_indptr: Ints, out_indices: Ints, out_order: Ints, num_loops: int
) -> None:
    """CSR with exactly one loop in each of the first `num_loops` rows and none in the others.

    out_order is the old position, -1 for a loop that was not there. Of several loops on one node the last is
    kept: the one whose weight PyG keeps.
    """
    q = 0
    for r in range(indptr.size - 1):
        loop = -1
        slot = -1
        for p in range(indptr[r], indptr[r + 1]):
            v = indices[p]
            if v == r:
                loop = p
                continue
            if v > r and slot < 0 and r < num_loops:
                slot = q
                q += 1
            out_indices[q] = v
            out_order[q] = p
            q += 1
        if r < num_loops:
            if slot < 0:
                slot = q
                q += 1
            out_indices[slot] = r
            out_order[slot] = loop
        out_indptr[r + 1] = q
