"""distributed/report.py: the prediction of an epoch, beside what was measured."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from plait.analysis.network import network_of
from plait.distributed.report import Prediction, predicted
from tests.analysis.test_growth import random_graph


def asked(size: int) -> tuple[Any, Any]:
    graph = random_graph(400, 3000)
    bounds = np.linspace(0, 400, size + 1).astype(np.int64)
    session = SimpleNamespace(graph=graph, size=size, bounds=bounds, owned=range(1))
    return session, SimpleNamespace(batch_size=16, fanouts=(4, 4))


def test_a_prediction_counts_rows_ids_and_headers_of_an_epoch() -> None:
    session, loader = asked(2)
    told = predicted(session, loader, "sage", (24, 16, 4), network_of("10gbit"), np.arange(200))
    assert told is not None
    assert told.seconds > 0
    # no batch fetches more than the other part's nodes: 13 steps of either rank
    assert 0 < told.bytes_of_rows < 2 * 13 * 200 * (24 * 4 + 8) * 1.1


def test_one_rank_has_nothing_to_fetch_and_no_prediction() -> None:
    session, loader = asked(1)
    assert predicted(session, loader, "sage", (24, 16, 4), network_of("10gbit"), np.arange(200)) is None


def test_the_line_says_how_the_measured_compares() -> None:
    text = Prediction(2.0, 4e6).beside(4.0, 1e6)
    assert text == "predicted 2.00 s (0.50 of measured), 4.0 MB without a cache (0.25 of it sent)"
