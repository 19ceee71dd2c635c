"""Which nodes are computed together: clusters of rows that share partial sums, packed into tiles."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from plait.graph.compiled import compiled
from plait.graph.hag.rows import invert

if TYPE_CHECKING:
    from plait.graph.hag.hierarchy import Hag

__all__ = ["Tiles", "cluster_tiles", "is_nearly_consecutive", "node_tiles", "root_of", "usual_tile_nodes"]

Ints = NDArray[Any]


class Tiles(NamedTuple):
    """Tile t computes the nodes order[start[t] : start[t + 1]], in that order."""

    order: Ints
    start: Ints


def cluster_tiles(hag: Hag, tile_nodes: int) -> Tiles:
    """Tiles of at most `tile_nodes` nodes that keep the readers of a partial sum together where they fit.

    Clusters no larger than a tile grow along the sums with the longest chains first (their readers share
    most), then those of inputs only, then along the inputs; so connected parts smaller than a tile are never
    split. A union that would not fit is left out whole. Clusters are packed by their
    smallest node, and a tile's nodes ascend: consecutive rows are prefetched and written together.
    """
    num_sums = hag.num_aggregation_nodes
    length = np.diff(hag.indptr).astype(np.int32)
    reader_start, readers = invert(hag.indptr[:-1], length, hag.indices, hag.num_sources + num_sums)
    link = np.arange(hag.num_nodes, dtype=np.int32)
    size = np.ones(hag.num_nodes, np.int32)
    following = np.full(hag.num_nodes, -1, np.int32)
    last = np.arange(hag.num_nodes, dtype=np.int32)
    row_of_sum = np.full(num_sums, -1, np.int32)
    seen = np.full(hag.num_nodes, -1, np.int32)
    # inputs with few readers tell more about locality than hubs, whose readers fit no tile anyway
    fan_out = np.diff(reader_start[: hag.num_sources + 1])
    inputs = np.argsort(fan_out, kind="stable").astype(np.int32)
    inputs = inputs[(fan_out[inputs] > 1) & (fan_out[inputs] <= tile_nodes)]
    columns = np.concatenate((hag.num_sources + np.arange(num_sums, dtype=np.int32)[::-1], inputs))
    _grow_clusters(
        columns, hag.num_sources, hag.num_nodes, reader_start, readers,
        tile_nodes, link, size, following, last, row_of_sum, seen,
    )  # fmt: skip
    order = np.empty(hag.num_nodes, np.int32)
    start = np.zeros(hag.num_nodes + 1, np.int64)
    num_tiles = _pack(link, size, following, tile_nodes, order, start)
    _sort_tiles(order, start, num_tiles)
    return Tiles(order, start[: num_tiles + 1].copy())


def usual_tile_nodes(num_nodes: int) -> int:
    """Enough tiles to share among cores, few enough that neighbours seldom part."""
    return min(max(num_nodes // 32, 512), 8192)


def is_nearly_consecutive(tiles: Tiles) -> bool:
    """True when the tiles' nodes, from the smallest to the largest, span at most twice their number."""
    if tiles.order.size == 0:
        return True
    first, last = tiles.order[tiles.start[:-1]], tiles.order[tiles.start[1:] - 1]  # a tile's nodes ascend
    return bool((last - first + 1).sum() <= 2 * tiles.order.size)


def node_tiles(num_nodes: int, tile_nodes: int) -> Tiles:
    """Tiles of consecutive nodes; right where the nodes' own order is local already."""
    start = np.minimum(np.arange(0, num_nodes + tile_nodes, tile_nodes, dtype=np.int64), num_nodes)
    return Tiles(np.arange(num_nodes, dtype=np.int32), start if num_nodes else start[:1])


@compiled
def root_of(link: Ints, v: int) -> int:
    """The one that stands for all that are linked with v; paths are halved on the way."""
    while link[v] != v:
        link[v] = link[link[v]]
        v = link[v]
    return v


@compiled
def _grow_clusters(
    columns: Ints, num_sources: int, num_nodes: int, reader_start: Ints, readers: Ints, tile_nodes: int,
    link: Ints, size: Ints, following: Ints, last: Ints, row_of_sum: Ints, seen: Ints,
) -> None:  # fmt: skip
    """Join the clusters of all readers of a column, column after column, where the whole still fits."""
    for turn in range(columns.size):
        column = columns[turn]
        total = 0
        largest = -1
        for r in range(reader_start[column], reader_start[column + 1]):
            reader = readers[r]
            root = root_of(link, reader if reader < num_nodes else row_of_sum[reader - num_nodes])
            if seen[root] != turn:
                seen[root] = turn
                total += size[root]
                if largest < 0 or size[root] > size[largest]:
                    largest = root
        if column >= num_sources:
            row_of_sum[column - num_sources] = largest
        if total > tile_nodes or total == size[largest]:
            continue
        for r in range(reader_start[column], reader_start[column + 1]):
            reader = readers[r]
            root = root_of(link, reader if reader < num_nodes else row_of_sum[reader - num_nodes])
            if root != largest:
                link[root] = largest
                size[largest] += size[root]
                following[last[largest]] = root
                last[largest] = last[root]


@compiled
def _pack(link: Ints, size: Ints, following: Ints, tile_nodes: int, order: Ints, start: Ints) -> int:
    """Fill tiles with whole clusters, by smallest node; the number of tiles."""
    is_placed = np.zeros(link.size, np.bool_)
    at = 0
    tile = 0
    for v in range(link.size):
        root = root_of(link, v)
        if is_placed[root]:
            continue
        is_placed[root] = True
        if at > start[tile] and at - start[tile] + size[root] > tile_nodes:
            tile += 1
            start[tile] = at
        member = root
        while member >= 0:
            order[at] = member
            at += 1
            member = following[member]
    if at > start[tile]:
        tile += 1
        start[tile] = at
    return tile


@compiled
def _sort_tiles(order: Ints, start: Ints, num_tiles: int) -> None:
    for tile in range(num_tiles):
        order[start[tile] : start[tile + 1]] = np.sort(order[start[tile] : start[tile + 1]])
