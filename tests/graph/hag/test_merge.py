"""merge.py against a greedy search that counts every pair again before every merge."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from plait.graph import Graph
from plait.graph.hag.merge import Limits, merge_pairs
from plait.graph.hag.rows import working_rows

from .graphs import ODD_GRAPHS, graph_of, random_graph, rows_of


def layers(row: list[int]) -> list[set[int]]:
    """A row with repeats as sets: the i-th holds the neighbours met more than i times."""
    most = max((row.count(u) for u in row), default=0)
    return [{u for u in row if row.count(u) > i} for i in range(most)]


def slow_greedy(
    graph: Graph, capacity: int, max_depth: int, min_count: int
) -> tuple[list[tuple[int, int]], list]:
    """(merges, rows): the pair most rows share, smallest numbers on a tie, is merged until none is left."""
    rows = [layer for row in rows_of(graph) for layer in layers(row)]
    depth = dict.fromkeys(range(graph.num_sources), 0)
    merges: list[tuple[int, int]] = []
    while len(merges) < capacity:
        count: dict[tuple[int, int], int] = {}
        for row in rows:
            for a, b in combinations(sorted(row), 2):
                if max(depth[a], depth[b]) < max_depth:
                    count[a, b] = count.get((a, b), 0) + 1
        if not count or max(count.values()) < min_count:
            break
        a, b = min(count, key=lambda pair: (-count[pair], pair))
        new = graph.num_sources + len(merges)
        depth[new] = max(depth[a], depth[b]) + 1
        merges.append((a, b))
        rows = [(row - {a, b}) | {new} if {a, b} <= row else row for row in rows]
    return merges, [sorted(row) for row in rows]


def fast_greedy(
    graph: Graph, capacity: int, max_depth: int, min_count: int
) -> tuple[list[tuple[int, int]], list]:
    work = working_rows(graph.indptr, graph.indices)
    merged = merge_pairs(work.rows, graph.num_sources, Limits(capacity, max_depth, min_count))
    start, length, columns, _ = merged.rows
    rows = [columns[start[r] : start[r] + length[r]].tolist() for r in work.row]
    return list(zip(merged.left.tolist(), merged.right.tolist(), strict=True)), rows


@pytest.mark.parametrize("seed", range(300))
def test_exact_search_makes_the_merges_of_the_slow_greedy(seed: int) -> None:
    rng = np.random.default_rng(seed)
    graph = random_graph(rng, repeats=seed % 3 == 0)
    limits = (int(rng.choice([2, 1000])), int(rng.choice([1, 2, 1000])), int(rng.choice([2, 3])))
    assert fast_greedy(graph, *limits) == slow_greedy(graph, *limits)


@pytest.mark.parametrize("name", ODD_GRAPHS)
def test_odd_graphs_merge_as_the_slow_greedy_does(name: str) -> None:
    graph = ODD_GRAPHS[name]
    assert fast_greedy(graph, 1000, 1000, 2) == slow_greedy(graph, 1000, 1000, 2)


def test_many_merges_outgrow_the_first_allocation() -> None:
    rng = np.random.default_rng(7)
    rows = [sorted(rng.choice(12, 9, replace=False).tolist()) for _ in range(400)]
    graph = graph_of(rows, 12)
    merges, kept = fast_greedy(graph, 10_000, 1000, 2)
    assert len(merges) > 67  # 12 // 4 columns are below the least room of 64
    assert (merges, kept) == slow_greedy(graph, 10_000, 1000, 2)


def test_a_past_deadline_leaves_the_rows_untouched_and_says_so() -> None:
    work = working_rows(ODD_GRAPHS["clique"].indptr, ODD_GRAPHS["clique"].indices)
    before = work.rows.columns.copy()
    merged = merge_pairs(work.rows, 9, Limits(deadline=0.0))
    assert not merged.is_complete
    assert merged.left.size == 0
    assert np.array_equal(work.rows.columns, before)
