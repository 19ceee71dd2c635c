"""Feature rows between processes: the one file that talks to others.

All ranks take part in rounds, run by a thread on a process group of its own: how many rows each rank wants of
each other one, the ids, the rows; three all_to_all. A rank that wants rows rings the others, which join with
whatever they want by then, or nothing; so nobody has to ask in step with the others, and while no rank wants
anything nothing is sent. A round carries each row once. Everything travels as plain numbers: nothing received
is unpickled.

There are several series of such rounds, and every rank asks in one of them. A link carries rows both ways at
once; in a single series a rank that asks a moment after another one waits for the end of the other's round,
and the two directions take turns.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from plait.errors import ExchangeError, InputError
from plait.features.rows import ArrayRows, Row, place

__all__ = ["WIRE", "Exchange", "ExchangeCounters", "LocalRows", "Request", "cause", "told"]

Array = NDArray[Any]

WIRE = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

# Rows of one rank's requests in one round, so that buffers stay bounded.
_MOST_BYTES = 1 << 26
_HEADER = 3  # rows wanted of the receiver, rows wanted of anyone, whether the sender asks no more
_LAST_BELL = -1
# Two threads and two process groups each. Two hosts at 1 Gbit/s moved 96 MB/s in both directions together
# with one series, 195 MB/s with two.
_MOST_SERIES = 4
_COUNTING = threading.Lock()  # all series count together
# A bell may stay silent for as long as a model trains between two exchanges; a rank that is gone is noticed
# by its closed connection.
_SILENCE = timedelta(days=30)


@dataclass
class ExchangeCounters:
    """What this rank exchanged so far; bytes count ids, rows and headers, as handed to torch.distributed."""

    rounds: int = 0
    requested_rows: int = 0
    rows_in: int = 0
    rows_out: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    busy_seconds: float = 0.0
    """Time the thread spent in rounds that carried rows."""
    waited_seconds: float = 0.0
    """Time callers waited for rows."""


class LocalRows:
    """The rows of neighbouring parts, which are those of the nodes `begin` .. `end` - 1."""

    def __init__(self, arrays: Sequence[Array], begin: int) -> None:
        if not arrays:
            raise InputError("arrays: a rank owns at least one part; give its rows")
        self._arrays = list(arrays)
        sizes = [array.shape[0] for array in arrays]
        self._starts = begin + np.concatenate(([0], np.cumsum(sizes)))
        self.begin, self.end = begin, begin + sum(sizes)
        self.width: int = int(arrays[0].shape[1])
        self.row: Row = ((self.width,), np.dtype(np.float32))

    def take(self, ids: Array) -> Array:
        """One row for every id, copied."""
        out = np.empty((ids.size, self.width), np.float32)
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


class Request:
    """Rows on their way; `wait` returns them in the order of the ids that were asked for."""

    def __init__(self, ids: Array, width: int) -> None:
        self.ids, self.rows = ids, np.empty((0, width), np.float32)
        self._done = threading.Event()
        self._error: ExchangeError | None = None
        if ids.size == 0:
            self._done.set()

    def finish(self, error: ExchangeError | None = None) -> None:
        """Lets `wait` return, or raise."""
        self._error = error
        self._done.set()

    def wait(self, seconds: float) -> Array:
        """The rows; ExchangeError when they could not be had or did not come in time."""
        if not self._done.wait(seconds):
            raise ExchangeError(
                f"no answer for {self.ids.size} rows within {seconds:g} s; another rank hangs or ended, see "
                "its output, or raise timeout_seconds"
            )
        if self._error is not None:
            raise self._error
        return self.rows


class Exchange:
    """The feature rows of all nodes, near ones from `local`, the others from the ranks that own them.

    `bounds` says which nodes each rank owns. `take(ids)` may be called by any thread at any time; `request`
    starts the journey and returns at once. `wire` is the type rows travel in; narrower ones halve the bytes
    and round remote rows, never local ones. All ranks have to `close` it, in any order.
    """

    def __init__(
        self,
        local: LocalRows,
        bounds: Array,
        rank: int = 0,
        *,
        wire: str = "float32",
        timeout_seconds: float = 300.0,
    ) -> None:
        if wire not in WIRE:
            raise InputError(f"wire={wire!r} is unknown; choose one of {', '.join(WIRE)}")
        if timeout_seconds <= 0:
            raise InputError(f"timeout_seconds={timeout_seconds}: give a positive number of seconds")
        self.local, self.bounds, self.rank, self.size = local, bounds, rank, bounds.size - 1
        self.num_rows: int | None = int(bounds[-1])
        self.counters = ExchangeCounters()
        self._timeout, self._is_closed = float(timeout_seconds), False
        count = min(self.size, _MOST_SERIES)
        made = (local, bounds, rank, WIRE[wire], self._timeout, self.counters)
        self._series = [_Rounds(*made) for _ in range(count)]  # all ranks make their groups in this order

    def take(self, ids: Array) -> Array:
        """A fresh array whose row i is row ids[i]."""
        wanted = np.asarray(ids, np.int64)
        is_far = self.is_far(wanted)
        if not is_far.any():
            return self.local.take(wanted)
        far = np.flatnonzero(is_far)
        requests = self.request(wanted[far])
        out = np.empty((wanted.size, self.local.width), np.float32)
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
        """The rows of requests, waited for."""
        begin = time.perf_counter()
        rows = [request.wait(self._timeout) for request in requests]
        self.counters.waited_seconds += time.perf_counter() - begin
        if len(rows) == 1:
            return rows[0]
        return np.concatenate(rows) if rows else np.empty((0, self.local.width), np.float32)

    def close(self) -> None:
        """Ends the exchange once every rank has closed it; a second call does nothing."""
        self._is_closed = True
        for rounds in self._series:
            rounds.ask_no_more()
        for rounds in self._series:
            rounds.join()

    def abandon(self) -> None:
        """Stops asking and waits for nobody; the threads end with the process."""
        for rounds in self._series:
            rounds.abandon()


class _Rounds:
    """Rounds one after the other, on process groups of their own."""

    def __init__(
        self,
        local: LocalRows,
        bounds: Array,
        rank: int,
        wire: torch.dtype,
        timeout_seconds: float,
        counters: ExchangeCounters,
    ) -> None:
        self.local, self.bounds, self.rank, self.size = local, bounds, rank, bounds.size - 1
        self.counters = counters
        self._wire, self._timeout = wire, timeout_seconds
        self._most_rows = max(1, _MOST_BYTES // (4 * max(1, local.width)))
        self._asked: deque[Request] = deque()
        self._wake = threading.Condition()
        self._error: ExchangeError | None = None
        self._is_closing = self._is_done = False
        self._has_said_so = False
        self._rung = -1  # the last round another rank rang for
        self._in_round: Sequence[Request] = ()
        self._threads: list[threading.Thread] = []
        if self.size > 1:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self._timeout))
            self._bells = dist.new_group(backend="gloo", timeout=_SILENCE)
            for work in (self._serve, self._listen):
                self._threads.append(threading.Thread(target=work, name="plait-exchange", daemon=True))
                self._threads[-1].start()

    def request(self, ids: Array) -> list[Request]:
        """The rows of nodes of other ranks, on their way; several requests where they are many."""
        step = self._most_rows
        pieces = [ids[begin : begin + step] for begin in range(0, ids.size, step)]
        requests = [Request(piece, self.local.width) for piece in pieces]
        with self._wake:
            if self._error is not None:
                raise self._error
            self._asked.extend(requests)
            self._wake.notify()
        return requests

    def ask_no_more(self) -> None:
        """Tells the others, in a last round, that this rank asks no more."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()

    def join(self) -> None:
        """Waits until no rank asks any more."""
        threads, self._threads = self._threads, []
        for thread in threads:
            thread.join(self._timeout)

    def abandon(self) -> None:
        """Stops asking and waits for nobody."""
        self._threads = []
        self._fail(ExchangeError(f"rank {self.rank}: the exchange was abandoned after an error"))

    def _serve(self) -> None:
        """Rounds until no rank asks any more; an error ends them and reaches everybody who waits."""
        try:
            number, is_last = 0, False
            while not is_last:
                requests, asks_no_more, is_rung = self._collected(number)
                if not is_rung:
                    self._ring(number)
                is_last = self._round(requests, asks_no_more)
                number += 1
            self._is_done = True
            self._send(_LAST_BELL, (self.rank + 1) % self.size)
        except Exception as error:  # whatever torch.distributed raises ends the exchange
            self._fail(self._lost(error))

    def _listen(self) -> None:
        """Hears the bells of other ranks."""
        bell = torch.empty(1, dtype=torch.int64)
        try:
            while True:
                dist.recv(bell, group=self._bells)
                if int(bell) == _LAST_BELL:
                    return
                with self._wake:
                    self._rung = max(self._rung, int(bell))
                    self._wake.notify_all()
        except Exception as error:  # as above; after the last round the others may leave before us
            if not self._is_done:
                self._fail(self._lost(error))

    def _ring(self, number: int) -> None:
        """Has every other rank join round `number`."""
        for rank in range(self.size):
            if rank != self.rank:
                self._send(number, rank)

    def _send(self, number: int, rank: int) -> None:
        dist.send(torch.tensor([number]), rank, group=self._bells)

    def _lost(self, error: Exception) -> ExchangeError:
        return ExchangeError(
            f"rank {self.rank}: feature rows could not be exchanged ({cause(error)}); another rank ended or "
            "was cut off, see its output"
        )

    def _fail(self, error: ExchangeError) -> None:
        with self._wake:
            self._error = error
            asked, self._asked = self._asked, deque()
        for request in [*self._in_round, *asked]:
            request.finish(error)

    def _collected(self, number: int) -> tuple[Sequence[Request], bool, bool]:
        """What was asked for, whether it is the last, and whether another rank rang for this round.

        Waits for one of the three. Requests are bounded, but for the first one.
        """
        with self._wake:
            self._wake.wait_for(
                lambda: self._asked or self._rung >= number or self._has_news() or self._error
            )
            if self._error is not None:
                raise self._error
            chosen: list[Request] = []
            rows = 0
            while self._asked and (not chosen or rows + self._asked[0].ids.size <= self._most_rows):
                chosen.append(self._asked.popleft())
                rows += chosen[-1].ids.size
            self._in_round = chosen
            asks_no_more = self._is_closing and not self._asked
            self._has_said_so = asks_no_more
            return chosen, asks_no_more, self._rung >= number

    def _has_news(self) -> bool:
        """Whether the others are still to be told that this rank asks no more."""
        return self._is_closing and not self._has_said_so

    def _round(self, requests: Sequence[Request], asks_no_more: bool) -> bool:
        """One round; whether it was the last, because no rank asks any more."""
        begin = time.perf_counter()
        ids, inverse = _distinct(requests)
        wanted = np.diff(np.searchsorted(ids, self.bounds)).astype(np.int64)  # ids ascend, and so do owners
        header = np.stack((wanted, np.full(self.size, ids.size), np.full(self.size, asks_no_more)), axis=1)
        told = self._all_to_all(torch.from_numpy(header), _HEADER * np.ones(self.size, np.int64)).numpy()
        told = told.reshape(self.size, _HEADER)
        with _COUNTING:
            self.counters.rounds += 1
        is_last = bool(told[:, 2].all())
        if not told[:, 1].any():
            return is_last
        counts = told[:, 0]
        if not 0 <= int(counts.min()) <= int(counts.max()) <= self._most_rows:
            raise ExchangeError(f"a rank asks for {counts.max()} rows at once; all must run the same version")
        asked = self._all_to_all(torch.from_numpy(ids), wanted, counts).numpy()
        sent = torch.from_numpy(self.local.take(asked)).to(self._wire)
        row_bytes = sent.element_size() * self.local.width
        raw = sent.view(torch.uint8).view(-1) if sent.numel() else torch.empty(0, dtype=torch.uint8)
        came = self._all_to_all(raw, counts * row_bytes, wanted * row_bytes)
        rows = came.view(self._wire).view(-1, self.local.width).to(torch.float32).numpy()
        with _COUNTING:
            self.counters.rows_in += ids.size
            self.counters.rows_out += asked.size
        _hand_out(rows, requests, inverse)
        self._in_round = ()
        with _COUNTING:
            self.counters.busy_seconds += time.perf_counter() - begin
        return is_last

    def _all_to_all(self, sent: Tensor, counts: Array, expected: Array | None = None) -> Tensor:
        """What the others sent, one after the other; sent[...] is cut by `counts` in the same way."""
        expected = counts if expected is None else expected
        flat = sent.reshape(-1)
        out = flat.new_empty(int(expected.sum()))
        dist.all_to_all_single(out, flat, expected.tolist(), counts.tolist(), group=self._group)
        away = np.arange(self.size) != self.rank
        with _COUNTING:
            self.counters.bytes_in += int(expected[away].sum()) * out.element_size()
            self.counters.bytes_out += int(counts[away].sum()) * out.element_size()
        return out


@contextlib.contextmanager
def told(rank: int, what: str) -> Iterator[None]:
    """What torch.distributed raises, as an error that names the rank."""
    try:
        yield
    except RuntimeError as error:
        raise ExchangeError(
            f"rank {rank}: {what} failed ({cause(error)}); another rank ended, was cut off or is late by "
            "more than the time-out, see its output"
        ) from error


def cause(error: Exception) -> str:
    """What torch.distributed says went wrong, less the place in its source and its advice."""
    text = str(error).strip() or type(error).__name__
    return re.sub(r"^\[[^\]]*\]\s*", "", text.splitlines()[0]).partition(". ")[0]


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
