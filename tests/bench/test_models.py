"""bench/models: every peer trains the same model to the same losses, and is recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from plait.bench import models
from plait.bench.models import ModelCase, Options, cases, measure, run
from plait.bench.task import build_model, load_task
from plait.errors import InputError
from plait.graph import generate
from plait.measure import Record, read

GRAPH = "sbm:num_nodes=80,features=9"


def peers_of(record: Record) -> dict[str, dict[str, Any]]:
    found: Any = record.result["peers"]
    return dict(found)


@pytest.mark.parametrize("kind", ["gcn", "sage", "gin"])
def test_all_peers_follow_the_same_loss_curve(kind: str) -> None:
    task = load_task(generate.sbm(80, features=9), "sbm")
    result: Any = measure(ModelCase("sbm", kind, 6), task, Options(environment={}))
    timed = {name: line for name, line in result["peers"].items() if line["status"] == "timed"}
    assert {"pyg-default", "pyg-csr", "plait"} <= set(timed)
    assert all(line["max_loss_difference"] < 1e-4 for line in timed.values())
    assert all(len(line["losses"]) == 6 for line in timed.values())
    assert not [line for line in result["peers"].values() if line["status"] == "wrong"]


def test_training_lowers_the_loss_and_leaves_the_model_as_it_was() -> None:
    task = load_task(generate.sbm(80, features=9), "sbm")
    model = build_model("gcn", 9, task.num_classes)
    before = [parameter.clone() for parameter in model.parameters()]
    losses = models.train("pyg-csr", model, "gcn", task, 20)
    assert losses[-1] < losses[0]
    assert all(a.equal(b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_run_is_recorded_and_resumed(tmp_path: Path) -> None:
    grid = cases([GRAPH], ["gcn", "gin"], 2)
    options = Options(
        peers=("pyg-default", "pyg-csr"), output=tmp_path / "run.jsonl", environment={}, memory=True
    )
    records = run(grid[:1], options, lambda record: None)
    assert records == read(tmp_path / "run.jsonl")
    assert peers_of(records[0])["pyg-csr"]["peak_tensor_bytes"] > 0
    resumed = Options(peers=options.peers, output=options.output, environment={}, resume=True)
    assert models.left(grid, resumed) == grid[1:]
    assert len(run(grid, resumed, lambda record: None)) == 2


def test_a_peer_with_other_losses_is_wrong_and_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = models.train

    def train(peer: str, *rest: Any) -> list[float]:
        return [loss * (1.5 if peer == "pyg-csr" else 1.0) for loss in right(peer, *rest)]

    monkeypatch.setattr(models, "train", train)
    task = load_task(generate.sbm(80, features=9), "sbm")
    result: Any = measure(
        ModelCase("sbm", "gcn", 2), task, Options(peers=("pyg-default", "pyg-csr"), environment={})
    )
    assert result["peers"]["pyg-csr"]["status"] == "wrong"
    assert "median_seconds" not in result["peers"]["pyg-csr"]


def test_bad_names_and_counts_are_refused() -> None:
    with pytest.raises(InputError, match="--models: unknown name 'gcm'"):
        cases([GRAPH], ["gcm"], 5)
    with pytest.raises(InputError, match="--epochs"):
        cases([GRAPH], ["gcn"], 0)
