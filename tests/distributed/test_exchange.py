"""The exchange alone: rows of several parts, requests in pieces, refusals, errors that reach who waits."""

from __future__ import annotations

import numpy as np
import pytest

from plait.distributed.exchange import Exchange, LocalRows, Request, _distinct, _hand_out
from plait.errors import ExchangeError, InputError

ROWS = np.arange(30, dtype=np.float32).reshape(10, 3)


def test_rows_of_neighbouring_parts_are_one_range() -> None:
    rows = LocalRows([ROWS[2:5], ROWS[5:5], ROWS[5:9]], 2)
    assert (rows.begin, rows.end, rows.width) == (2, 9, 3)
    ids = np.array([8, 2, 4, 5, 2])
    assert np.array_equal(rows.take(ids), ROWS[ids])
    assert rows.take(np.empty(0, np.int64)).shape == (0, 3)
    with pytest.raises(InputError):
        rows.take(np.array([9]))
    with pytest.raises(InputError, match="at least one part"):
        LocalRows([], 0)


def test_one_rank_has_everything_at_hand() -> None:
    exchange = Exchange(LocalRows([ROWS], 0), np.array([0, 10]))
    assert np.array_equal(exchange.take(np.array([9, 0, 9])), ROWS[[9, 0, 9]])
    assert exchange.counters.rounds == 0
    exchange.close()
    exchange.close()


def test_rows_in_16_bits_are_rounded_where_they_are_owned() -> None:
    rows = np.random.default_rng(0).standard_normal((10, 3)).astype(np.float32)
    local = LocalRows([rows[:4], rows[4:]], 0, "float16")
    expected = rows.astype(np.float16)
    ids = np.array([9, 0, 9])
    assert local.row == ((3,), np.dtype(np.uint16))
    assert np.array_equal(local.take(ids), expected[ids].view(np.uint16))
    exchange = Exchange(local, np.array([0, 10]))
    assert np.array_equal(exchange.take(ids), expected[ids].astype(np.float32))
    exchange.close()


def test_ids_of_all_requests_are_asked_for_once() -> None:
    requests = [Request(np.array(ids), ROWS[:0]) for ids in ([5, 3, 5], [3, 9])]
    ids, inverse = _distinct(requests)
    assert ids.tolist() == [3, 5, 9]
    assert ids[inverse].tolist() == [5, 3, 5, 3, 9]
    assert _distinct([])[0].size == 0


@pytest.mark.parametrize("asked", [([2, 5], [7]), ([5, 2], [5, 7]), ([], [3])])
def test_every_request_gets_its_rows(asked: tuple[list[int], ...]) -> None:
    requests = [Request(np.array(ids, np.int64), ROWS[:0]) for ids in asked]
    ids, inverse = _distinct(requests)
    assert (inverse is None) == (asked != ([5, 2], [5, 7]))
    _hand_out(ROWS[ids], requests, inverse)
    for request, wanted in zip(requests, asked, strict=True):
        assert np.array_equal(request.wait(1), ROWS[wanted])


def test_bad_arguments_are_refused() -> None:
    local, bounds = LocalRows([ROWS], 0), np.array([0, 10])
    with pytest.raises(InputError, match="wire"):
        LocalRows([ROWS], 0, wire="int4")
    with pytest.raises(InputError, match="timeout_seconds"):
        Exchange(local, bounds, timeout_seconds=float("nan"))
    with pytest.raises(InputError, match="numbered 0 to 9"):
        Exchange(local, bounds).request(np.array([10]))


def test_an_answer_that_does_not_come_is_an_error_not_a_wait() -> None:
    with pytest.raises(ExchangeError, match="no answer for 1 rows within"):
        Request(np.array([4]), ROWS[:0]).wait(0.01)


def test_nothing_is_asked_for_after_the_end() -> None:
    exchange = Exchange(LocalRows([ROWS[:5]], 0), np.array([0, 5]))
    exchange.close()
    with pytest.raises(ExchangeError, match="after close"):
        exchange.request(np.array([1]))
    other = Exchange(LocalRows([ROWS[:5]], 0), np.array([0, 5]))
    waiting = other.request(np.array([1]))
    other.abandon()
    with pytest.raises(ExchangeError, match="abandoned"):
        waiting[0].wait(1)
    with pytest.raises(ExchangeError, match="abandoned"):
        other.request(np.array([1]))
