"""overlap.py: idempotent covers are sets that may overlap, and take fewer additions than disjoint ones."""

from __future__ import annotations

import numpy as np
import pytest

from plait.graph.hag import Hag, search
from plait.graph.hag.overlap import cover_again
from plait.graph.hag.reference import aggregate, run
from plait.graph.hag.schedule import tile_schedule

from .graphs import graph_of, random_graph, real_graph


@pytest.mark.parametrize("seed", range(60))
def test_idempotent_covers_are_right_and_never_need_more_additions(seed: int) -> None:
    graph = random_graph(np.random.default_rng(seed), repeats=seed % 2 == 0)
    hag, disjoint = search(graph, order="idempotent", min_count=2), search(graph, min_count=2)
    assert hag.check(graph)
    assert hag.aggregations <= disjoint.aggregations
    x = np.random.default_rng(seed).standard_normal((graph.num_sources, 2))
    for reduce in ("max", "min"):
        assert np.array_equal(run(tile_schedule(hag, 4), x, reduce), aggregate(graph, x, reduce))


def test_a_row_reads_overlapping_partial_results() -> None:
    low, high = list(range(6)), list(range(4, 10))
    graph = graph_of([low, low, high, high, list(range(10))], 10)
    rows = [[10], [10], [11], [11], [10, 6, 7, 8, 9], low, high]
    hag = Hag(
        num_nodes=5,
        num_sources=10,
        indptr=np.cumsum([0] + [len(row) for row in rows]),
        indices=np.array([column for row in rows for column in row], np.int32),
        level=np.array([1, 1], np.int32),
        order="idempotent",
        num_graph_edges=graph.num_edges,
        fingerprint=graph.fingerprint,
    )
    assert hag.check(graph)
    again = cover_again(hag, graph, inline=True)
    assert again.check(graph)
    assert again.indices[again.indptr[4] : again.indptr[5]].tolist() == [10, 11]


@pytest.mark.parametrize("name", ["amazon_photo", "squirrel", "blogcatalog_attr", "coauthor_cs"])
def test_real_graphs_take_fewer_additions_than_the_disjoint_form(name: str) -> None:
    graph = real_graph(name)
    hag = search(graph, max_depth=10, order="idempotent")
    assert hag.check(graph)
    assert hag.aggregations < search(graph, max_depth=10).aggregations
