"""Which feature rows one partition would fetch from the others: the trace to judge a cache by."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from plait.errors import InputError
from plait.graph import Graph
from plait.loader.draw import stream_key
from plait.loader.sampler import Sampler

__all__ = ["RemoteTrace", "remote_trace"]

Array = NDArray[Any]


@dataclass(frozen=True)
class RemoteTrace:
    """Remote rows of every batch of some epochs, with what was seen while drawing them."""

    batches: list[Array]
    epochs: int
    sample_seconds: float
    rows_per_batch: float
    is_cut: bool


def remote_trace(
    graph: Graph,
    fanout: Sequence[int],
    batch_size: int,
    part: ArrayLike,
    *,
    rank: int = 0,
    train: ArrayLike | None = None,
    epochs: int = 2,
    seed: int = 0,
    most_rows: int = 20_000_000,
) -> RemoteTrace:
    """The rows outside part `rank` that its batches sample; drawing stops after `most_rows` of them.

    `part` gives every node its partition, `train` lists the seeds of all of them (default: all nodes). Of a
    trace that was cut whole epochs are kept where there are any.
    """
    owner = np.asarray(part)
    if owner.shape != (graph.num_nodes,):
        raise InputError(
            f"part has shape {owner.shape}; give a partition for each of {graph.num_nodes} nodes"
        )
    nodes = np.arange(graph.num_nodes) if train is None else np.asarray(train)
    mine = nodes[owner[nodes] == rank]
    if mine.size == 0:
        raise InputError(f"rank={rank}: no node to train on is in that partition; choose another rank")
    if batch_size < 1 or epochs < 1:
        raise InputError(f"batch_size={batch_size}, epochs={epochs}: both are at least 1")
    sampler = Sampler(graph, fanout, seed=seed)
    sampler.sample(mine[:1])  # compiles outside the clock
    found: list[Array] = []
    total = asked = 0
    begin = time.perf_counter()
    for epoch in range(epochs):
        rng = np.random.Generator(np.random.Philox(int(stream_key(seed, epoch, 0x5EED))))
        order = rng.permutation(mine)
        for number, at in enumerate(range(0, order.size, batch_size)):
            n_id = sampler.sample(order[at : at + batch_size], epoch, number).n_id
            asked += n_id.size
            found.append(n_id[owner[n_id] != rank])
            total += found[-1].size
            if total > most_rows:
                break
        if total > most_rows:
            break
    seconds, rows = (time.perf_counter() - begin) / len(found), asked / len(found)
    per_epoch = -(-mine.size // batch_size)
    whole = len(found) // per_epoch
    is_cut = whole < epochs
    if is_cut and whole:
        found = found[: whole * per_epoch]
    return RemoteTrace(found, max(1, whole), seconds, rows, is_cut)
