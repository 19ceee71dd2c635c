"""bench/floor: the least a layer could take is below its price, and only for layers planned by expression."""

from __future__ import annotations

import pytest
from torch_geometric.data import Data

import plait
from plait.bench.floor import floor_seconds
from plait.bench.problem import Forms, Problem
from plait.graph import generate


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize("layer", ["gcn", "sage-max", "tag", "gat"])
def test_a_floor_lies_below_the_price(layer: str, mode: str) -> None:
    problem = Problem(layer, Forms.of(generate.erdos(400, 3_000, 1)), 16, 8)
    floor = floor_seconds(problem, mode)
    data = Data(x=problem.x, edge_index=problem.edge_index, num_nodes=problem.num_nodes)
    priced = plait.compile(problem.layer, data, mode=mode).plan.seconds
    assert floor is not None
    assert 0.0 < floor < priced
