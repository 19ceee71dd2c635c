"""Global node numbers to places in the sample, in order of discovery: a stamped array or a hash table.

The stamped array costs 4 bytes per node of the graph and per thread and needs no clearing: an entry counts
only when it is at least `base` (1 or more), and base moves past all earlier entries with every sample. The
hash table serves graphs too large for that, and disjoint samples, where the same node has a place in every
tree that reaches it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from plait.features.memory import prefetch
from plait.graph.compiled import compiled, inlined
from plait.loader.draw import mix

__all__ = ["finish", "hash_relabel", "induce", "stamp_relabel", "stamp_seeds"]


# Edges between prefetching a node's entry and reading it. Behind a gather of features the entries are out of
# the cache: without prefetching, an edge takes 1.7 to 2.1 times as long (graphs of 80 k to 8 M nodes);
# 16 edges ahead are within 6% of 32 from a million nodes on, and 1.15 to 1.2 times slower below.
_AHEAD = np.uint64(32)
_ONE = np.uint64(1)


@compiled
def stamp_seeds(slot: Any, base: Any, n_id: Any, count: int) -> None:
    """Enters the seeds; of a repeated seed the first copy answers for the node."""
    for i in range(count):
        if slot[n_id[i]] < base:
            slot[n_id[i]] = np.uint32(base + np.uint32(i))


@compiled
def stamp_relabel(
    slot: Any, base: Any, source: Any, begin: int, end: int, n_id: Any, found: int, row: Any
) -> int:
    """The number of nodes after source[begin:end] joined; row receives their places."""
    # Unsigned throughout, which spares the test for negative indices, and without a branch: whether a source
    # is new cannot be predicted (1.2 against 4.2 ns per edge).
    after = np.uint32(base + np.uint32(found))
    stop = np.uint64(end)
    for e in range(np.uint64(begin), stop):
        prefetch(slot, source[min(e + _AHEAD, stop - _ONE)])
        node = np.uint64(source[e])
        place = slot[node]
        is_new = place < base
        place = after if is_new else place
        slot[node] = place
        n_id[np.uint64(after - base)] = node
        after = np.uint32(after + np.uint32(is_new))
        row[e] = np.uint32(place - base)
    return int(after - base)


@inlined
def _probe(keys: Any, mask: Any, wanted: Any) -> Any:
    """Where `wanted` is, or the free cell where it belongs; keys are shifted by one so that 0 means free."""
    at = np.int64(mix(np.uint64(wanted))) & mask
    while keys[at] != 0 and keys[at] != wanted + 1:
        at = (at + 1) & mask
    return at


@compiled
def hash_relabel(
    keys: Any, places: Any, num_nodes: int, source: Any, pointer: Any, begin: int, end: int, n_id: Any,
    tree: Any, target_tree: Any, found: int, row: Any,
) -> int:  # fmt: skip
    """As `stamp_relabel` for targets begin..end, on an empty table; nodes known so far are entered first.

    n_id and tree are those of the sources, whose number of nodes in the graph is num_nodes.
    """
    mask = keys.size - 1
    has_tree = tree.size > 0
    for i in range(found):
        wanted = np.int64(n_id[i]) + (tree[i] * num_nodes if has_tree else 0)
        at = _probe(keys, mask, wanted)
        if keys[at] == 0:
            keys[at] = wanted + 1
            places[at] = i
    for i in range(begin, end):
        offset = target_tree[i] * num_nodes if has_tree else 0
        for e in range(pointer[i], pointer[i + 1]):
            wanted = np.int64(source[e]) + offset
            at = _probe(keys, mask, wanted)
            if keys[at] == 0:
                keys[at] = wanted + 1
                places[at] = found
                n_id[found] = source[e]
                if has_tree:
                    tree[found] = target_tree[i]
                found += 1
            row[e] = places[at]
    return found


@compiled
def finish(
    row: Any, edge: Any, pointer: Any, targets: int, out_row: Any, out_col: Any, out_edge: Any
) -> None:
    """Writes the answer in the caller's index type: places of sources and targets, and the edges' numbers."""
    for i in range(np.uint64(targets)):
        for e in range(np.uint64(pointer[i]), np.uint64(pointer[i + _ONE])):
            out_col[e] = i
    for e in range(np.uint64(pointer[targets])):
        out_row[e] = row[e]
        out_edge[e] = edge[e]


@compiled
def induce(
    slot: Any, base: int, indptr: Any, indices: Any, n_id: Any, out_row: Any, out_col: Any, out_edge: Any
) -> int:
    """The number of edges among the sampled nodes; written target by target where the outputs have room."""
    count = 0
    room = out_row.size
    for i in range(n_id.size):
        v = n_id[i]
        for p in range(indptr[v], indptr[v + 1]):
            place = slot[indices[p]]
            if place >= base:
                if count < room:
                    out_row[count] = np.int64(place - base)
                    out_col[count] = i
                    out_edge[count] = p
                count += 1
    return count
