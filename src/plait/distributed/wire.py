"""What lies between the ranks, measured: seconds of exchanges of several sizes as bandwidth and latency."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from plait.analysis.network import Network
from plait.distributed.exchange import told

__all__ = ["fitted", "measure_network"]

# Bytes one rank sends to each other one: from a message that is all latency to one that fills no cache.
_SIZES = (8, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
_RUNS, _EXCHANGES = 5, 8  # medians of runs of exchanges, one right after the other


def measure_network(group: Any = None, sizes: tuple[int, ...] = _SIZES) -> Network:
    """The network as all_to_all of `group` (default: all ranks) sees it, the same on every rank.

    All ranks call it together and are otherwise idle. Every rank sends to every other at once, as exchanges
    do, so what comes out is bytes a second per rank while all of them send.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    seconds = {size: _exchange_seconds(size, rank, ranks, group) for size in sizes}
    slowest = torch.tensor(list(seconds.values()), dtype=torch.float64)
    with told(rank, "all-reduce"):
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    sent = [size * (ranks - 1) for size in sizes]
    return fitted(dict(zip(sent, slowest.tolist(), strict=True)), ranks - 1)


def _exchange_seconds(size: int, rank: int, ranks: int, group: Any) -> float:
    """The median over runs of the mean seconds of an exchange.

    An exchange waits for every rank, so a run of them keeps ranks in step by itself; a barrier before each
    would add how late ranks leave it.
    """
    counts = [0 if other == rank else size for other in range(ranks)]
    sent = torch.ones(sum(counts), dtype=torch.uint8)
    got = torch.zeros_like(sent)
    took = []
    for _ in range(_RUNS + 1):
        begin = time.perf_counter()
        for _ in range(_EXCHANGES):
            with told(rank, "all_to_all"):
                dist.all_to_all_single(got, sent, counts, counts, group=group)
        took.append((time.perf_counter() - begin) / _EXCHANGES)
    return statistics.median(took[1:])


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
