"""fast.py: the merges are right whatever the blocks, the same on any number of threads, and few are lost."""

from __future__ import annotations

import numpy as np
import pytest

from plait.graph.hag import fast, search

from .graphs import random_graph, real_graph


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


def test_an_ended_time_budget_leaves_a_right_hierarchy() -> None:
    graph = real_graph("cora")
    hag = search(graph, mode="fast", time_budget=0.0)
    assert hag.check(graph)
    assert not hag.is_complete
