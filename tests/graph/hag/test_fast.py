"""fast.py: the merges are right whatever the blocks, the same on any number of threads, and few are lost."""

from __future__ import annotations

import numpy as np
import pytest

from plait.graph.hag import fast, search
from plait.graph.hag.merge import Limits, merge_pairs
from plait.graph.hag.rows import working_rows

from .graphs import graph_of, random_graph, real_graph


@pytest.mark.parametrize("seed", range(60))
def test_small_pieces_and_blocks_still_cover_exactly(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "_PIECE", 3)
    monkeypatch.setattr(fast, "_BLOCK_ENTRIES", 16)
    graph = random_graph(np.random.default_rng(seed), repeats=seed % 2 == 0)
    for limits in ({}, {"capacity": 2}, {"max_depth": 1}):
        hag = search(graph, mode="fast", min_count=2, **limits)
        assert hag.check(graph)


def test_the_number_of_threads_does_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = real_graph("amazon_photo")
    found = []
    for threads in (1, 3):
        monkeypatch.setattr(fast, "_MAX_THREADS", threads)
        found.append(search(graph, mode="fast"))
    assert np.array_equal(found[0].indices, found[1].indices)


@pytest.mark.parametrize(("name", "share"), [("amazon_photo", 0.8), ("coauthor_cs", 0.7), ("squirrel", 0.9)])
def test_the_fast_mode_finds_most_of_what_the_exact_one_saves(name: str, share: float) -> None:
    graph = real_graph(name)
    exact, quick = search(graph), search(graph, mode="fast")
    assert quick.check(graph)
    assert quick.graph_aggregations - quick.aggregations >= share * (
        exact.graph_aggregations - exact.aggregations
    )


def test_components_searched_alone_give_the_merges_of_the_whole() -> None:
    one = [[u for u in range(7) if u != v] for v in range(7)]
    rows = [[7 * k + u for u in row] for k in range(9) for row in one] + [[]]
    work, again = (working_rows(graph_of(rows, 63).indptr, graph_of(rows, 63).indices) for _ in range(2))
    whole = merge_pairs(work.rows, 63, Limits(10_000, 3, 2))
    apart = fast.merge_components(again.rows, 63, Limits(10_000, 3, 2))
    assert apart.left.size == whole.left.size > 0
    assert np.array_equal(apart.rows.length, whole.rows.length)


def test_components_are_searched_alone_only_without_a_capacity() -> None:
    graph = real_graph("tu_proteins")
    assert search(graph, capacity=5, min_count=2, inline=False).num_aggregation_nodes == 5
    assert search(graph, min_count=2).check(graph)


def test_an_ended_time_budget_leaves_a_right_hierarchy() -> None:
    graph = real_graph("cora")
    hag = search(graph, mode="fast", time_budget=0.0)
    assert hag.check(graph)
    assert not hag.is_complete
