"""cli/bench: tables come out, records are written, bad flags are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.cli.main import main
from plait.measure import read

LAYERS = ["bench", "layers", "--graphs", "star:n=9", "--layers", "gcn", "--widths", "4:3", "--repeats", "1"]
MODELS = ["bench", "models", "--datasets", "sbm:num_nodes=60", "--models", "gcn", "--epochs", "2"]


def test_layers_prints_a_table_and_writes_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.jsonl"
    arguments = [*LAYERS, "--peers", "pyg-default", "pyg-csr", "--warmup", "0", "--output", str(path)]
    assert main(arguments) == 0
    shown = capsys.readouterr()
    assert "gcn, training" in shown.out
    assert str(path) in shown.out
    assert "2/2" in shown.err
    assert [record.case["mode"] for record in read(path)] == ["inference", "training"]
    assert main([*arguments, "--resume"]) == 0
    assert len(read(path)) == 2


def test_models_prints_a_table_and_writes_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.jsonl"
    assert main([*MODELS, "--peers", "pyg-default", "pyg-csr", "--output", str(path)]) == 0
    assert "seconds for 2 epochs" in capsys.readouterr().out
    assert len(read(path)) == 1


def test_plans_prints_the_regret_of_attention_candidates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.jsonl"
    arguments = ["bench", "plans", "--graphs", "star:n=30", "--layers", "gat", "gatv2", "--widths", "8:8"]
    assert main([*arguments, "--budget", "0.05", "--output", str(path)]) == 0
    assert "regret over 2 cases" in capsys.readouterr().out
    found = [record.result["candidates"] for record in read(path)]
    # each association with a backward pass over sources or targets first, or lean; raw rows by sources alone
    assert [len(candidates) for candidates in found] == [8, 3]  # type: ignore[arg-type]
    assert len({candidate["candidate"] for candidate in found[0]}) == 8  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench"], "name a kind"),
        ([*LAYERS, "--resume"], "--resume: give --output"),
        ([*LAYERS, "--peers", "jax"], "--peers: unknown name 'jax'"),
        ([*LAYERS, "--widths", "four"], "--widths"),
        ([*LAYERS, "--layers", "gcm"], "--layers: unknown name 'gcm'"),
        ([*LAYERS, "--layers", "gat", "--heads", "2"], "--heads: 2 heads do not divide"),
        ([*LAYERS, "--num-threads", "0"], "--num-threads"),
        ([*MODELS, "--models", "gcm"], "--models: unknown name 'gcm'"),
    ],
)
def test_bad_flags_are_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err
