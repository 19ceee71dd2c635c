"""Row id -> cache slot in constant time: a direct table while ids are few, a hash table otherwise."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from plait.errors import InputError
from plait.features.memory import prefetch
from plait.features.rows import all_below
from plait.graph.compiled import compiled, inlined

__all__ = ["DirectTable", "HashTable", "SlotTable", "slot_table"]

Array = NDArray[Any]
_EMPTY = -1
_GONE = -2
# Ids between prefetching a cell and reading it.
_AHEAD = 24


def slot_table(capacity: int, num_ids: int | None = None) -> SlotTable:
    """A table for `capacity` ids; direct when `num_ids` bounds them by 16 times the capacity or 4 million."""
    if capacity < 1:
        raise InputError(f"capacity={capacity}: a slot table holds at least one id")
    # 4 bytes per possible id against 32 to 64 per held one: up to 16 to 1 direct addressing takes no more
    # memory, and it is three times as fast
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
        if array.size and not all_below(array, self.num_ids):
            raise InputError(f"ids: some are not between 0 and {self.num_ids - 1}, the range of this table")
        return array


class HashTable(SlotTable):
    """Linear probing at a load of at most one half, tombstones swept when they pile up.

    Cell c is (id, slot) at 2c and 2c + 1, so that a look-up reads one cache line.
    """

    def __init__(self, capacity: int) -> None:
        self._cells = _no_cells(1 << max(4, (2 * capacity - 1).bit_length()))
        self._used = 0

    @property
    def num_cells(self) -> int:
        """How many ids the table could hold if it were filled to the brim."""
        return self._cells.size // 2

    def find(self, ids: ArrayLike) -> Array:
        wanted = np.asarray(ids, np.int64)
        out = np.empty(wanted.size, np.int32)
        _hash_find(self._cells, wanted, out)
        return out

    def put(self, ids: ArrayLike, slots: ArrayLike) -> None:
        wanted = np.asarray(ids, np.int64)
        if wanted.size and wanted.min() < 0:
            raise InputError(f"ids holds the negative id {wanted.min()}; rows are numbered from 0")
        if self._used + wanted.size > self.num_cells // 2:
            self._sweep(wanted.size)
        places = np.broadcast_to(np.asarray(slots, np.int64), wanted.shape).copy()
        self._used += _hash_put(self._cells, wanted, places)

    def drop(self, ids: ArrayLike) -> None:
        _hash_drop(self._cells, np.asarray(ids, np.int64))

    def _sweep(self, incoming: int) -> None:
        """Builds the table again without tombstones, larger when the live ids need it."""
        pairs = self._cells.reshape(-1, 2)
        live = pairs[pairs[:, 0] >= 0]
        size = self.num_cells
        while size < 2 * (live.shape[0] + incoming):
            size *= 2
        self._cells = _no_cells(size)
        self._used = int(_hash_put(self._cells, live[:, 0].copy(), live[:, 1].copy()))


def _no_cells(count: int) -> Array:
    return np.full(2 * count, _EMPTY, np.int64)


@compiled
def _direct_find(slots: Any, ids: Any, out: Any) -> None:
    for i in range(ids.size):
        out[i] = slots[np.uint64(ids[i])]


@inlined
def _home(row: Any, mask: Any) -> Any:
    # Fibonacci hashing: the high bits of a product with 2**64 / golden ratio spread consecutive ids
    return np.int64((np.uint64(row) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32)) & mask


@inlined
def _probe(cells: Any, row: Any, mask: Any) -> Any:
    """Where the pair of `row` starts, or the empty pair where it belongs."""
    at = _home(row, mask)
    while cells[2 * at] != row and cells[2 * at] != _EMPTY:
        at = (at + 1) & mask
    return 2 * at


@compiled
def _hash_find(cells: Any, ids: Any, out: Any) -> None:
    mask = cells.size // 2 - 1
    for i in range(ids.size):
        # the cell wanted a few ids from now is on its way while this one is compared
        prefetch(cells, 2 * _home(ids[min(i + _AHEAD, ids.size - 1)], mask))
        at = _probe(cells, ids[i], mask)
        out[i] = cells[at + 1] if ids[i] >= 0 and cells[at] == ids[i] else -1


@compiled
def _hash_put(cells: Any, ids: Any, places: Any) -> int:
    """The number of cells taken that were empty before."""
    mask = cells.size // 2 - 1
    taken = 0
    for i in range(ids.size):
        at = _probe(cells, ids[i], mask)
        taken += int(cells[at] == _EMPTY)
        cells[at] = ids[i]
        cells[at + 1] = places[i]
    return taken


@compiled
def _hash_drop(cells: Any, ids: Any) -> None:
    mask = cells.size // 2 - 1
    for i in range(ids.size):
        at = _probe(cells, ids[i], mask)
        if ids[i] >= 0 and cells[at] == ids[i]:
            cells[at] = _GONE
