"""Exact greedy pair merging: the pair of columns that most rows share becomes one new column, again and again.

A pair (a, b), a < b, belongs to its smaller column a. Every column keeps its best partner and that pair's count.
Counts of old pairs only fall, and a merge can only add pairs with the new column, so a stored count is an upper
bound until a merge takes the partner away; then the column is counted again, but only when its turn comes. That is
what keeps the memory at O(edges): no table of pairs exists.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

__all__ = ["MergeState", "collapse_rows", "merge_pairs", "new_state"]

# slots of `MergeState.scalars`, the numbers that outlive one slice of work
NUM_COLUMNS, BUCKET, HEAP_SIZE, WORK, DONE, MERGED = 0, 1, 2, 3, 4, 5
NUM_SCALARS = 6


@njit(cache=True, nogil=True)
def _sift_up(heap, i):  # type: ignore[no-untyped-def]
    value = heap[i]
    while i > 0:
        parent = (i - 1) >> 1
        if heap[parent] <= value:
            break
        heap[i] = heap[parent]
        i = parent
    heap[i] = value


@njit(cache=True, nogil=True)
def _pop_smallest(heap, size):  # type: ignore[no-untyped-def]
    smallest = heap[0]
    value = heap[size - 1]
    size -= 1
    i = 0
    while True:
        child = 2 * i + 1
        if child >= size:
            break
        if child + 1 < size and heap[child + 1] < heap[child]:
            child += 1
        if heap[child] >= value:
            break
        heap[i] = heap[child]
        i = child
    heap[i] = value
    return smallest


@njit(cache=True, nogil=True)
def _link(bucket_first, following, previous, a, count):  # type: ignore[no-untyped-def]
    following[a] = bucket_first[count]
    previous[a] = -1
    if bucket_first[count] >= 0:
        previous[bucket_first[count]] = a
    bucket_first[count] = a


@njit(cache=True, nogil=True)
def _unlink(bucket_first, following, previous, a, count):  # type: ignore[no-untyped-def]
    if previous[a] >= 0:
        following[previous[a]] = following[a]
    else:
        bucket_first[count] = following[a]
    if following[a] >= 0:
        previous[following[a]] = previous[a]


@njit(cache=True, nogil=True)
def _position(row_columns, start, stop, column):  # type: ignore[no-untyped-def]
    """Where `column` stands (or would stand) in the sorted slice [start, stop)."""
    while start < stop:
        middle = (start + stop) >> 1
        if row_columns[middle] < column:
            start = middle + 1
        else:
            stop = middle
    return start


@njit(cache=True, nogil=True)
def _best_partner(  # type: ignore[no-untyped-def]
    a, row_start, row_length, row_columns, row_weight, list_start, list_length, lists, depth, max_depth, counter, touched
):
    """(count, partner, work): the most frequent column after `a` in the rows of `a`, the smallest on a tie."""
    num_touched = 0
    work = 0
    for i in range(list_start[a], list_start[a] + list_length[a]):
        row = lists[i]
        start = row_start[row]
        stop = start + row_length[row]
        after = _position(row_columns, start, stop, a) + 1
        weight = row_weight[row]
        work += stop - after + 8
        for j in range(after, stop):
            x = row_columns[j]
            if counter[x] == 0:
                touched[num_touched] = x
                num_touched += 1
            counter[x] += weight
    best = 0
    partner = -1
    for i in range(num_touched):
        x = touched[i]
        count = counter[x]
        counter[x] = 0
        if (count > best or (count == best and x < partner)) and depth[x] < max_depth:
            best = count
            partner = x
    return best, partner, work


@njit(cache=True, nogil=True)
def _split_lists(a, b, w, lists, list_start, list_length, keep):  # type: ignore[no-untyped-def]
    """Rows that hold both `a` and `b` move to the list of `w`, in the room that they leave in the list of `a`."""
    start_a, stop_a = list_start[a], list_start[a] + list_length[a]
    start_b, stop_b = list_start[b], list_start[b] + list_length[b]
    i, j = start_a, start_b
    kept_a, kept_b, shared = start_a, start_b, 0
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
            keep[shared] = lists[i]
            shared += 1
            i += 1
            j += 1
    while i < stop_a:
        lists[kept_a] = lists[i]
        kept_a += 1
        i += 1
    while j < stop_b:
        lists[kept_b] = lists[j]
        kept_b += 1
        j += 1
    list_length[a] = kept_a - start_a
    list_length[b] = kept_b - start_b
    list_start[w] = kept_a
    list_length[w] = shared
    for i in range(shared):
        lists[kept_a + i] = keep[i]


@njit(cache=True, nogil=True)
def _replace_in_row(row_columns, start, length, a, b, w):  # type: ignore[no-untyped-def]
    """Row without `a` and `b`, with `w` at the end: the newest column has the largest number, so rows stay sorted."""
    stop = start + length
    at_a = _position(row_columns, start, stop, a)
    at_b = _position(row_columns, at_a + 1, stop, b)
    for j in range(at_a, at_b - 1):
        row_columns[j] = row_columns[j + 1]
    for j in range(at_b - 1, stop - 2):
        row_columns[j] = row_columns[j + 2]
    row_columns[stop - 2] = w


@njit(cache=True, nogil=True)
def merge_slice(  # type: ignore[no-untyped-def]
    row_start, row_length, row_columns, row_weight, list_start, list_length, lists, list_weight,
    best, partner, depth, left, right, bucket_first, following, previous, heap, counter, touched, scalars,
    num_sources, capacity, max_depth, min_count, work_limit,
):  # fmt: skip
    """Merge until `work_limit` row entries were visited or no pair of `min_count` is left; sets scalars[DONE]."""
    work = 0
    k = scalars[BUCKET]
    heap_size = scalars[HEAP_SIZE]
    num_columns = scalars[NUM_COLUMNS]
    while work < work_limit:
        if num_columns - num_sources >= capacity:
            scalars[DONE] = 1
            break
        if heap_size == 0:
            while k >= min_count and bucket_first[k] < 0:
                k -= 1
            if k < min_count:
                scalars[DONE] = 1
                break
            while bucket_first[k] >= 0:
                a = bucket_first[k]
                _unlink(bucket_first, following, previous, a, k)
                heap[heap_size] = a
                _sift_up(heap, heap_size)
                heap_size += 1
        a = _pop_smallest(heap, heap_size)
        heap_size -= 1
        work += 8
        if partner[a] < 0:  # its best pair was taken apart: count again
            if list_weight[a] < k:
                best[a] = list_weight[a]
            else:
                best[a], partner[a], visited = _best_partner(
                    a, row_start, row_length, row_columns, row_weight, list_start, list_length, lists,
                    depth, max_depth, counter, touched,
                )  # fmt: skip
                work += visited
                scalars[MERGED] += 1
            if best[a] < k:
                _link(bucket_first, following, previous, a, best[a])
                continue
        b = partner[a]
        w = num_columns
        num_columns += 1
        left[w - num_sources] = a
        right[w - num_sources] = b
        depth[w] = max(depth[a], depth[b]) + 1
        _split_lists(a, b, w, lists, list_start, list_length, touched)
        list_weight[a] -= k
        list_weight[b] -= k
        list_weight[w] = k
        best[w] = 0
        partner[w] = -1
        num_touched = 0
        for i in range(list_start[w], list_start[w] + list_length[w]):
            row = lists[i]
            start = row_start[row]
            _replace_in_row(row_columns, start, row_length[row], a, b, w)
            row_length[row] -= 1
            stop = start + row_length[row] - 1
            weight = row_weight[row]
            work += 2 * (stop - start) + 8
            for j in range(start, stop):
                x = row_columns[j]
                if counter[x] == 0:
                    touched[num_touched] = x
                    num_touched += 1
                counter[x] += weight
        can_grow = depth[w] < max_depth
        for i in range(num_touched):
            x = touched[i]
            count = counter[x]
            counter[x] = 0
            if partner[x] == a or partner[x] == b:
                partner[x] = -1
            if can_grow and count > best[x] and depth[x] < max_depth:
                # larger than an upper bound of every other pair of x, so valid whatever its state was
                _unlink(bucket_first, following, previous, x, best[x])
                best[x] = count
                partner[x] = w
                if count == k:
                    heap[heap_size] = x
                    _sift_up(heap, heap_size)
                    heap_size += 1
                else:
                    _link(bucket_first, following, previous, x, count)
        _link(bucket_first, following, previous, w, 0)
        partner[b] = -1
        partner[a] = -1
        best[a] = min(k, list_weight[a])
        if best[a] == k:
            heap[heap_size] = a
            _sift_up(heap, heap_size)
            heap_size += 1
        else:
            _link(bucket_first, following, previous, a, best[a])
    scalars[BUCKET] = k
    scalars[HEAP_SIZE] = heap_size
    scalars[NUM_COLUMNS] = num_columns
    scalars[WORK] += work
