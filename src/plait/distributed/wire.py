"""Measures the network between ranks: bandwidth, latency, and what they lose where they meet."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional

from plait.analysis.network import Network, Traffic, all_reduce, network_path
from plait.distributed.peers import Peers
from plait.distributed.rounds import naming
from plait.kernels.compiled import cache_folder
from plait.runtime.adjoint import mapped

__all__ = ["fitted", "measure_network", "measure_sharing", "with_meeting"]

# Bytes one rank sends to each other one: from a message that is all latency to one that fills no cache.
_SIZES = (8, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
_EXCHANGES = 16  # of each size; of the smallest, which is the latency, four times as many
_FIRST = 4  # exchanges of each size that are not counted
_WORKED = 1 << 15  # rows of 64 numbers worked on between two exchanges: 8 MB
# steps of training by their rows: with the first a cache holds most of them, with the second it does not
_SHARED = {1 << 14: 4, 1 << 16: 1}
_SHARING_ROUNDS = 3
# rows, and steps and rounds with and without meetings
_MET, _MET_STEPS, _MET_ROUNDS = 1 << 13, 8, 5
_MET_ROWS = 8  # that a rank needs of each other one
_WIDTH, _LAYERS, _CLASSES = 64, 2, 8


def measure_network(group: Any = None, sizes: tuple[int, ...] = _SIZES, keep: bool = False) -> Network:
    """The network as exchanges of `group` (default: all ranks) see it, the same on every rank.

    All ranks call it together and are otherwise idle. Every rank sends to every other at once, as exchanges
    do, so the result is bytes per second and rank while all of them send. Between two exchanges every rank
    computes, as it does between layers: then caches are full of something else, threads sleep, and a message
    takes twice as long as in a loop of nothing but messages. What ranks lose beyond that where they meet in
    the middle of training is measured apart (`Network.meeting`), on steps of a small model.

    keep: write it to plait's cache folder, from which `plait.shard` and `plait.analyze` take it by default.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    work = _Work(_WORKED)
    measured = {size * (ranks - 1): _exchange_seconds(size, work, rank, ranks, group) for size in sizes}
    seconds = {size: took for size, (took, _) in measured.items()}
    busy = measured[min(measured)][1] / max(1, ranks - 1)
    found = replace(fitted(seconds, ranks - 1), busy=busy)
    found = with_meeting(found, *_step_seconds(group), _Steps.traffic(ranks))
    if keep:
        found.save(network_path(cache_folder()))
    return found


def with_meeting(network: Network, apart: float, together: float, traffic: Traffic) -> Network:
    """The network with what ranks lose each time they meet: what is left of how much longer steps take.

    `apart` are the seconds of a step in which ranks compute at once and never meet, `together` of the same
    step with this traffic. The latency stays what it is between two pieces of work: on a busy machine steps
    that never wait lose their turns to other programs, and nothing is left for meetings.
    """
    left = together - apart - network.seconds(traffic)
    return replace(network, meeting=max(0.0, left / max(1, traffic.meetings)))


def _exchange_seconds(size: int, work: _Work, rank: int, ranks: int, group: Any) -> tuple[float, float]:
    """What a piece of work and an exchange take beyond the slowest rank's work; a rank's processor seconds.

    The former is the median, because what ranks lose in exchanges that are slow now and then is part of a
    meeting; the latter, of all threads of a rank in the exchange, the mean. What comes is written to fresh
    memory, as rows of other ranks are.
    """
    counts = [0 if other == rank else size for other in range(ranks)]
    sent = torch.ones(sum(counts), dtype=torch.uint8)
    times = _EXCHANGES * (4 if size == min(_SIZES) else 1)
    worked, passed, busy = torch.zeros(3, _FIRST + times, dtype=torch.float64)
    for k in range(_FIRST + times):
        begin = time.perf_counter()
        worked[k] = work.seconds()
        used = time.process_time()
        with naming(rank, "all_to_all"):
            dist.all_to_all_single(torch.empty_like(sent), sent, counts, counts, group=group)
        passed[k] = time.perf_counter() - begin
        busy[k] = time.process_time() - used
    with naming(rank, "all-reduce"):
        dist.all_reduce(worked, dist.ReduceOp.MAX, group=group)
        dist.all_reduce(passed, group=group)
        dist.all_reduce(busy, group=group)
    taken: list[float] = (passed / ranks - worked)[_FIRST:].tolist()
    return max(0.0, statistics.median(taken)), float(busy[_FIRST:].mean()) / ranks


def measure_sharing(group: Any = None) -> float:
    """How many times longer a step of training takes where all ranks train at once and apart; 1 at least.

    Ranks of one machine share its memory and, in part, its caches. They do not meet here: what they lose by
    waiting for each other is `Network.meeting`. The same on every rank.
    """
    factors: list[float] = []
    for rows, steps in _SHARED.items():
        one = _Steps(rows, group)
        rounds = [(one.alone(steps), one.at_once(steps)) for _ in range(_SHARING_ROUNDS)]
        alone, at_once = (statistics.median(column) for column in zip(*rounds, strict=True))
        factors.append(at_once / alone)
    return max(1.0, statistics.mean(factors))


def _step_seconds(group: Any) -> tuple[float, float]:
    """Of a step in which ranks compute at once and never meet, and of one in which they do."""
    apart, joined = _Steps(_MET, group), _Steps(_MET, group, meets=True)
    rounds = [(apart.at_once(_MET_STEPS), joined.at_once(_MET_STEPS)) for _ in range(_MET_ROUNDS)]
    first, second = (statistics.median(column) for column in zip(*rounds, strict=True))
    return first, second


class _Steps:
    """Steps of training of a small model on a rank's own rows, their neighbours gathered.

    Where ranks meet they do as those of a sharded model: every layer's rows are exchanged, in the backward
    pass their gradients, and gradients of weights are added up at the end. Only a few rows travel.
    """

    def __init__(self, rows: int, group: Any, meets: bool = False) -> None:
        self.rank, self.ranks, self.group = dist.get_rank(group), dist.get_world_size(group), group
        self._peers = self._met(rows) if meets else Peers(np.array([0, rows]), np.empty(0, np.int64))
        self._rows = torch.ones(rows, _WIDTH)
        self._weights = [torch.full((_WIDTH, _WIDTH), 0.01, requires_grad=True) for _ in range(_LAYERS)]
        self._picked = torch.arange(rows).mul(40503).remainder(rows)
        self._labels = torch.zeros(rows, dtype=torch.int64)
        self._optimizer = torch.optim.SGD(self._weights, lr=0.01)
        self._mean(_FIRST)

    def _met(self, rows: int) -> Peers:
        """The peers of this rank, with the first rows of each of them as its halo."""
        others = [other for other in range(self.ranks) if other != self.rank]
        halo = [rows * other + k for other in others for k in range(_MET_ROWS)]
        bounds = rows * np.arange(self.ranks + 1)
        return Peers(bounds, np.array(halo, np.int64), self.rank, self.group)

    @staticmethod
    def traffic(ranks: int) -> Traffic:
        """Of a step where they meet."""
        size = _MET_ROWS * (ranks - 1) * _WIDTH * 4
        exchanged = Traffic(size * ranks, size, ranks - 1, 1) * (2 * _LAYERS)
        return exchanged + all_reduce(_LAYERS * _WIDTH**2 * 4, ranks)

    def alone(self, steps: int) -> float:
        """Mean seconds of a step while the other ranks wait, over all ranks."""
        total = torch.zeros(1, dtype=torch.float64)
        for turn in range(self.ranks):
            self._wait()
            if turn == self.rank:
                total += self._mean(steps)
        with naming(self.rank, "all-reduce"):
            dist.all_reduce(total, group=self.group)
        return float(total) / self.ranks

    def at_once(self, steps: int) -> float:
        """Seconds of a step of the slowest rank, all ranks at once."""
        self._wait()
        mean = torch.tensor([self._mean(steps)], dtype=torch.float64)
        with naming(self.rank, "all-reduce"):
            dist.all_reduce(mean, dist.ReduceOp.MAX, group=self.group)
        return float(mean)

    def _wait(self) -> None:
        with naming(self.rank, "barrier"):
            dist.barrier(self.group)

    def _mean(self, steps: int) -> float:
        begin = time.perf_counter()
        for _ in range(steps):
            self._step()
        return (time.perf_counter() - begin) / steps

    def _step(self) -> None:
        x, peers = self._rows, self._peers
        for weight in self._weights:
            made = (x.index_select(0, self._picked) @ weight).relu()
            x = mapped(made, peers.fetch, peers.give_back).narrow(0, 0, made.shape[0])
        self._optimizer.zero_grad()
        functional.cross_entropy(x[:, :_CLASSES], self._labels).backward()  # type: ignore[no-untyped-call]
        peers.add(torch.cat([weight.grad.reshape(-1) for weight in self._weights if weight.grad is not None]))
        self._optimizer.step()


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
