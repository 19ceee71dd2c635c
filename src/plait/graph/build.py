"""Kernels that turn an edge list into CSR by destination, transpose it, and read it once for facts."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from plait.errors import GraphError

__all__ = ["INT32_LIMIT", "EdgeScan", "index_dtype", "require_int32"]

Ints = NDArray[Any]

INT32_LIMIT = 2**31
"""Counts from here on do not fit the 32-bit indices the kernels prefer."""


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


class EdgeScan:
    """What one pass over an edge list tells: ranges and the order it is already in."""

    __slots__ = ("is_csr_order", "is_source_order", "max_dst", "max_src", "min_dst", "min_src")

    def __init__(self, facts: tuple[int, int, int, int, bool, bool]) -> None:
        self.min_src, self.max_src, self.min_dst, self.max_dst = (int(v) for v in facts[:4])
        self.is_csr_order, self.is_source_order = bool(facts[4]), bool(facts[5])


def scan(src: Ints, dst: Ints) -> EdgeScan:
    """One pass: smallest and largest of both ends; sorted by (dst, src)? sorted by src?"""
    return EdgeScan(_scan(src, dst))


@njit(cache=True, nogil=True)
def _scan(src: Ints, dst: Ints) -> tuple[int, int, int, int, bool, bool]:
    if src.size == 0:
        return 0, -1, 0, -1, True, True
    low_s = high_s = last_s = src[0]
    low_d = high_d = last_d = dst[0]
    by_dst = True
    by_src = True
    for e in range(src.size):
        s = src[e]
        d = dst[e]
        low_s = min(low_s, s)
        high_s = max(high_s, s)
        low_d = min(low_d, d)
        high_d = max(high_d, d)
        by_src &= s >= last_s
        by_dst &= (d > last_d) | ((d == last_d) & (s >= last_s))
        last_s = s
        last_d = d
    return low_s, high_s, low_d, high_d, by_dst, by_src


@njit(cache=True, nogil=True)
def count_rows(keys: Ints, indptr: Ints) -> None:
    """indptr (zeros, [rows + 1]) becomes the row pointers of `keys`."""
    for e in range(keys.size):
        indptr[keys[e] + 1] += 1
    for r in range(indptr.size - 1):
        indptr[r + 1] += indptr[r]


@njit(cache=True, nogil=True)
def stable_positions(keys: Ints, cursor: Ints, order: Ints) -> None:
    """order[p] = the edge at position p when edges are sorted stably by key; cursor starts as row starts."""
    for e in range(keys.size):
        k = keys[e]
        p = cursor[k]
        cursor[k] = p + 1
        order[p] = e


@njit(cache=True, nogil=True)
def stable_positions_via(keys: Ints, first: Ints, cursor: Ints, order: Ints) -> None:
    """As stable_positions, visiting the edges in the order `first`."""
    for i in range(first.size):
        e = first[i]
        k = keys[e]
        p = cursor[k]
        cursor[k] = p + 1
        order[p] = e


def build_csr(src: Ints, dst: Ints, num_nodes: int, num_sources: int) -> tuple[Ints, Ints, Ints | None]:
    """(indptr, indices, order): rows are destinations, sources ascend in a row, ties keep the caller's order.

    order[p] is the caller's number of the edge at position p; None when that is p everywhere.
    """
    dtype = index_dtype(max(num_nodes, num_sources), src.size)
    facts = scan(src, dst)
    indptr = np.zeros(num_nodes + 1, dtype)
    count_rows(dst, indptr)
    if facts.is_csr_order:
        return indptr, src.astype(dtype), None
    order = np.empty(src.size, dtype)
    if facts.is_source_order:
        stable_positions(dst, indptr[:-1].copy(), order)
    else:
        by_source = np.zeros(num_sources + 1, dtype)
        count_rows(src, by_source)
        first = np.empty(src.size, dtype)
        stable_positions(src, by_source[:-1].copy(), first)
        stable_positions_via(dst, first, indptr[:-1].copy(), order)
    return indptr, src[order].astype(dtype), order


@njit(cache=True, nogil=True)
def rows_are_sorted(indptr: Ints, indices: Ints) -> bool:
    """True when sources ascend (repeats allowed) inside every row."""
    for r in range(indptr.size - 1):
        for p in range(indptr[r] + 1, indptr[r + 1]):
            if indices[p] < indices[p - 1]:
                return False
    return True


@njit(cache=True, nogil=True)
def transpose_positions(indptr: Ints, indices: Ints, cursor: Ints, order: Ints, rows: Ints) -> None:
    """order[p] = the CSR position of transposed position p, rows[p] = its row; cursor starts as row starts.

    Rows are visited in ascending order, so every transposed row comes out ascending too.
    """
    for r in range(indptr.size - 1):
        for e in range(indptr[r], indptr[r + 1]):
            v = indices[e]
            p = cursor[v]
            cursor[v] = p + 1
            order[p] = e
            rows[p] = r


@njit(cache=True, nogil=True)
def matches_transpose(indptr: Ints, indices: Ints, cursor: Ints) -> bool:
    """True when A == A^T with multiplicities; cursor starts as row starts.

    Visiting rows in ascending order meets the entries of each transposed row in ascending order, so the
    r-th visit to v must find r at the cursor of row v: no transpose is written, the first mismatch ends it.
    """
    for r in range(indptr.size - 1):
        for e in range(indptr[r], indptr[r + 1]):
            v = indices[e]
            p = cursor[v]
            if p == indptr[v + 1] or indices[p] != r:
                return False
            cursor[v] = p + 1
    return True


@njit(cache=True, nogil=True)
def count_self_loops(indptr: Ints, indices: Ints) -> int:
    """Number of entries with row == source."""
    total = 0
    for r in range(indptr.size - 1):
        for p in range(indptr[r], indptr[r + 1]):
            total += indices[p] == r
    return total


@njit(cache=True, nogil=True)
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


@njit(cache=True, nogil=True)
def one_loop_per_row(
    indptr: Ints, indices: Ints, out_indptr: Ints, out_indices: Ints, out_order: Ints
) -> None:
    """CSR with exactly one loop per row; out_order is the old position, -1 for a loop that was not there.

    Of several loops on one node the last is kept: the one whose weight PyG keeps.
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
            if v > r and slot < 0:
                slot = q
                q += 1
            out_indices[q] = v
            out_order[q] = p
            q += 1
        if slot < 0:
            slot = q
            q += 1
        out_indices[slot] = r
        out_order[slot] = loop
        out_indptr[r + 1] = q
