"""What lies between the ranks, measured: seconds of exchanges of several sizes as bandwidth and latency."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from plait.analysis.network import Network
from plait.distributed.rounds import told

__all__ = ["fitted", "measure_network", "measure_sharing"]

# Bytes one rank sends to each other one: from a message that is all latency to one that fills no cache.
_SIZES = (8, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
_EXCHANGES = 16  # of each size; of the smallest, which is the latency, four times as many
_FIRST = 4  # exchanges of each size that are not counted
# rows of 64 numbers, and how often they are worked on: 8 MB, which a cache may hold, and 32 MB
_WORKED = {1 << 15: 24, 1 << 17: 8}


def measure_network(group: Any = None, sizes: tuple[int, ...] = _SIZES) -> Network:
    """The network as all_to_all of `group` (default: all ranks) sees it, the same on every rank.

    All ranks call it together and are otherwise idle. Every rank sends to every other at once, as exchanges
    do, so the result is bytes per second and rank while all of them send. Between two exchanges every rank
    computes, as it does between layers: then caches are full of something else, threads sleep, and a message
    takes twice as long as in a loop of nothing but messages.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    work = _Work(min(_WORKED))
    seconds = {size * (ranks - 1): _exchange_seconds(size, work, rank, ranks, group) for size in sizes}
    return fitted(seconds, ranks - 1)


def _exchange_seconds(size: int, work: _Work, rank: int, ranks: int, group: Any) -> float:
    """The mean of what a piece of work and an exchange take beyond the slowest rank's work.

    The mean, because an epoch pays for exchanges that were slow too: a message is fast or waits for a thread
    to wake. What comes is written to fresh memory, as rows of other ranks are.
    """
    counts = [0 if other == rank else size for other in range(ranks)]
    sent = torch.ones(sum(counts), dtype=torch.uint8)
    times = _EXCHANGES * (4 if size == min(_SIZES) else 1)
    worked, begin = torch.zeros(times, dtype=torch.float64), 0.0
    for k in range(-_FIRST, times):
        if k == 0:
            begin = time.perf_counter()
        took = work.seconds()
        if k >= 0:
            worked[k] = took
        with told(rank, "all_to_all"):
            dist.all_to_all_single(torch.empty_like(sent), sent, counts, counts, group=group)
    passed = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
    with told(rank, "all-reduce"):
        dist.all_reduce(worked, dist.ReduceOp.MAX, group=group)
        dist.all_reduce(passed, group=group)
    return max(0.0, float(passed) / ranks - float(worked.sum())) / times


def measure_sharing(group: Any = None) -> float:
    """How many times longer ranks take that compute at once and meet after every piece than one; 1 at least.

    Ranks of one machine share its memory and, in part, its caches; and where they meet they wait for the
    slowest, each time another one. The same on every rank.
    """
    factors = [_sharing(_Work(rows), pieces, group) for rows, pieces in _WORKED.items()]
    return max(1.0, statistics.mean(factors))


def _sharing(work: _Work, pieces: int, group: Any) -> float:
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    alone = torch.zeros(1, dtype=torch.float64)
    for turn in range(ranks):
        with told(rank, "barrier"):
            dist.barrier(group)
        if turn == rank:
            alone += statistics.mean(work.seconds() for _ in range(pieces))
    together = torch.zeros(pieces, dtype=torch.float64)
    for k in range(pieces):
        with told(rank, "barrier"):
            dist.barrier(group)
        together[k] = work.seconds()
    with told(rank, "all-reduce"):
        dist.all_reduce(alone, group=group)
        dist.all_reduce(together, dist.ReduceOp.MAX, group=group)
    return float(together.mean()) / (float(alone) / ranks)


class _Work:
    """A gather of rows, a product with a small matrix, and a pass over the result: a layer, in small."""

    def __init__(self, rows: int) -> None:
        self._rows, self._weight = torch.ones(rows, 64), torch.ones(64, 64)
        self._picked = torch.arange(rows).mul(40503).remainder(rows)
        self.seconds()

    def seconds(self) -> float:
        """To do it once, and to free what it made."""
        begin = time.perf_counter()
        (self._rows.index_select(0, self._picked) @ self._weight).relu_()
        return time.perf_counter() - begin


def fitted(seconds: Mapping[int, float], peers: int) -> Network:
    """Bandwidth and latency of exchanges that took so long, by the bytes a rank sent in each.

    The smallest message is all latency. The bandwidth is the median over the larger ones, so that one that
    was disturbed does not decide.
    """
    smallest = min(seconds)
    latency = seconds[smallest] / max(1, peers)
    rates = [
        (size - smallest) / (took - seconds[smallest])
        for size, took in seconds.items()
        if size > smallest and took > seconds[smallest]
    ]
    return Network("measured", statistics.median(rates) if rates else float(smallest) / latency, latency)
