"""cli/hag: counts, times and a verdict; bad arguments are refused before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from plait.cli.main import main
from plait.graph import Graph
from plait.graph.io import save

GRAPH = ["hag", "--data", "sbm:num_nodes=60,features=8"]


def test_counts_times_and_the_verdict_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*GRAPH, "--widths", "4,16", "--min-count", "3", "--time-budget", "5"]) == 0
    out = capsys.readouterr().out
    for word in ("forecast:", "additions", "levels", "backward", "verdict:"):
        assert word in out
    assert all(len(line) <= 120 for line in out.splitlines())


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--capacity", "much"),
        ("--capacity", "-3"),
        ("--widths", "0"),
        ("--widths", "a"),
        ("--layers", "gcn"),
        ("--output", "records.jsonl"),
    ],
)
def test_bad_arguments_are_refused(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*GRAPH, f"{option}={value}"]) == 2
    assert option.strip("-") in capsys.readouterr().err


def test_all_graphs_of_a_folder_are_compared_with_csr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path / "ring.npz", Graph.from_edge_index(np.arange(9), (np.arange(9) + 1) % 9, 9))
    code = main(
        ["hag", "--all", str(tmp_path), "--layers", "gcn", "--output", str(tmp_path / "records.jsonl")]
    )
    out = capsys.readouterr().out
    assert "ring" in out
    assert "choices below" in out
    assert code in (0, 1)  # a step of nine nodes is noise
    assert (tmp_path / "records.jsonl").exists()


def test_options_of_one_graph_are_refused_where_they_would_not_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for option, value in (("--capacity", "3"), ("--widths", "4"), ("--data-dir", str(tmp_path))):
        assert main(["hag", "--all", str(tmp_path), option, value]) == 2
        assert f"{option}: is for --data" in capsys.readouterr().err


def test_what_to_look_at_must_be_named_once(tmp_path: Path) -> None:
    for arguments in (["hag"], [*GRAPH, "--all", str(tmp_path)]):
        with pytest.raises(SystemExit):
            main(arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_a_device_that_is_not_there_is_refused_before_any_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("plait.graph.hag.search", lambda *a, **k: pytest.fail("searched"))
    assert main(["hag", "--data", "sbm:num_nodes=60,features=8", "--device", "cuda"]) == 2
    shown = capsys.readouterr()
    assert "torch sees no CUDA device" in shown.err
    assert shown.out == ""
