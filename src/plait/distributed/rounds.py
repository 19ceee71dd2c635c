"""Rounds of an exchange between ranks: a rank that needs something notifies the others, and all take part.

A thread runs the rounds on a separate process group: how much each rank needs from each other one, what it
needs, the answers; all by all_to_all. A rank that needs something notifies the others ("rings"), which join
with whatever they need by then, or nothing. So ranks need not ask in step, and while no rank needs anything
nothing is sent. Everything is sent as plain numbers: nothing received is unpickled.
"""

from __future__ import annotations

import contextlib
import math
import re
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Generic, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from plait.errors import ExchangeError, InputError

__all__ = ["COUNTING", "Counters", "Pending", "Rounds", "cause", "naming", "timeout_of"]

Array = NDArray[Any]

_HEADER = 3  # numbers requested from the receiver, numbers requested from anyone, whether the sender is done
_LAST_BELL = -1
# A bell may stay silent for as long as a model trains between two exchanges; a rank that is gone is noticed
# by its closed connection.
_SILENCE = timedelta(days=30)
COUNTING = threading.Lock()  # several exchanges may count together


@dataclass
class Counters:
    """Counts what this rank exchanged; bytes are those handed to torch.distributed, headers included."""

    rounds: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    busy_seconds: float = 0.0
    """Time the thread spent in rounds that carried something."""
    waited_seconds: float = 0.0
    """Time callers waited for answers."""


class Pending:
    """A request to other ranks; `wait` returns when its answer is there."""

    what = "numbers"

    def __init__(self, size: int) -> None:
        self.size = size
        self._done = threading.Event()
        self._error: ExchangeError | None = None
        if size == 0:
            self._done.set()

    def finish(self, error: ExchangeError | None = None) -> None:
        """Lets `wait` return, or raise."""
        self._error = error
        self._done.set()

    def arrive(self, seconds: float) -> None:
        """Returns once it is there; ExchangeError when that failed or took too long."""
        if not self._done.wait(seconds):
            raise ExchangeError(
                f"no answer for {self.size} {self.what} within {seconds:g} s; another rank hangs or ended, "
                "see its output, or raise timeout_seconds"
            )
        if self._error is not None:
            raise self._error


Asked = TypeVar("Asked", bound=Pending)


class Rounds(Generic[Asked]):
    """Requests of this rank carried to the others in rounds; `bounds` says which nodes each rank owns.

    An exchange says what its requests ask (`_message`) and what becomes of the questions of others and of
    their answers (`_answer`). At most `most` of what requests count by `size` enters a round, but for the
    first request. All ranks have to `close` it, in any order.
    """

    what = "numbers"
    counters: Counters

    def __init__(self, bounds: Array, rank: int, most: int, timeout_seconds: float) -> None:
        self.bounds, self.rank, self.size = bounds, rank, int(bounds.size - 1)
        self._most, self._timeout = most, timeout_of(timeout_seconds)
        self._asked: deque[Asked] = deque()
        self._wake = threading.Condition()
        self._error: ExchangeError | None = None
        self._is_closing = self._is_done = False
        self._has_said_so = False
        self._rung = -1  # the last round another rank rang for
        self._in_round: Sequence[Asked] = ()
        self._threads: list[threading.Thread] = []

    def _start(self) -> None:
        """Begins with the rounds; on all ranks, which make the process groups together."""
        if self.size == 1:
            return
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self._timeout))
        self._bells = dist.new_group(backend="gloo", timeout=_SILENCE)
        for work in (self._serve, self._listen):
            self._threads.append(threading.Thread(target=work, name="plait-exchange", daemon=True))
            self._threads[-1].start()

    def close(self) -> None:
        """Ends the exchange once every rank has closed it; a second call does nothing."""
        self.ask_no_more()
        self.join()

    def ask_no_more(self) -> None:
        """Tells the others, in a last round, that this rank sends no more requests."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()

    def join(self) -> None:
        """Waits until no rank sends requests any more."""
        threads, self._threads = self._threads, []
        for thread in threads:
            thread.join(self._timeout)

    def abandon(self) -> None:
        """Stops without waiting for others; the threads end with the process."""
        self._threads = []
        self._fail(ExchangeError(f"rank {self.rank}: the exchange was abandoned after an error"))

    # What an exchange says ----------------------------------------------------------------------

    def _message(self, requests: Sequence[Asked]) -> tuple[Tensor, Array, Any]:
        """The questions to all ranks one after the other, how many numbers to each, and what to remember."""
        raise NotImplementedError

    def _answer(
        self, requests: Sequence[Asked], asked: Tensor, wanted: Array, counts: Array, memory: Any
    ) -> None:
        """Answers `asked`, cut by rank as `counts` says, takes the others' answers and ends the requests."""
        raise NotImplementedError

    # For callers ----------------------------------------------------------------------------------

    def _enter(self, requests: Sequence[Asked]) -> None:
        """Queues the requests for one of the next rounds."""
        with self._wake:
            if self._error is not None:
                raise self._error
            if self._is_closing:
                raise ExchangeError(
                    f"{self.what} were asked for after close(); keep the exchange open until then"
                )
            self._asked.extend(requests)
            self._wake.notify()

    def _arrived(self, requests: Sequence[Asked]) -> None:
        """Waits until all of them are there."""
        begin = time.perf_counter()
        for request in requests:
            request.arrive(self._timeout)
        self.counters.waited_seconds += time.perf_counter() - begin

    # The threads ----------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Runs rounds until every rank is done; an error ends them and is raised in every waiting thread."""
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
        """Receives the notifications of other ranks."""
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
        """Calls every other rank to round `number`."""
        for rank in range(self.size):
            if rank != self.rank:
                self._send(number, rank)

    def _send(self, number: int, rank: int) -> None:
        dist.send(torch.tensor([number]), rank, group=self._bells)

    def _lost(self, error: Exception) -> ExchangeError:
        return ExchangeError(
            f"rank {self.rank}: {self.what} could not be exchanged ({cause(error)}); another rank ended or "
            "was cut off, see its output"
        )

    def _fail(self, error: ExchangeError) -> None:
        with self._wake:
            self._error = error
            asked, self._asked = self._asked, deque()
        for request in [*self._in_round, *asked]:
            request.finish(error)

    def _collected(self, number: int) -> tuple[Sequence[Asked], bool, bool]:
        """What was asked for, whether it is the last, and whether another rank rang for this round.

        Waits for one of the three. Requests are bounded, but for the first one.
        """
        with self._wake:
            self._wake.wait_for(
                lambda: self._asked or self._rung >= number or self._has_news() or self._error
            )
            if self._error is not None:
                raise self._error
            chosen: list[Asked] = []
            size = 0
            while self._asked and (not chosen or size + self._asked[0].size <= self._most):
                chosen.append(self._asked.popleft())
                size += chosen[-1].size
            self._in_round = chosen
            asks_no_more = self._is_closing and not self._asked
            self._has_said_so = asks_no_more
            return chosen, asks_no_more, self._rung >= number

    def _has_news(self) -> bool:
        """Whether this rank has yet to tell the others that it is done."""
        return self._is_closing and not self._has_said_so

    def _round(self, requests: Sequence[Asked], asks_no_more: bool) -> bool:
        """Runs one round; returns whether it was the last one, because every rank is done."""
        begin = time.perf_counter()
        message, wanted, memory = self._message(requests)
        columns = (wanted, np.full(self.size, wanted.sum()), np.full(self.size, asks_no_more))
        header = torch.from_numpy(np.stack(columns, axis=1).astype(np.int64))
        headers = self._all_to_all(header, _HEADER * np.ones(self.size, np.int64)).numpy()
        headers = headers.reshape(self.size, _HEADER)
        with COUNTING:
            self.counters.rounds += 1
        is_last = bool(headers[:, 2].all())
        if not headers[:, 1].any():
            return is_last
        counts = headers[:, 0]
        if not 0 <= int(counts.min()) <= int(counts.max()) <= self._longest():
            raise ExchangeError(
                f"a rank asks for {counts.max()} {self.what} at once; all must run the same version"
            )
        asked = self._all_to_all(message, wanted, counts)
        self._answer(requests, asked, wanted, counts, memory)
        self._in_round = ()
        with COUNTING:
            self.counters.busy_seconds += time.perf_counter() - begin
        return is_last

    def _longest(self) -> int:
        """Numbers in the longest message that a rank of this version sends."""
        return self._most

    def _all_to_all(self, sent: Tensor, counts: Array, expected: Array | None = None) -> Tensor:
        """What the others sent, one after the other; sent[...] is cut by `counts` in the same way."""
        expected = counts if expected is None else expected
        flat = sent.reshape(-1)
        out = flat.new_empty(int(expected.sum()))
        dist.all_to_all_single(out, flat, expected.tolist(), counts.tolist(), group=self._group)
        away = np.arange(self.size) != self.rank
        with COUNTING:
            self.counters.bytes_in += int(expected[away].sum()) * out.element_size()
            self.counters.bytes_out += int(counts[away].sum()) * out.element_size()
        return out


def timeout_of(seconds: float) -> float:
    """The seconds to wait for other ranks, checked."""
    if not 0 < seconds < math.inf:
        raise InputError(f"timeout_seconds={seconds}: give a positive number of seconds")
    return float(seconds)


@contextlib.contextmanager
def naming(rank: int, what: str) -> Iterator[None]:
    """Turns what torch.distributed raises inside into an ExchangeError that names the rank."""
    try:
        yield
    except RuntimeError as error:
        raise ExchangeError(
            f"rank {rank}: {what} failed ({cause(error)}); another rank ended, was cut off or is late by "
            "more than the time-out, see its output"
        ) from error


def cause(error: Exception) -> str:
    """The cause of an error by torch.distributed, without its source location and advice."""
    text = str(error).strip() or type(error).__name__
    return re.sub(r"^\[[^\]]*\]\s*", "", text.splitlines()[0]).partition(". ")[0]
