"""Row id -> cache slot in constant time: a direct table while ids are few, a hash table otherwise."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import ArrayLike, NDArray

from plait.errors import InputError

__all__ = ["DirectTable", "HashTable", "SlotTable", "slot_table"]

Array = NDArray[Any]
_EMPTY = -1
_GONE = -2


def slot_table(capacity: int, num_ids: int | None = None) -> SlotTable:
    """A table for `capacity` ids; direct when `num_ids` bounds them by 16 times the capacity or 4 million."""
    if capacity < 1:
        raise InputError(f"capacity={capacity}: a slot table holds at least one id")
    # 4 bytes per possible id against 24 to 48 per held one: direct addressing takes less memory up to 8 to
    # 1 and is worth some more, being one cache miss instead of two
    if num_ids is not None and num_ids <= max(16 * capacity, 1 << 22):
        return DirectTable(num_ids)
    return HashTable(capacity)


class SlotTable:
    """A map from row ids to slots; `find` is the hot path."""

    def find(self, ids: ArrayLike) -> Array:
        """The slot of each id as int32, -1 where it has none."""
        raise NotImplementedError

    def put(self, ids: ArrayLike, slots: ArrayLike) -> None:
        """Gives each id its slot, replacing the one it had."""
        raise NotImplementedError

    def drop(self, ids: ArrayLike) -> None:
        """Forgets the ids; those not held are ignored."""
        raise NotImplementedError


class DirectTable(SlotTable):
    """slots[id], 4 bytes for every id there could be."""

    def __init__(self, num_ids: int) -> None:
        self.num_ids = num_ids
        self._slots = np.full(num_ids, -1, np.int32)

    def find(self, ids: ArrayLike) -> Array:
        wanted = self._checked(ids)
        out = np.empty(wanted.size, np.int32)
        _direct_find(self._slots, wanted, out)
        return out

    def put(self, ids: ArrayLike, slots: ArrayLike) -> None:
        self._slots[self._checked(ids)] = slots

    def drop(self, ids: ArrayLike) -> None:
        self._slots[self._checked(ids)] = -1

    def _checked(self, ids: ArrayLike) -> Array:
        array = np.asarray(ids)
        if array.size and not _all_below(array, self.num_ids):
            raise InputError(f"ids: some are not between 0 and {self.num_ids - 1}, the range of this table")
        return array


class HashTable(SlotTable):
    """Linear probing at a load of at most one half, tombstones swept when they pile up."""

    def __init__(self, capacity: int) -> None:
        cells = 1 << max(4, (2 * capacity - 1).bit_length())
        self._keys = np.full(cells, _EMPTY, np.int64)
        self._slots = np.empty(cells, np.int32)
        self._used = 0

    def find(self, ids: ArrayLike) -> Array:
        wanted = np.asarray(ids)
        out = np.empty(wanted.size, np.int32)
        _hash_find(self._keys, self._slots, wanted, out)
        return out

    def put(self, ids: ArrayLike, slots: ArrayLike) -> None:
        wanted, places = np.asarray(ids, np.int64), np.asarray(slots, np.int32)
        if wanted.size and wanted.min() < 0:
            raise InputError(f"ids holds the negative id {wanted.min()}; rows are numbered from 0")
        if self._used + wanted.size > self._keys.size // 2:
            self._sweep(wanted.size)
        self._used += _hash_put(self._keys, self._slots, wanted, np.broadcast_to(places, wanted.shape).copy())

    def drop(self, ids: ArrayLike) -> None:
        _hash_drop(self._keys, np.asarray(ids, np.int64))

    def _sweep(self, incoming: int) -> None:
        """Builds the table anew without tombstones, larger when the live ids need it."""
        live = np.flatnonzero(self._keys >= 0)
        keys, slots = self._keys[live], self._slots[live]
        cells = self._keys.size
        while cells < 2 * (keys.size + incoming):
            cells *= 2
        self._keys = np.full(cells, _EMPTY, np.int64)
        self._slots = np.empty(cells, np.int32)
        self._used = int(_hash_put(self._keys, self._slots, keys, slots))


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _all_below(ids: Any, bound: int) -> bool:
    # one unsigned comparison covers both ends; no early exit, so that the loop is vectorised
    bad = 0
    for i in range(ids.size):
        bad += int(np.uint64(ids[i]) >= np.uint64(bound))
    return bad == 0


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _direct_find(slots: Any, ids: Any, out: Any) -> None:
    for i in range(ids.size):
        out[i] = slots[np.uint64(ids[i])]


@njit(cache=True, nogil=True, inline="always")  # type: ignore[untyped-decorator]
def _home(row: Any, mask: Any) -> Any:
    # Fibonacci hashing: the high bits of a product with 2**64 / golden ratio spread consecutive ids
    return np.int64((np.uint64(row) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32)) & mask


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _hash_find(keys: Any, slots: Any, ids: Any, out: Any) -> None:
    mask = keys.size - 1
    for i in range(ids.size):
        row = np.int64(ids[i])
        at = _home(row, mask)
        while keys[at] != row and keys[at] != _EMPTY:
            at = (at + 1) & mask
        out[i] = slots[at] if keys[at] == row and row >= 0 else -1


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _hash_put(keys: Any, slots: Any, ids: Any, places: Any) -> int:
    """The number of cells taken that were empty before."""
    mask = keys.size - 1
    taken = 0
    for i in range(ids.size):
        at = _home(ids[i], mask)
        while keys[at] != ids[i] and keys[at] != _EMPTY:
            at = (at + 1) & mask
        taken += int(keys[at] == _EMPTY)
        keys[at] = ids[i]
        slots[at] = places[i]
    return taken


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _hash_drop(keys: Any, ids: Any) -> None:
    mask = keys.size - 1
    for i in range(ids.size):
        at = _home(ids[i], mask)
        while keys[at] != ids[i] and keys[at] != _EMPTY:
            at = (at + 1) & mask
        if ids[i] >= 0 and keys[at] == ids[i]:
            keys[at] = _GONE
