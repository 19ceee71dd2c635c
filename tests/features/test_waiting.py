"""Batches that wait lend their rows: the right ones, from the batch that waits longest, and no longer."""

from __future__ import annotations

import numpy as np

from plait.features.waiting import Waiting


def test_the_latest_batch_lends_a_row_and_the_first_to_leave_is_the_first_made() -> None:
    waiting = Waiting(10)
    every = np.arange(10)
    assert not waiting.has(every).any()
    first = waiting.add(np.array([3, 5]), np.array([1, 0]), np.array([[50.0], [30.0]]))
    second = waiting.add(np.array([5, 7]), np.array([0, 2]), np.array([[5.0], [0.0], [7.0]]))
    assert every[waiting.has(every)].tolist() == [3, 5, 7]
    out = np.zeros((4, 1))
    waiting.place(np.array([7, 3, 5]), np.array([0, 1, 3]), out)
    assert out[:, 0].tolist() == [7.0, 30.0, 0.0, 5.0]
    assert waiting.first() is first
    assert first not in waiting
    assert second in waiting
    assert every[waiting.has(every)].tolist() == [5, 7]
    waiting.clear()
    assert len(waiting) == 0
    assert second not in waiting
    assert not waiting.has(every).any()


def test_rows_that_were_moved_are_lent_from_where_they_are() -> None:
    waiting = Waiting(4)
    lent = waiting.add(np.array([1, 2]), np.array([0, 1]), np.array([[0.0], [0.0]]))
    waiting.move(lent, np.array([2, 0]), np.array([[2.0], [0.0], [1.0]]))
    out = np.zeros((2, 1))
    waiting.place(np.array([1, 2]), np.array([0, 1]), out)
    assert out[:, 0].tolist() == [1.0, 2.0]
