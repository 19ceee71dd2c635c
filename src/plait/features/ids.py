"""Ids of feature rows as callers give them: checked, once each, and masks over all of them."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from plait.errors import InputError
from plait.graph.compiled import compiled

__all__ = ["Distinct", "checked", "first_places", "mask_of"]

Array = NDArray[Any]


def checked(ids: ArrayLike, num_rows: int) -> Array:
    """The ids as an int64 array; InputError where they are no row numbers below `num_rows`."""
    wanted = np.asarray(ids)
    if wanted.ndim != 1 or (wanted.size and wanted.dtype.kind not in "iu"):
        raise InputError(
            f"ids has shape {wanted.shape} and type {wanted.dtype}; give a list of whole row numbers"
        )
    wanted = wanted.astype(np.int64, copy=False)
    if wanted.size and (wanted.min() < 0 or wanted.max() >= num_rows):
        bad = wanted.min() if wanted.min() < 0 else wanted.max()
        raise InputError(f"ids holds {bad}, but rows are numbered 0 to {num_rows - 1}")
    return wanted


def mask_of(name: str, given: ArrayLike | None, count: int) -> Array | None:
    """The truth values, one for each of `count` rows, checked; None where none are given."""
    if given is None:
        return None
    mask = np.asarray(given)
    if mask.shape != (count,) or mask.dtype != np.bool_:
        raise InputError(
            f"{name} has shape {mask.shape} and type {mask.dtype}; give one truth value for each of "
            f"{count} rows"
        )
    return mask


def first_places(ids: Array) -> Array:
    """The ids without repeats, in order of first appearance."""
    unique, at = np.unique(ids, return_index=True)
    return ids if unique.size == ids.size else ids[np.sort(at)]


class Distinct:
    """Tells which of a batch's ids repeat others; several threads may ask."""

    def __init__(self, num_rows: int) -> None:
        self._stamp = np.zeros(num_rows, np.int64)
        self._place = np.empty(num_rows, np.int32)
        self._batch = 0
        self._marking = threading.Lock()

    def __call__(self, ids: Array) -> tuple[Array, Array | None]:
        """The ids without repeats, as they come, and, if there were any, which of them each one is."""
        unique, inverse = np.empty_like(ids), np.empty(ids.size, np.int64)
        with self._marking:
            self._batch += 1
            count = int(_distinct(ids, self._stamp, self._batch, self._place, unique, inverse))
        return (ids, None) if count == ids.size else (unique[:count], inverse)


@compiled
def _distinct(ids: Any, stamp: Any, batch: int, place: Any, unique: Any, inverse: Any) -> int:
    """The number of distinct ids; unique lists them as they come, ids[i] == unique[inverse[i]]."""
    count = 0
    for i in range(ids.size):
        row = ids[i]
        if stamp[row] != batch:
            stamp[row] = batch
            place[row] = count
            unique[count] = row
            count += 1
        inverse[i] = place[row]
    return count
