"""Partial sums inlined, dropped and numbered: what every search does with its raw result."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.graph.compiled import compiled

__all__ = ["hierarchy_csr", "levels_of"]

Ints = NDArray[Any]


def hierarchy_csr(
    indptr: Ints,
    indices: Ints,
    num_nodes: int,
    num_sources: int,
    inline: bool,
    capacity: int | None = None,
) -> tuple[Ints, Ints, Ints]:
    """(indptr, indices, level) with single-use nodes inlined, unread ones dropped, the rest by level.

    A node reads only nodes of smaller number. Where more are left than `capacity`, those with most readers
    stay. Rows are sorted.
    """
    num_sums = indptr.size - 1 - num_nodes
    uses = np.zeros(num_sums, np.int64)
    _count_uses(indptr, indices, num_nodes, num_sources, uses)
    is_kept = uses > (1 if inline else 0)
    if capacity is not None and np.count_nonzero(is_kept) > capacity:
        most_read = np.argsort(np.where(is_kept, -uses, 0), kind="stable")[:capacity]
        is_kept = np.zeros(num_sums, bool)
        is_kept[most_read] = True
    length = np.zeros(num_nodes + num_sums, np.int64)
    level = np.zeros(num_sums, np.int32)
    _measure(indptr, indices, num_nodes, num_sources, is_kept, length, level)
    kept = np.flatnonzero(is_kept)
    kept = kept[np.argsort(level[kept], kind="stable")]
    number = np.full(num_sums, -1, np.int32)
    number[kept] = np.arange(kept.size, dtype=np.int32)
    row_of = np.concatenate((np.arange(num_nodes), num_nodes + kept))
    new_indptr = np.zeros(row_of.size + 1, np.int64)
    np.cumsum(length[row_of], out=new_indptr[1:])
    new_indices = np.empty(int(new_indptr[-1]), np.int32)
    _write(indptr, indices, num_nodes, num_sources, row_of, number, new_indptr, new_indices)
    _sort_rows(new_indptr, new_indices)
    return new_indptr, new_indices, level[kept]


def levels_of(indptr: Ints, indices: Ints, num_nodes: int, num_sources: int) -> Ints:
    """Level of every aggregation node: one more than the highest it reads, inputs being 0.

    A node must have a larger number than those it reads; where it has not, its level is 0.
    """
    level = np.zeros(indptr.size - 1 - num_nodes, np.int32)
    _fill_levels(indptr, indices, num_nodes, num_sources, level)
    return level


@compiled
def _fill_levels(indptr: Ints, indices: Ints, num_nodes: int, num_sources: int, level: Ints) -> None:
    for j in range(level.size):
        highest = 0
        for e in range(indptr[num_nodes + j], indptr[num_nodes + j + 1]):
            child = indices[e] - num_sources
            if child >= j:
                highest = -1
                break
            if child >= 0:
                highest = max(highest, level[child])
        level[j] = highest + 1


@compiled
def _count_uses(indptr: Ints, indices: Ints, num_nodes: int, num_sources: int, uses: Ints) -> None:
    """Readers of every partial sum; what an unread one reads does not count."""
    for e in range(indptr[num_nodes]):
        if indices[e] >= num_sources:
            uses[indices[e] - num_sources] += 1
    for j in range(uses.size - 1, -1, -1):
        if uses[j] == 0:
            continue
        for e in range(indptr[num_nodes + j], indptr[num_nodes + j + 1]):
            if indices[e] >= num_sources:
                uses[indices[e] - num_sources] += 1


@compiled
def _measure(
    indptr: Ints, indices: Ints, num_nodes: int, num_sources: int, is_kept: Ints, length: Ints, level: Ints
) -> None:
    """Row lengths and levels after inlining, partial sums first: what they read is done by then."""
    for i in range(length.size):
        row = (num_nodes + i) % length.size
        highest = 0
        total = 0
        for e in range(indptr[row], indptr[row + 1]):
            child = indices[e] - num_sources
            if child < 0:
                total += 1
            elif is_kept[child]:
                total += 1
                highest = max(highest, level[child])
            else:  # its row stands in for it: its level is one above what it reads
                total += length[num_nodes + child]
                highest = max(highest, level[child] - 1)
        length[row] = total
        if row >= num_nodes:
            level[row - num_nodes] = highest + 1


@compiled
def _write(
    indptr: Ints, indices: Ints, num_nodes: int, num_sources: int, row_of: Ints, number: Ints,
    new_indptr: Ints, new_indices: Ints,
) -> None:  # fmt: skip
    """Write every kept row from left to right; an inlined child's row is written in its place."""
    depth = 64
    position = np.empty(depth, np.int64)
    stop = np.empty(depth, np.int64)
    for new_row in range(row_of.size):
        at = new_indptr[new_row]
        position[0], stop[0] = indptr[row_of[new_row]], indptr[row_of[new_row] + 1]
        top = 0
        while top >= 0:
            if position[top] == stop[top]:
                top -= 1
                continue
            column = indices[position[top]]
            position[top] += 1
            child = column - num_sources
            if child < 0:
                new_indices[at] = column
                at += 1
            elif number[child] >= 0:
                new_indices[at] = num_sources + number[child]
                at += 1
            else:
                top += 1
                if top == position.size:
                    position = np.concatenate((position, np.empty_like(position)))
                    stop = np.concatenate((stop, np.empty_like(stop)))
                position[top], stop[top] = indptr[num_nodes + child], indptr[num_nodes + child + 1]


@compiled
def _sort_rows(indptr: Ints, indices: Ints) -> None:
    for row in range(indptr.size - 1):
        start, stop = indptr[row], indptr[row + 1]
        for j in range(start + 1, stop):
            if indices[j - 1] > indices[j]:
                indices[start:stop] = np.sort(indices[start:stop])
                break
