"""Rows of batches that are made and wait for their use: later batches copy them, no memory is added."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.features.rows import place

__all__ = ["Lent", "Waiting"]

Array = NDArray[Any]


@dataclass(eq=False)
class Lent:
    """A batch that waits: row at[i] of `rows` is that of ids[i], each id once."""

    number: int
    ids: Array
    at: Array
    rows: Array


class Waiting:
    """Batches in the order they were made, and which of them has a row: the latest, which waits longest."""

    def __init__(self, num_rows: int) -> None:
        self._lent: deque[Lent] = deque()
        self._added = 0
        self._batch_of = np.full(num_rows, -1, np.int64)
        self._place_of = np.zeros(num_rows, np.int32)

    def __len__(self) -> int:
        return len(self._lent)

    def __contains__(self, lent: Lent) -> bool:
        return bool(self._lent) and self._lent[0].number <= lent.number

    def add(self, ids: Array, at: Array, rows: Array) -> Lent:
        """A batch, which nobody may write to before it is withdrawn."""
        lent = Lent(self._added, ids, at, rows)
        self._added += 1
        self._batch_of[ids] = lent.number
        self._place_of[ids] = at
        self._lent.append(lent)
        return lent

    def move(self, lent: Lent, at: Array, rows: Array) -> None:
        """Says that the rows of the batch lie elsewhere now."""
        lent.at, lent.rows = at, rows
        self._place_of[lent.ids] = at

    def has(self, ids: Array) -> Array:
        """Which of the rows a waiting batch has, one truth value each."""
        if not self._lent:
            return np.zeros(ids.size, bool)
        found: Array = self._batch_of[ids] >= self._lent[0].number
        return found

    def place(self, ids: Array, at: Array, out: Array) -> None:
        """out[at] = the rows of ids, all of which wait."""
        holder = self._batch_of[ids]
        for lent in self._lent:
            own = np.flatnonzero(holder == lent.number)
            place(lent.rows, self._place_of[ids[own]], at[own], out)

    def first(self) -> Lent:
        """The batch that was made first, which waits no longer."""
        return self._lent.popleft()

    def clear(self) -> None:
        """No batch waits any more."""
        self._lent.clear()
