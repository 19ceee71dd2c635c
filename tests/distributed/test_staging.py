"""Rows staged for several batches: asked for once, handed out right, dropped when nobody needs them."""

from __future__ import annotations

from typing import Any

import numpy as np

from plait.distributed.exchange import LocalRows, Request
from plait.distributed.staging import Staging

ROWS = np.arange(200, dtype=np.float32).reshape(100, 2)


class Pretended:
    """An exchange of one process that owns rows 0 to 49 and answers at once."""

    def __init__(self) -> None:
        self.local, self.num_rows = LocalRows([ROWS[:50]], 0), 100
        self.asked: list[list[int]] = []

    def is_far(self, ids: Any) -> Any:
        return ids >= 50

    def request(self, ids: Any) -> list[Request]:
        self.asked.append(ids.tolist())
        request = Request(ids, ROWS[:0])
        request.rows = ROWS[ids]
        request.finish()
        return [request]

    def wait(self, requests: Any) -> Any:
        return np.concatenate([request.wait(1) for request in requests])

    def fetch(self, ids: Any) -> Any:
        far = ids[ids >= 50]
        if far.size:
            self.asked.append(far.tolist())
        return ROWS[ids]


def staging() -> tuple[Staging, Pretended]:
    pretended: Any = Pretended()
    return Staging(pretended), pretended


def test_rows_of_several_batches_are_asked_for_once() -> None:
    staged, exchange = staging()
    staged.stage(np.array([3, 60, 70, 80]), [np.array([60, 3, 70]), np.array([80, 70])])
    for ids in ([60, 3, 70, 60], [80, 70]):
        assert np.array_equal(staged.take(np.array(ids)), ROWS[ids])
        staged.done()
    assert exchange.asked == [[60, 70, 80]]


def test_a_later_group_uses_what_an_earlier_one_brings() -> None:
    staged, exchange = staging()
    staged.stage(np.array([60, 70]), [np.array([60, 70])])
    staged.stage(np.array([70, 80]), [np.array([70, 80])])
    staged.stage(np.array([60, 90]), [np.array([60, 90])])
    for ids in ([60, 70], [70, 80], [60, 90]):
        assert np.array_equal(staged.take(np.array(ids)), ROWS[ids])
        staged.done()
    assert exchange.asked == [[60, 70], [80], [90]]
    assert not staged._groups


def test_groups_are_dropped_though_all_of_them_want_one_row() -> None:
    staged, _ = staging()
    for step in range(20):
        staged.stage(np.array([60, 61 + step]), [np.array([60, 61 + step])])
        if step >= 2:
            assert np.array_equal(staged.take(np.array([60, 59 + step])), ROWS[[60, 59 + step]])
            staged.done()
    assert len(staged._groups) <= 4


def test_what_was_not_staged_is_fetched_and_local_rows_are_not() -> None:
    staged, exchange = staging()
    assert np.array_equal(staged.take(np.array([1, 2])), ROWS[[1, 2]])
    assert exchange.asked == []
    staged.stage(np.array([60]), [np.array([60])])
    assert np.array_equal(staged.take(np.array([60, 5, 99])), ROWS[[60, 5, 99]])
    assert exchange.asked == [[60], [99]]


def test_forgetting_drops_everything() -> None:
    staged, exchange = staging()
    staged.stage(np.array([60]), 3 * [np.array([60])])
    staged.forget()
    staged.take(np.array([60]))
    staged.done()
    assert exchange.asked == [[60], [60]]


def test_rows_are_held_until_the_last_batch_staged_for_them_is_made() -> None:
    staged, _ = staging()
    every = np.array([3, 60, 70, 80, 90])
    staged.stage(np.array([60, 70]), [np.array([60, 3, 70]), np.array([70])])
    staged.stage(np.array([60, 80]), [np.array([80, 60, 3, 90])])  # 90 was found elsewhere
    for held in ([60, 70, 80], [60, 80], []):
        assert every[staged.held(every)].tolist() == held
        staged.done()
    staged.stage(np.array([60]), 2 * [np.array([60])])
    staged.forget()
    assert not staged.held(every).any()
