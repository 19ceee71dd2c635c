"""cli/cache: the table, the recommendation, the figure, and refusals."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest

from plait.cli.main import main
from plait.graph import partition

GRAPH = ["--data", "rmat:scale=9,edges=4000", "--batch", "16", "--fanout", "4,3", "--parts", "2"]


def test_the_advice_is_printed_and_fits_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", *GRAPH, "--network", "1mbit", "--compute", "1"]) == 0
    out = capsys.readouterr().out
    assert "lookahead" in out
    assert "belady" in out
    assert "recommended: policy=" in out
    assert all(len(line) <= 100 for line in out.splitlines())


def test_rows_of_16_bits_count_half(capsys: pytest.CaptureFixture[str]) -> None:
    megabytes = []
    for wire in ("float32", "float16"):
        assert main(["cache", *GRAPH, "--network", "1mbit", "--width", "50000", "--wire", wire]) == 0
        out = capsys.readouterr().out
        assert f"rows of 50000 {wire}" in out
        none = next(line.split() for line in out.splitlines() if line.split()[:2] == ["none", "none"])
        megabytes.append(float(none[4]))
    assert megabytes[0] == pytest.approx(2 * megabytes[1], rel=0.02)


def test_it_says_when_none_is_worth_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", *GRAPH, "--network", "100gbit"]) == 0
    assert "recommended: no cache" in capsys.readouterr().out


def test_the_figure_is_svg(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "hit.svg"
    assert main(["cache", *GRAPH, "--plot", str(target)]) == 0
    root = ElementTree.parse(target).getroot()
    assert root.tag.endswith("svg")
    assert len(root.findall("{*}polyline")) == 8
    assert [p.name for p in tmp_path.iterdir()] == ["hit.svg"]


def test_an_assignment_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "part.npy", np.arange(512) % 5)
    assert main(["cache", *GRAPH, "--assignment", str(tmp_path / "part.npy")]) == 0
    assert "part 0 of 5 (part.npy)" in capsys.readouterr().out


def test_it_says_why_the_graph_was_not_partitioned(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(partition, "has_metis", lambda: False)
    assert main(["cache", *GRAPH]) == 0
    assert "by node number: pymetis is not installed" in capsys.readouterr().out


@pytest.mark.parametrize(
    "bad",
    [
        ["--fanout", "a"],
        ["--wire", "int8"],
        ["--parts", "1"],
        ["--train", "2"],
        ["--network", "fast"],
        ["--assignment", "no.npy"],
        ["--assignment", __file__],
        ["--plot", "no/such/folder/x.svg"],
        ["--width", "0"],
        ["--compute", "nan"],
        ["--compute", "-1"],
    ],
    ids=" ".join,
)
def test_bad_arguments_are_one_line(bad: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", *GRAPH, *bad]) == 2
    assert capsys.readouterr().err.startswith("plait: ")
