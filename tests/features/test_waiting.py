"""Batches under way lend their rows: the right ones, whenever these come, and to nobody once they left."""

from __future__ import annotations

from typing import Any

import numpy as np

from plait.features.waiting import Lent, Waiting

ROWS = np.arange(10.0).reshape(10, 1) * 10


def book(waiting: Waiting, ids: list[int], slots: list[int] | None = None) -> Lent:
    """A batch all of whose rows are remote."""
    from_slots = np.full(len(ids), -1, np.int32) if slots is None else np.array(slots, np.int32)
    return waiting.add(np.array(ids), None, np.arange(len(ids)), from_slots)


def fetch(lent: Lent) -> Any:
    """What is missing comes; the whole batch."""
    rows = lent.room(((1,), ROWS.dtype))
    rows[lent.at[lent.missing]] = ROWS[lent.wanted]
    lent.is_made = True
    return rows[:, 0].tolist()


def test_rows_come_from_the_latest_batch_that_will_have_them() -> None:
    waiting = Waiting(10)
    every = np.arange(10)
    assert not waiting.has(every).any()
    first, second = book(waiting, [3, 5]), book(waiting, [5, 7])
    assert every[waiting.has(every)].tolist() == [3, 5, 7]
    third = book(waiting, [7, 3, 9, 5])
    assert [lent.wanted.tolist() for lent in (first, second, third)] == [[3, 5], [7], [9]]
    assert fetch(first) == [30, 50]
    waiting.copy(None)
    assert fetch(second) == [50, 70]
    assert not third.is_ready
    assert waiting.first() is first
    first.rows = None  # handed out: nobody reads it again
    assert first not in waiting
    assert second in waiting
    waiting.copy(None)
    assert third.is_ready
    assert fetch(third) == [70, 30, 90, 50]
    assert every[waiting.has(every)].tolist() == [3, 5, 7, 9]
    waiting.clear()
    assert len(waiting) == 0
    assert second not in waiting
    assert not waiting.has(every).any()


def test_a_batch_that_leaves_gives_its_rows_to_those_that_are_not_made() -> None:
    waiting = Waiting(10)
    first, second = book(waiting, [3, 5]), book(waiting, [5])
    fetch(first)
    leaving = waiting.first()
    assert leaving.rows is not None
    leaving.rows[:] = np.nan
    assert second.is_ready
    assert fetch(second) == [50]


def test_rows_in_slots_stay_there_until_these_change() -> None:
    waiting = Waiting(10)
    kept = ROWS[[4, 6, 8]]
    lent = book(waiting, [6, 1, 8], [1, -1, 2])
    assert lent.wanted.tolist() == [1]
    waiting.save(kept, np.array([0, 1]))
    kept[:2] = np.nan
    assert lent.slots.tolist() == [-1, -1, 2]
    waiting.copy(kept)
    kept[2] = np.nan
    assert lent.is_ready
    assert fetch(lent) == [60, 10, 80]


def test_rows_that_were_moved_are_lent_from_where_they_are() -> None:
    waiting = Waiting(4)
    lent = book(waiting, [1, 2])
    before = book(waiting, [2])
    fetch(lent)
    # row 1 is wanted twice
    waiting.move(lent, np.array([2, 0]), np.array([[20.0], [10.0], [10.0]]))
    after = book(waiting, [1, 2])
    waiting.copy(None)
    assert fetch(before) == [20]
    waiting.copy(None)
    assert fetch(after) == [10, 20]
