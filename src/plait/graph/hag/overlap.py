"""Max and min: covers may overlap, so a row may read any partial result whose inputs are all its own.

The disjoint search comes first. Every row, of a node or of a partial result, is then covered again by the
fewest columns that lie inside it (greedy set cover); a row keeps its list unless the new one is shorter. What
the nodes read after that is merged and covered once more. A round that saves no addition is dropped.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from plait.graph.compiled import compiled
from plait.graph.hag.assemble import assemble
from plait.graph.hag.heap import pop_smallest, push
from plait.graph.hag.hierarchy import Hag
from plait.graph.hag.merge import Limits, merge_pairs
from plait.graph.hag.numbering import hierarchy_csr
from plait.graph.hag.rows import working_rows

if TYPE_CHECKING:
    from plait.graph.csr import Graph

__all__ = ["cover_again", "merge_overlapping"]

Ints = NDArray[Any]

_ROUNDS = 2
"""A third round found less than 0.2% on the real graphs."""
_SLICE = 4096
"""Rows covered between two looks at the clock."""


class _Cover(NamedTuple):
    """A hierarchy and the marks a cover needs; a mark is the number of the row, or the token, that set it."""

    indptr: Ints
    indices: Ints
    level: Ints
    reader_start: Ints  # partial results that read column c: readers[reader_start[c] : reader_start[c + 1]]
    readers: Ints
    size: Ints  # inputs under every partial result
    wanted: Ints  # per input: the row it belongs to
    covered: Ints  # per input
    counted: Ints  # per partial result: `met` is about this row
    met: Ints  # its rows already met
    inner: Ints  # per partial result: inside another one that lies inside this row
    seen: Ints  # per column: token
    queue: Ints
    stack: Ints
    heap: Ints
    chosen: Ints
    token: Ints


def merge_overlapping(disjoint: Hag, graph: Graph, limits: Limits, inline: bool) -> Hag:
    """`disjoint` made idempotent: rounds of a wide cover, merges of what is common now, a tight cover."""
    hag = replace(disjoint, order="idempotent")
    for _ in range(_ROUNDS):
        if time.perf_counter() > limits.deadline:
            return replace(hag, is_complete=False)
        wide = cover_again(hag, graph, inline=False, is_wide=True, deadline=limits.deadline)
        merged = _merge_nodes(wide, graph, limits)
        before, hag = hag, cover_again(merged, graph, inline, deadline=limits.deadline)
        if hag.aggregations >= before.aggregations:
            return before
    return hag


def _merge_nodes(hag: Hag, graph: Graph, limits: Limits) -> Hag:
    """`hag` after merging pairs in the rows of its nodes; what partial results read stays."""
    num_nodes, num_sums = hag.num_nodes, hag.num_aggregation_nodes
    num_columns = hag.num_sources + num_sums
    end = int(hag.indptr[num_nodes])
    work = working_rows(hag.indptr[: num_nodes + 1], hag.indices[:end])
    depth = np.concatenate((np.zeros(hag.num_sources, np.int32), hag.level))
    limits = limits._replace(capacity=max(limits.capacity - num_sums, 0))
    merged = merge_pairs(work.rows, num_columns, limits, depth)
    old_start = hag.indptr[num_nodes:] - end
    new_start = old_start[-1] + 2 * np.arange(1, merged.left.size + 1)
    parts = np.concatenate((hag.indices[end:], np.column_stack((merged.left, merged.right)).reshape(-1)))
    parts_start, is_complete = np.concatenate((old_start, new_start)), hag.is_complete and merged.is_complete
    return assemble(graph, work, parts_start, parts, "idempotent", inline=False, is_complete=is_complete)


def cover_again(
    hag: Hag, graph: Graph, inline: bool, is_wide: bool = False, deadline: float = float("inf")
) -> Hag:
    """`hag` with every row covered by the fewest columns inside it; idempotent, so covers may overlap.

    A wide cover reads a partial result even where it adds a single input, as long as the row grows no longer:
    wide rows have more in common. Rows not reached before `deadline` keep their lists.
    """
    cover = _start(hag)
    num_rows = hag.indptr.size - 1
    graph_indptr = graph.indptr.astype(np.int64)
    new_indices, length = hag.indices.copy(), np.diff(hag.indptr)
    is_complete = hag.is_complete
    for first in range(0, num_rows, _SLICE):
        if time.perf_counter() > deadline:
            is_complete = False
            break
        last = min(first + _SLICE, num_rows)
        _cover_rows(
            cover, first, last, hag.num_nodes, graph_indptr, graph.indices, new_indices, length, is_wide
        )
    indptr = np.zeros(num_rows + 1, np.int64)
    np.cumsum(length, out=indptr[1:])
    room = np.diff(hag.indptr)
    is_used = np.arange(new_indices.size) - np.repeat(hag.indptr[:-1], room) < np.repeat(length, room)
    csr = hierarchy_csr(indptr, new_indices[is_used], hag.num_nodes, hag.num_sources, inline)
    return replace(
        hag, indptr=csr[0], indices=csr[1], level=csr[2], order="idempotent", is_complete=is_complete
    )


def _start(hag: Hag) -> _Cover:
    num_sums, num_columns = hag.num_aggregation_nodes, hag.num_sources + hag.num_aggregation_nodes
    read = hag.indices[hag.indptr[hag.num_nodes] :]
    by = np.repeat(np.arange(num_sums, dtype=np.int32), np.diff(hag.indptr[hag.num_nodes :]))
    order = np.argsort(read, kind="stable")
    reader_start = np.zeros(num_columns + 1, np.int64)
    np.cumsum(np.bincount(read, minlength=num_columns), out=reader_start[1:])
    cover = _Cover(
        indptr=hag.indptr,
        indices=hag.indices,
        level=hag.level,
        reader_start=reader_start,
        readers=by[order],
        size=np.zeros(num_sums, np.int32),
        wanted=np.full(hag.num_sources, -1, np.int32),
        covered=np.full(hag.num_sources, -1, np.int32),
        counted=np.full(num_sums, -1, np.int32),
        met=np.zeros(num_sums, np.int32),
        inner=np.full(num_sums, -1, np.int32),
        seen=np.full(num_columns, -1, np.int64),
        queue=np.empty(num_columns + hag.num_sources, np.int32),
        stack=np.empty(hag.num_edges + 1, np.int32),
        heap=np.empty(num_sums + 1, np.int64),
        chosen=np.empty(num_columns, np.int32),
        token=np.zeros(1, np.int64),
    )
    _fill_sizes(cover, hag.num_nodes)
    return cover


@compiled
def _unfold(c: _Cover, num_nodes: int, sum_number: int, found: Ints) -> int:
    """Write the inputs under a partial result to `found`, each once; their number."""
    num_sources = c.wanted.size
    c.token[0] += 1
    token = c.token[0]
    c.stack[0] = sum_number
    height, number = 1, 0
    while height > 0:
        height -= 1
        row = num_nodes + c.stack[height]
        for e in range(c.indptr[row], c.indptr[row + 1]):
            column = c.indices[e]
            if c.seen[column] == token:
                continue
            c.seen[column] = token
            if column < num_sources:
                found[number] = column
                number += 1
            else:
                c.stack[height] = column - num_sources
                height += 1
    return number


@compiled
def _fill_sizes(c: _Cover, num_nodes: int) -> None:
    for j in range(c.size.size):
        c.size[j] = _unfold(c, num_nodes, j, c.queue)


@compiled
def _find_inside(c: _Cover, row: int, num_nodes: int, number: int) -> int:
    """Extend the first `number` entries of the queue, the row's inputs, by all partial results inside it."""
    num_sources = c.wanted.size
    limit = row - num_nodes  # a partial result reads lower levels only, so that levels never rise
    at = 0
    while at < number:
        column = c.queue[at]
        at += 1
        for r in range(c.reader_start[column], c.reader_start[column + 1]):
            j = c.readers[r]
            if limit >= 0 and c.level[j] >= c.level[limit]:
                continue
            if c.counted[j] != row:
                c.counted[j] = row
                c.met[j] = 0
            c.met[j] += 1
            if c.met[j] == c.indptr[num_nodes + j + 1] - c.indptr[num_nodes + j]:
                c.queue[number] = num_sources + j
                number += 1
                for e in range(c.indptr[num_nodes + j], c.indptr[num_nodes + j + 1]):
                    if c.indices[e] >= num_sources:
                        c.inner[c.indices[e] - num_sources] = row
    return number


@compiled
def _choose(c: _Cover, row: int, num_nodes: int, num_inputs: int, number: int, limit: int, least: int) -> int:
    """Write to `chosen` a cover of the row by greedy choice, every sum adding `least` inputs; its length.

    -1 when longer than `limit`. Sums inside another that lies inside the row are left out: the outer one
    covers more at the same price.
    """
    num_sources = c.wanted.size
    heap_size = 0
    for q in range(num_inputs, number):
        j = c.queue[q] - num_sources
        if c.inner[j] != row:
            push(c.heap, heap_size, (-np.int64(c.size[j]) << 32) + j)
            heap_size += 1
    inputs_left, length = num_inputs, 0
    found = c.queue[num_inputs:]  # the sums that stood there are in the heap now
    while heap_size > 0 and length < limit:
        key = pop_smallest(c.heap, heap_size)
        heap_size -= 1
        j = key & 0xFFFFFFFF
        num_found = _unfold(c, num_nodes, j, found)
        gain = 0
        for i in range(num_found):
            if c.covered[found[i]] != row:
                gain += 1
        if gain < least:
            continue
        if heap_size > 0 and gain < -(c.heap[0] >> 32):
            push(c.heap, heap_size, (-np.int64(gain) << 32) + j)
            heap_size += 1
            continue
        for i in range(num_found):
            c.covered[found[i]] = row
        c.chosen[length] = num_sources + j
        length += 1
        inputs_left -= gain
    if length + inputs_left > limit:
        return -1
    for q in range(num_inputs):
        if c.covered[c.queue[q]] != row:
            c.chosen[length] = c.queue[q]
            length += 1
    return length


@compiled
def _cover_rows(
    c: _Cover, first: int, last: int, num_nodes: int, graph_indptr: Ints, graph_indices: Ints,
    new_indices: Ints, length: Ints, is_wide: bool,
) -> None:  # fmt: skip
    for row in range(first, last):
        if length[row] < 3:
            continue
        number = 0
        if row < num_nodes:
            for e in range(graph_indptr[row], graph_indptr[row + 1]):
                if c.wanted[graph_indices[e]] != row:
                    c.wanted[graph_indices[e]] = row
                    c.queue[number] = graph_indices[e]
                    number += 1
        else:
            number = _unfold(c, num_nodes, row - num_nodes, c.queue)
        is_node_wide = is_wide and row < num_nodes
        limit = length[row] if is_node_wide else length[row] - 1
        num_inputs = number
        number = _find_inside(c, row, num_nodes, number)
        chosen = _choose(c, row, num_nodes, num_inputs, number, limit, 1 if is_node_wide else 2)
        if chosen > 0:
            length[row] = chosen
            for i in range(chosen):
                new_indices[c.indptr[row] + i] = c.chosen[i]
