"""Slot tables against a dict."""

from __future__ import annotations

import numpy as np
import pytest

from plait.errors import InputError
from plait.features.lookup import DirectTable, HashTable, SlotTable, slot_table


@pytest.mark.parametrize("table", [DirectTable(500), HashTable(4), HashTable(300)])
def test_tables_agree_with_a_dict(table: SlotTable) -> None:
    rng = np.random.default_rng(0)
    wanted: dict[int, int] = {}
    for _ in range(200):
        ids = rng.choice(500, rng.integers(0, 40), replace=False)
        slots = rng.integers(0, 1000, ids.size)
        table.put(ids, slots)
        wanted.update(zip(ids.tolist(), slots.tolist(), strict=True))
        gone = rng.choice(500, rng.integers(0, 40), replace=False)
        table.drop(gone)
        for i in gone.tolist():
            wanted.pop(i, None)
        ask = rng.integers(0, 500, 60)
        assert table.find(ask).tolist() == [wanted.get(i, -1) for i in ask.tolist()]


def test_a_hash_table_does_not_grow_from_coming_and_going() -> None:
    table = HashTable(100)
    cells = table.num_cells
    for start in range(0, 20_000, 50):
        table.put(np.arange(start, start + 50), np.arange(50))
        table.drop(np.arange(start, start + 50))
    assert table.num_cells == cells


def test_large_ids_are_hashed_and_small_ones_addressed() -> None:
    assert isinstance(slot_table(1000, 10_000), DirectTable)
    assert isinstance(slot_table(1000, 10**9), HashTable)
    table = slot_table(1000)
    table.put([2**60, 7], [3, 4])
    assert table.find(np.array([7, 2**60, 8, -1, -2])).tolist() == [4, 3, -1, -1, -1]


def test_ids_out_of_range_are_refused() -> None:
    with pytest.raises(InputError, match="0 and 9"):
        DirectTable(10).find([10])
    with pytest.raises(InputError, match="0 and 9"):
        DirectTable(10).find([-1])
    with pytest.raises(InputError, match="-5"):
        HashTable(10).put([-5], [0])
    with pytest.raises(InputError, match="capacity"):
        slot_table(0)
