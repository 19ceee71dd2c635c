"""Which in-edges of which targets enter a sample: ranges first, then one kernel per way of choosing.

A frontier is the slice [begin, end) of the nodes found so far. `locate` turns it into CSR ranges
(start, degree), the offsets of what each target will be given (pointer) and one random key per target; a pick
kernel then writes the chosen CSR positions. Every target writes only between its own offsets and draws only
from its own key, so any split of the frontier over threads gives the same positions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from plait.loader.draw import below, draw, mix, node_key, unit

__all__ = [
    "locate",
    "locate_in_time",
    "pick_all",
    "pick_labor",
    "pick_replace",
    "pick_uniform",
    "pick_weighted",
    "pick_weighted_replace",
]

# Above this fanout membership of a position is kept in a table: scanning the earlier picks would be quadratic.
_SCAN_LIMIT = 48


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def locate(
    indptr: Any,
    n_id: Any,
    tree: Any,
    begin: int,
    end: int,
    fanout: int,
    replace: bool,
    hop_key: Any,
    start: Any,
    degree: Any,
    pointer: Any,
    key: Any,
) -> int:
    """The number of edges the frontier will be given; fills start, degree, pointer and key for it."""
    has_tree = tree.size > 0
    total = pointer[begin]
    for i in range(begin, end):
        v = n_id[i]
        first = indptr[v]
        count = indptr[v + 1] - first
        start[i - begin] = first
        degree[i - begin] = count
        key[i - begin] = node_key(node_key(hop_key, tree[i]) if has_tree else hop_key, v)
        if fanout >= 0 and (count > fanout or (replace and count > 0)):
            count = fanout
        total += count
        pointer[i + 1] = total
    return total - pointer[begin]


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def locate_in_time(
    indptr: Any,
    times: Any,
    n_id: Any,
    tree: Any,
    seed_time: Any,
    begin: int,
    end: int,
    fanout: int,
    replace: bool,
    last: bool,
    hop_key: Any,
    start: Any,
    degree: Any,
    pointer: Any,
    key: Any,
) -> int:
    """As `locate`, with each range cut to the edges no later than the seed; `times` ascend within a row."""
    total = pointer[begin]
    for i in range(begin, end):
        v = n_id[i]
        limit = seed_time[tree[i]]
        first = np.int64(indptr[v])
        low = first
        high = np.int64(indptr[v + 1])
        while low < high:
            middle = (low + high) >> 1
            if times[middle] <= limit:
                low = middle + 1
            else:
                high = middle
        if last and fanout >= 0:
            first = max(first, low - fanout)
        count = low - first
        start[i - begin] = first
        degree[i - begin] = count
        key[i - begin] = node_key(node_key(hop_key, tree[i]), v)
        if fanout >= 0 and (count > fanout or (replace and count > 0)):
            count = fanout
        total += count
        pointer[i + 1] = total
    return total - pointer[begin]


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def pick_all(begin: int, end: int, origin: int, start: Any, pointer: Any, chosen: Any) -> None:
    """The whole range of every target."""
    for i in range(begin, end):
        first = start[i - origin]
        for e in range(pointer[i], pointer[i + 1]):
            chosen[e] = first + (e - pointer[i])


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def pick_uniform(
    begin: int, end: int, origin: int, start: Any, degree: Any, pointer: Any, key: Any, chosen: Any
) -> None:
    """A uniform subset of each range by Floyd's algorithm: k draws for k picks, whatever the degree."""
    largest = 0
    for i in range(begin, end):
        if pointer[i + 1] - pointer[i] > _SCAN_LIMIT and degree[i - origin] > pointer[i + 1] - pointer[i]:
            largest = max(largest, np.int64(degree[i - origin]))
    seen = np.zeros(largest, np.int64)
    for i in range(begin, end):
        first = start[i - origin]
        count = degree[i - origin]
        o = pointer[i]
        k = pointer[i + 1] - o
        if count == k:
            for j in range(k):
                chosen[o + j] = first + j
        elif k <= _SCAN_LIMIT:
            _floyd_scanning(first, count, k, key[i - origin], chosen, o)
        else:
            _floyd_marking(first, count, k, key[i - origin], chosen, o, seen, i + 1)


@njit(cache=True, nogil=True, inline="always")  # type: ignore[untyped-decorator]
def _floyd_scanning(first: Any, count: Any, k: Any, key: Any, chosen: Any, o: Any) -> None:
    # 64 bits of a Bloom filter answer "surely new" for nearly every draw; only the rest look through the picks
    filled = np.uint64(0)
    for j in range(k):
        top = count - k + j
        t = below(draw(key, j), top + 1)
        bit = np.uint64(1) << np.uint64(t & 63)
        if filled & bit:
            for q in range(j):
                if chosen[o + q] == first + t:
                    t = np.int64(top)
                    bit = np.uint64(1) << np.uint64(t & 63)
                    break
        filled |= bit
        chosen[o + j] = first + t


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _floyd_marking(first: Any, count: Any, k: Any, key: Any, chosen: Any, o: Any, seen: Any, stamp: Any) -> None:
    for j in range(k):
        top = count - k + j
        t = below(draw(key, j), top + 1)
        if seen[t] == stamp:
            t = np.int64(top)
        seen[t] = stamp
        chosen[o + j] = first + t


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def pick_replace(
    begin: int, end: int, origin: int, start: Any, degree: Any, pointer: Any, key: Any, chosen: Any
) -> None:
    """Independent uniform draws from each range."""
    for i in range(begin, end):
        o = pointer[i]
        for e in range(o, pointer[i + 1]):
            chosen[e] = start[i - origin] + below(draw(key[i - origin], e - o), degree[i - origin])


@njit(cache=True, nogil=True, inline="always")  # type: ignore[untyped-decorator]
def _roulette(running: Any, first: int, stop: int, base: float, point: float) -> int:
    """The first position in [first, stop) whose running weight exceeds base + point."""
    low = first
    high = stop - 1  # the last position answers for what rounding pushed past the end
    while low < high:
        middle = (low + high) >> 1
        if running[middle] - base > point:
            high = middle
        else:
            low = middle + 1
    return low


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def pick_weighted_replace(
    begin: int,
    end: int,
    origin: int,
    start: Any,
    degree: Any,
    pointer: Any,
    key: Any,
    indptr: Any,
    n_id: Any,
    running: Any,
    chosen: Any,
) -> None:
    """Independent draws from each range in proportion to weight; `running` sums weights from each row's start."""
    for i in range(begin, end):
        o = pointer[i]
        if pointer[i + 1] == o:
            continue
        first = np.int64(start[i - origin])
        stop = first + np.int64(degree[i - origin])
        base = running[first - 1] if indptr[n_id[i]] < first else 0.0
        total = running[stop - 1] - base
        for e in range(o, pointer[i + 1]):
            point = unit(draw(key[i - origin], e - o)) * total
            chosen[e] = _roulette(running, first, stop, base, point)


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def pick_weighted(
    begin: int,
    end: int,
    origin: int,
    start: Any,
    degree: Any,
    pointer: Any,
    key: Any,
    indptr: Any,
    n_id: Any,
    running: Any,
    weight: Any,
    chosen: Any,
) -> None:
    """Successive draws without replacement, each in proportion to the weights not yet drawn.

    Roulette draws that hit an earlier pick are thrown away, which leaves the law of the next pick unchanged.
    When few heavy edges make that slow, the rest is chosen by the smallest -log(u)/w (Efraimidis and
    Spirakis 2006), which has the same law given what was picked before.
    """
    for i in range(begin, end):
        o = pointer[i]
        k = pointer[i + 1] - o
        first = np.int64(start[i - origin])
        count = np.int64(degree[i - origin])
        if k == count:
            for j in range(k):
                chosen[o + j] = first + j
            continue
        base = running[first - 1] if indptr[n_id[i]] < first else 0.0
        total = running[first + count - 1] - base
        spins = 0
        done = 0
        while done < k and spins < 4 * k and k <= _SCAN_LIMIT:
            p = _roulette(running, first, first + count, base, unit(draw(key[i - origin], spins)) * total)
            spins += 1
            fresh = True
            for q in range(done):
                if chosen[o + q] == p:
                    fresh = False
                    break
            if fresh:
                chosen[o + done] = p
                done += 1
        if done < k:
            _race(first, count, done, k, mix(key[i - origin]), weight, chosen, o)


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _race(first: int, count: int, done: int, k: int, key: Any, weight: Any, chosen: Any, o: int) -> None:
    """Fills picks done..k by the smallest arrival times -log(u)/w among the positions not picked yet."""
    arrival = np.empty(k - done, np.float64)
    size = 0
    for p in range(first, first + count):
        taken = False
        for q in range(done):
            if chosen[o + q] == p:
                taken = True
                break
        if taken:
            continue
        time = -np.log(unit(draw(key, p - first))) / weight[p]
        size = _keep_smallest(arrival, chosen, o + done, size, k - done, time, p)


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _keep_smallest(rank: Any, chosen: Any, o: int, size: int, k: int, value: Any, position: int) -> int:
    """Offers (value, position) to the max-heap of the k smallest in rank and chosen[o:]; its new size."""
    if size < k:
        child = size
        while child > 0:
            parent = (child - 1) >> 1
            if rank[parent] >= value:
                break
            rank[child] = rank[parent]
            chosen[o + child] = chosen[o + parent]
            child = parent
        rank[child] = value
        chosen[o + child] = position
        return size + 1
    if value < rank[0]:
        hole = 0
        child = 1
        while child < k:
            if child + 1 < k and rank[child + 1] > rank[child]:
                child += 1
            if rank[child] <= value:
                break
            rank[hole] = rank[child]
            chosen[o + hole] = chosen[o + child]
            hole = child
            child = 2 * hole + 1
        rank[hole] = value
        chosen[o + hole] = position
    return size


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def pick_labor(
    begin: int,
    end: int,
    origin: int,
    start: Any,
    degree: Any,
    pointer: Any,
    indices: Any,
    weight: Any,
    labor_key: Any,
    batch: int,
    dependency: int,
    chosen: Any,
) -> None:
    """The k sources with the smallest variate of each range; a source has one variate for all its targets.

    This is LABOR-0 (Balin and Catalyurek 2023) in its sequential Poisson form, which keeps the fanout exact:
    one target sees a uniform subset, several targets agree on their sources. A variate lives for `dependency`
    batches; sources renew theirs in turn, 1/dependency of them each batch. Copies of a repeated edge share
    the source's variate, so ties go to the earlier position.
    """
    longest = 0
    for i in range(begin, end):
        longest = max(longest, np.int64(pointer[i + 1] - pointer[i]))
    rank = np.empty(longest, np.float64)
    for i in range(begin, end):
        o = pointer[i]
        k = pointer[i + 1] - o
        first = np.int64(start[i - origin])
        count = np.int64(degree[i - origin])
        if k == count:
            for j in range(k):
                chosen[o + j] = first + j
            continue
        if k == 0:
            continue
        size = 0
        for p in range(first, first + count):
            source = node_key(labor_key, indices[p])
            if dependency > 1:
                phase = below(source, dependency)
                source = draw(source, (batch + phase) // dependency)
            value = unit(source)
            if weight.size > 0:
                value = -np.log(value) / weight[p]
            size = _keep_smallest(rank, chosen, o, size, k, value, p)
