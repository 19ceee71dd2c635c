"""Division of a graph among ranks, against plain loops."""

from __future__ import annotations

import numpy as np
import pytest

from plait.graph.division import column_shares, divide, edges_into, portion


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_places_have_the_halos_and_loans_that_a_loop_finds(size: int) -> None:
    rng = np.random.default_rng(size)
    nodes, edges = 40, 150
    source, target = rng.integers(0, nodes, (2, edges))
    part = rng.integers(0, max(1, size - 1), nodes)  # the last rank of several has no nodes
    found = divide(source, target, part, size)
    lent = [0] * size
    for rank, place in enumerate(found.places):
        remote = {int(s) for s, t in zip(source, target, strict=True) if part[t] == rank != part[s]}
        assert set(found.nodes[place.halo].tolist()) == remote
        assert place.num_rows == int((part == rank).sum())
        assert (place.size, place.num_nodes) == (size, nodes)
        assert place.columns.tolist()[place.num_rows :] == place.halo.tolist()
        for node in remote:
            lent[part[node]] += 1
    assert [place.num_shared for place in found.places] == lent


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("edges", [0, 150])
def test_portions_are_those_of_the_division_though_no_rank_sees_all_edges(size: int, edges: int) -> None:
    rng = np.random.default_rng(size)
    source, target = rng.integers(0, 40, (2, edges))
    part = rng.integers(0, max(1, size - 1), 40)
    whole = divide(source, target, part, size)
    marks: list[np.ndarray] = []

    def kept(own: np.ndarray) -> np.ndarray:
        marks.append(own)
        return own

    own = [edges_into(source, target, part, rank) for rank in range(size)]
    for rank in range(size):
        portion(own[rank], part, size, rank, kept)
    is_outer = np.sum(marks, axis=0, dtype=np.uint8)
    for rank in range(size):
        found = portion(own[rank], part, size, rank, lambda _: is_outer)
        assert np.array_equal(found.nodes, whole.nodes)
        assert np.array_equal(found.bounds, whole.bounds)
        assert np.array_equal(found.halo, whole.halo_of(rank))
        assert np.array_equal(found.edges, whole.edges_of(rank))
        assert np.array_equal(found.local_edges, whole.local_edges(rank))


def test_edges_are_found_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.graph.division._AT_ONCE", 4)
    source, target = np.arange(11), np.arange(11)[::-1].copy()
    numbers, sources, targets = edges_into(source, target, np.arange(11) % 2, 1)
    assert numbers.tolist() == sources.tolist() == [1, 3, 5, 7, 9]
    assert targets.tolist() == [9, 7, 5, 3, 1]


def test_no_edges_and_no_nodes() -> None:
    none = np.empty(0, np.int64)
    assert [place.num_shared for place in divide(none, none, np.array([0, 1, 1]), 2).places] == [0, 0]
    assert divide(none, none, none, 2).places[1].num_rows == 0


def test_columns_are_shared_out_evenly() -> None:
    assert column_shares(7, 3) == [3, 2, 2]
    assert column_shares(1, 3) == [1, 0, 0]
