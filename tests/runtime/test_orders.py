"""orders.py: the two orders of a graph's edges lead to each other, and blocks of rows cover all of them."""

from __future__ import annotations

import numpy as np
import pytest

from plait.graph import Graph
from plait.runtime.orders import EdgeOrders


def orders_of(num_edges: int, num_targets: int = 7, num_sources: int = 9) -> EdgeOrders:
    rng = np.random.default_rng(0)
    source, target = rng.integers(0, num_sources, num_edges), rng.integers(0, num_targets, num_edges)
    return EdgeOrders(Graph.from_edge_index(source, target, num_targets, num_sources))


@pytest.mark.parametrize("num_edges", [0, 1, 40])
def test_each_order_finds_the_others_values(num_edges: int) -> None:
    orders = orders_of(num_edges)
    np.testing.assert_array_equal(orders.order[orders.inverse], np.arange(num_edges))
    np.testing.assert_array_equal(orders.targets.numpy()[orders.order], orders.transpose.indices)
    np.testing.assert_array_equal(orders.sources.numpy(), orders.pattern.indices)


def test_sums_by_target_of_values_by_source() -> None:
    orders = orders_of(40)
    values = np.random.default_rng(1).random(40)  # in the transpose's order
    wanted = np.zeros(7)
    np.add.at(wanted, orders.transpose.indices, values)
    pattern = orders.slopes_by_target
    own = [
        values[pattern.indices[a:b]].sum()
        for a, b in zip(pattern.indptr[:-1], pattern.indptr[1:], strict=True)
    ]
    np.testing.assert_allclose(own, wanted)


def test_degrees_norms_and_targets_without_edges() -> None:
    orders = EdgeOrders(Graph.from_edge_index([0, 1, 1], [0, 0, 1], 3))
    assert orders.inverse_degrees.tolist() == [0.5, 1.0, 1.0]
    assert orders.bare.tolist() == [2]
    np.testing.assert_allclose(orders.symmetric_norm, [0.5, 0.5**0.5, 1.0])


@pytest.mark.parametrize("count", [1, 5, 1000])
def test_blocks_are_whole_rows_and_cover_every_edge_once(count: int) -> None:
    orders = orders_of(40)
    blocks = orders.blocks(count)
    assert [block.first for block in blocks[1:]] == [block.last for block in blocks[:-1]]
    assert (blocks[0].first, blocks[-1].last) == (0, 7)
    assert sum(block.num_edges for block in blocks) == 40
    for block in blocks:
        rows = np.diff(orders.pattern.indptr)[block.rows]
        np.testing.assert_array_equal(np.diff(block.to_targets.indptr), rows)
        np.testing.assert_array_equal(block.to_edges.indices, np.repeat(np.arange(len(rows)), rows))
