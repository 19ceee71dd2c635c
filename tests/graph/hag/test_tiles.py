"""tiles.py: every node stands in one tile, tiles are bounded, and clusters follow what rows share."""

from __future__ import annotations

import numpy as np
import pytest

from plait.graph.hag import search
from plait.graph.hag.tiles import Tiles, cluster_tiles, is_nearly_consecutive, node_tiles

from .graphs import ODD_GRAPHS, graph_of, random_graph


def assert_partition(tiles: Tiles, num_nodes: int, tile_nodes: int) -> None:
    assert np.array_equal(np.sort(tiles.order), np.arange(num_nodes))
    assert tiles.start[0] == 0
    assert tiles.start[-1] == num_nodes
    sizes = np.diff(tiles.start)
    assert (sizes > 0).all()
    assert (sizes <= tile_nodes).all()


@pytest.mark.parametrize("tile_nodes", [1, 2, 5, 100])
@pytest.mark.parametrize("name", ODD_GRAPHS)
def test_tiles_split_the_nodes_within_their_bound(name: str, tile_nodes: int) -> None:
    hag = search(ODD_GRAPHS[name], min_count=2)
    assert_partition(cluster_tiles(hag, tile_nodes), hag.num_nodes, tile_nodes)
    assert_partition(node_tiles(hag.num_nodes, tile_nodes), hag.num_nodes, tile_nodes)


@pytest.mark.parametrize("seed", range(20))
def test_tiles_of_random_graphs_split_the_nodes(seed: int) -> None:
    hag = search(random_graph(np.random.default_rng(seed)), min_count=2)
    assert_partition(cluster_tiles(hag, 4), hag.num_nodes, 4)


def test_readers_of_a_sum_are_kept_together_however_the_nodes_are_numbered() -> None:
    groups = [[0, 1, 2, 3], [4, 5, 6, 7]]
    rows = [groups[v % 2] for v in range(8)]
    tiles = cluster_tiles(search(graph_of(rows)), 4)
    assert sorted(tiles.order[:4].tolist()) == [0, 2, 4, 6]
    assert not is_nearly_consecutive(Tiles(np.array([0, 7, 1, 6]), np.array([0, 2, 4])))
    assert is_nearly_consecutive(node_tiles(8, 4))
