"""cli/bench_batches: parts by name, a table and records out, bad flags refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.cli.main import main
from plait.measure import read


def test_a_part_prints_its_bars_and_writes_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.jsonl"
    assert (
        main(["bench", "batches", "--small", "--parts", "lookup", "--budget", "0.05", "--output", str(path)])
        == 0
    )
    shown = capsys.readouterr()
    assert "targets are met" in shown.out
    assert "of binary search's time" in shown.err
    assert [record.case["part"] for record in read(path)] == ["lookup", "lookup"]


@pytest.mark.parametrize(
    ("flags", "says"), [(["--parts", "nonsense"], "lookup"), (["--epochs", "2"], "at least 4")]
)
def test_bad_flags_are_refused_with_the_choice(
    flags: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "batches", *flags]) == 2
    assert says in capsys.readouterr().err
