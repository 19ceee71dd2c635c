"""cli/report: the page and its figures are written whole; refusals are one line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from plait.cli.main import main
from tests.report.page import made


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "layers.jsonl"
    made.write(path, made.layers(np.random.default_rng(0)))
    return path


def test_the_page_is_written(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(made.plan()))
    target = tmp_path / "report.html"
    assert main(["report", str(run), str(plan), "-o", str(target)]) == 0
    assert target.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert capsys.readouterr().out == f"report: {target}\n"
    assert {p.name for p in tmp_path.iterdir()} == {"layers.jsonl", "plan.json", "report.html"}


def test_figures_are_svg_and_png_where_it_can_be_drawn(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "figures"
    command = ["report", str(run), "-o", str(tmp_path / "a.html"), "--figures", str(folder)]
    monkeypatch.setitem(sys.modules, "cairosvg", None)
    assert main(command) == 0
    assert {p.name for p in folder.iterdir()} == {"ratio-layers.svg", "strips-layers.svg"}
    assert "for PNG too, install cairosvg" in capsys.readouterr().out
    drawn = SimpleNamespace(svg2png=lambda bytestring, scale: b"png")
    monkeypatch.setitem(sys.modules, "cairosvg", drawn)
    assert main(command) == 0
    assert (folder / "ratio-layers.png").read_bytes() == b"png"


def test_damaged_lines_are_told_and_the_rest_is_drawn(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run.write_text(run.read_text() + "{cut\n")
    target = tmp_path / "a.html"
    assert main(["report", str(run), "-o", str(target)]) == 0
    assert capsys.readouterr().err == "note: layers.jsonl: skipped 1 damaged or foreign lines\n"
    assert "Layers.jsonl: skipped 1 damaged" in target.read_text(encoding="utf-8")


def test_bad_arguments_are_one_line(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    blocked = tmp_path / "blocked"
    blocked.touch()
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    bad = [
        [str(tmp_path / "none.jsonl")],
        [str(empty)],
        [str(nothing)],
        [str(run), "-o", str(tmp_path / "no" / "such" / "a.html")],
        [str(run), "-o", str(tmp_path)],
        [str(run), "-o", str(tmp_path / "a.html"), "--figures", str(blocked)],
    ]
    for arguments in bad:
        assert main(["report", *arguments]) == 2, arguments
        error = capsys.readouterr().err
        assert error.startswith("plait: ")
        assert error.count("\n") == 1
