"""Exchanges feature rows between processes: a round carries each row once, in float32 or in 16 bits.

There are several series of rounds (rounds.py), and every rank uses one of them. Links carry rows both ways
at once; in a single series a rank that needs rows a moment after another one waits for the end of the
other's round, and the two directions take turns.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plait.distributed.rounds import COUNTING, Counters, Pending, Rounds, timeout_of
from plait.distributed.trace import Trace
from plait.errors import ExchangeError, InputError
from plait.features.narrow import BITS, PRECISIONS, narrowed_features, widened
from plait.features.rows import ArrayRows, Row, place

__all__ = ["WIRE", "Exchange", "ExchangeCounters", "LocalRows", "Request"]

Array = NDArray[Any]

WIRE = ("float32", *PRECISIONS)

# Rows of one rank's requests in one round, so that buffers stay bounded.
_MOST_BYTES = 1 << 26
# Two threads and two process groups each. Two hosts at 1 Gbit/s moved 96 MB/s in both directions together
# with one series, 195 MB/s with two.
_MOST_SERIES = 4


@dataclass
class ExchangeCounters(Counters):
    """Counts what this rank exchanged; bytes are ids, rows and headers as handed to torch.distributed."""

    requested_rows: int = 0
    rows_in: int = 0
    rows_out: int = 0


class LocalRows:
    """The rows of neighbouring parts, which are those of the nodes `begin` .. `end` - 1.

    A `wire` of 16 bits rounds them all at once, own and sent ones, so that every process sees the
    same features; they are then held in memory, in half the bytes of their files.
    """

    def __init__(self, arrays: Sequence[Array], begin: int, wire: str = "float32") -> None:
        if not arrays:
            raise InputError("arrays: a rank owns at least one part; give its rows")
        if wire not in WIRE:
            raise InputError(f"wire={wire!r} is unknown; choose one of {', '.join(WIRE)}")
        self.precision = None if wire == "float32" else wire
        self._arrays = [a if self.precision is None else narrowed_features(a, self.precision) for a in arrays]
        sizes = [array.shape[0] for array in arrays]
        self._starts = begin + np.concatenate(([0], np.cumsum(sizes)))
        self.begin, self.end = begin, begin + sum(sizes)
        self.width: int = int(arrays[0].shape[1])
        self.row: Row = ((self.width,), np.dtype(np.float32) if self.precision is None else BITS)

    def empty(self, count: int) -> Array:
        """Uninitialised memory for this many rows."""
        return np.empty((count, self.width), self.row[1])

    def take(self, ids: Array) -> Array:
        """One row for every id, copied, as it is kept."""
        out = self.empty(ids.size)
        self.place(ids, np.arange(ids.size), out)
        return out

    def place(self, ids: Array, at: Array, out: Array) -> None:
        """out[at] = the rows of `ids`, which may come from another rank and so are checked."""
        if ids.size and not self.begin <= int(ids.min()) <= int(ids.max()) < self.end:
            raise InputError(f"ids: this rank owns the rows {self.begin} to {self.end - 1} and no others")
        if len(self._arrays) == 1:
            place(self._arrays[0], ids - self.begin, at, out)
            return
        owner = np.searchsorted(self._starts, ids, side="right") - 1
        for k, array in enumerate(self._arrays):
            own = np.flatnonzero(owner == k)
            place(array, ids[own] - self._starts[k], at[own], out)


class Request(Pending):
    """Rows on their way; `wait` returns them in the order of the requested ids."""

    what = "rows"

    def __init__(self, ids: Array, none: Array) -> None:
        super().__init__(int(ids.size))
        self.ids, self.rows = ids, none

    def wait(self, seconds: float) -> Array:
        """The rows; ExchangeError when they could not be fetched or did not arrive in time."""
        self.arrive(seconds)
        return self.rows


class Exchange:
    """The feature rows of all nodes, near ones from `local`, the others from the ranks that own them.

    `bounds` says which nodes each rank owns. `take(ids)` may be called by any thread at any time; `request`
    starts fetching and returns at once. Rows are sent as `local` keeps them. All ranks have to `close` it,
    in any order.
    """

    def __init__(
        self,
        local: LocalRows,
        bounds: Array,
        rank: int = 0,
        *,
        timeout_seconds: float = 300.0,
    ) -> None:
        self.local, self.bounds, self.rank, self.size = local, bounds, rank, bounds.size - 1
        self.num_rows: int | None = int(bounds[-1])
        self.counters = ExchangeCounters()
        self._timeout, self._is_closed = timeout_of(timeout_seconds), False
        count = min(self.size, _MOST_SERIES)
        made = (local, bounds, rank, self._timeout, self.counters)
        self._series = [_RowRounds(*made) for _ in range(count)]  # all ranks make their groups in this order
        self.trace: Trace | None = None  # spans are kept where one is set (report.py)

    def take(self, ids: Array) -> Array:
        """A fresh float32 array whose row i is row ids[i]."""
        rows = self.fetch(ids)
        return rows if self.local.precision is None else widened(rows, self.local.precision)

    def fetch(self, ids: Array) -> Array:
        """A fresh array whose row i is row ids[i], as rows are kept."""
        wanted = np.asarray(ids, np.int64)
        is_far = self.is_far(wanted)
        if not is_far.any():
            return self.local.take(wanted)
        far = np.flatnonzero(is_far)
        requests = self.request(wanted[far])
        out = self.local.empty(wanted.size)
        near = np.flatnonzero(~is_far)
        self.local.place(wanted[near], near, out)  # while the others are on their way
        place(self.wait(requests), np.arange(far.size), far, out)
        return out

    def is_far(self, ids: Array) -> Array:
        """Which of the ids another rank owns."""
        far: Array = (ids < self.local.begin) | (ids >= self.local.end)
        return far

    def request(self, ids: Array) -> list[Request]:
        """The rows of nodes of other ranks, on their way; several requests where they are many."""
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < int(self.bounds[-1]):
            raise InputError(f"ids: rows are numbered 0 to {int(self.bounds[-1]) - 1}")
        if self._is_closed:
            raise ExchangeError("rows were asked for after close(); keep the exchange open until then")
        requests = self._series[self.rank % len(self._series)].request(ids)
        self.counters.requested_rows += ids.size
        return requests

    def wait(self, requests: Sequence[Request]) -> Array:
        """Waits for the rows of requests and returns them."""
        begin = time.perf_counter()
        rows = [request.wait(self._timeout) for request in requests]
        end = time.perf_counter()
        self.counters.waited_seconds += end - begin
        if self.trace is not None:
            self.trace.add("exchange", begin, end)
        if len(rows) == 1:
            return rows[0]
        return np.concatenate(rows) if rows else self.local.empty(0)

    def close(self) -> None:
        """Ends the exchange once every rank has closed it; a second call does nothing."""
        self._is_closed = True
        for rounds in self._series:
            rounds.ask_no_more()
        for rounds in self._series:
            rounds.join()

    def abandon(self) -> None:
        """Stops without waiting for others; the threads end with the process."""
        for rounds in self._series:
            rounds.abandon()


class _RowRounds(Rounds[Request]):
    """Rounds one after the other, on process groups of their own."""

    what = "feature rows"
    counters: ExchangeCounters

    def __init__(
        self,
        local: LocalRows,
        bounds: Array,
        rank: int,
        timeout_seconds: float,
        counters: ExchangeCounters,
    ) -> None:
        self._row_bytes = local.width * local.row[1].itemsize
        super().__init__(bounds, rank, max(1, _MOST_BYTES // max(1, self._row_bytes)), timeout_seconds)
        self.local, self.counters = local, counters
        self._start()

    def request(self, ids: Array) -> list[Request]:
        """The rows of nodes of other ranks, on their way; several requests where they are many."""
        pieces = [ids[begin : begin + self._most] for begin in range(0, ids.size, self._most)]
        requests = [Request(piece, self.local.empty(0)) for piece in pieces]
        self._enter(requests)
        return requests

    def _message(self, requests: Sequence[Request]) -> tuple[Tensor, Array, Any]:
        """The ids of all requests, each once; they ascend, and so do their owners."""
        ids, inverse = _distinct(requests)
        wanted = np.diff(np.searchsorted(ids, self.bounds)).astype(np.int64)
        return torch.from_numpy(ids), wanted, inverse

    def _answer(
        self, requests: Sequence[Request], asked: Tensor, wanted: Array, counts: Array, memory: Array | None
    ) -> None:
        """Rows for ids."""
        ids = asked.numpy()
        raw = torch.from_numpy(self.local.take(ids).reshape(-1).view(np.uint8))
        came = self._all_to_all(raw, counts * self._row_bytes, wanted * self._row_bytes)
        rows = came.numpy().view(self.local.row[1]).reshape(-1, self.local.width)
        with COUNTING:
            self.counters.rows_in += int(wanted.sum())
            self.counters.rows_out += ids.size
        _hand_out(rows, requests, memory)


def _distinct(requests: Sequence[Request]) -> tuple[Array, Array | None]:
    """The ids of all requests once each, ascending, and the place of every one; None where it is its own."""
    if not requests:
        return np.empty(0, np.int64), None
    every = np.concatenate([request.ids for request in requests])
    if every.size < 2 or bool((every[1:] > every[:-1]).all()):
        return every, None
    ids, inverse = np.unique(every, return_inverse=True)
    return ids, inverse


def _hand_out(rows: Array, requests: Sequence[Request], inverse: Array | None) -> None:
    """Gives every request its rows: those that came as they lie where the order is theirs."""
    at = 0
    for request in requests:
        end = at + request.ids.size
        request.rows = rows[at:end] if inverse is None else ArrayRows(rows).take(inverse[at:end])
        request.finish()
        at = end
