"""The rows of a cache: those in its slots, and those its source is asked for, timed and counted."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.errors import InputError
from plait.features.counters import Counters
from plait.features.rows import RetryingRows, Row, place

__all__ = ["Stock"]

Array = NDArray[Any]


class Stock:
    """`capacity` slots before a source; which row is in which slot is the rule's to know.

    kept: the rows in the slots, None until it is known what rows are.
    """

    def __init__(self, source: RetryingRows, capacity: int, counters: Counters) -> None:
        self.source, self.capacity, self.counters = source, capacity, counters
        self.kept: Array | None = None

    @property
    def row(self) -> Row | None:
        """The shape and type of a row; None until the first came from a source that does not say."""
        return self.source.row if self.kept is None else (self.kept.shape[1:], self.kept.dtype)

    def slots(self, like: Array) -> Array:
        """The slots, made for rows like these where there are none yet."""
        if self.kept is None:
            self.kept = np.empty((self.capacity, *like.shape[1:]), like.dtype)
        return self.kept

    def copied(self, slots: Array, at: Array, count: int, out: Array | None) -> tuple[Array, Array | None]:
        """Which rows are in slots, -1 being none, and room for `count` rows, where these are at `at`."""
        is_near = slots >= 0
        if self.kept is None or not is_near.any():
            return np.zeros(slots.size, bool), out
        if out is None:
            out = np.empty((count, *self.kept.shape[1:]), self.kept.dtype)
        place(self.kept, slots[is_near], at[is_near], out)
        return is_near, out

    def fetched(
        self, ids: Array, remote: int, lacking: Array | None = None, out: Array | None = None
    ) -> Array:
        """One row per id, `remote` of them from far away, in `out` where it is given.

        Only those at `lacking` are fetched; the others are in `out` already.
        """
        wanted = ids if lacking is None else ids[lacking]
        if wanted.size == 0 and out is not None:
            return out
        if wanted.size == 0 and self.kept is not None:
            return self.kept[:0].copy()
        begin = time.perf_counter()
        try:
            rows = self._from_source(wanted, lacking, out)
        finally:
            self.counters.fetch_seconds += time.perf_counter() - begin
            self.counters.failures = self.source.failures
        if self.kept is not None:
            _check_alike(rows, self.kept)
        self.counters.remote_rows += remote
        self.counters.remote_bytes += remote * (rows.nbytes // max(1, rows.shape[0]))
        return rows

    def _from_source(self, ids: Array, at: Array | None, out: Array | None) -> Array:
        """Fresh rows, or rows at those places of `out`, written there by the source where it can."""
        every = np.arange(ids.size)
        row = self.source.row
        if row is None:
            rows: Array = self.source.take(ids)
            if out is None:
                return rows
            _check_alike(rows, out)
            place(rows, every, every if at is None else at, out)
            return out
        if out is None:
            out = np.empty((ids.size, *row[0]), row[1])
        self.source.place(ids, every if at is None else at, out)
        return out


def _check_alike(rows: Array, others: Array) -> None:
    if rows.shape[1:] != others.shape[1:] or rows.dtype != others.dtype:
        raise InputError(
            f"source returned rows of shape {rows.shape[1:]} and type {rows.dtype} after rows of "
            f"{others.shape[1:]} and {others.dtype}; all rows must have the same shape and type"
        )
