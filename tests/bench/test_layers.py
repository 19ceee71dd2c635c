"""bench/layers: cells are checked, timed, recorded and resumed; a broken peer is a line."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.bench import layers, peers
from plait.bench.cases import data_folders, layer_cases
from plait.bench.layers import Options, measure, run
from plait.bench.peers.runner import Runner
from plait.bench.problem import Forms, Problem
from plait.graph import generate
from plait.measure import Record, read

QUICK = {"repeats": 2, "warmup": 0, "budget_seconds": 0.0, "environment": {}}
GRID = layer_cases(["grid:rows=4,cols=4"], ["gcn", "gin"], [(5, 3)])


def quick(*names: str, **more: Any) -> Options:
    return Options(peers=names or ("pyg-default", "pyg", "pyg-csr"), **(QUICK | more))


def lines(record: Record) -> dict[str, dict[str, Any]]:
    found: Any = record.result["peers"]
    return dict(found)


def test_every_case_gives_a_record_with_its_times(tmp_path: Path) -> None:
    seen: list[Record] = []
    records = run(GRID, quick(output=tmp_path / "run.jsonl"), seen.append)
    assert records == seen == read(tmp_path / "run.jsonl")
    assert [record.case["layer"] for record in records] == ["gcn", "gcn", "gin", "gin"]
    assert all(record.case["num_edges"] == 48 for record in records)
    for record in records:
        assert all(line["median_seconds"] > 0.0 for line in lines(record).values())


def test_a_peer_that_does_what_another_does_gets_its_time() -> None:
    gin = run(GRID[2:3], quick(), lambda record: None)[0]
    assert lines(gin)["pyg"]["status"] == "same"
    assert lines(gin)["pyg"]["median_seconds"] == lines(gin)["pyg-default"]["median_seconds"]


def test_a_resumed_run_measures_only_what_is_left(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    run(GRID[:3], quick(output=path), lambda record: None)
    options = quick(output=path, resume=True)
    assert layers.left(GRID, options) == [GRID[3]]
    seen: list[Record] = []
    assert len(run(GRID, options, seen.append)) == 4
    assert len(seen) == 1


def test_a_wrong_peer_is_reported_and_never_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(problem: Problem, mode: str) -> Runner:
        right = peers.prepare("pyg-default", problem, mode)
        return Runner(lambda x: right.forward(x) * 1.01, right.parameters, right.gradients)

    monkeypatch.setitem(peers.PEERS, "pyg-csr", wrong)
    line = lines(run(GRID[1:2], quick("pyg-default", "pyg-csr"), lambda record: None)[0])["pyg-csr"]
    assert line["status"] == "wrong"
    assert "differs by" in line["reason"]
    assert "median_seconds" not in line


@pytest.mark.parametrize("when", ["preparing", "running"])
def test_a_peer_that_breaks_is_a_line_in_the_table(monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    def broken(problem: Problem, mode: str) -> Runner:
        def fail(x: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("out of order")

        if when == "preparing":
            raise RuntimeError("out of order")
        return Runner(fail, (), dict)

    monkeypatch.setitem(peers.PEERS, "dgl", broken)
    line = lines(run(GRID[:1], quick("pyg-default", "dgl"), lambda record: None)[0])["dgl"]
    assert line["status"] in ("missing", "wrong")
    assert "out of order" in line["reason"]


def test_where_no_reference_answers_nothing_is_timed_and_the_run_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("no max here")

    monkeypatch.setattr(peers.pyg, "free_bytes", lambda device: 10)
    monkeypatch.setitem(peers.PEERS, "pyg-csr", lambda problem, mode: Runner(fail, (), dict))
    records = run(GRID[:2], quick("plait", "pyg-default", "pyg-csr"), lambda record: None)
    assert len(records) == 2
    for record in records:
        assert "no max here" in lines(record)["pyg-csr"]["reason"]
        assert lines(record)["plait"]["status"] == "missing"
        assert "median_seconds" not in lines(record)["plait"]


def test_without_room_for_the_default_the_csr_answer_is_the_reference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peers.pyg, "free_bytes", lambda device: 10)
    record = run(GRID[:1], quick("pyg-default", "pyg-csr"), lambda record: None)[0]
    assert record.result["reference"] == "pyg-csr"
    assert lines(record)["pyg-default"]["status"] == "missing"
    assert "median_seconds" in lines(record)["pyg-csr"]


def test_all_peers_are_right_on_a_real_graph() -> None:
    if not any((folder / "cora.npz").exists() for folder in data_folders()):
        pytest.skip("cora.npz is in none of PLAIT_DATA and ../shared/data")
    for record in run(
        layer_cases(["cora"], ["sage-max", "tag"], [(16, 8)]), quick(*peers.DEFAULT), lambda record: None
    ):
        assert all(line["status"] != "wrong" for line in lines(record).values())
        assert "median_seconds" in lines(record)["plait"]


def test_memory_is_measured_on_request() -> None:
    problem = Problem("gcn", Forms.of(generate.grid(10, 10)), 32, 32)
    result: Any = measure(problem, "training", quick("pyg-csr", memory=True))
    assert result["peers"]["pyg-csr"]["peak_tensor_bytes"] > 100 * 32 * 4
    assert problem.x.grad is None


@pytest.mark.processes
@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")
@pytest.mark.parametrize("name", ["pyg", peers.REFERENCE])
def test_a_peer_that_kills_its_process_is_a_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(problem: Problem, mode: str) -> Runner:
        os.kill(os.getpid(), signal.SIGILL)
        raise AssertionError("unreachable")

    monkeypatch.setitem(peers.PEERS, name, killed)
    record = run(GRID[:1], quick(), lambda record: None)[0]
    assert lines(record)[name]["status"] == "missing"
    assert "SIGILL" in lines(record)[name]["reason"]
