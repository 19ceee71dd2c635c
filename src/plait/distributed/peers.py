"""Exchanges rows, columns and sums between the ranks of a full graph: all communication of a sharded model.

The order of additions is fixed (own row first, then what came from rank 0, 1, ...), so equal runs give equal
bits. Everything is sent as plain numbers or JSON: nothing received is unpickled.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from plait.distributed.rounds import naming
from plait.graph.division import column_shares
from plait.plan.exchange import slowest

__all__ = ["Peers", "WireCounters"]

Array = NDArray[Any]


@dataclass
class WireCounters:
    """Counts what this rank sent and received; sums over ranks are counted separately."""

    exchanges: int = 0
    bytes_out: int = 0
    bytes_in: int = 0
    reduced_bytes: int = 0
    seconds: float = 0.0
    """Time spent waiting for rows, and so for slower ranks."""


@dataclass
class Sent:
    """Rows on their way: where they arrive, what was sent (held until then), and torch's handles."""

    rows: Tensor
    outgoing: Tensor
    works: list[Any]


class Peers:
    """The ranks that share a graph; node v belongs to the rank r with bounds[r] <= v < bounds[r + 1].

    `halo` are the nodes of other ranks whose rows are needed here, ascending, so grouped by owner.
    """

    def __init__(self, bounds: Array, halo: Array, rank: int = 0, group: Any = None) -> None:
        self.bounds, self.rank, self.size, self.group = bounds, rank, int(bounds.size - 1), group
        self.begin, end = int(bounds[rank]), int(bounds[rank + 1])
        self.num_rows, self.num_nodes = end - self.begin, int(bounds[-1])
        self.columns: Array = np.concatenate((np.arange(self.begin, end), halo)).astype(np.int64)
        self.counters = WireCounters()
        self.device = torch.device("cpu")
        self._nodes = np.diff(bounds).tolist()
        self._wanted = np.diff(np.searchsorted(halo, bounds)).tolist()
        self._let_go: list[Sent] = []
        self._lent, self._shared = self._lend(halo)
        self.num_shared = sum(self._lent)

    def _lend(self, halo: Array) -> tuple[list[int], Tensor]:
        """How many rows each rank needs of this one, and which, rank by rank."""
        if self.size == 1:
            return [0], torch.empty(0, dtype=torch.int64)
        counts = self._all_to_all(torch.tensor(self._wanted), [1] * self.size, [1] * self.size).tolist()
        asked = self._all_to_all(torch.from_numpy(halo.astype(np.int64)), self._wanted, counts)
        return counts, asked - self.begin

    def to(self, device: torch.device) -> None:
        """Rows lie on that device from now on."""
        self.device, self._shared = device, self._shared.to(device)

    # Rows -------------------------------------------------------------------------------------

    def fetch(self, x: Tensor) -> Tensor:
        """The rows of this rank with those of its halo behind them."""
        out = x.new_empty((self.columns.size, x.shape[1]))
        sent = self._start(self.pick(x), self._lent, self._wanted, out[self.num_rows :])
        out[: self.num_rows] = x
        self.receive(sent)
        return out

    def give_back(self, grad: Tensor) -> Tensor:
        """The gradients of this rank's rows, with those that other ranks computed for them added."""
        sent = self.send(grad[self.num_rows :], True)
        return self.receive_back(sent, grad[: self.num_rows].clone())

    def pick(self, x: Tensor) -> Tensor:
        """The rows that other ranks need, rank by rank."""
        return x.index_select(0, self._shared)

    def send(self, x: Tensor, is_back: bool) -> Sent:
        """Starts sending rows picked for others, or gradients of the halo, without waiting."""
        counts, expected = (self._wanted, self._lent) if is_back else (self._lent, self._wanted)
        return self._start(x.contiguous(), counts, expected)

    def receive(self, sent: Sent) -> Tensor:
        """The rows of the halo."""
        begin = time.perf_counter()
        with naming(self.rank, "all_to_all"):
            for work in sent.works:
                work.wait()
        self.counters.seconds += time.perf_counter() - begin
        return sent.rows

    def let_go(self, values: Iterable[Any]) -> None:
        """What was sent among these values is awaited before anything else is: its memory is written to."""
        self._let_go += [value for value in values if isinstance(value, Sent)]

    def receive_back(self, sent: Sent, out: Tensor) -> Tensor:
        """`out` with the gradients that other ranks computed for rows of this one added, rank by rank."""
        came = self.receive(sent)
        for rows, places in zip(
            torch.split(came, self._lent), torch.split(self._shared, self._lent), strict=True
        ):
            if rows.shape[0]:
                out.index_add_(0, places, rows)  # a rank requests a row once: no row occurs twice here
        return out

    def _start(self, x: Tensor, counts: list[int], expected: list[int], out: Tensor | None = None) -> Sent:
        """Starts sending rows cut by `counts` and receiving rows cut by `expected`."""
        while self._let_go:
            self.receive(self._let_go.pop())
        width = x.shape[1]
        out = x.new_empty((sum(expected), width)) if out is None else out
        if self.size == 1:
            return Sent(out, x, [])
        outgoing, incoming = [n * width for n in counts], [n * width for n in expected]
        with naming(self.rank, "all_to_all"):
            works = (self._pairs if x.is_cpu else self._together)(
                out.view(-1), x.view(-1), incoming, outgoing
            )
        self._count(x.element_size(), incoming, outgoing)
        return Sent(out, x, works)

    def _pairs(self, out: Tensor, sent: Tensor, expected: list[int], counts: list[int]) -> list[Any]:
        """All receives are started before the first send.

        gloo sends numbers once their receiver has signalled that it is ready, over the connection that
        carries its own numbers. all_to_all sends first: the signal waits behind the numbers of the rank that
        is late, and then both directions of a link take turns (48 instead of 28 ms, 3 MB at 0.9 Gbit/s).
        """
        others = [(self.rank + k) % self.size for k in range(1, self.size)]
        came, left = torch.split(out, expected), torch.split(sent, counts)
        works = [dist.irecv(came[r], r, group=self.group) for r in others if expected[r]]
        return works + [dist.isend(left[r], r, group=self.group) for r in others if counts[r]]

    def _together(self, out: Tensor, sent: Tensor, expected: list[int], counts: list[int]) -> list[Any]:
        return [dist.all_to_all_single(out, sent, expected, counts, group=self.group, async_op=True)]

    def numbers(self, values: Tensor) -> Tensor:
        """Numbers of this rank's nodes with those of its halo behind them: set-up, not counted."""
        if self.size == 1:
            return values
        width = values.shape[1]
        lent, wanted = ([n * width for n in counts] for counts in (self._lent, self._wanted))
        came = self._all_to_all(values[self._shared.cpu()].reshape(-1), lent, wanted)
        return torch.cat((values, came.view(-1, width)))

    # Columns ----------------------------------------------------------------------------------

    def share_of(self, width: int) -> int:
        """How many of this many columns are this rank's."""
        return column_shares(width, self.size)[self.rank]

    def to_columns(self, x: Tensor) -> Tensor:
        """This rank's columns of the rows of all nodes."""
        shares = column_shares(x.shape[1], self.size)
        own, counts = shares[self.rank], [self.num_rows * w for w in shares]
        out, sent = x.new_empty((self.num_nodes, own)), x.new_empty(x.numel())
        for place, columns in zip(torch.split(sent, counts), torch.split(x, shares, dim=1), strict=True):
            place.view(columns.shape).copy_(columns)
        self._trade(out.view(-1), sent, [n * own for n in self._nodes], counts)
        return out

    def to_rows(self, x: Tensor, width: int) -> Tensor:
        """The rows of this rank, all columns; what `to_columns` took apart."""
        shares = column_shares(width, self.size)
        expected, came = [self.num_rows * w for w in shares], x.new_empty(self.num_rows * width)
        self._trade(came, x.reshape(-1), expected, [n * shares[self.rank] for n in self._nodes])
        parts = zip(torch.split(came, expected), shares, strict=True)
        return torch.cat([part.view(self.num_rows, w) for part, w in parts], dim=1)

    # What travels -----------------------------------------------------------------------------

    def _trade(self, out: Tensor, sent: Tensor, expected: list[int], counts: list[int]) -> None:
        """Sends numbers cut by `counts` and receives numbers cut by `expected`."""
        begin = time.perf_counter()
        with naming(self.rank, "all_to_all"):
            dist.all_to_all_single(out, sent, expected, counts, group=self.group)
        self._count(out.element_size(), expected, counts)
        self.counters.seconds += time.perf_counter() - begin

    def _count(self, size: int, expected: list[int], counts: list[int]) -> None:
        counters = self.counters
        counters.exchanges += 1
        counters.bytes_out += size * (sum(counts) - counts[self.rank])
        counters.bytes_in += size * (sum(expected) - expected[self.rank])

    def _all_to_all(self, sent: Tensor, counts: list[int], expected: list[int]) -> Tensor:
        """Numbers of the set-up."""
        out = sent.new_empty(sum(expected))
        with naming(self.rank, "all_to_all"):
            dist.all_to_all_single(out, sent, expected, counts, group=self.group)
        return out

    # Sums and agreements ----------------------------------------------------------------------

    def add(self, tensor: Tensor) -> Tensor:
        """Replaces the tensor by its sum over all ranks and returns it."""
        if self.size > 1:
            with naming(self.rank, "all-reduce"):
                dist.all_reduce(tensor, group=self.group)
            self.counters.reduced_bytes += tensor.numel() * tensor.element_size()
        return tensor

    def adding(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Starts adding the tensor up over all ranks; the function waits for the sum and returns it."""
        if self.size == 1:
            return lambda: tensor
        with naming(self.rank, "all-reduce"):
            work = dist.all_reduce(tensor, group=self.group, async_op=True)
        self.counters.reduced_bytes += tensor.numel() * tensor.element_size()

        def added() -> Tensor:
            with naming(self.rank, "all-reduce"):
                work.wait()
            return tensor

        return added

    def texts(self, text: str) -> list[str]:
        """A text of every rank."""
        if self.size == 1:
            return [text]
        own = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(self.device)
        lengths = [torch.zeros(1, dtype=torch.int64, device=self.device) for _ in range(self.size)]
        with naming(self.rank, "all-gather"):
            dist.all_gather(lengths, torch.tensor([own.numel()], device=self.device), group=self.group)
            longest = max(int(length) for length in lengths)
            padded = torch.zeros(longest, dtype=torch.uint8, device=self.device)
            padded[: own.numel()] = own
            every = [torch.empty_like(padded) for _ in range(self.size)]
            dist.all_gather(every, padded, group=self.group)
        return [
            bytes(one[: int(length)].tolist()).decode() for one, length in zip(every, lengths, strict=True)
        ]

    def agree(self, prices: Mapping[str, float]) -> Mapping[str, float]:
        """The largest price of each group that every rank has a price for."""
        return slowest([json.loads(text) for text in self.texts(json.dumps(dict(prices)))])
