"""The trace of remote rows: what the sampler draws, less what is at home."""

from __future__ import annotations

import numpy as np
import pytest

from plait.errors import InputError
from plait.graph import Graph
from plait.loader.remote import remote_trace

RNG = np.random.default_rng(3)
GRAPH = Graph.from_edge_index(RNG.integers(0, 80, 600), RNG.integers(0, 80, 600), num_nodes=80)
PART = np.arange(80) % 3


def test_only_remote_rows_are_traced() -> None:
    trace = remote_trace(GRAPH, [3, 2], 5, PART, rank=1, epochs=2)
    assert len(trace.batches) == 2 * 6
    assert trace.epochs == 2
    assert not trace.is_cut
    for ids in trace.batches:
        assert (PART[ids] != 1).all()
        assert np.unique(ids).size == ids.size


def test_all_neighbours_are_all_remote_ones() -> None:
    trace = remote_trace(GRAPH, [-1], 80, PART, epochs=1)
    home = np.flatnonzero(PART == 0)
    reached = np.concatenate([GRAPH.indices[GRAPH.indptr[v] : GRAPH.indptr[v + 1]] for v in home])
    assert set(trace.batches[0]) == set(reached[PART[reached] != 0])


def test_a_trace_repeats() -> None:
    one, two = (remote_trace(GRAPH, [2], 4, PART, epochs=1, seed=5) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(one.batches, two.batches, strict=True))


def test_a_long_trace_is_cut_to_whole_epochs() -> None:
    per_epoch = sum(b.size for b in remote_trace(GRAPH, [3], 5, PART, epochs=1).batches)
    trace = remote_trace(GRAPH, [3], 5, PART, epochs=9, most_rows=int(2.5 * per_epoch))
    assert trace.is_cut
    assert trace.epochs == 2
    assert len(trace.batches) == 2 * 6


def test_bad_input_is_refused() -> None:
    with pytest.raises(InputError, match="part"):
        remote_trace(GRAPH, [2], 4, PART[:5])
    with pytest.raises(InputError, match="rank=7"):
        remote_trace(GRAPH, [2], 4, PART, rank=7)
    with pytest.raises(InputError, match="batch_size"):
        remote_trace(GRAPH, [2], 0, PART)
