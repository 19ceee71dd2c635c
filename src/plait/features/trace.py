"""A trace of feature rows: which rows each batch requested, packed for replay."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from plait.errors import InputError
from plait.graph.compiled import compiled

__all__ = ["NEVER", "Trace", "pack"]

Array = NDArray[Any]

# The batch in which a row is used next, when there is none.
NEVER = np.int32(2**31 - 1)

# Ids below this address arrays directly; larger ones are renumbered first.
_DIRECT_LIMIT = 1 << 27


@dataclass(frozen=True, eq=False)
class Trace:
    """Batch b requests rows ids[offsets[b]:offsets[b + 1]], each once, all below num_ids.

    `names[i]` is the caller's number of row i; None when that is i.
    """

    ids: Array
    offsets: Array
    num_ids: int
    names: Array | None = None

    def __len__(self) -> int:
        return int(self.offsets.size - 1)

    def __iter__(self) -> Iterator[Array]:
        for b in range(len(self)):
            yield self.batch(b)

    def batch(self, b: int) -> Array:
        """The rows of batch b."""
        return self.ids[self.offsets[b] : self.offsets[b + 1]]

    def first(self, batches: int) -> Trace:
        """The trace cut after that many batches."""
        offsets = self.offsets[: batches + 1]
        return Trace(self.ids[: offsets[-1]], offsets, self.num_ids, self.names)

    @property
    def requests(self) -> int:
        """How many rows were requested, over all batches."""
        return int(self.ids.size)

    def counts(self) -> Array:
        """How many batches requested each row."""
        return np.bincount(self.ids, minlength=self.num_ids)

    def by_row(self, scores: ArrayLike) -> Array:
        """Scores by the caller's ids as one float per row; rows past the end of `scores` count 0."""
        given = np.asarray(scores)
        if given.ndim != 1 or given.dtype.kind not in "iufb":
            raise InputError(
                f"scores must hold one number per id; got shape {given.shape} and type {given.dtype}"
            )
        if given.dtype.kind == "f" and not np.isfinite(given).all():
            raise InputError("scores holds NaN or infinity; give finite numbers, larger for hotter rows")
        out = np.zeros(self.num_ids)
        if self.names is None:
            out[: min(given.size, self.num_ids)] = given[: self.num_ids]
        else:
            known = self.names < given.size
            out[known] = given[self.names[known]]
        return out


def pack(trace: Iterable[ArrayLike] | Trace) -> Trace:
    """The trace in one piece; within a batch a repeated id counts once, where it first stands."""
    if isinstance(trace, Trace):
        return trace
    batches = [_checked(b, np.asarray(ids)) for b, ids in enumerate(trace)]
    if not batches:
        raise InputError("trace is empty; give a list of id arrays, one per batch")
    flat = np.concatenate(batches)
    offsets = np.concatenate(([0], np.cumsum([b.size for b in batches])))
    names = None
    num_ids = int(flat.max()) + 1 if flat.size else 1
    if num_ids > _DIRECT_LIMIT:
        names, flat = np.unique(flat, return_inverse=True)
        num_ids = names.size
    ids = np.empty(flat.size, np.int32)
    kept = np.empty_like(offsets)
    total = _drop_repeats(flat, offsets, np.full(num_ids, -1, np.int32), ids, kept)
    return Trace(ids[:total], kept, num_ids, names)


def _checked(b: int, ids: Array) -> Array:
    if ids.size == 0:
        return np.empty(0, np.int64)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise InputError(
            f"trace: batch {b} has shape {ids.shape} and type {ids.dtype}; give a list of whole row numbers"
        )
    if ids.min() < 0:
        raise InputError(f"trace: batch {b} holds the negative id {ids.min()}; rows are numbered from 0")
    return ids.astype(np.int64, copy=False)


@compiled
def _drop_repeats(flat: Any, offsets: Any, seen: Any, ids: Any, kept: Any) -> int:
    total = 0
    kept[0] = 0
    for b in range(offsets.size - 1):
        for i in range(offsets[b], offsets[b + 1]):
            row = flat[i]
            if seen[row] != b:
                seen[row] = b
                ids[total] = row
                total += 1
        kept[b + 1] = total
    return total
