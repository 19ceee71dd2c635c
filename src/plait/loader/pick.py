"""Which in-edges of which targets enter a sample: ranges first, then one rule per way of choosing.

A frontier is the slice [begin, end) of the nodes found so far. `locate` turns it into CSR ranges
(start, degree), the offsets of what each target will be given (pointer) and one random key per target;
`pick_edges` then writes the chosen edges. Every target writes only between its own offsets and draws only
from its own key, so any split of the frontier over threads gives the same edges.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from plait.features.memory import prefetch
from plait.graph.compiled import compiled, inlined
from plait.loader.draw import below, draw, mix, node_key, unit

__all__ = [
    "ALL", "LABOR", "REPLACE", "UNIFORM", "WEIGHTED", "WEIGHTED_REPLACE", "locate", "locate_in_time",
    "pick_edges", "pick_uniform", "running_sums",
]  # fmt: skip

ALL, UNIFORM, REPLACE, WEIGHTED, WEIGHTED_REPLACE, LABOR = range(6)

# Above this many picks for one target, looking through the earlier ones would be quadratic.
_SCAN_LIMIT = 64
# Cells of the table of drawn offsets: 16 KiB, half of a small L1 cache.
_MARKS = 4096
# Targets whose edges are chosen before their ends are read: far enough apart for the prefetch to arrive, near
# enough for its lines to be in the L1 cache still (128 targets took 0.98 to 1.09 times as long, the whole
# frontier 1.3 to 1.8 times).
_BLOCK = 32
# Edges between two prefetches where a whole row is read: no more than a cache line holds.
_LINE = 8
# Targets between prefetching a row pointer and reading it. After a gather of features the pointers are not in
# the cache: without prefetching, a target takes 1.4 to 1.6 times as long.
_AHEAD = 16

# Indices of the loops over edges are unsigned: numba tests signed ones for counting from the end.
_ONE, _TWO = np.uint64(1), np.uint64(2)


@compiled
def locate(
    indptr: Any, n_id: Any, tree: Any, begin: int, end: int, fanout: int, replace: bool, hop_key: Any,
    start: Any, degree: Any, pointer: Any, key: Any,
) -> int:  # fmt: skip
    """The number of edges the frontier will be given; fills start, degree, pointer and key for it."""
    has_tree = tree.size > 0
    total = pointer[begin]
    origin, stop = np.uint64(begin), np.uint64(end)
    for i in range(origin, stop):
        prefetch(indptr, n_id[min(i + np.uint64(_AHEAD), stop - _ONE)])
        v = np.uint64(n_id[i])
        first = indptr[v]
        count = indptr[v + _ONE] - first
        start[i - origin] = first
        degree[i - origin] = count
        key[i - origin] = node_key(node_key(hop_key, tree[i]) if has_tree else hop_key, v)
        if fanout >= 0 and (count > fanout or (replace and count > 0)):
            count = fanout
        total += count
        pointer[i + _ONE] = total
    return int(total - pointer[begin])


@compiled
def locate_in_time(
    indptr: Any, times: Any, n_id: Any, tree: Any, seed_time: Any, begin: int, end: int, fanout: int,
    replace: bool, last: bool, hop_key: Any, start: Any, degree: Any, pointer: Any, key: Any,
) -> int:  # fmt: skip
    """As `locate`, with each range cut to the edges no later than the seed; `times` ascend within a row."""
    total = pointer[begin]
    for i in range(begin, end):
        v = n_id[i]
        limit = seed_time[tree[i]]
        first = int(indptr[v])
        low = first
        high = int(indptr[v + 1])
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
    return int(total - pointer[begin])


@compiled
def running_sums(indptr: Any, weight: Any) -> Any:
    """Sums of weight from the start of each row: one sum over all would lose light rows behind heavy ones."""
    running = np.empty_like(weight)
    for v in range(indptr.size - 1):
        total = 0.0
        for p in range(indptr[v], indptr[v + 1]):
            total += weight[p]
            running[p] = total
    return running


@compiled
def pick_uniform(
    begin: int, end: int, origin: int, start: Any, degree: Any, pointer: Any, key: Any, ends: Any,
    stride: int, source: Any, edge: Any,
) -> None:  # fmt: skip
    """As `pick_edges` for uniform subsets by Floyd's algorithm: k draws for k picks, whatever the degree.

    mark[t] == stamp says that offset t was drawn for this target; offsets beyond the table share its cells,
    and a hit there is checked against the picks. All of it stands in one loop: a call with array arguments
    counts references with atomic operations, which doubled the time of an edge.
    """
    mark = np.zeros(_marks_needed(begin, end, origin, degree, pointer), np.int32)
    cells = np.uint64(mark.size)
    mask = cells - _ONE
    for block in range(begin, end, _BLOCK):
        stop = min(end, block + _BLOCK)
        for i in range(block, stop):
            first = np.uint64(start[i - origin])
            count = np.uint64(degree[i - origin])
            o = np.uint64(pointer[i])
            k = np.uint64(pointer[i + 1]) - o
            if count == k:
                for j in range(k):
                    edge[o + j] = first + j
                for j in range(np.uint64(0), k, np.uint64(_LINE)):
                    prefetch(ends, np.uint64(stride) * (first + j))
                continue
            target_key = key[i - origin]
            stamp = np.int32(i - begin + 1)
            for j in range(k):
                top = count - k + j
                t = np.uint64(below(draw(target_key, j), top + _ONE))
                if mark[t & mask] == stamp:
                    if count <= cells:
                        t = top
                    else:
                        for q in range(j):
                            if np.uint64(edge[o + q]) == first + t:
                                t = top
                                break
                mark[t & mask] = stamp
                edge[o + j] = first + t
                prefetch(ends, np.uint64(stride) * (first + t))
        _read_ends(ends, stride, pointer[block], pointer[stop], source, edge)


@compiled
def _read_ends(ends: Any, stride: int, begin: int, end: int, source: Any, edge: Any) -> None:
    """Turns positions into sources and, where edges have other numbers than those, into numbers."""
    if stride == 2:
        for e in range(np.uint64(begin), np.uint64(end)):
            at = _TWO * np.uint64(edge[e])
            source[e] = ends[at]
            edge[e] = ends[at + _ONE]
    else:
        for e in range(np.uint64(begin), np.uint64(end)):
            source[e] = ends[np.uint64(edge[e])]


@compiled
def pick_edges(
    mode: int, begin: int, end: int, origin: int, start: Any, degree: Any, pointer: Any, key: Any,
    ends: Any, stride: int, indptr: Any, n_id: Any, weight: Any, running: Any, labor_key: Any, batch: int,
    dependency: int, source: Any, edge: Any,
) -> None:  # fmt: skip
    """Writes the sources and the numbers of the edges chosen for targets begin..end, by any rule but UNIFORM.

    ends[stride * p] is the source of the edge at position p; with stride 2 its number follows. Positions are
    chosen a block of targets ahead of reading them: these reads go all over the graph, and with prefetching
    an edge costs 7 ns instead of 12 to 17.
    """
    rank = np.empty(_longest(begin, end, pointer) if mode >= WEIGHTED else 0, np.float64)
    for block in range(begin, end, _BLOCK):
        stop = min(end, block + _BLOCK)
        for i in range(block, stop):
            first = np.int64(start[i - origin])
            count = np.int64(degree[i - origin])
            o = pointer[i]
            k = pointer[i + 1] - o
            if k == 0:
                continue
            target_key = key[i - origin]
            if mode == REPLACE:
                for j in range(k):
                    edge[o + j] = first + below(draw(target_key, j), count)
            elif mode == WEIGHTED_REPLACE:
                base = running[first - 1] if indptr[n_id[i]] < first else 0.0
                _spin(first, count, k, target_key, running, base, edge, o)
            elif count == k:
                for j in range(k):
                    edge[o + j] = first + j
            elif mode == WEIGHTED:
                base = running[first - 1] if indptr[n_id[i]] < first else 0.0
                _successive(first, count, k, target_key, weight, running, base, rank, edge, o)
            else:
                _labor(first, count, k, ends, stride, weight, labor_key, batch, dependency, rank, edge, o)
            for e in range(o, o + k):
                prefetch(ends, stride * np.int64(edge[e]))
        _read_ends(ends, stride, pointer[block], pointer[stop], source, edge)


@compiled
def _marks_needed(begin: int, end: int, origin: int, degree: Any, pointer: Any) -> int:
    size = _MARKS
    for i in range(begin, end):
        if pointer[i + 1] - pointer[i] > _SCAN_LIMIT:
            while size < degree[i - origin]:
                size *= 2
    return size


@compiled
def _longest(begin: int, end: int, pointer: Any) -> int:
    longest = 0
    for i in range(begin, end):
        longest = max(longest, pointer[i + 1] - pointer[i])
    return longest


@inlined
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


@compiled
def _spin(first: int, count: int, k: int, key: Any, running: Any, base: float, edge: Any, o: int) -> None:
    """k independent draws in proportion to weight; `running` sums weights from the start of the row."""
    total = running[first + count - 1] - base
    for j in range(k):
        edge[o + j] = _roulette(running, first, first + count, base, unit(draw(key, j)) * total)


@compiled
def _successive(
    first: int, count: int, k: int, key: Any, weight: Any, running: Any, base: float, rank: Any, edge: Any,
    o: int,
) -> None:  # fmt: skip
    """Draws without replacement, each in proportion to the weights not yet drawn.

    Roulette draws that hit an earlier pick are thrown away, which leaves the law of the next pick unchanged.
    When few heavy edges make that slow, the rest is chosen by the smallest -log(u)/w (Efraimidis and Spirakis
    2006), which has the same law given what was picked before.
    """
    total = running[first + count - 1] - base
    spins = 0
    done = 0
    while done < k and spins < 4 * k and k <= _SCAN_LIMIT:
        p = _roulette(running, first, first + count, base, unit(draw(key, spins)) * total)
        spins += 1
        is_new = True
        for q in range(done):
            if edge[o + q] == p:
                is_new = False
                break
        if is_new:
            edge[o + done] = p
            done += 1
    if done < k:
        _race(first, count, done, k, mix(key), weight, rank, edge, o)


@compiled
def _race(
    first: int, count: int, done: int, k: int, key: Any, weight: Any, rank: Any, edge: Any, o: int
) -> None:
    """Fills picks done..k by the smallest arrival times -log(u)/w among the positions not picked yet."""
    size = 0
    for p in range(first, first + count):
        taken = False
        for q in range(done):
            if edge[o + q] == p:
                taken = True
                break
        if taken:
            continue
        time = -np.log(unit(draw(key, p - first))) / weight[p]
        if size < k - done or time < rank[0]:
            size = _keep_smallest(rank, edge, o + done, size, k - done, time, p)


@compiled
def _keep_smallest(rank: Any, edge: Any, o: int, size: int, k: int, value: Any, position: int) -> int:
    """Enters a value below the largest into the max-heap of the k smallest in rank, edge[o:]; its size."""
    if size < k:
        child = size
        while child > 0:
            parent = (child - 1) >> 1
            if rank[parent] >= value:
                break
            rank[child] = rank[parent]
            edge[o + child] = edge[o + parent]
            child = parent
        rank[child] = value
        edge[o + child] = position
        return size + 1
    hole = 0
    child = 1
    while child < k:
        if child + 1 < k and rank[child + 1] > rank[child]:
            child += 1
        if rank[child] <= value:
            break
        rank[hole] = rank[child]
        edge[o + hole] = edge[o + child]
        hole = child
        child = 2 * hole + 1
    rank[hole] = value
    edge[o + hole] = position
    return size


@compiled
def _labor(
    first: int, count: int, k: int, ends: Any, stride: int, weight: Any, labor_key: Any, batch: int,
    dependency: int, rank: Any, edge: Any, o: int,
) -> None:  # fmt: skip
    """The k sources with the smallest variate; a source has one variate for all its targets.

    This is LABOR-0 (Balin and Catalyurek 2023) in its sequential Poisson form, which keeps the fanout exact:
    one target sees a uniform subset, several targets agree on their sources. A variate lives for `dependency`
    batches; sources renew theirs in turn, 1/dependency of them each batch.
    """
    size = 0
    for p in range(first, first + count):
        bits = node_key(labor_key, ends[stride * p])
        if dependency > 1:
            bits = draw(bits, (batch + below(bits, dependency)) // dependency)
        value = unit(bits)
        if weight.size > 0:
            value = -np.log(value) / weight[p]
        if size < k or value < rank[0]:
            size = _keep_smallest(rank, edge, o, size, k, value, p)
