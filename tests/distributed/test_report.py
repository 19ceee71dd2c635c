"""distributed/report.py: the prediction of an epoch, beside what was measured."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from plait.analysis.network import network_of
from plait.distributed.report import Prediction, predicted
from tests.analysis.test_growth import random_graph


def asked(size: int, number: Any = np.float32) -> tuple[Any, Any]:
    graph = random_graph(400, 3000)
    bounds = np.linspace(0, 400, size + 1).astype(np.int64)
    local = SimpleNamespace(row=((24,), np.dtype(number)))
    exchange = SimpleNamespace(local=local)
    session = SimpleNamespace(graph=graph, size=size, bounds=bounds, owned=range(1), exchange=exchange)
    return session, SimpleNamespace(batch_size=16, fanouts=(4, 4))


def test_a_prediction_counts_rows_ids_and_headers_of_an_epoch() -> None:
    session, loader = asked(2)
    told = predicted(session, loader, "sage", (24, 16, 4), network_of("10gbit"), np.arange(200))
    assert told is not None
    assert told.seconds > 0
    # no batch fetches more than the other part's nodes: 13 steps of either rank
    assert 0 < told.bytes_of_rows < 2 * 13 * 200 * (24 * 4 + 8) * 1.1


def test_rows_in_16_bits_are_predicted_in_half_the_bytes() -> None:
    wide, narrow = (
        predicted(*asked(2, number), "sage", (24, 16, 4), network_of("1gbit"), np.arange(200))
        for number in (np.float32, np.uint16)
    )
    assert wide is not None
    assert narrow is not None
    rows, rest = 24 * 4, 8  # of a row, and of its number
    assert narrow.bytes_of_rows / wide.bytes_of_rows == pytest.approx(
        (rows / 2 + rest) / (rows + rest), rel=0.01
    )
    assert narrow.seconds < wide.seconds


def test_one_rank_has_nothing_to_fetch_and_no_prediction() -> None:
    session, loader = asked(1)
    assert predicted(session, loader, "sage", (24, 16, 4), network_of("10gbit"), np.arange(200)) is None


def test_the_line_says_how_the_measured_compares() -> None:
    text = Prediction(2.0, 4e6).beside(4.0, 1e6)
    assert text == "predicted 2.00 s (0.50 of measured), 4.0 MB without a cache (0.25 of it sent)"
