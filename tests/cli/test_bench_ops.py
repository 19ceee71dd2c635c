"""cli/bench_ops: one case alone, files, comparisons, and flags that are refused in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from plait.cli.main import main
from plait.measure import read

ONE = ["bench", "ops", "--op", "mm", "--nodes", "50", "--inner", "4", "--width", "3", "--repeats", "2"]


def test_one_case_prints_a_table_and_writes_records_csv_and_findings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = {name: tmp_path / f"run.{name}" for name in ("jsonl", "csv", "json")}
    extra = ["--output", str(paths["jsonl"]), "--csv", str(paths["csv"]), "--findings", str(paths["json"])]
    assert main([*ONE, *extra]) == 0
    shown = capsys.readouterr().out
    assert "mm, forward, cpu" in shown
    assert str(paths["jsonl"]) in shown
    assert {record.case["variant"] for record in read(paths["jsonl"])} == {"torch", "plait"}
    assert len(paths["csv"].read_text().splitlines()) == 3
    assert json.loads(paths["json"].read_text())[0]["name"] == "no_sparse_path"
    assert main([*ONE, *extra, "--resume"]) == 0
    assert len(read(paths["jsonl"])) == 2


def test_two_runs_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(tmp_path / name) for name in ("a.jsonl", "b.jsonl")]
    for path in paths:
        assert main([*ONE, "--output", path]) == 0
    capsys.readouterr()
    assert main(["bench", "compare", *paths]) == 0
    assert "2 compared" in capsys.readouterr().out


def test_operations_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "ops", "--list"]) == 0
    assert "neighbour_sampling" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--op", "spnn"], "--op: unknown operation 'spnn'; known are"),
        (["--suite", "huge"], "--suite: unknown suite 'huge'; known are quick, paper"),
        (["--edges", "10"], "--edges: sizes are of one operation"),
        (["--op", "mm", "--suite", "quick"], "--suite: a suite has its own operations"),
        (["--op", "mm", "--variants", "jax"], "--variants: unknown name 'jax'; known are torch, plait"),
        (["--variants", "jax"], "--variants: unknown name 'jax'; known are "),
        (["--op", "spmm", "--graph", "nowhere"], "graph 'nowhere': no "),
        (["--op", "mm", "--csv", "/"], "--csv: / is a folder"),
        (["--op", "spmm", "--edges", "1e15"], "the largest that fits"),
        (["--device", "tpu"], "--device: unknown name 'tpu'"),
        (["--op", "mm", "--clock", "processor"], "--clock: processor adds up"),
        (["--op", "mm", "--clock", "sun"], "--clock: unknown name 'sun'"),
        (["--op", "mm", "--resume"], "--resume: give --output"),
    ],
)
def test_bad_flags_are_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "ops", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_gpu_that_is_not_there_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert main(["bench", "ops", "--device", "cuda"]) == 2
    assert "torch sees no CUDA device" in capsys.readouterr().err


def test_runs_that_cannot_be_compared_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    assert main(["bench", "compare", str(empty), str(empty)]) == 2
    assert "no timed case in common" in capsys.readouterr().err
    assert main(["bench", "compare", str(tmp_path / "none.jsonl"), str(empty)]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_a_direction_that_was_not_given_is_not_blamed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = ["bench", "ops", "--op", "sort", "--edges", "100", "--repeats", "2", "--no-memory"]
    assert main([*alone, "--output", str(tmp_path / "run.jsonl")]) == 0
    assert "--direction" not in capsys.readouterr().err
