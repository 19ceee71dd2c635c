"""bench/suite.py: every record is kept as it is taken, and a resumed run takes only what is missing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from plait.bench.suite import Options, Suite, case_reader
from plait.measure import Record, append
from plait.measure.record import read


@dataclass(frozen=True)
class Case:
    name: str
    width: int = 4


def take(cases: list[Case], options: Options) -> Iterator[Record]:
    for case in cases:
        yield Record("made", asdict(case) | {"fact": 1}, {"seconds": case.width}, {})


SUITE = Suite("made", case_reader(Case), take)
GRID = [Case("a"), Case("b"), Case("c", 8)]


def test_records_are_appended_as_they_are_taken(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    seen: list[int] = []
    records = SUITE.run(GRID, Options(output=output), lambda record: seen.append(len(list(read(output)))))
    assert seen == [1, 2, 3]
    assert [record.case["name"] for record in records] == ["a", "b", "c"]


def test_a_resumed_run_takes_what_is_missing(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    append(output, Record("made", {"name": "b"}, {"seconds": -1}, {}))  # of a time without widths
    append(output, Record("other", {"name": "a"}, {}, {}))
    append(output, Record("made", {"width": 4}, {}, {}))  # nobody knows what it was
    options = Options(output=output, resume=True)
    assert SUITE.left(GRID, options) == [Case("a"), Case("c", 8)]
    assert SUITE.left(GRID, Options(output=output)) == GRID
    records = SUITE.run(GRID, options, lambda record: None)
    assert [(r.case["name"], r.result["seconds"]) for r in records] == [("b", -1), ("a", 4), ("c", 8)]


def test_without_a_file_nothing_is_written(tmp_path: Path) -> None:
    assert len(SUITE.run(GRID, Options(resume=True), lambda record: None)) == 3
    assert not list(tmp_path.iterdir())
