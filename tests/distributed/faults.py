"""What ranks do in the tests of faults: they are killed or stopped, lose their network, run out of disk, read
damaged parts, and go on."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch_geometric.nn import GCN

import plait
import plait.distributed as distributed
from plait.distributed.train import Trainer, make_model
from plait.errors import CheckpointError, ExchangeError, PartsError
from tests.distributed.shards import graph, until_told

EVERY, KILLED, EPOCHS, STEPS = 3, 8, 3, 12
TIMEOUT = 20.0
SILENT = 6.0  # the timeout where it has to pass: of a rank that says nothing, its connections open


def _kill(step: int, rank: int, is_killed: bool) -> None:
    if is_killed and rank == 1 and step == KILLED:
        os.kill(os.getpid(), signal.SIGKILL)


def train(
    folder: Path, rank: int, name: str, is_killed: bool = False, topology: str = "partitioned"
) -> list[float]:
    """Mini-batches over parts, with dropout; the loss of every epoch."""
    with distributed.init(folder / "parts", timeout_seconds=TIMEOUT) as session:
        loader = distributed.NeighborLoader(
            session, [4, 3], batch_size=8, shuffle=True, seed=3, topology=topology
        )
        torch.manual_seed(1)
        model = make_model("sage", 12, 8, 2, 4, 0.5)
        torch.manual_seed(rank)
        trainer = Trainer(session, model, loader, compiled=False)
        done, found = trainer._done, []

        def counted(loss: float) -> None:
            done(loss)
            _kill(trainer.position.step, rank, is_killed)

        trainer._done = counted  # type: ignore[method-assign]
        at = trainer.checkpoint(folder / name, every_steps=EVERY)
        for _ in range(at.epoch, EPOCHS):
            found.append(trainer.epoch().loss)
        return found


def sharded(folder: Path, rank: int, name: str, is_killed: bool = False) -> list[float]:
    """The full graph, with dropout; the loss of every step since the last checkpoint."""
    torch.manual_seed(1)
    model = GCN(12, 8, 3, 4, dropout=0.5, norm="batch")
    over = plait.shard(model, graph(), timeout_seconds=TIMEOUT)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    checkpoints = distributed.Checkpoints(folder / name, model, optimizer, every_steps=EVERY)
    at, found = checkpoints.resume() or distributed.Position(), []
    for step in range(at.step + 1, STEPS + 1):
        optimizer.zero_grad()
        loss = over.loss(functional.cross_entropy, over(over.data.x, over.data.edge_index), over.data.y)
        loss.backward()
        optimizer.step()
        found.append(float(over.total(loss)))
        checkpoints.after_step(distributed.Position(step=step))
        _kill(step, rank, is_killed)
    return found


def _ends(work: Callable[[], Any], folder: Path, name: str) -> None:
    """Others are lost; this rank is told and ends."""
    until_told(work, folder, name)
    os._exit(0)  # the group has lost a member


def stopped_exchange(rank: int, size: int, folder: Path) -> None:
    """Rank 1 stands still, its connections open, while rank 0 asks it for rows."""
    session = distributed.init(folder / "parts", timeout_seconds=SILENT)
    session.exchange.take(session.bounds[[1 - rank]])
    served = folder / "served"
    if rank == 0:
        served.touch()
    while not served.exists():  # rank 1 must not stop before rank 0 has its rows
        time.sleep(0.05)
    _stop(rank)
    _ends(lambda: session.exchange.take(session.bounds[[1 - rank]]), folder, "exchange")


def stopped_shard(rank: int, size: int, folder: Path) -> None:
    """Rank 1 stands still between two steps of a sharded model."""
    _, step = _steps()
    step()
    _stop(rank)
    _ends(step, folder, "stopped-shard")


def _stop(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)


def _steps() -> tuple[Any, Callable[[], None]]:
    """A sharded model, and what one step of its training does."""
    torch.manual_seed(1)
    over = plait.shard(GCN(12, 8, 2, 4), graph(), timeout_seconds=SILENT)

    def step() -> None:
        over.loss(functional.cross_entropy, over(over.data.x, over.data.edge_index), over.data.y).backward()

    return over, step


def cut_off(folder: Path) -> None:
    """Trains until the network is gone, says that it began, and what it was told."""
    over, step = _steps()
    step()
    (folder / f"began-{over.rank}").touch()

    def steps() -> None:
        while True:
            step()
            last[0] = time.perf_counter()

    last = [time.perf_counter()]
    try:
        steps()
    except ExchangeError as error:
        told = f"{time.perf_counter() - last[0]:.1f} {error}"
        (folder / f"told-{over.rank}.txt").write_text(told)
    os._exit(0)


def first(rank: int, size: int, folder: Path) -> None:
    """Training is killed."""
    _ends(lambda: train(folder, rank, "kept", is_killed=True), folder, "train")


def second(rank: int, size: int, folder: Path) -> None:
    """Training goes on and ends; then the full graph's is killed."""
    np.save(folder / f"train-{rank}.npy", train(folder, rank, "kept"))
    _ends(lambda: sharded(folder, rank, "whole", is_killed=True), folder, "shard")


def third(rank: int, size: int, folder: Path) -> None:
    """The full graph's goes on; undisturbed runs, a full disk, damaged parts."""
    np.save(folder / f"shard-{rank}.npy", sharded(folder, rank, "whole"))
    np.save(folder / f"shard-undisturbed-{rank}.npy", sharded(folder, rank, "other"))
    np.save(folder / f"train-undisturbed-{rank}.npy", train(folder, rank, "another", topology="replicated"))
    _full_disk(folder, rank)
    _damaged(folder, rank)


def _full_disk(folder: Path, rank: int) -> None:
    """Rank 1 may write no more than 64 bytes to a file; all ranks hear of it, and nothing is lost."""
    torch.manual_seed(1)
    model = GCN(12, 8, 3, 4)
    checkpoints = distributed.Checkpoints(folder / "disk", model, torch.optim.SGD(model.parameters(), lr=0.1))
    checkpoints.save(distributed.Position(step=1))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, before[1]))
    begin = time.perf_counter()
    with pytest.raises(CheckpointError, match=r"rank 1: .*(too large|inline_container|unexpected pos)"):
        checkpoints.save(distributed.Position(step=2))
    assert time.perf_counter() - begin < TIMEOUT
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    torch.distributed.barrier()
    assert os.listdir(folder / "disk") == ["step-0000000001"]
    assert checkpoints.resume() == distributed.Position(step=1)


def _damaged(folder: Path, rank: int) -> None:
    """Rank 1's copy of the parts is changed, then cut short; all ranks say so."""
    place = folder / "parts"
    if rank == 1:
        place = folder / "copy"
        shutil.copytree(folder / "parts", place)
        _flip(place / "indices.npy")
    begin = time.perf_counter()
    with pytest.raises(PartsError, match=r"rank 1: .*indices\.npy does not have the checksum"):
        distributed.init(place, timeout_seconds=TIMEOUT, verify=True)
    if rank == 1:
        os.truncate(place / "part-1.x.npy", 200)
    with pytest.raises(PartsError, match=r"rank 1: .*part-1\.x\.npy has 200 bytes"):
        distributed.init(place, timeout_seconds=TIMEOUT)
    assert time.perf_counter() - begin < 2 * TIMEOUT


def _flip(path: Path) -> None:
    """Changes one bit of the last number."""
    content = bytearray(path.read_bytes())
    content[-4] ^= 1
    path.write_bytes(content)
