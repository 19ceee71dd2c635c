"""What one rank does in the tests of two (tests/distributed/test_neighbor.py)."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.nn import GraphSAGE

import plait
import plait.distributed as distributed
from plait.distributed.session import Session
from plait.errors import ExchangeError, PlaitError

FANOUT, BATCH, SEED = [4, 3], 16, 7


def every_row(parts: distributed.Parts) -> Any:
    return np.concatenate([parts.x(p) for p in range(parts.num_parts)])


def loader(session: Session, **options: Any) -> distributed.NeighborLoader:
    return distributed.NeighborLoader(
        session, FANOUT, **{"batch_size": BATCH, "shuffle": True, "seed": SEED, **options}
    )


def losses(session: Session, wrap: Callable[[Any], Any], steps: int = 12, **options: Any) -> list[float]:
    """The mean loss over ranks of some steps."""
    torch.manual_seed(3)
    model = GraphSAGE(8, 12, 2, 4)
    trained = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    batches, found = loader(session, **options), []
    while len(found) < steps:
        for batch in batches:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(
                trained(batch.x, batch.edge_index)[: batch.batch_size], batch.y[: batch.batch_size]
            )
            loss.backward()
            optimizer.step()
            found.append(session.sums([float(loss.detach())])[0] / session.size)
    return found


def exchanging(session: Session, rows: Any) -> None:
    """Rows asked for by several threads at once, by one rank more often than by the other."""
    rng = np.random.default_rng(session.rank)
    wrong: list[Any] = []

    def ask() -> None:
        for _ in range(10 + 10 * session.rank):
            ids = rng.integers(0, rows.shape[0], int(rng.integers(0, 60)))
            if not np.array_equal(session.exchange.take(ids), rows[ids]):
                wrong.append(ids)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert not any(thread.is_alive() for thread in threads)


def counted(session: Session) -> None:
    """One request with repeats: each row travels once, and every byte is accounted for."""
    counters, other = session.exchange.counters, 1 - session.rank
    before = (counters.rows_in, counters.rounds)
    ids = np.repeat(np.arange(session.bounds[other], session.bounds[other] + 5), 3)
    session.exchange.take(ids)
    assert counters.rows_in - before[0] == 5
    # the thread may be inside a round: its header is counted before its rows
    for _ in range(200):
        row_bytes = (4 if session.wire == "float32" else 2) * session.exchange.local.width
        expected = 24 * counters.rounds + 8 * counters.rows_out + row_bytes * counters.rows_in
        if counters.bytes_in == expected:
            return
        time.sleep(0.001)
    raise AssertionError((counters, expected))


def rounded(folder: Path, rows: Any, wire: str) -> None:
    """All rows are those of features rounded before, on every rank, and travel in half the bytes."""
    expected = torch.from_numpy(rows).to(getattr(torch, wire)).float().numpy()
    with distributed.init(folder, wire=wire) as session:
        assert np.array_equal(session.exchange.take(np.arange(rows.shape[0])), expected)
        for options in ({}, {"cache": 0.25, "prefetch": 3}, {"cache": 10, "policy": "lru", "prefetch": 0}):
            batches = loader(session, **options)
            for batch in batches:
                assert batch.x.dtype == torch.float32
                assert np.array_equal(batch.x.numpy(), expected[batch.n_id.numpy()]), options
        plain = loader(session, cache=0.25).cache
        assert plain is not None
        assert plain.capacity == round(0.5 * int(session.halo.sum()))
        counted(session)
        ddp = torch.nn.parallel.DistributedDataParallel
        np.save(folder.parent / f"losses-{wire}-{session.rank}.npy", losses(session, ddp, cache=0.25))


def too_large(folder: Path) -> None:
    """Features that float16 cannot hold are an error on every rank that names the one that has them."""
    with pytest.raises(PlaitError, match=r"rank 1: wire='float16': features reach 1e\+06.*choose bfloat16"):
        distributed.init(folder, wire="float16")


def loading(session: Session, rows: Any, folder: Path) -> None:
    """Batches are the same under every policy, with and without threads; one early exit disturbs nobody."""
    expected = None
    for options in (
        {"prefetch": 0, "coalesce": 1},
        {"prefetch": 3, "coalesce": 3},
        {"cache": 0.25},
        {"cache": 10, "policy": "lru", "prefetch": 0},
        {"cache": 0.5, "policy": "vip", "coalesce": 4},
        {"cache": 0.5, "policy": "massivegnn"},
        {"cache": 20, "policy": "presample"},
        {"cache": 60, "policy": "sieve", "shared": f"plait-test-{os.getppid()}"},
    ):
        batches = loader(session, **options)
        found = [b for _ in range(2) for b in batches]
        assert len(found) == 2 * len(batches)
        for batch in found:
            assert np.array_equal(batch.x.numpy(), rows[batch.n_id.numpy()]), options
        nodes = [b.n_id.tolist() for b in found]
        assert expected is None or nodes == expected, options
        expected = nodes
        if options.get("cache") and options.get("policy") != "lru":
            assert batches.cache is not None
            assert batches.cache.counters.hits > 0, options
            batches.cache.close()
    for _ in loader(session, prefetch=2):
        if session.rank == 0:
            break
    flat = np.concatenate([np.r_[len(n), n] for n in expected or []])
    np.save(folder / f"batches-{session.rank}.npy", flat)
    seen = np.concatenate(
        [b.n_id[: b.batch_size].numpy() for b in loader(session, input_nodes="val", pad=False)]
    )
    np.save(folder / f"evaluated-{session.rank}.npy", seen)


def everything(rank: int, size: int, folder: Path) -> None:
    """All scenarios that end well, in one process: importing torch takes longest."""
    with distributed.init(folder / "parts", timeout_seconds=60) as session:
        assert (session.rank, session.size) == (rank, size)
        rows = every_row(session.parts)
        exchanging(session, rows)
        counted(session)
        loading(session, rows, folder)
        ddp = torch.nn.parallel.DistributedDataParallel
        np.save(folder / f"losses-{rank}.npy", losses(session, ddp, cache=0.25))
        planned = losses(session, lambda model: ddp(plait.compile(model)), coalesce=3)
        np.save(folder / f"planned-{rank}.npy", planned)
    for wire in ("float16", "bfloat16"):
        rounded(folder / "parts", rows, wire)
    too_large(folder / "large")


def abandoned(rank: int, size: int, folder: Path) -> None:
    """Rank 1 ends without a word; rank 0 is told, soon."""
    session = distributed.init(folder / "parts", timeout_seconds=20)
    begin = time.perf_counter()
    try:
        while time.perf_counter() - begin < 30:
            session.exchange.take(session.bounds[[1 - rank]])
            if rank == 1:
                os._exit(0)
    except ExchangeError as error:
        (folder / "told.txt").write_text(f"{time.perf_counter() - begin:.1f} {error}")
    os._exit(0)  # the default group has lost a member: destroying it would wait
