"""cli/analyze: text, JSON, a page; graphs at hand and graphs by their statistics."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from plait.cli.main import main

GRAPH = ["--data", "sbm:num_nodes=60,features=8"]
FAR = ["--nodes", "1000000", "--edges", "20000000", "--widths", "16,8,4"]


@pytest.mark.parametrize("model", ["gcn", "gat", "commnet"])
def test_an_analysis_is_printed_and_fits_a_terminal(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", "--model", model, *GRAPH, "--workers", "1,2,4"]) == 0
    out = capsys.readouterr().out
    assert "best: " in out
    assert all(len(line) <= 100 for line in out.splitlines())


def test_json_is_json_and_the_page_is_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "out.html"
    assert main(["analyze", *FAR, "--workers", "2,8", "--json", "--html", str(page)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["workers"] == 8
    assert told["graph"]["nodes"] == 1_000_000
    text = page.read_text()
    assert text.count("<figure") == text.count("</figure>") == 6
    assert "http" not in text.replace("http-equiv", "").replace("http://www.w3.org/2000/svg", "")


def test_widths_that_nobody_gave_are_assumed_and_that_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", "--nodes", "1000", "--edges", "9000"]) == 0
    assert "64 -> 64 -> 64 columns wide are assumed; --widths gives others" in capsys.readouterr().err


@pytest.mark.processes
def test_statistics_need_no_torch() -> None:
    code = (
        "import sys; from plait.cli.main import main; "
        f"main(['analyze', *{FAR!r}, '--json']); print('torch' in sys.modules, file=sys.stderr)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert run.stderr.strip().endswith("False")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "graphormer", *GRAPH], "known are gcn"),
        (["--model", "graphormer", *FAR], "known are gcn"),
        ([*GRAPH, "--workers", "0"], "--workers: '0'"),
        ([*GRAPH, "--workers", "61"], "61 workers for 60 nodes"),
        ([*GRAPH, "--workers", "two"], "--workers"),
        ([*GRAPH, "--network=-3gbit"], "network"),
        ([*GRAPH, "--network", "-3gbit"], "network: a bandwidth of -3.75e+08"),
        ([*GRAPH, "--workers", "-4,2"], "--workers: '-4,2'"),
        ([*FAR, "--halo", "-1"], "halo: -1.0"),
        (["--nodes", "10", "--widths", "4,2"], "--nodes, --edges: one is missing; give both"),
        ([*GRAPH, "--degrees", "regular"], "--degrees: describes a graph given by --nodes"),
        ([*GRAPH, "--max-degree", "3"], "--max-degree: describes a graph given by --nodes"),
        ([*GRAPH, "--train-nodes", "61"], "--train-nodes: 61 of 60 nodes; give 1 to 60"),
        ([*GRAPH, "--batch-size", "0"], "batch_size=0"),
        ([*GRAPH, "--html", "/dev/full"], "--html: cannot write /dev/full"),
        ([*FAR, *GRAPH], "not both"),
        ([*FAR, "--degrees", "cauchy"], "known are powerlaw"),
        ([*FAR, "--fanouts", "3,x"], "--fanouts"),
        ([*FAR, "--html", "/nowhere/at/all.html"], "--html: folder"),
        (["--nodes", "-4", "--edges", "2", "--widths", "4,2"], "nodes: -4"),
    ],
)
def test_bad_input_is_one_line(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
