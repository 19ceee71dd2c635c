"""Ordered aggregation: neighbour lists with a common prefix share it (a trie of the lists).

Every distinct prefix is computed once, which is the fewest steps an ordered aggregator can take. A prefix
becomes an aggregation node where lists part or end; the elements between two such places are one row.
Recurrent aggregators run the tree by length instead (`prefix_levels`): all prefixes of k elements at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from plait.graph.compiled import compiled
from plait.graph.hag.assemble import plain
from plait.graph.hag.hierarchy import Hag, sequence_indices
from plait.graph.hag.numbering import hierarchy_csr

if TYPE_CHECKING:
    from plait.graph.csr import Graph

__all__ = ["PrefixLevels", "prefix_levels", "share_prefixes"]

Ints = NDArray[Any]


def share_prefixes(graph: Graph, capacity: int, max_depth: int) -> Hag:
    """The hierarchy of shared prefixes; the neighbours' order is that of the caller's edges.

    With a capacity the prefixes that save most steps are kept: (readers - 1) * elements each.
    """
    indptr, indices = graph.indptr.astype(np.int64), sequence_indices(graph)
    if capacity == 0 or max_depth == 0 or graph.num_edges == 0:
        return plain(graph, "sequence", indices)
    order = _sorted_rows(indptr, indices)
    num_prefixes, depth, parent, row, row_parent = _prefix_tree(order, indptr, indices)
    depth, parent, row = depth[:num_prefixes], parent[:num_prefixes], row[:num_prefixes]
    by_depth = np.argsort(depth, kind="stable")  # a prefix is read only by longer ones
    number = np.full(num_prefixes + 1, -1, np.int32)  # the last entry answers for "no parent", -1
    number[by_depth] = np.arange(num_prefixes, dtype=np.int32)
    depth, parent, row = depth[by_depth], number[parent[by_depth]], row[by_depth]
    row_parent = number[row_parent]
    csr = _tree_csr(graph, indptr, indices, depth, parent, row, row_parent)
    is_kept = _chosen(depth, parent, row_parent, capacity, max_depth)
    found = hierarchy_csr(
        *csr, graph.num_nodes, graph.num_sources, inline=False, keep_order=True, is_kept=is_kept
    )
    return Hag.of(graph, found, "sequence")


@dataclass(frozen=True, eq=False)
class PrefixLevels:
    """The distinct prefixes of all lists by length, every list padded at its end to the longest one's length.

    The prefixes of length k + 1 are start[k] : start[k + 1]. Prefix p extends prefix parent[p] (counted from
    the first of that length) by column[p]; num_sources stands for the padding. Row v's whole list is prefix
    last[v] of the longest length.
    """

    num_nodes: int
    num_sources: int
    start: Ints  # int64 [length + 1]
    parent: Ints  # int32 [num_steps]
    column: Ints  # int32 [num_steps]
    last: Ints  # int64 [num_nodes]

    @property
    def length(self) -> int:
        """Elements of the longest list."""
        return int(self.start.size - 1)

    @property
    def num_steps(self) -> int:
        """Elements taken in when every distinct prefix is computed once."""
        return int(self.start[-1])

    @property
    def plain_steps(self) -> int:
        """Elements taken in when every row is run alone."""
        return self.num_nodes * self.length


def prefix_levels(graph: Graph) -> PrefixLevels:
    """The distinct prefixes of the neighbour lists, in the order of the caller's edges, by length."""
    indptr, indices = graph.indptr.astype(np.int64), sequence_indices(graph)
    length = int(np.diff(indptr).max(initial=0))
    order = _sorted_rows(indptr, indices)
    common = _common_with_previous(order, indptr, indices, length)
    # a row begins a prefix of its own at every length beyond what it shares with the row before
    count = np.cumsum(np.bincount(common, minlength=length + 1)[:length])
    start = np.zeros(length + 1, np.int64)
    np.cumsum(count, out=start[1:])
    parent, column = np.empty(int(start[-1]), np.int32), np.empty(int(start[-1]), np.int32)
    _fill_levels(order, indptr, indices, common, graph.num_sources, start, parent, column)
    last = np.empty(graph.num_nodes, np.int64)
    last[order] = np.cumsum(common < length) - 1
    return PrefixLevels(graph.num_nodes, graph.num_sources, start, parent, column, last)


@compiled
def _common_with_previous(order: Ints, indptr: Ints, indices: Ints, length: int) -> Ints:
    """Elements every row shares with the one before it; `length` where the lists are equal, padding too."""
    common = np.zeros(order.size, np.int64)
    for i in range(1, order.size):
        one, other = order[i - 1], order[i]
        shared = _common_prefix(indptr, indices, one, other)
        is_equal = shared == indptr[one + 1] - indptr[one] and shared == indptr[other + 1] - indptr[other]
        common[i] = length if is_equal else shared
    return common


@compiled
def _fill_levels(
    order: Ints, indptr: Ints, indices: Ints, common: Ints, padding: int, start: Ints, parent: Ints,
    column: Ints,
) -> None:  # fmt: skip
    """Length after length: the rows that begin prefixes so far, and those that part from their neighbour."""
    by_common = np.argsort(common, kind="mergesort")  # stable: rows of one length ascend
    rows = np.empty(order.size, np.int64)
    size = 0
    at = 0
    for k in range(start.size - 1):
        end = at
        while end < by_common.size and common[by_common[end]] == k:
            end += 1
        # merged from the back, in place; parents are counted among the rows of the length before
        old, new, place = size - 1, end - 1, size + (end - at) - 1
        size += end - at
        while place >= 0:
            if new >= at and (old < 0 or by_common[new] > rows[old]):
                rows[place] = by_common[new]
                parent[start[k] + place] = old
                new -= 1
            else:
                rows[place] = rows[old]
                parent[start[k] + place] = old
                old -= 1
            place -= 1
        at = end
        for p in range(size):
            row = order[rows[p]]
            is_inside = k < indptr[row + 1] - indptr[row]
            column[start[k] + p] = indices[indptr[row] + k] if is_inside else padding


def _chosen(depth: Ints, parent: Ints, row_parent: Ints, capacity: int, max_depth: int) -> Ints:
    """Which prefixes stay under the limits; the rest is inlined into its readers."""
    level = np.zeros(depth.size, np.int64)
    _fill_tree_levels(parent, level)
    is_kept = level <= max_depth
    if np.count_nonzero(is_kept) > capacity:
        readers = np.bincount(parent[parent >= 0], minlength=depth.size)
        readers += np.bincount(row_parent[row_parent >= 0], minlength=depth.size)
        elements = depth - np.where(parent >= 0, depth[parent], 0)
        saved = np.where(is_kept, (readers - 1) * elements, -1)
        is_kept = np.zeros(depth.size, bool)
        is_kept[np.argsort(-saved, kind="stable")[:capacity]] = True
    return is_kept


def _tree_csr(
    graph: Graph, indptr: Ints, indices: Ints, depth: Ints, parent: Ints, row: Ints, row_parent: Ints
) -> tuple[Ints, Ints]:
    """One CSR: every node's parent prefix and the rest of its list, then every prefix likewise."""
    begin = np.concatenate((row_parent, parent))
    skipped = np.where(begin >= 0, depth[begin] if depth.size else 0, 0)
    rows = np.concatenate((np.arange(graph.num_nodes), row))
    stop = np.concatenate((np.diff(indptr), depth))
    new_indptr = np.zeros(rows.size + 1, np.int64)
    np.cumsum(stop - skipped + (begin >= 0), out=new_indptr[1:])
    new_indices = np.empty(int(new_indptr[-1]), np.int32)
    _fill_tree(indptr, indices, begin, skipped, rows, stop, graph.num_sources, new_indptr, new_indices)
    return new_indptr, new_indices


@compiled
def _fill_tree(
    indptr: Ints, indices: Ints, begin: Ints, skipped: Ints, rows: Ints, stop: Ints, num_sources: int,
    new_indptr: Ints, new_indices: Ints,
) -> None:  # fmt: skip
    for i in range(rows.size):
        at = new_indptr[i]
        if begin[i] >= 0:
            new_indices[at] = num_sources + begin[i]
            at += 1
        for e in range(indptr[rows[i]] + skipped[i], indptr[rows[i]] + stop[i]):
            new_indices[at] = indices[e]
            at += 1


@compiled
def _fill_tree_levels(parent: Ints, level: Ints) -> None:
    for j in range(parent.size):
        level[j] = 1 if parent[j] < 0 else level[parent[j]] + 1


@compiled
def _common_prefix(indptr: Ints, indices: Ints, one: int, other: int) -> int:
    length = min(indptr[one + 1] - indptr[one], indptr[other + 1] - indptr[other])
    for i in range(length):
        if indices[indptr[one] + i] != indices[indptr[other] + i]:
            return i
    return length  # type: ignore[no-any-return]


@compiled
def _comes_first(indptr: Ints, indices: Ints, one: int, other: int) -> bool:
    """True when list `one` sorts before list `other`, or is equal to it."""
    at = _common_prefix(indptr, indices, one, other)
    if at == indptr[one + 1] - indptr[one]:
        return True
    if at == indptr[other + 1] - indptr[other]:
        return False
    return indices[indptr[one] + at] < indices[indptr[other] + at]  # type: ignore[no-any-return]


@compiled
def _sorted_rows(indptr: Ints, indices: Ints) -> Ints:
    """Rows in lexicographic order of their lists; a stable merge sort from the bottom up."""
    size = indptr.size - 1
    order = np.arange(size)
    other = np.empty_like(order)
    run = 1
    while run < size:
        for start in range(0, size, 2 * run):
            i, middle = start, min(start + run, size)
            j, stop = middle, min(start + 2 * run, size)
            for at in range(start, stop):
                if j >= stop or (i < middle and _comes_first(indptr, indices, order[i], order[j])):
                    other[at] = order[i]
                    i += 1
                else:
                    other[at] = order[j]
                    j += 1
        order, other = other, order
        run *= 2
    return order


@compiled
def _prefix_tree(order: Ints, indptr: Ints, indices: Ints) -> tuple[int, Ints, Ints, Ints, Ints]:
    """(number, depth, parent, row, row_parent): every prefix that two rows share and that cannot be longer.

    `row` is one row with that prefix; row_parent the longest shared prefix of every row, or -1. A stack holds
    the shared prefixes of the row before, ever longer; those longer than what the next row shares are done.
    """
    size = order.size
    depth, parent, row = np.empty(size, np.int64), np.full(size, -1, np.int64), np.empty(size, np.int64)
    row_parent = np.full(size, -1, np.int64)
    stack = np.empty(size + 1, np.int64)
    height = 0
    number = 0
    for i in range(size):
        common = 0
        if i + 1 < size:
            common = _common_prefix(indptr, indices, order[i], order[i + 1])
        if common > 0 and (height == 0 or depth[stack[height - 1]] < common):
            depth[number], row[number] = common, order[i]
            stack[height] = number
            height += 1
            number += 1
        if height > 0:
            row_parent[order[i]] = stack[height - 1]
        while height > 0 and depth[stack[height - 1]] > common:
            done = stack[height - 1]
            height -= 1
            if common > 0 and (height == 0 or depth[stack[height - 1]] < common):
                depth[number], row[number] = common, order[i]
                stack[height] = number
                height += 1
                number += 1
            parent[done] = stack[height - 1] if height > 0 else -1
    return number, depth, parent, row, row_parent
