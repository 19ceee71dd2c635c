"""Exact greedy pair merging: the two columns that most rows share become one new column, again and again.

A pair (a, b), a < b, belongs to its smaller column a. Every column keeps its best partner and that pair's
count. Counts of old pairs only fall, and a merge adds only pairs with the new column, so a stored count is an
upper bound until a merge takes the partner away; the column is then counted again, but only when its turn
comes. No table of pairs exists, so the memory is O(edges). Ties go to the smallest a, then the smallest b, as
in the HAG authors' program: the counts agree with theirs.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from plait.graph.compiled import compiled
from plait.graph.hag.heap import pop_smallest, push
from plait.graph.hag.rows import Rows, invert

__all__ = ["UNLIMITED", "Limits", "Merged", "merge_pairs"]

Ints = NDArray[Any]

# slots of `_State.scalars`: the numbers that outlive one slice of work
_NUM_COLUMNS, _BUCKET, _HEAP_SIZE, _DONE = 0, 1, 2, 3

_SLICE = 50_000_000
"""Row entries visited between two looks at the clock; about 0.05 s."""


UNLIMITED = int(np.iinfo(np.int32).max)


class Limits(NamedTuple):
    """How far a search goes; the merges done until it ends stand."""

    capacity: int = UNLIMITED  # most merges
    max_depth: int = UNLIMITED  # longest chain of merges
    min_count: int = 3  # fewest rows that share a merge
    deadline: float = float("inf")  # by time.perf_counter()


class Merged(NamedTuple):
    """The rows after merging, and what each new column (numbered from num_sources) stands for."""

    rows: Rows
    left: Ints
    right: Ints
    is_complete: bool


class _State(NamedTuple):
    """Everything the search knows between two slices; arrays ending in (c) have one entry per column."""

    row_start: Ints
    row_length: Ints
    row_columns: Ints
    row_weight: Ints
    list_start: Ints  # (c) where the rows of a column begin in `lists`
    list_length: Ints  # (c)
    list_weight: Ints  # (c) its rows, each counted with its weight
    lists: Ints
    best: Ints  # (c) count of the best pair, or an upper bound while partner is -1
    partner: Ints  # (c)
    depth: Ints  # (c)
    left: Ints  # (c)
    right: Ints  # (c)
    following: Ints  # (c) neighbours in the bucket of equal best
    previous: Ints  # (c)
    counter: Ints  # (c) zero between uses
    heap: Ints  # (c) the columns of the largest bucket, smallest first
    bucket_first: Ints
    touched: Ints
    scalars: Ints


def merge_pairs(rows: Rows, num_sources: int, limits: Limits, depth: Ints | None = None) -> Merged:
    """`rows` (changed in place) after as many merges as the limits allow, of the pair most rows share each.

    `depth` is that of the given columns, where some stand for merges already.
    """
    state = _start(rows, num_sources, depth, limits.max_depth)
    while not state.scalars[_DONE] and time.perf_counter() < limits.deadline:
        if state.scalars[_NUM_COLUMNS] == state.best.size:
            state = _grown(state)
        _merge_slice(state, num_sources, limits.capacity, limits.max_depth, limits.min_count, _SLICE)
    num_merged = int(state.scalars[_NUM_COLUMNS]) - num_sources
    new = slice(num_sources, num_sources + num_merged)
    return Merged(rows, state.left[new].copy(), state.right[new].copy(), bool(state.scalars[_DONE]))


def _start(rows: Rows, num_sources: int, depth: Ints | None, max_depth: int) -> _State:
    start, lists = invert(rows.start, rows.length, rows.columns, num_sources)
    # room for new columns grows by doubling; few graphs ask for more than a quarter of their nodes
    size = num_sources + max(num_sources // 4, 64)
    weight = np.bincount(rows.columns, np.repeat(rows.weight, rows.length), num_sources).astype(np.int32)
    num_rows = rows.start.size

    def per_column(values: Ints | None = None, fill: int = 0, dtype: type = np.int32) -> Ints:
        array: Ints = np.full(size, fill, dtype)
        if values is not None:
            array[: values.size] = values
        return array

    state = _State(
        row_start=rows.start,
        row_length=rows.length,
        row_columns=rows.columns,
        row_weight=rows.weight,
        list_start=per_column(start[:-1], dtype=np.int64),
        list_length=per_column(np.diff(start)),
        list_weight=per_column(weight),
        lists=lists,
        best=per_column(weight if depth is None else np.where(depth < max_depth, weight, 0)),
        partner=per_column(fill=-1),
        depth=per_column(depth),
        left=per_column(),
        right=per_column(),
        following=per_column(fill=-1),
        previous=per_column(fill=-1),
        counter=per_column(),
        heap=per_column(),
        bucket_first=np.full(int(weight.max(initial=0)) + 1, -1, np.int32),
        touched=np.empty(max(size, num_rows), np.int32),
        scalars=np.zeros(4, np.int64),
    )
    state.scalars[_NUM_COLUMNS] = num_sources
    state.scalars[_BUCKET] = state.bucket_first.size - 1
    _fill_buckets(state, num_sources)
    return state


_PER_COLUMN = (
    "list_start", "list_length", "list_weight", "best", "partner", "depth", "left", "right",
    "following", "previous", "counter", "heap",
)  # fmt: skip


def _grown(state: _State) -> _State:
    """The same state with room for twice as many new columns."""
    size = state.best.size * 3 // 2 + 64
    larger: dict[str, Ints] = {}
    for name in _PER_COLUMN:
        old = getattr(state, name)
        larger[name] = np.zeros(size, old.dtype)
        larger[name][: old.size] = old
    return state._replace(touched=np.empty(max(size, state.touched.size), np.int32), **larger)


@compiled
def _link(s: _State, a: int, count: int) -> None:
    first = s.bucket_first[count]
    s.following[a] = first
    s.previous[a] = -1
    if first >= 0:
        s.previous[first] = a
    s.bucket_first[count] = a


@compiled
def _unlink(s: _State, a: int, count: int) -> None:
    before, after = s.previous[a], s.following[a]
    if before >= 0:
        s.following[before] = after
    else:
        s.bucket_first[count] = after
    if after >= 0:
        s.previous[after] = before


@compiled
def _fill_buckets(s: _State, num_sources: int) -> None:
    for a in range(num_sources):
        _link(s, a, s.best[a])


@compiled
def _position(columns: Ints, start: int, stop: int, column: int) -> int:
    """Where `column` stands (or would stand) in the sorted slice [start, stop)."""
    while start < stop:
        middle = (start + stop) >> 1
        if columns[middle] < column:
            start = middle + 1
        else:
            stop = middle
    return start


@compiled
def _count_again(s: _State, a: int, max_depth: int) -> int:
    """Set best[a] and partner[a] to the most frequent column after `a` in its rows; the entries visited."""
    num_touched = 0
    work = 0
    for i in range(s.list_start[a], s.list_start[a] + s.list_length[a]):
        row = s.lists[i]
        start = s.row_start[row]
        stop = start + s.row_length[row]
        after = _position(s.row_columns, start, stop, a) + 1
        weight = s.row_weight[row]
        work += stop - after + 8
        for j in range(after, stop):
            x = s.row_columns[j]
            if s.counter[x] == 0:
                s.touched[num_touched] = x
                num_touched += 1
            s.counter[x] += weight
    best, partner = 0, -1
    for i in range(num_touched):
        x = s.touched[i]
        count = s.counter[x]
        s.counter[x] = 0
        if (count > best or (count == best and x < partner)) and s.depth[x] < max_depth:
            best, partner = count, x
    s.best[a] = best
    s.partner[a] = partner
    return work


@compiled
def _split_lists(s: _State, a: int, b: int, w: int) -> None:
    """Rows with both `a` and `b` move to the list of `w`, into the room they leave in the list of `a`."""
    lists, shared = s.lists, s.touched
    i, j = s.list_start[a], s.list_start[b]
    stop_a, stop_b = i + s.list_length[a], j + s.list_length[b]
    kept_a, kept_b, num_shared = i, j, 0
    while i < stop_a and j < stop_b:
        if lists[i] < lists[j]:
            lists[kept_a] = lists[i]
            kept_a += 1
            i += 1
        elif lists[i] > lists[j]:
            lists[kept_b] = lists[j]
            kept_b += 1
            j += 1
        else:
            shared[num_shared] = lists[i]
            num_shared += 1
            i += 1
            j += 1
    for rest in range(i, stop_a):
        lists[kept_a] = lists[rest]
        kept_a += 1
    for rest in range(j, stop_b):
        lists[kept_b] = lists[rest]
        kept_b += 1
    s.list_length[a] = kept_a - s.list_start[a]
    s.list_length[b] = kept_b - s.list_start[b]
    s.list_start[w] = kept_a
    s.list_length[w] = num_shared
    for n in range(num_shared):
        lists[kept_a + n] = shared[n]


@compiled
def _replace_in_row(columns: Ints, start: int, stop: int, a: int, b: int, w: int) -> None:
    """The row without `a` and `b`, with `w` last: its number is the largest, so the row stays sorted."""
    at_a = _position(columns, start, stop, a)
    at_b = _position(columns, at_a + 1, stop, b)
    for j in range(at_a, at_b - 1):
        columns[j] = columns[j + 1]
    for j in range(at_b - 1, stop - 2):
        columns[j] = columns[j + 2]
    columns[stop - 2] = w


@compiled
def _rewrite_rows(s: _State, a: int, b: int, w: int) -> tuple[int, int]:
    """Put `w` for `a` and `b` in the rows of `w`, counting in `counter` what stands beside it."""
    num_touched = 0
    work = 0
    for i in range(s.list_start[w], s.list_start[w] + s.list_length[w]):
        row = s.lists[i]
        start = s.row_start[row]
        _replace_in_row(s.row_columns, start, start + s.row_length[row], a, b, w)
        s.row_length[row] -= 1
        stop = start + s.row_length[row] - 1
        weight = s.row_weight[row]
        work += 2 * (stop - start) + 8
        for j in range(start, stop):
            x = s.row_columns[j]
            if s.counter[x] == 0:
                s.touched[num_touched] = x
                num_touched += 1
            s.counter[x] += weight
    return num_touched, work


@compiled
def _offer_partner(s: _State, w: int, x: int, count: int, bucket: int, heap_size: int) -> int:
    """Make `w` the partner of `x`; above an upper bound of its other pairs, so valid whatever x held."""
    _unlink(s, x, s.best[x])
    s.best[x] = count
    s.partner[x] = w
    if count == bucket:
        push(s.heap, heap_size, x)
        return heap_size + 1
    _link(s, x, count)
    return heap_size


@compiled
def _merge(s: _State, a: int, w: int, bucket: int, heap_size: int, max_depth: int) -> tuple[int, int]:
    """Merge `a` and its partner, shared by `bucket` rows, into the new column `w`; heap size and work."""
    b = s.partner[a]
    s.left[w], s.right[w] = a, b
    s.depth[w] = max(s.depth[a], s.depth[b]) + 1
    _split_lists(s, a, b, w)
    s.list_weight[a] -= bucket
    s.list_weight[b] -= bucket
    s.list_weight[w] = bucket
    num_touched, work = _rewrite_rows(s, a, b, w)
    can_grow = s.depth[w] < max_depth
    for i in range(num_touched):
        x = s.touched[i]
        count = s.counter[x]
        s.counter[x] = 0
        if s.partner[x] == a or s.partner[x] == b:
            s.partner[x] = -1
        if can_grow and count > s.best[x] and s.depth[x] < max_depth:
            heap_size = _offer_partner(s, w, x, count, bucket, heap_size)
    s.best[w] = 0  # pairs with larger columns come with those
    s.partner[w] = s.partner[a] = s.partner[b] = -1
    _link(s, w, 0)
    s.best[a] = min(bucket, s.list_weight[a])
    if s.best[a] == bucket:
        push(s.heap, heap_size, a)
        heap_size += 1
    else:
        _link(s, a, s.best[a])
    return heap_size, work


@compiled
def _open_bucket(s: _State, bucket: int, min_count: int) -> tuple[int, int]:
    """(count, heap size): the largest count with a column, its columns moved to the heap."""
    while bucket >= min_count and s.bucket_first[bucket] < 0:
        bucket -= 1
    heap_size = 0
    if bucket >= min_count:
        while s.bucket_first[bucket] >= 0:
            a = s.bucket_first[bucket]
            _unlink(s, a, bucket)
            push(s.heap, heap_size, a)
            heap_size += 1
    return bucket, heap_size


@compiled
def _merge_slice(
    s: _State, num_sources: int, capacity: int, max_depth: int, min_count: int, work_limit: int
) -> None:
    """Merge until `work_limit` entries were visited, arrays are full, or nothing is left (scalars[_DONE])."""
    w, bucket, heap_size = s.scalars[_NUM_COLUMNS], s.scalars[_BUCKET], s.scalars[_HEAP_SIZE]
    work = 0
    while work < work_limit and w < s.best.size:
        if w - num_sources >= capacity:
            s.scalars[_DONE] = 1
            break
        if heap_size == 0:
            bucket, heap_size = _open_bucket(s, bucket, min_count)
            if heap_size == 0:
                s.scalars[_DONE] = 1
                break
        a = pop_smallest(s.heap, heap_size)
        heap_size -= 1
        work += 8
        if s.partner[a] < 0:
            if s.list_weight[a] < bucket:  # in too few rows for a pair of this count, whatever the partner
                s.best[a] = s.list_weight[a]
            else:
                work += _count_again(s, a, max_depth)
            if s.best[a] < bucket:
                _link(s, a, s.best[a])
                continue
        heap_size, visited = _merge(s, a, w, bucket, heap_size, max_depth)
        work += visited
        w += 1
    s.scalars[_NUM_COLUMNS], s.scalars[_BUCKET], s.scalars[_HEAP_SIZE] = w, bucket, heap_size
