"""Rows are written where they are wanted, and all that come are alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from plait.errors import InputError
from plait.features import Cache


def test_a_source_that_changes_its_rows_is_refused() -> None:
    cache = Cache(lambda ids: np.zeros((ids.size, 3 if 0 in ids else 2)), 4, num_rows=9)
    cache.take(np.array([0, 1]))
    with pytest.raises(InputError, match="same shape and type"):
        cache.take(np.array([5]))


@pytest.mark.parametrize("is_placing", [False, True])
@pytest.mark.parametrize("policy", ["auto", "lru", "none"])
def test_rows_are_written_where_they_are_wanted(is_placing: bool, policy: str) -> None:
    rng = np.random.default_rng(5)
    rows = rng.random((40, 3)).astype(np.float32)
    source: Any = rows if is_placing else (lambda ids: rows[ids])
    cache = Cache(source, 10, policy, num_rows=None if is_placing else 40, local=np.arange(40) < 15)
    for _ in range(6):
        ids = rng.integers(0, 40, 25)
        out = np.full((25, 3), np.nan, np.float32)
        assert cache.take(ids, out) is out
        assert np.array_equal(out, rows[ids])
        assert np.array_equal(cache.take(ids), rows[ids])
    assert cache.row == ((3,), np.float32) or policy == "none"
    with pytest.raises(InputError, match="room for 2 rows"):
        cache.take([1, 2], np.empty((3, 3), np.float32))
