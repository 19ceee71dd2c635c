"""Edges of some nodes: what is drawn there is what a sampler of the whole graph draws."""

from __future__ import annotations

import numpy as np
import pytest

from plait.errors import InputError
from plait.graph import Graph, generate
from plait.loader import Sampler
from plait.loader.draw import stream_key
from plait.loader.owned import Frontier, OwnedEdges

GRAPH = generate.sbm(300, 4, features=2).graph.with_order(None)


def owned(graph: Graph, begin: int, end: int) -> OwnedEdges:
    indptr = graph.indptr[begin : end + 1]
    return OwnedEdges(indptr, graph.indices[indptr[0] : indptr[-1]], begin, graph.num_nodes)


@pytest.mark.parametrize(
    ("fanout", "replace"), [(3, False), (0, False), (-1, False), (4, True), (100, False)]
)
def test_an_owner_draws_what_the_sampler_of_the_whole_graph_draws(fanout: int, replace: bool) -> None:
    nodes = np.array([120, 99, 150, 149, 120])
    whole = Sampler(GRAPH, [fanout], replace=replace, seed=5).sample(nodes, 2, 9)
    key = int(stream_key(5, 2, 9, 0))
    counts, source, edge = owned(GRAPH, 99, 151).choose(Frontier(nodes, key, fanout, replace))
    assert counts.tolist() == np.bincount(whole.col, minlength=nodes.size).tolist()
    assert np.array_equal(source, whole.n_id[whole.row])
    assert np.array_equal(edge, whole.e_id)
    assert (source.dtype, edge.dtype) == (GRAPH.indices.dtype, GRAPH.indptr.dtype)


def test_nodes_of_others_are_refused_and_none_are_no_edges() -> None:
    edges = owned(GRAPH, 10, 20)
    assert [part.size for part in edges.choose(Frontier(np.empty(0, np.int64), 1, 3))] == [0, 0, 0]
    for node in (9, 20):
        with pytest.raises(InputError, match="owns the nodes 10 to 19"):
            edges.choose(Frontier(np.array([12, node]), 1, 3))
    assert owned(GRAPH, 10, 10).nbytes == GRAPH.indptr.itemsize


def test_isolated_nodes_have_no_edges() -> None:
    lonely = Graph.from_edge_index([], [], 4)
    counts, source, _ = owned(lonely, 1, 3).choose(Frontier(np.array([1, 2, 1]), 7, 5))
    assert counts.tolist() == [0, 0, 0]
    assert source.size == 0
