"""Partial sums placed in time: tiles run depth-first, each partial sum in a slot that is soon free again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from plait.errors import InputError
from plait.graph.compiled import compiled
from plait.graph.hag.tiles import Tiles, cluster_tiles, is_nearly_consecutive, node_tiles, usual_tile_nodes

if TYPE_CHECKING:
    from plait.graph.hag.hierarchy import Hag

__all__ = ["Schedule", "chunks", "tile_schedule"]

Ints = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Schedule:
    """Partial sums in an order that an executor can run.

    Phases run one after the other; the tiles of a phase are independent and may run at the same time; the
    steps of a tile run in order. Step s reduces the rows operands[start[s] : start[s + 1]]; from
    subtracted[s] on, where that array is given, they are subtracted. Row r is input r below num_sources;
    then come num_shared rows of one buffer that all tiles see (a tile reads those of earlier phases and its
    own), then num_slots rows of scratch, a tile's own.
    (One numbering, because one loop with a select per operand ran 1.1-1.25x faster than a loop per kind.) The
    result goes to output node[s] and to row buffer[s], numbered likewise, each where it is not -1. A step
    without operands writes zeros. Every node is written once; no step writes a row that it reads.
    """

    num_nodes: int
    num_sources: int
    num_shared: int
    num_slots: int
    phases: Ints  # int64 [num_phases + 1], over tiles
    tiles: Ints  # int64 [num_tiles + 1], over steps
    start: Ints  # int64 [num_steps + 1], over operands
    operands: Ints  # int32
    node: Ints  # int32 [num_steps]
    buffer: Ints  # int32 [num_steps]
    subtracted: Ints | None = None  # int64 [num_steps]

    @property
    def num_steps(self) -> int:
        """Rows computed."""
        return int(self.node.size)

    @property
    def num_tiles(self) -> int:
        """Tiles of all phases."""
        return int(self.tiles.size - 1)

    @property
    def num_phases(self) -> int:
        """Phases; between two of them every tile is waited for."""
        return int(self.phases.size - 1)

    @property
    def num_rows(self) -> int:
        """Rows of the joint numbering: inputs, shared, slots."""
        return self.num_sources + self.num_shared + self.num_slots

    @property
    def aggregations(self) -> int:
        """Binary additions and subtractions."""
        return int(np.maximum(np.diff(self.start) - 1, 0).sum())

    @property
    def traffic(self) -> int:
        """Rows read and written by all steps; most of them hit the cache where sums are local."""
        return int(self.operands.size) + self.num_steps

    @property
    def bytes(self) -> int:
        """Memory of the schedule itself."""
        arrays = (self.phases, self.tiles, self.start, self.operands, self.node, self.buffer, self.subtracted)
        return sum(array.nbytes for array in arrays if array is not None)

    def __repr__(self) -> str:
        return (
            f"Schedule({self.num_steps:,} steps, {self.operands.size:,} operands, {self.num_tiles:,} tiles "
            f"in {self.num_phases} phases, {self.num_slots:,} slots, {self.num_shared:,} shared sums)"
        )


def tile_schedule(hag: Hag, tile_nodes: int | None = None, tiles: Tiles | None = None) -> Schedule:
    """The hierarchy as tiles: a partial sum that one tile reads lives in its scratch, any other is shared.

    Shared sums are computed first, level by level; they read inputs and shared sums only. `tiles` replaces
    those that are found otherwise.
    """
    if tile_nodes is not None and tile_nodes < 1:
        raise InputError(f"tile_nodes={tile_nodes}; a tile holds at least one node")
    size = usual_tile_nodes(hag.num_nodes) if tile_nodes is None else tile_nodes
    if tiles is not None:
        return _place(hag, tiles, _homes(hag, tiles), size)
    tiles = cluster_tiles(hag, size)
    if not is_nearly_consecutive(tiles):
        by_node = node_tiles(hag.num_nodes, size)
        home = _homes(hag, by_node)
        # where the nodes' own order is local, rows read and written in that order are worth some shared
        # sums: web_cnr2000 (25% shared) gained 1.1x over clusters, amazon_photo (99%) lost 1.1-1.3x
        if np.count_nonzero(home == _SHARED) <= _FEW_SHARED * home.size:
            return _place(hag, by_node, home, size)
    return _place(hag, tiles, _homes(hag, tiles), size)


_UNREAD, _SHARED = -2, -1
_FEW_SHARED = 0.4


def chunks(count: int, size: int) -> Ints:
    """0, size, 2 size, ..., count."""
    return np.append(np.arange(0, count, size, dtype=np.int64), np.int64(count))


def _homes(hag: Hag, tiles: Tiles) -> Ints:
    """The one tile that reads every partial sum, or _SHARED."""
    numbers = np.arange(tiles.start.size - 1, dtype=np.int32)
    tile_of_node = np.empty(hag.num_nodes, np.int32)
    tile_of_node[tiles.order] = np.repeat(numbers, np.diff(tiles.start))
    home = np.full(hag.num_aggregation_nodes, _UNREAD, np.int32)
    _find_homes(hag.indptr, hag.indices, hag.num_nodes, hag.num_sources, tile_of_node, home)
    return home


def _place(hag: Hag, tiles: Tiles, home: Ints, tile_nodes: int) -> Schedule:
    shared_sums = np.flatnonzero(home == _SHARED).astype(np.int32)  # by level, as the sums are numbered
    num_steps = hag.num_nodes + hag.num_aggregation_nodes
    row_of_sum = np.full(hag.num_aggregation_nodes, -1, np.int32)
    row_of_sum[shared_sums] = hag.num_sources + np.arange(shared_sums.size, dtype=np.int32)
    start = np.zeros(num_steps + 1, np.int64)
    operands = np.empty(hag.num_edges, np.int32)
    node, buffer = np.full(num_steps, -1, np.int32), np.full(num_steps, -1, np.int32)
    csr = (hag.indptr, hag.indices, hag.num_nodes, hag.num_sources)
    _emit_shared(*csr, shared_sums, row_of_sum, start, operands, buffer)
    step_of_tile = np.zeros(tiles.start.size, np.int64)
    steps = (start, operands, node, buffer)
    num_slots = _emit_tiles(*csr, *tiles, row_of_sum, shared_sums.size, *steps, step_of_tile)
    phases, pieces = _cut_phases(hag.level[shared_sums], step_of_tile, tile_nodes)
    sizes = (hag.num_nodes, hag.num_sources, shared_sums.size, int(num_slots))
    return Schedule(*sizes, phases, pieces, *steps)


def _cut_phases(shared_levels: Ints, step_of_tile: Ints, tile_nodes: int) -> tuple[Ints, Ints]:
    """(phases, tiles): one phase per level of shared sums, cut into pieces, then the tiles of the outputs."""
    starts = [np.zeros(1, np.int64)]
    phases = [0]
    bounds = np.flatnonzero(np.diff(shared_levels)) + 1
    begin = 0
    for end in [*bounds.tolist(), shared_levels.size] if shared_levels.size else []:
        cuts = begin + chunks(end - begin, tile_nodes)[1:]
        starts.append(cuts)
        phases.append(phases[-1] + cuts.size)
        begin = end
    if step_of_tile.size > 1:
        starts.append(step_of_tile[1:])
        phases.append(phases[-1] + step_of_tile.size - 1)
    return np.array(phases, np.int64), np.concatenate(starts)


@compiled
def _find_homes(
    indptr: Ints, indices: Ints, num_nodes: int, num_sources: int, tile_of_node: Ints, home: Ints
) -> None:
    """Readers tell what they read: outputs, then the sums from the last, as readers have larger numbers."""
    for i in range(num_nodes + home.size):
        row = i if i < num_nodes else num_nodes + home.size - 1 - (i - num_nodes)
        mine = tile_of_node[row] if row < num_nodes else home[row - num_nodes]
        for e in range(indptr[row], indptr[row + 1]):
            child = indices[e] - num_sources
            if child >= 0:
                if home[child] == -2:
                    home[child] = mine
                elif home[child] != mine:
                    home[child] = -1


@compiled
def _emit_shared(
    indptr: Ints, indices: Ints, num_nodes: int, num_sources: int, shared_sums: Ints, row_of_sum: Ints,
    start: Ints, operands: Ints, buffer: Ints,
) -> None:  # fmt: skip
    at = 0
    for step in range(shared_sums.size):
        row = num_nodes + shared_sums[step]
        for e in range(indptr[row], indptr[row + 1]):
            column = indices[e]
            operands[at] = column if column < num_sources else row_of_sum[column - num_sources]
            at += 1
        start[step + 1] = at
        buffer[step] = num_sources + step


@compiled
def _emit_tiles(
    indptr: Ints, indices: Ints, num_nodes: int, num_sources: int, order: Ints, tile_start: Ints,
    row_of_sum: Ints, num_shared: int, start: Ints, operands: Ints, node: Ints, buffer: Ints,
    step_of_tile: Ints,
) -> int:  # fmt: skip
    """Emit the nodes of every tile in order, each after the sums it needs; the most slots a tile uses."""
    num_sums = row_of_sum.size
    reads_left = np.zeros(num_sums, np.int32)
    for e in range(indptr[-1]):
        if indices[e] >= num_sources:
            reads_left[indices[e] - num_sources] += 1
    first_slot = num_sources + num_shared
    free = np.empty(num_sums + 1, np.int32)
    stack = np.empty(num_sums + 2, np.int64)
    position = np.empty(num_sums + 2, np.int64)
    step = num_shared
    at = start[num_shared]
    most_slots = 0
    for tile in range(tile_start.size - 1):
        step_of_tile[tile] = step
        num_slots = 0
        num_free = 0
        for i in range(tile_start[tile], tile_start[tile + 1]):
            stack[0], position[0] = order[i], indptr[order[i]]
            height = 1
            while height > 0:
                row = stack[height - 1]
                missing = -1
                for e in range(position[height - 1], indptr[row + 1]):
                    child = indices[e] - num_sources
                    if child >= 0 and row_of_sum[child] < 0:
                        position[height - 1] = e + 1
                        missing = num_nodes + child
                        break
                if missing >= 0:
                    stack[height], position[height] = missing, indptr[missing]
                    height += 1
                    continue
                height -= 1
                if row < num_nodes:
                    node[step] = row
                else:  # taken before the operands' slots are given back: a step never writes where it reads
                    if num_free > 0:
                        num_free -= 1
                        buffer[step] = free[num_free]
                    else:
                        buffer[step] = first_slot + num_slots
                        num_slots += 1
                    row_of_sum[row - num_nodes] = buffer[step]
                for e in range(indptr[row], indptr[row + 1]):
                    child = indices[e] - num_sources
                    if child < 0:
                        operands[at] = indices[e]
                    else:
                        operands[at] = row_of_sum[child]
                        reads_left[child] -= 1
                        if reads_left[child] == 0 and row_of_sum[child] >= first_slot:
                            free[num_free] = row_of_sum[child]
                            num_free += 1
                    at += 1
                step += 1
                start[step] = at
        most_slots = max(most_slots, num_slots)
    step_of_tile[tile_start.size - 1] = step
    return most_slots
