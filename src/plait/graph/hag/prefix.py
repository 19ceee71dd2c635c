"""Ordered aggregation: neighbour lists with a common prefix share it (a trie of the lists).

Every distinct prefix is computed once, which is the fewest steps an ordered aggregator can take, and all
prefixes of k elements at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from plait.graph.compiled import compiled

if TYPE_CHECKING:
    from plait.graph.csr import Graph

__all__ = ["PrefixLevels", "prefix_levels"]

Ints = NDArray[Any]


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
    indptr, indices = graph.indptr.astype(np.int64), _in_order(graph)
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


def _in_order(graph: Graph) -> Ints:
    """Every node's neighbours in the order of the caller's edges; edges added since then come last."""
    if graph.order is None:
        return graph.indices
    turn = np.where(graph.order < 0, graph.num_edges, graph.order)
    by_turn: Ints = graph.indices[np.lexsort((turn, graph.edge_rows()))]
    return by_turn


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
