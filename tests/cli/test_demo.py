"""cli/demo: four models, three ways, one table and a plan."""

from __future__ import annotations

import pytest

from plait.cli.main import main


def test_the_demo_shows_plan_accuracy_time_and_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--epochs", "2", "--num-nodes", "120"]) == 0
    shown = capsys.readouterr()
    for part in (
        "built-in graph: 120 nodes",
        "Plan of",
        "Where to look next",
        "test accuracy",
        "speed-up",
        "memory ratio",
    ):
        assert part in shown.out
    rows = [
        line.split() for line in shown.out.splitlines() if line.startswith(("gcn ", "sage ", "gin ", "gat "))
    ]
    assert len(rows) == 11
    assert "gcn: PyG, PyG on torch CSR, plait: 2/2" in shown.err


def test_no_epochs_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--epochs", "0"]) == 2
    assert "--epochs" in capsys.readouterr().err


def test_a_graph_too_small_for_the_demonstration_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--num-nodes", "5"]) == 2
    assert "--num-nodes: 5" in capsys.readouterr().err
