"""Division of a graph among ranks, against plain loops."""

from __future__ import annotations

import numpy as np
import pytest

from plait.graph.division import column_shares, divide


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


def test_no_edges_and_no_nodes() -> None:
    none = np.empty(0, np.int64)
    assert [place.num_shared for place in divide(none, none, np.array([0, 1, 1]), 2).places] == [0, 0]
    assert divide(none, none, none, 2).places[1].num_rows == 0


def test_columns_are_shared_out_evenly() -> None:
    assert column_shares(7, 3) == [3, 2, 2]
    assert column_shares(1, 3) == [1, 0, 0]
