"""cli/explain: the plan as text and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plait.cli.main import main

GRAPH = ["--data", "sbm:num_nodes=60,features=8"]


def test_the_plan_is_printed_and_fits_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--model", "gcn", *GRAPH]) == 0
    out = capsys.readouterr().out
    assert "Plan of gcn 8-64-" in out
    assert "GCNConv" in out
    assert all(len(line) <= 100 for line in out.splitlines())


@pytest.mark.parametrize("mode", ["training", "inference"])
def test_json_is_json_and_nothing_else(mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--model", "gcn", "--widths", "12,4", *GRAPH, "--mode", mode, "--json"]) == 0
    shown = capsys.readouterr()
    plan = json.loads(shown.out)
    assert plan["layers"][0]["mode"] == mode
    assert "random ones stand in" in shown.err


def test_analyze_adds_measured_times(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", *GRAPH, "--analyze", "--json"]) == 0
    steps = json.loads(capsys.readouterr().out)["layers"][0]["steps"]
    assert any(step["measured_seconds"] is not None for step in steps)


@pytest.mark.parametrize("widths", ["12", "12,x", "12,0", ""])
def test_bad_widths_are_refused(widths: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", *GRAPH, "--widths", widths]) == 2
    assert "--widths" in capsys.readouterr().err


def test_an_unknown_generator_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--data", "torus:n=3", "--widths", "4,2"]) == 2
    assert "known are cliques" in capsys.readouterr().err


def test_the_print_is_in_words_and_verbose_has_the_formulas(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", *GRAPH]) == 0
    plain = capsys.readouterr().out
    assert main(["explain", *GRAPH, "--verbose"]) == 0
    verbose = capsys.readouterr().out
    assert "@" not in plain
    assert "rejected:" in verbose
    assert "(A @" in verbose


def test_a_model_or_file_that_is_nearly_one_is_suggested(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", "--model", "gatt", *GRAPH]) == 2
    assert "did you mean 'gat'?" in capsys.readouterr().err
    (tmp_path / "cora.npz").write_bytes(b"")
    assert main(["explain", "--data", str(tmp_path / "coar.npz")]) == 2
    assert "did you mean 'cora.npz'?" in capsys.readouterr().err
    assert main(["explain", "--data", "coar", "--data-dir", str(tmp_path)]) == 2
    assert "did you mean 'cora'?" in capsys.readouterr().err


def test_a_file_that_is_no_graph_is_not_answered_with_advice_to_load_it_unsafely(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.npz").write_bytes(b"this is text, not a zip archive")
    assert main(["explain", "--data", str(tmp_path / "bad.npz")]) == 2
    shown = capsys.readouterr().err
    assert "pickle" not in shown
    assert "not a readable npz file" in shown
