"""Rows as differences: a node's sum is that of a similar node, plus and minus what they do not share.

The idea of CBM (Compressed Binary Matrix): a spanning tree over the rows, in which an edge costs the entries
two rows do not share and the root stands for computing a row plainly, so there are never more additions than
in the plain graph. Candidates for parents come from MinHash order, not from all pairs.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from plait.errors import GraphError, InputError
from plait.graph.compiled import compiled
from plait.graph.hag import fast
from plait.graph.hag.schedule import Schedule
from plait.graph.hag.tiles import root_of, usual_tile_nodes

if TYPE_CHECKING:
    from plait.graph.csr import Graph

__all__ = ["Differences", "difference_rows", "difference_schedule"]

Ints = NDArray[Any]

_ORDERS, _NEIGHBOURS = 6, 4
"""Rows are compared with this many successors in each of this many MinHash orders."""


@dataclass(frozen=True, eq=False)
class Differences:
    """A forest over the nodes: sum(v) = sum(parent[v]) + added inputs - subtracted inputs.

    Row v adds columns[start[v] : middle[v]] and subtracts columns[middle[v] : start[v + 1]]; a node without
    parent (-1) adds its neighbours. `order` visits parents before their children, depth first.
    """

    num_nodes: int
    num_sources: int
    parent: Ints  # int32 [num_nodes]
    start: Ints  # int64 [num_nodes + 1]
    middle: Ints  # int64 [num_nodes]
    columns: Ints  # int32
    order: Ints  # int32 [num_nodes]
    num_graph_edges: int
    fingerprint: str

    @property
    def num_roots(self) -> int:
        """Nodes computed plainly."""
        return int(np.count_nonzero(self.parent < 0))

    @property
    def aggregations(self) -> int:
        """Additions and subtractions."""
        operands = np.diff(self.start) + (self.parent >= 0)
        return int(np.maximum(operands - 1, 0).sum())

    @property
    def traffic(self) -> int:
        """Feature rows read and written."""
        has_operands = (np.diff(self.start) > 0) | (self.parent >= 0)
        return int(self.columns.size + self.num_nodes - self.num_roots + np.count_nonzero(has_operands))

    def __repr__(self) -> str:
        return (
            f"Differences({self.num_graph_edges:,} -> {self.columns.size:,} entries, "
            f"{self.num_nodes - self.num_roots:,} rows from another, {self.aggregations:,} additions)"
        )

    def check(self, graph: Graph) -> bool:
        """True; raises GraphError naming the first node whose row does not come out with multiplicity."""
        if self.fingerprint != graph.fingerprint:
            raise GraphError("differences: made for another graph; compute them for this one")
        turn = np.empty(self.num_nodes, np.int64)
        turn[self.order] = np.arange(self.num_nodes)
        has_parent = self.parent >= 0
        if (turn[self.parent[has_parent]] >= turn[has_parent]).any():
            raise GraphError("differences: a row is needed before it is computed; compute them again")
        counter = np.zeros(self.num_sources, np.int32)
        node = _first_wrong_row(
            self.parent, self.start, self.middle, self.columns, graph.indptr, graph.indices, counter
        )
        if node >= 0:
            raise GraphError(f"differences: the row of node {node} is wrong; compute them again")
        return True


def difference_rows(
    graph: Graph, least_saving: int = 2, max_depth: int = 128, time_budget: float | None = None
) -> Differences:
    """The graph's rows as differences, where that saves `least_saving` additions or more each.

    Chains longer than `max_depth` are cut: rounding errors add up along them. After `time_budget` seconds no
    more candidates are looked for.
    """
    if least_saving < 0 or max_depth < 0:
        raise InputError(f"least_saving={least_saving}, max_depth={max_depth}: both are 0 or more")
    graph.require_int32("hag.difference_rows")
    indptr, indices = graph.indptr.astype(np.int64), graph.indices.astype(np.int32)
    deadline = math.inf if time_budget is None else time.perf_counter() + time_budget
    one, other, weight = _candidates(indptr, indices, deadline)
    parent, order = _spanning_tree(indptr, one, other, weight)
    _cut_tree(indptr, indices, order, least_saving, max_depth, parent)
    order = _depth_first(parent)
    start, middle = np.zeros(graph.num_nodes + 1, np.int64), np.zeros(graph.num_nodes, np.int64)
    columns = np.empty(indices.size, np.int32)  # a kept difference is shorter than its row
    size = _write_differences(indptr, indices, parent, start, middle, columns)
    return Differences(
        graph.num_nodes,
        graph.num_sources,
        parent,
        start,
        middle,
        columns[:size].copy(),
        order,
        graph.num_edges,
        graph.fingerprint,
    )


def difference_schedule(rows: Differences, tile_nodes: int | None = None) -> Schedule:
    """The forest as tiles of whole trees, depth first; a tile ends with the tree that fills `tile_nodes`."""
    size = usual_tile_nodes(rows.num_nodes) if tile_nodes is None else tile_nodes
    if size < 1:
        raise InputError(f"tile_nodes={tile_nodes}; a tile holds at least one node")
    num_steps = rows.num_nodes
    start = np.zeros(num_steps + 1, np.int64)
    subtracted = np.zeros(num_steps, np.int64)
    operands = np.empty(rows.columns.size + num_steps, np.int32)
    buffer = np.full(num_steps, -1, np.int32)
    tiles = np.zeros(num_steps + 1, np.int64)
    num_tiles, num_slots, used = _emit_forest(
        rows.parent, rows.start, rows.middle, rows.columns, rows.order, rows.num_sources, size,
        start, subtracted, operands, buffer, tiles,
    )  # fmt: skip
    return Schedule(
        rows.num_nodes,
        rows.num_sources,
        0,
        int(num_slots),
        np.array([0, num_tiles] if num_tiles else [0], np.int64),
        tiles[: num_tiles + 1].copy(),
        start,
        operands[:used].copy(),
        rows.order,
        buffer,
        subtracted,
    )


def _candidates(indptr: Ints, indices: Ints, deadline: float) -> tuple[Ints, Ints, Ints]:
    """(one, other, weight): pairs of similar rows and the entries they do not share."""
    num_nodes = indptr.size - 1
    length = np.diff(indptr).astype(np.int32)
    rooms = num_nodes * _NEIGHBOURS
    found = [tuple(np.zeros(0, np.int32) for _ in range(3))]
    for seed in range(_ORDERS):
        if time.perf_counter() > deadline:
            break
        order = fast.similar_order(indptr[:-1], length, indices, seed)
        one, other, weight = (np.empty(rooms, np.int32) for _ in range(3))
        size = _compare(order, indptr, indices, _NEIGHBOURS, one, other, weight)
        found.append((one[:size].copy(), other[:size].copy(), weight[:size].copy()))
    return tuple(np.concatenate(part) for part in zip(*found, strict=True))  # type: ignore[return-value]


def _spanning_tree(indptr: Ints, one: Ints, other: Ints, weight: Ints) -> tuple[Ints, Ints]:
    """(parent, order) of the lightest tree that joins all rows to the root, parents before children."""
    num_nodes = indptr.size - 1
    nodes = np.arange(num_nodes, dtype=np.int32)
    plain = np.maximum(np.diff(indptr) - 1, 0).astype(np.int32)
    # root edges come first, so a tie computes the row plainly
    one = np.concatenate((nodes, one))
    other = np.concatenate((np.full(num_nodes, num_nodes, np.int32), other))
    by_weight = np.argsort(np.concatenate((plain, weight)), kind="stable")
    is_taken = np.zeros(one.size, bool)
    _take_lightest(by_weight, one, other, np.arange(num_nodes + 1, dtype=np.int32), is_taken)
    one, other = one[is_taken], other[is_taken]
    ends = np.concatenate((one, other))
    by_end = np.argsort(ends, kind="stable")
    start = np.zeros(num_nodes + 2, np.int64)
    np.cumsum(np.bincount(ends, minlength=num_nodes + 1), out=start[1:])
    parent, order = np.full(num_nodes, -1, np.int32), np.empty(num_nodes, np.int32)
    _orient(start, np.concatenate((other, one))[by_end], parent, order)
    return parent, order


def _depth_first(parent: Ints) -> Ints:
    """Nodes from the roots down, a node's children right after it; trees by their root."""
    order = np.empty(parent.size, np.int32)
    by_parent = np.argsort(parent, kind="stable").astype(np.int32)
    start = np.zeros(parent.size + 2, np.int64)
    np.cumsum(np.bincount(parent + 1, minlength=parent.size + 1), out=start[1:])
    _walk(start, by_parent, order)
    return order


@compiled
def _distance(indptr: Ints, indices: Ints, one: int, other: int, limit: int) -> int:
    """Entries of two sorted rows without a partner in the other, or `limit` when not fewer."""
    i, stop_i = indptr[one], indptr[one + 1]
    j, stop_j = indptr[other], indptr[other + 1]
    distance = 0
    while i < stop_i and j < stop_j and distance < limit:
        if indices[i] == indices[j]:
            i += 1
            j += 1
        else:
            distance += 1
            if indices[i] < indices[j]:
                i += 1
            else:
                j += 1
    return min(distance + stop_i - i + stop_j - j, limit)  # type: ignore[no-any-return]


@compiled
def _compare(
    order: Ints, indptr: Ints, indices: Ints, neighbours: int, one: Ints, other: Ints, weight: Ints
) -> int:
    """Pairs of near rows in `order` whose difference is shorter than the longer row; their number."""
    size = 0
    for i in range(order.size):
        v = order[i]
        length = indptr[v + 1] - indptr[v]
        for k in range(i + 1, min(i + 1 + neighbours, order.size)):
            u = order[k]
            longer = max(length, indptr[u + 1] - indptr[u])
            if longer < 3:
                continue
            distance = _distance(indptr, indices, v, u, longer)
            if distance < longer - 1:
                one[size], other[size], weight[size] = v, u, distance
                size += 1
    return size


@compiled
def _take_lightest(by_weight: Ints, one: Ints, other: Ints, link: Ints, is_taken: Ints) -> None:
    """Kruskal: the lightest edge that joins two parts, again and again."""
    for e in by_weight:
        a, b = root_of(link, one[e]), root_of(link, other[e])
        if a != b:
            link[a] = b
            is_taken[e] = True


@compiled
def _orient(start: Ints, ends: Ints, parent: Ints, order: Ints) -> None:
    """Walk from the root, node number parent.size, and set every node's parent; its children get -1."""
    root = parent.size
    is_seen = np.zeros(root + 1, np.bool_)
    is_seen[root] = True
    size = 0
    for e in range(start[root], start[root + 1]):
        order[size] = ends[e]
        is_seen[ends[e]] = True
        size += 1
    at = 0
    while at < size:
        v = order[at]
        at += 1
        for e in range(start[v], start[v + 1]):
            u = ends[e]
            if not is_seen[u]:
                is_seen[u] = True
                parent[u] = v
                order[size] = u
                size += 1


@compiled
def _cut_tree(
    indptr: Ints, indices: Ints, order: Ints, least_saving: int, max_depth: int, parent: Ints
) -> None:
    """Make a root of every node that saves too little or stands too deep."""
    depth = np.zeros(parent.size, np.int32)
    for v in order:
        if parent[v] < 0:
            continue
        plain = indptr[v + 1] - indptr[v] - 1
        distance = _distance(indptr, indices, v, parent[v], plain + 1)
        if plain - distance < max(least_saving, 0) or depth[parent[v]] >= max_depth:
            parent[v] = -1
        else:
            depth[v] = depth[parent[v]] + 1


@compiled
def _walk(start: Ints, by_parent: Ints, order: Ints) -> None:
    """Depth first over children lists; entry 0 of `start` is that of the root."""
    stack = np.empty(order.size + 1, np.int64)
    height, size = 0, 0
    for e in range(start[1] - 1, start[0] - 1, -1):
        stack[height] = by_parent[e]
        height += 1
    while height > 0:
        height -= 1
        v = stack[height]
        order[size] = v
        size += 1
        for e in range(start[v + 2] - 1, start[v + 1] - 1, -1):
            stack[height] = by_parent[e]
            height += 1


@compiled
def _write_differences(
    indptr: Ints, indices: Ints, parent: Ints, start: Ints, middle: Ints, columns: Ints
) -> int:
    at = 0
    for v in range(parent.size):
        i, stop_i = indptr[v], indptr[v + 1]
        if parent[v] < 0:
            columns[at : at + stop_i - i] = indices[i:stop_i]
            at += stop_i - i
            middle[v] = start[v + 1] = at
            continue
        for turn in range(2):  # what only v has, then what only its parent has
            one, other = (v, parent[v]) if turn == 0 else (parent[v], v)
            i, stop_i = indptr[one], indptr[one + 1]
            j, stop_j = indptr[other], indptr[other + 1]
            while i < stop_i:
                if j == stop_j or indices[i] < indices[j]:
                    columns[at] = indices[i]
                    at += 1
                    i += 1
                elif indices[i] > indices[j]:
                    j += 1
                else:
                    i += 1
                    j += 1
            if turn == 0:
                middle[v] = at
        start[v + 1] = at
    return at


@compiled
def _first_wrong_row(
    parent: Ints, start: Ints, middle: Ints, columns: Ints, indptr: Ints, indices: Ints, counter: Ints
) -> int:
    """A row is right when its parent's row, the added and the subtracted entries cancel it out."""
    for v in range(parent.size):
        for e in range(indptr[v], indptr[v + 1]):
            counter[indices[e]] += 1
        for e in range(start[v], start[v + 1]):
            counter[columns[e]] += -1 if e < middle[v] else 1
        if parent[v] >= 0:
            for e in range(indptr[parent[v]], indptr[parent[v] + 1]):
                counter[indices[e]] -= 1
                if counter[indices[e]] < 0:
                    return v
        for e in range(indptr[v], indptr[v + 1]):
            if counter[indices[e]] != 0:
                return v
        for e in range(start[v], start[v + 1]):
            if counter[columns[e]] != 0:
                return v
    return -1


@compiled
def _emit_forest(
    parent: Ints, row_start: Ints, middle: Ints, columns: Ints, order: Ints, num_sources: int,
    tile_nodes: int, start: Ints, subtracted: Ints, operands: Ints, buffer: Ints, tiles: Ints,
) -> tuple[int, int, int]:  # fmt: skip
    """(tiles, slots, operands): one step per node; a parent's slot is free after its last child."""
    children = np.zeros(parent.size, np.int32)
    for v in range(parent.size):
        if parent[v] >= 0:
            children[parent[v]] += 1
    slot_of = np.full(parent.size, -1, np.int32)
    free = np.empty(parent.size + 1, np.int32)
    num_tiles, most_slots, num_slots, num_free, at = 0, 0, 0, 0, 0
    for step in range(order.size):
        v = order[step]
        up = parent[v]
        if up < 0 and step - tiles[num_tiles] >= tile_nodes:
            num_tiles += 1
            tiles[num_tiles] = step
            most_slots = max(most_slots, num_slots)
            num_slots = num_free = 0
        if up >= 0:
            operands[at] = num_sources + slot_of[up]
            at += 1
        for e in range(row_start[v], row_start[v + 1]):
            if e == middle[v]:
                subtracted[step] = at
            operands[at] = columns[e]
            at += 1
        if middle[v] == row_start[v + 1]:
            subtracted[step] = at
        start[step + 1] = at
        if children[v] > 0:  # before the parent's slot is given back: a step never writes where it reads
            if num_free > 0:
                num_free -= 1
                slot_of[v] = free[num_free]
            else:
                slot_of[v] = num_slots
                num_slots += 1
            buffer[step] = num_sources + slot_of[v]
        if up >= 0:
            children[up] -= 1
            if children[up] == 0:
                free[num_free] = slot_of[up]
                num_free += 1
    if order.size > tiles[num_tiles]:
        num_tiles += 1
        tiles[num_tiles] = order.size
    return num_tiles, max(most_slots, num_slots), at
