"""Graph.from_edge_index takes an edge_index, or its two rows."""

import numpy as np
import pytest
import torch

from plait.errors import GraphError
from plait.graph import Graph

ENDS = [[0, 2, 1, 2, 2], [1, 1, 0, 2, 1]]


@pytest.mark.parametrize(
    "edge_index",
    [
        ENDS,
        np.array(ENDS),
        np.array(ENDS, np.int32),
        torch.tensor(ENDS),
        torch.tensor(ENDS).t().contiguous().t(),
        (torch.tensor(ENDS[0]), torch.tensor(ENDS[1])),
    ],
    ids=["list", "int64", "int32", "tensor", "strided", "pair"],
)
def test_an_edge_index_gives_the_graph_of_its_rows(edge_index):
    graph, same = Graph.from_edge_index(edge_index), Graph.from_edge_index(*ENDS)
    assert graph.fingerprint == same.fingerprint
    assert Graph.from_edge_index(edge_index, num_nodes=7).num_nodes == 7


def test_an_edge_index_without_edges():
    assert Graph.from_edge_index(torch.empty((2, 0), dtype=torch.long), num_nodes=3).num_edges == 0


@pytest.mark.parametrize(
    ("shape", "hint"), [((5, 2), "transpose it"), ((5,), "pass dst too"), ((3, 5), "sources")]
)
def test_other_shapes_are_refused(shape, hint):
    with pytest.raises(GraphError, match=hint):
        Graph.from_edge_index(np.zeros(shape, int))
