"""What lies between the ranks, measured: seconds of exchanges of several sizes as bandwidth and latency."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from plait.analysis.network import Network
from plait.distributed.rounds import told

__all__ = ["fitted", "measure_network", "measure_sharing"]

# Bytes one rank sends to each other one: from a message that is all latency to one that fills no cache.
_SIZES = (8, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
_EXCHANGES = 24  # of each size; of the smallest, which is the latency, four times as many
_WORK_NODES = 1 << 17  # 32 MB of features: half of that left out what ranks take of each other's cache
_WORK_ROWS = 256  # of the product between two exchanges, about a millisecond


def measure_network(group: Any = None, sizes: tuple[int, ...] = _SIZES) -> Network:
    """The network as all_to_all of `group` (default: all ranks) sees it, the same on every rank.

    All ranks call it together and are otherwise idle. Every rank sends to every other at once, as exchanges
    do, so the result is bytes per second and rank while all of them send. Between two exchanges every rank
    computes for a moment, as it does between layers: a thread that has to be woken takes longer to answer.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    seconds = {size * (ranks - 1): _exchange_seconds(size, rank, ranks, group) for size in sizes}
    return fitted(seconds, ranks - 1)


def _exchange_seconds(size: int, rank: int, ranks: int, group: Any) -> float:
    """The mean over exchanges of the time it took the last rank to come: the others waited for it.

    The mean, because an epoch pays for those that were slow too; a message is fast or waits for a thread to
    wake, two cases of which a median takes one.
    """
    counts = [0 if other == rank else size for other in range(ranks)]
    sent = torch.ones(sum(counts), dtype=torch.uint8)
    got = torch.zeros_like(sent)

    def exchange() -> None:
        with told(rank, "all_to_all"):
            dist.all_to_all_single(got, sent, counts, counts, group=group)

    return _mean_seconds(exchange, _EXCHANGES * (4 if size == min(_SIZES) else 1), rank, group)


def _mean_seconds(run: Callable[[], None], times: int, rank: int, group: Any) -> float:
    square = torch.ones(_WORK_ROWS, _WORK_ROWS)
    took = []
    for _ in range(times):
        torch.mm(square, square)
        begin = time.perf_counter()
        run()
        took.append(time.perf_counter() - begin)
    last = torch.tensor(took, dtype=torch.float64)
    with told(rank, "all-reduce"):
        dist.all_reduce(last, dist.ReduceOp.MIN, group=group)
    return float(last[_EXCHANGES // 4 :].mean())


def measure_sharing(group: Any = None) -> float:
    """How many times slower a rank computes while all ranks do than while it does alone; 1 at least.

    Ranks of one machine share its memory and, in part, its caches. The same on every rank.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    _work_seconds()
    alone = 0.0
    for turn in range(ranks):
        with told(rank, "barrier"):
            dist.barrier(group)
        if turn == rank:
            alone = _work_seconds()
    with told(rank, "barrier"):
        dist.barrier(group)
    factor = torch.tensor([_work_seconds() / alone], dtype=torch.float64)
    with told(rank, "all-reduce"):
        dist.all_reduce(factor, group=group)
    return max(1.0, float(factor) / ranks)


def _work_seconds() -> float:
    """Products with a matrix that fits the caches, and gathers and passes over one that does not."""
    rows, weight = torch.ones(_WORK_NODES, 64), torch.ones(64, 64)
    picked = torch.arange(_WORK_NODES).mul(40503).remainder(_WORK_NODES)
    took = []
    for _ in range(9):
        begin = time.perf_counter()
        made = rows.index_select(0, picked) @ weight
        made.relu_()
        took.append(time.perf_counter() - begin)
    return statistics.median(took)


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
