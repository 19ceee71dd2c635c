"""Traces: packing, cutting, counting and next uses."""

from __future__ import annotations

import numpy as np

from plait.features.trace import pack

BATCHES = [[3, 1, 3], [], [1, 2], [3]]


def test_packing_keeps_first_places_and_batches() -> None:
    trace = pack(BATCHES)
    assert [b.tolist() for b in trace] == [[3, 1], [], [1, 2], [3]]
    assert (len(trace), trace.requests, trace.num_ids) == (4, 5, 4)
    assert trace.counts().tolist() == [0, 2, 1, 2]
    assert [b.tolist() for b in trace.first(2)] == [[3, 1], []]


def test_large_ids_are_renumbered_with_their_scores() -> None:
    trace = pack([[10**10, 5], [10**10]])
    assert trace.num_ids == 2
    assert trace.names is not None
    assert trace.names[trace.ids].tolist() == [10**10, 5, 10**10]
    assert trace.by_row(np.arange(8)).tolist() == [5.0, 0.0]
