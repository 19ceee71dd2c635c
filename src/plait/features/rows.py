"""Feature rows by number, from whatever holds them: an array, a mapped file, a function, a store."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from plait.errors import InputError
from plait.features.memory import prefetch
from plait.graph.compiled import compiled

__all__ = [
    "ArrayRows", "FunctionRows", "RetryingRows", "Row", "Rows", "all_below", "as_rows", "gather", "place",
    "row_of",
]  # fmt: skip

Array = NDArray[Any]

# Rows between prefetching a row and copying it. 11k random rows of 128 B to 2.4 kB, one core: 4 to 16 within
# 5% on rows of 512 B and more, 16 best on short ones; without prefetching 1.2 to 1.8 times slower.
_AHEAD = 16
_LINE_WORDS = 8


Row = tuple[tuple[int, ...], Any]
"""The shape and the type of one row."""


class Rows(Protocol):
    """A source of rows by number; num_rows is None when it does not know how many it has.

    One that knows `row`, the shape and type of its rows, may also write them where they are wanted, which
    spares a copy and fresh memory: `place(ids, at, out)` does out[at] = rows of ids, `fill(ids, out)`
    out[:] = rows of ids.
    """

    num_rows: int | None

    def take(self, ids: Array) -> Array:
        """A fresh array whose row i is row ids[i]."""
        ...


def row_of(rows: Any) -> Row | None:
    """The shape and type of the rows where they can be placed, else None."""
    return rows.row if hasattr(rows, "place") else None


def as_rows(source: object, num_rows: int | None = None) -> Rows:
    """Rows from an array, the path of a .npy file (mapped, not read), a function of ids, or a `Rows`.

    A function takes an int64 array of ids and returns one row for each. Anything with a shape is indexed.
    """
    if isinstance(source, str | os.PathLike):
        return ArrayRows(_mapped(Path(source)))
    if hasattr(source, "take") and hasattr(source, "num_rows"):
        return source
    if hasattr(source, "detach"):  # a tensor, without importing torch; shares its memory
        source = source.detach().cpu().numpy()
    if isinstance(source, np.ndarray):
        return ArrayRows(source)
    if callable(source):
        return FunctionRows(source, num_rows)
    if getattr(source, "shape", ()) and hasattr(source, "__getitem__"):
        return FunctionRows(source.__getitem__, int(source.shape[0]))  # type: ignore[attr-defined]
    raise InputError(
        f"source: {type(source).__name__} is not a source of rows; give an array, the path of a .npy file, "
        "or a function from ids to rows"
    )


class ArrayRows:
    """Rows of an array in memory or of a mapped file."""

    def __init__(self, array: Array) -> None:
        if array.ndim < 1:
            raise InputError("source: a single number has no rows; give an array of at least one dimension")
        if array.dtype.hasobject:
            raise InputError("source holds Python objects; give numbers")
        self.array = array
        self.num_rows: int | None = array.shape[0]
        self.row: Row = (array.shape[1:], array.dtype)

    def place(self, ids: Array, at: Array, out: Array) -> None:
        """out[at] = the rows; ids are checked."""
        _check_file(self.array)
        place(self.array, ids, at, out)

    def fill(self, ids: Array, out: Array) -> None:
        """out[:] = the rows; ids are checked."""
        gather(self.array, ids, out)

    def take(self, ids: Array) -> Array:
        """The rows, copied; ids are checked."""
        out = np.empty((ids.size, *self.array.shape[1:]), self.array.dtype)
        gather(self.array, ids, out)
        return out


class FunctionRows:
    """Rows a function fetches; what it returns is checked before it is believed."""

    def __init__(self, function: Callable[[Array], ArrayLike], num_rows: int | None = None) -> None:
        self._function = function
        self.num_rows = num_rows

    def take(self, ids: Array) -> Array:
        """What the function returns for the ids, as an array."""
        returned: Any = self._function(ids)
        rows = np.asarray(returned.detach().cpu().numpy() if hasattr(returned, "detach") else returned)
        if rows.ndim < 1 or rows.shape[0] != ids.size:
            got = f"{rows.shape[0]} rows" if rows.ndim else "a single number"
            raise InputError(f"source returned {got} for {ids.size} ids; it must return one row per id")
        return rows


class RetryingRows:
    """Rows that are requested again when the source raises, each time after twice the pause."""

    def __init__(self, rows: Rows, retries: int = 2, pause_seconds: float = 0.05) -> None:
        if retries < 0 or pause_seconds < 0:
            raise InputError(f"retries={retries}, pause_seconds={pause_seconds}: neither can be negative")
        self._rows, self._retries, self._pause = rows, retries, pause_seconds
        self.num_rows = rows.num_rows
        self.failures = 0

    @property
    def row(self) -> Row | None:
        """That of the source."""
        return row_of(self._rows)

    def take(self, ids: Array) -> Array:
        """The rows; after the last failure an InputError that says how often and keeps the cause."""
        found: Array = self._tried(lambda: self._rows.take(ids), ids.size)
        return found

    def place(self, ids: Array, at: Array, out: Array) -> None:
        """out[at] = the rows, tried as often."""
        source: Any = self._rows
        self._tried(lambda: source.place(ids, at, out), ids.size)

    def held(self, ids: Array) -> Array:
        """Which of the rows the source has at hand until they are requested again, as a mask.

        An empty array where the source does not say.
        """
        source: Any = self._rows
        found: Array = source.held(ids) if hasattr(source, "held") else np.empty(0, np.bool_)
        return found

    def _tried(self, work: Callable[[], Any], count: int) -> Any:
        for attempt in range(self._retries + 1):
            try:
                return work()
            except InputError:
                raise  # wrong ids or a wrong shape are wrong the next time too
            except Exception as error:
                self.failures += 1
                if attempt == self._retries:
                    raise InputError(
                        f"source failed {attempt + 1} times in a row for {count} rows, "
                        f"last with {type(error).__name__}: {error}; fix the source or raise retries"
                    ) from error
            time.sleep(self._pause * 2**attempt)
        raise AssertionError("unreachable")


def gather(array: Array, ids: Array, out: Array) -> None:
    """out[i] = array[ids[i]] without the interpreter lock; a file that shrank is an error, not a crash."""
    _check_file(array)
    if ids.size == 0:
        return
    if not all_below(ids, array.shape[0]):
        raise InputError(f"ids: some are not between 0 and {array.shape[0] - 1}, the rows there are")
    row_bytes = array.dtype.itemsize * math.prod(array.shape[1:])
    if not (array.flags.c_contiguous and out.flags.c_contiguous) or row_bytes == 0:
        np.take(array, ids, axis=0, out=out, mode="clip")
        return
    word = np.uint64 if row_bytes % 8 == 0 and _aligned(array) and _aligned(out) else np.uint8
    _gather(_words(array, word), ids, _words(out, word))


def place(array: Array, ids: Array, at: Array, out: Array) -> None:
    """out[at[i]] = array[ids[i]] without the interpreter lock, which numpy would hold; no place twice."""
    if ids.size == 0:
        return
    if not all_below(ids, array.shape[0]):
        raise InputError(f"ids: some are not between 0 and {array.shape[0] - 1}, the rows there are")
    if not all_below(at, out.shape[0]):
        raise InputError(f"at: some are not between 0 and {out.shape[0] - 1}, the rows of out")
    row_bytes = array.dtype.itemsize * math.prod(array.shape[1:])
    if not (array.flags.c_contiguous and out.flags.c_contiguous) or row_bytes == 0:
        out[at] = array[ids]
        return
    word = np.uint64 if row_bytes % 8 == 0 and _aligned(array) and _aligned(out) else np.uint8
    _place(_words(array, word), ids, at, _words(out, word))


def _aligned(array: Array) -> bool:
    return int(array.__array_interface__["data"][0]) % 8 == 0


def _words(array: Array, word: Any) -> Array:
    """The same memory as [rows, words]."""
    plain = array.view(np.ndarray)
    return plain.reshape(array.shape[0], -1).view(word)


@compiled
def all_below(ids: Any, bound: int) -> bool:
    """Whether all ids are in [0, bound)."""
    # one unsigned comparison covers both ends; no early exit, so that the loop is vectorised
    bad = 0
    for i in range(ids.size):
        bad += int(np.uint64(ids[i]) >= np.uint64(bound))
    return bad == 0


@compiled
def _gather(rows: Any, ids: Any, out: Any) -> None:
    words = rows.shape[1]
    flat = rows.reshape(-1)
    last = ids.size - 1
    for i in range(ids.size):
        ahead = ids[min(i + _AHEAD, last)] * words
        for line in range(0, min(words, 4 * _LINE_WORDS), _LINE_WORDS):
            prefetch(flat, ahead + line)
        source = ids[i]
        for k in range(words):
            out[i, k] = rows[source, k]


@compiled
def _place(rows: Any, ids: Any, at: Any, out: Any) -> None:
    words = rows.shape[1]
    flat = rows.reshape(-1)
    last = ids.size - 1
    for i in range(ids.size):
        ahead = ids[min(i + _AHEAD, last)] * words
        for line in range(0, min(words, 4 * _LINE_WORDS), _LINE_WORDS):
            prefetch(flat, ahead + line)
        source, target = ids[i], at[i]  # once: indexed in the loop they keep it from being vectorised
        for k in range(words):
            out[target, k] = rows[source, k]


def _mapped(path: Path) -> Array:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise InputError(
            f"source: {path} is not a readable .npy file ({error}); write it with numpy.save"
        ) from error
    if not isinstance(array, np.ndarray):
        raise InputError(f"source: {path} holds several arrays; save the features as one .npy file")
    return array


def _check_file(array: Array) -> None:
    """A read past the end of a mapped file kills the process, so its length is looked at first."""
    base: Any = array
    while base is not None and not hasattr(base, "filename"):
        base = getattr(base, "base", None)
    name = getattr(base, "filename", None)
    if name is None:
        return
    needed = base.offset + base.size * base.dtype.itemsize
    try:
        size = os.stat(name).st_size
    except FileNotFoundError:
        return  # unlinked: the mapping keeps its pages
    if size < needed:
        raise InputError(
            f"source: {name} has {size} bytes now, but {needed} were mapped; it shrank while in use, "
            "write it again and reopen it"
        )
