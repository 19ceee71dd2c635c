"""Checkpoints: whole or not there, the newest that is whole, and training that goes on as if nothing was."""

from __future__ import annotations

import io
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch_geometric.nn import GCN

from plait.distributed import Checkpoints, Position, partition
from plait.errors import CheckpointError, InputError
from tests.distributed import faults
from tests.distributed.shards import graph, start

DATA = graph(60, 150)


def job(folder: Path, **options: Any) -> tuple[Any, Checkpoints]:
    """A step to be run, and its checkpoints."""
    torch.manual_seed(0)
    model = GCN(12, 8, 2, 4, dropout=0.5, norm="batch")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def step() -> float:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(DATA.x, DATA.edge_index), DATA.y)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step, Checkpoints(folder, model, optimizer, **options)


def test_training_goes_on_as_if_nothing_was(tmp_path: Path) -> None:
    step, kept = job(tmp_path, every_steps=3)
    assert kept.resume() is None
    losses = []
    for number in range(1, 9):
        losses.append(step())
        assert kept.after_step(Position(1, number, number, sum(losses))) == (number % 3 == 0)
    assert sorted(os.listdir(tmp_path)) == ["step-0000000003", "step-0000000006"]
    again, kept = job(tmp_path)
    assert kept.resume() == Position(1, 6, 6, sum(losses[:6]))
    assert [again(), again()] == losses[6:]


def test_the_newest_that_is_whole_is_resumed(tmp_path: Path) -> None:
    step, kept = job(tmp_path, keep=3)
    for number in (1, 2, 3):
        step()
        kept.save(Position(step=number))
    written = next((tmp_path / "step-0000000003").glob("*.distcp"))
    content = bytearray(written.read_bytes())
    content[-5] ^= 1
    written.write_bytes(content)
    (tmp_path / "step-0000000002" / "plait.json").unlink()
    (tmp_path / ".step-0000000004.partial").mkdir()
    assert job(tmp_path)[1].resume() == Position(step=1)
    kept.save(Position(step=4))
    assert not list(tmp_path.glob(".*"))


def test_a_clock_may_say_when(tmp_path: Path) -> None:
    step, kept = job(tmp_path, every_minutes=1.0)
    step()
    assert not kept.after_step(Position(step=1))
    kept._saved -= 61
    assert kept.after_step(Position(step=2))
    assert not kept.after_step(Position(step=3))


def test_refusals_name_the_argument(tmp_path: Path) -> None:
    for message, options in {
        "every_steps": {"every_steps": 0},
        "every_minutes": {"every_minutes": 0.0},
        "keep": {"keep": 0},
    }.items():
        with pytest.raises(InputError, match=message):
            job(tmp_path, **options)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"rank 0: .*another folder"):
        job(tmp_path / "file")[1].save(Position())
    step, kept = job(tmp_path / "kept")
    step()
    kept.save(Position(step=1))
    kept.size = 2
    with pytest.raises(InputError, match="written by 1 ranks"):
        kept._newest()


def lives(scenario: Any, folder: Path) -> list[int]:
    """How the two ranks ended."""
    ranks = start(scenario, 2, folder)
    for process in ranks:
        process.join(120)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    said = "\n".join(path.read_text() for path in sorted(folder.glob("failed-*.txt")))
    assert None not in codes, said
    assert codes[0] == 0, said
    return codes


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize(
    ("scenario", "name", "said"),
    [
        (faults.stopped_exchange, "exchange", "rank 0: feature rows could not be exchanged|no answer for"),
        (faults.stopped_shard, "stopped-shard", "rank 0: .*(Timed out|timeout)"),
    ],
)
def test_a_rank_that_stands_still_is_given_up_after_the_timeout(
    tmp_path: Path, scenario: Any, name: str, said: str
) -> None:
    partition(graph(), 2, tmp_path / "parts", file=io.StringIO())
    ranks = start(scenario, 2, tmp_path)
    ranks[0].join(90)
    ranks[1].kill()
    failed = "\n".join(path.read_text() for path in sorted(tmp_path.glob("failed-*.txt")))
    assert ranks[0].exitcode == 0, failed
    seconds, told = (tmp_path / f"told-{name}.txt").read_text().split(" ", 1)
    assert 0.5 * faults.SILENT < float(seconds) < 4 * faults.SILENT
    assert re.search(said, told), told


@pytest.mark.processes
@pytest.mark.slow
def test_a_rank_killed_costs_no_more_than_the_steps_since_the_last_checkpoint(tmp_path: Path) -> None:
    partition(graph(), 2, tmp_path / "parts", file=io.StringIO())
    assert lives(faults.first, tmp_path)[1] == -9
    assert lives(faults.second, tmp_path)[1] == -9
    assert lives(faults.third, tmp_path)[1] == 0
    for name in ("train", "shard"):
        seconds, said = (tmp_path / f"told-{name}.txt").read_text().split(" ", 1)
        assert float(seconds) < 2 * faults.TIMEOUT
        assert re.search(r"rank 0: .*([Cc]onnection|closed|reset|peer)", said), said
    for rank in range(2):
        for name in ("train", "shard"):
            whole = np.load(tmp_path / f"{name}-undisturbed-{rank}.npy").tolist()
            after = np.load(tmp_path / f"{name}-{rank}.npy").tolist()
            assert 0 < len(after) < len(whole) or name == "train"
            assert after == whole[-len(after) :], name  # to the bit
