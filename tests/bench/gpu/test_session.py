"""The session's units: their arguments are plait's own, they resume, and what hangs is left behind."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from plait.bench.cases import LayerCase
from plait.bench.gpu import session
from plait.bench.gpu.session import UNITS, Cells, Unit, run_unit, units_of
from plait.cli.main import build_parser
from plait.errors import InputError
from plait.measure.record import read

CASES = tuple(LayerCase("pubmed", layer, 64, 64, "training") for layer in ("gcn", "gin"))


def test_every_unit_of_plait_has_arguments_that_plait_takes(tmp_path: Path) -> None:
    for unit in UNITS:
        if unit.command[0] == "plait":
            arguments = unit.line(tmp_path)[3:]
            build_parser(arguments).parse_args(arguments)
        if unit.cells is not None:
            assert unit.cells.left(tmp_path) == list(unit.cells.grid)
    assert len({unit.name for unit in UNITS}) == len(UNITS)
    cells = [case for unit in UNITS if unit.name.startswith("compiled") for case in unit.cells.grid]  # type: ignore[union-attr]
    assert len(cells) == len(set(cells)) == 7 * (4 * 4 + 3)


def test_finished_units_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "session.jsonl").write_text(
        json.dumps({"unit": "building", "rc": 0}) + "\n" + json.dumps({"unit": "epoch", "rc": 124}) + "\n"
    )
    left = [unit.name for unit in units_of(None, tmp_path)]
    assert "building" not in left
    assert left[0] == "epoch"
    assert [unit.name for unit in units_of(["calibrate"], tmp_path)] == ["calibrate"]
    with pytest.raises(InputError, match="--only"):
        units_of(["nothing"], tmp_path)


def test_a_dry_run_lists_cells(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "find_graph", lambda name: None)
    session._dry_run([Unit("cells", 5, ("plait",), Cells("layers", CASES, "cells.jsonl"))], tmp_path)
    assert "2 of 2 cells" in capsys.readouterr().out


def test_profiles_travel_with_the_records(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    (one / "machine-card.json").write_text("measured")
    session._copy_profiles(one, other)
    assert (other / "machine-card.json").read_text() == "measured"


def unit_of(tmp_path: Path, text: str, cell_seconds: float = 0.0) -> Unit:
    """A module that does what `text` says with its second argument, the file of records."""
    (tmp_path / "sleepy.py").write_text(text)
    cells = Cells("layers", CASES, "cells.jsonl", ("pyg-compile",), cell_seconds)
    return Unit("sleepy", 5, ("sleepy",), cells)


def test_a_unit_ends_at_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    unit = unit_of(tmp_path, "import time; time.sleep(60)")
    assert run_unit(unit, tmp_path, 1.0) == 124
    assert run_unit(unit_of(tmp_path, "raise SystemExit(3)"), tmp_path, 20.0) == 3


def test_a_cell_that_hangs_is_recorded_as_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(session, "_LEAST_SECONDS", 0.0)
    unit = unit_of(tmp_path, "import time; time.sleep(60)", 0.5)
    assert unit.line(tmp_path)[:3] == [sys.executable, "-m", "sleepy"]
    assert run_unit(unit, tmp_path, 30.0) == 0
    found = read(tmp_path / "cells.jsonl")
    assert [record.case["layer"] for record in found] == ["gcn", "gin"]
    peers = found[0].result["peers"]
    assert isinstance(peers, dict)
    assert "no answer within 0.5 s" in peers["pyg-compile"]["reason"]
    assert units_of(["building"], tmp_path)
