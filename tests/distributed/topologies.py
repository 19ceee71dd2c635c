"""What ranks do in the tests of a partitioned topology, and when one of them ends or falls silent."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from torch_geometric.nn import GraphSAGE

import plait
import plait.distributed as distributed
from plait.distributed.session import Session
from plait.errors import ExchangeError
from plait.loader.owned import Frontier
from tests.distributed.shards import graph, until_told

FANOUT, BATCH, SEED, STEPS = [4, 3, 2], 16, 7, 12
TIMEOUT = 5.0
FIELDS = ("n_id", "edge_index", "e_id", "x", "y")

OPTIONS: tuple[dict[str, Any], ...] = (
    {"prefetch": 0, "coalesce": 1},
    {"prefetch": 3, "coalesce": 3},
    {"replace": True},
    {"cache": 20, "policy": "presample", "prefetch": 1},
    {"cache": 0.5, "policy": "degree"},
    {"input_nodes": "val", "pad": False, "shuffle": False},
)


def loader(session: Session, **options: Any) -> distributed.NeighborLoader:
    return distributed.NeighborLoader(
        session, FANOUT, **{"batch_size": BATCH, "shuffle": True, "seed": SEED, **options}
    )


def batches(session: Session, **options: Any) -> list[Any]:
    """All batches of two epochs."""
    found = loader(session, **options)
    return [batch for _ in range(2) for batch in found]


def same(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        for name in FIELDS:
            assert torch.equal(one[name], other[name]), name
        for name in ("num_sampled_nodes", "num_sampled_edges", "batch_size"):
            assert one[name] == other[name], name


def losses(session: Session, **options: Any) -> list[float]:
    """The mean loss over ranks of some steps of a model whose gradients are averaged."""
    torch.manual_seed(3)
    model = GraphSAGE(12, 12, 3, 4)
    wrapped: Any = torch.nn.parallel.DistributedDataParallel(model) if session.size > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    given, found = loader(session, **options), []
    while len(found) < STEPS:
        for batch in given:
            optimizer.zero_grad()
            out = wrapped(batch.x, batch.edge_index)[: batch.batch_size]
            loss = functional.cross_entropy(out, batch.y[: batch.batch_size])
            loss.backward()
            optimizer.step()
            found.append(session.sums([float(loss.detach())])[0] / session.size)
    return found[:STEPS]


def everything(rank: int, size: int, folder: Path) -> None:
    """Batches are those of the replicated topology, losses those of one process."""
    with distributed.init(folder / "parts", timeout_seconds=60) as session:
        assert loader(session).topology == "replicated"  # it fits
        for options in OPTIONS:
            parted = batches(session, topology="partitioned", **options)
            same(parted, batches(session, topology="replicated", **options))
        for _ in loader(session, topology="partitioned"):
            if rank == 0:
                break  # one early exit disturbs nobody
        counters = session.frontiers().counters
        assert counters.edges_in > 0
        assert counters.bytes_in >= 8 * counters.edges_in
        held = session.gathered([loader(session, topology="partitioned").topology_bytes])
        assert sum(one for (one,) in held) < 1.2 * session.parts.topology_bytes
        np.save(folder / f"losses-{size}-{rank}.npy", losses(session, topology="partitioned"))
        session.topology_fits = False
        assert loader(session).topology == "partitioned"


def killed(rank: int, size: int, folder: Path) -> None:
    """Rank 1 ends by SIGKILL while neighbours are asked for; the others are told, soon."""
    session = distributed.init(folder / "parts", timeout_seconds=4 * TIMEOUT)
    begin = time.perf_counter()
    try:
        while time.perf_counter() - begin < 40:
            for number, _ in enumerate(loader(session, topology="partitioned")):
                if rank == 1 and number == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
    except ExchangeError as error:
        (folder / f"killed-{rank}.txt").write_text(f"{time.perf_counter() - begin:.1f} {error}")
    until_told(lambda: session.frontiers().ask([_far(session)]), folder, f"neighbours-{rank}")
    os._exit(0)


def cut_off(rank: int, size: int, folder: Path) -> None:
    """Rank 1 falls silent, as a machine that is cut off does; everything asked of it ends by the time-out."""
    session = distributed.init(folder / "parts", timeout_seconds=TIMEOUT)
    session.frontiers().ask([_far(session)])
    over = plait.shard(GraphSAGE(12, 8, 2, 4), graph(), timeout_seconds=TIMEOUT)
    over(over.data.x, over.data.edge_index)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    frontiers = session.frontiers()
    asked = {
        "features": lambda: session.exchange.take(session.bounds[[1 - rank]]),
        "neighbours": lambda: frontiers.ask([_far(session)]),
        "shard": lambda: over(over.data.x, over.data.edge_index),
    }
    # at once: each waits for the time-out
    waiting = [threading.Thread(target=until_told, args=(work, folder, name)) for name, work in asked.items()]
    for thread in waiting:
        thread.start()
    for thread in waiting:
        thread.join()
    os._exit(0)


def _far(session: Session) -> Frontier:
    """A node of the next rank."""
    return Frontier(session.bounds[[(session.rank + 1) % session.size]], 1, 2)
