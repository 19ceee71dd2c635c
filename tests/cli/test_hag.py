"""cli/hag: counts, times and a verdict; bad arguments are refused before anything is loaded."""

from __future__ import annotations

import pytest

from plait.cli.main import main

GRAPH = ["hag", "--data", "sbm:num_nodes=60,features=8"]


def test_counts_times_and_the_verdict_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*GRAPH, "--widths", "4,16", "--min-count", "3", "--time-budget", "5"]) == 0
    out = capsys.readouterr().out
    for word in ("forecast:", "additions", "levels", "backward", "verdict:"):
        assert word in out
    assert all(len(line) <= 120 for line in out.splitlines())


@pytest.mark.parametrize(
    ("option", "value"), [("--capacity", "much"), ("--capacity", "-3"), ("--widths", "0"), ("--widths", "a")]
)
def test_bad_arguments_are_refused(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*GRAPH, f"{option}={value}"]) == 2
    assert option.strip("-") in capsys.readouterr().err
