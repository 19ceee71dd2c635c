"""Scores before training: the formula on a small graph, and agreement with what the sampler does."""

from __future__ import annotations

import numpy as np
import pytest

from plait.errors import InputError
from plait.features import degree, inclusion_probability, presample
from plait.graph import Graph
from plait.loader import Sampler


def random_graph(rng: np.random.Generator, num_nodes: int, num_edges: int) -> Graph:
    src = (num_nodes * rng.random(num_edges) ** 2).astype(np.int64)
    return Graph.from_edge_index(src, rng.integers(0, num_nodes, num_edges), num_nodes=num_nodes)


def slow_probability(graph: Graph, fanout: list[int], train: list[int], batch_size: int) -> np.ndarray:
    p = np.array([min(1.0, batch_size / len(train)) if v in train else 0.0 for v in range(graph.num_nodes)])
    missed = 1 - p
    for k in fanout:
        absent = np.ones(graph.num_nodes)
        for u in range(graph.num_nodes):
            sources = graph.indices[graph.indptr[u] : graph.indptr[u + 1]]
            for v in sources:
                absent[v] *= 1 - (1.0 if k < 0 else min(1.0, k / len(sources))) * p[u]
        p = 1 - absent
        missed = missed * absent
    return 1 - missed


@pytest.mark.parametrize("fanout", [[2], [3, 2], [-1, 1]])
def test_inclusion_probability_follows_its_formula(fanout: list[int]) -> None:
    graph = random_graph(np.random.default_rng(0), 20, 80)
    got = inclusion_probability(graph, fanout, [1, 4, 7, 9], 2)
    assert np.allclose(got, slow_probability(graph, fanout, [1, 4, 7, 9], 2))


def test_inclusion_probability_predicts_how_often_nodes_are_sampled() -> None:
    rng = np.random.default_rng(1)
    graph = random_graph(rng, 2000, 16_000)
    train = rng.permutation(2000)[:800]
    one = Sampler(graph, [5, 3])
    batches = [one.sample(rng.choice(train, 50, replace=False), batch=b).n_id for b in range(400)]
    seen = presample(batches, 2000) / 400
    told = inclusion_probability(graph, [5, 3], train, 50)
    assert np.abs(seen - told).mean() < 0.02
    assert np.corrcoef(seen, told)[0, 1] > 0.98


def test_degree_counts_the_targets_that_could_ask() -> None:
    graph = Graph.from_edge_index([0, 0, 1], [1, 2, 2], num_nodes=4)
    assert degree(graph).tolist() == [2, 1, 0, 0]


def test_bad_arguments_are_named() -> None:
    graph = random_graph(np.random.default_rng(0), 20, 80)
    with pytest.raises(InputError, match="train"):
        inclusion_probability(graph, [2], [], 5)
    with pytest.raises(InputError, match="train"):
        inclusion_probability(graph, [2], [20], 5)
    with pytest.raises(InputError, match="batch_size"):
        inclusion_probability(graph, [2], [1], 0)
