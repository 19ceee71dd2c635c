"""Batches under way: what each one has lies in its own memory, from where later batches copy it.

A batch is under way from the moment it is booked, when it is settled where each of its rows will come from,
until it is handed out. It does not take its rows at once: those in slots lie there until it is made or
somebody else is about to be written there (`save`), those of a batch before it are copied when that one is
made, or at the latest when it is handed out (`first`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from plait.features.rows import Row, place

__all__ = ["Lent", "Waiting"]

Array = NDArray[np.generic]


@dataclass(eq=False)
class Lent:
    """A batch under way, of the rows `unique`, of which those at `at` are remote: `ids`, each once.

    `rows` is its memory, None where nobody knows yet what rows are. `missing` is true where a row comes from
    neither a slot nor another batch. What is not copied yet comes from `slots`, or from `places` of the
    batches numbered `holders`; both are -1 elsewhere.
    """

    number: int
    unique: NDArray[np.int64]
    inverse: NDArray[np.int64] | None
    ids: NDArray[np.int64]
    at: NDArray[np.int64]
    rows: Array | None
    slots: NDArray[np.int32]
    holders: NDArray[np.int64]
    places: NDArray[np.int32]
    missing: NDArray[np.bool_]
    is_made: bool = False

    @property
    def wanted(self) -> NDArray[np.int64]:
        """The remote rows that have to be fetched."""
        return self.ids[self.missing]

    @property
    def is_ready(self) -> bool:
        """Whether it has all that need not be fetched."""
        return not ((self.slots >= 0).any() or (self.holders >= 0).any())

    def room(self, row: Row) -> Array:
        """Its memory, allocated now if it had none."""
        if self.rows is None:
            self.rows = np.empty((self.unique.size, *row[0]), row[1])
        return self.rows


class Waiting:
    """Batches in the order of their use, and which of them has a row: the latest, which stays longest."""

    def __init__(self, num_rows: int) -> None:
        self._lent: deque[Lent] = deque()
        self._added = 0
        self._batch_of = np.full(num_rows, -1, np.int64)
        self._place_of = np.zeros(num_rows, np.int32)

    def __len__(self) -> int:
        return len(self._lent)

    def __contains__(self, lent: Lent) -> bool:
        return bool(self._lent) and self._lent[0].number <= lent.number

    def add(
        self,
        unique: NDArray[np.int64],
        inverse: NDArray[np.int64] | None,
        at: NDArray[np.int64],
        slots: NDArray[np.int32],
    ) -> Lent:
        """Books a batch, whose remote rows come from these slots or, where -1, from batches before it."""
        ids = unique[at]
        waits = self.has(ids) & (slots < 0)
        holders = np.where(waits, self._batch_of[ids], -1)
        missing = (slots < 0) & ~waits
        lent = Lent(self._added, unique, inverse, ids, at, None, slots, holders, self._place_of[ids], missing)
        self._added += 1
        self._batch_of[ids] = lent.number
        self._place_of[ids] = at
        self._lent.append(lent)
        return lent

    def has(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of the rows a batch has or will have, one truth value each."""
        if not self._lent:
            return np.zeros(ids.size, bool)
        return self._batch_of[ids] >= self._lent[0].number

    def copy(self, kept: Array | None) -> None:
        """Gives every batch that is not made all it gets from slots and from batches that are."""
        made = [lent for lent in self._lent if lent.is_made]
        for lent in self._lent:
            if not lent.is_made:
                if kept is not None:
                    _from_slots(lent, kept, lent.slots >= 0)
                for holder in made:
                    _from_batch(lent, holder)

    def save(self, kept: Array, places: NDArray[np.int64]) -> None:
        """Gives the batches that are not made what they get from these slots, which are about to change."""
        if places.size == 0:
            return
        changes = np.zeros(kept.shape[0] + 1, bool)  # the last one stands for no slot
        changes[places] = True
        for lent in self._lent:
            if not lent.is_made:
                _from_slots(lent, kept, changes[lent.slots])

    def first(self) -> Lent:
        """Removes the batch to be used first; those after it have copied what they get from it."""
        first = self._lent.popleft()
        for lent in self._lent:
            if not lent.is_made:
                _from_batch(lent, first)
        return first

    def move(self, lent: Lent, place_of: NDArray[np.int64], rows: Array) -> None:
        """Says that row k of the batch is row place_of[k] of `rows` now."""
        lent.at, lent.rows = place_of[lent.at], rows
        latest = self._batch_of[lent.ids] == lent.number
        self._place_of[lent.ids[latest]] = lent.at[latest]
        for other in self._lent:
            own = other.holders == lent.number
            other.places[own] = place_of[other.places[own]]

    def clear(self) -> None:
        """No batch is under way any more."""
        self._lent.clear()


def _from_slots(lent: Lent, kept: Array, which: NDArray[np.bool_]) -> None:
    own = np.flatnonzero(which)
    if own.size:
        out = lent.room((kept.shape[1:], kept.dtype))
        place(kept, lent.slots[own].astype(np.int64), lent.at[own], out)
        lent.slots[own] = -1


def _from_batch(lent: Lent, holder: Lent) -> None:
    own = np.flatnonzero(lent.holders == holder.number)
    if own.size and holder.rows is not None:
        out = lent.room((holder.rows.shape[1:], holder.rows.dtype))
        place(holder.rows, lent.places[own].astype(np.int64), lent.at[own], out)
        lent.holders[own] = -1
