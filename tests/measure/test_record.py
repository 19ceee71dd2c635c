"""measure/record: what was written is read, and damage costs only the damaged lines."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest

from plait.errors import InputError
from plait.measure.record import SCHEMA, Record, append, read


def record(number: int) -> Record:
    return Record(
        "test", {"case": number}, {"seconds": 0.5 * number}, {"cpu": "some"}, "2026-01-01T00:00:00Z"
    )


def test_appended_records_read_back_in_order(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "run.jsonl"
    for number in range(3):
        append(path, record(number))
    assert read(path) == [record(0), record(1), record(2)]


def test_truncated_and_foreign_lines_are_skipped_with_a_count(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    other = json.dumps(json.loads(record(5).to_json()) | {"schema": SCHEMA + 1})
    more = json.dumps(json.loads(record(5).to_json()) | {"unheard of": 1})
    wrong = json.dumps(json.loads(record(5).to_json()) | {"case": 3})
    lines = [
        record(1).to_json(),
        other,
        "[1, 2]",
        "not json",
        more,
        wrong,
        "",
        record(2).to_json(),
        record(3).to_json()[:40],
    ]
    path.write_text("\n".join(lines))
    with pytest.warns(UserWarning, match="skipped 6 damaged or foreign lines"):
        assert read(path) == [record(1), record(2)]


def test_an_append_after_a_cut_line_starts_a_line_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(record(1).to_json() + "\n" + record(2).to_json()[:30])
    append(path, record(3))
    with pytest.warns(UserWarning, match="skipped 1 "):
        assert read(path) == [record(1), record(3)]


def test_a_clean_file_gives_no_warning(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    append(path, record(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read(path)


def test_numbers_that_json_has_not_become_null(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    append(path, Record("test", {}, {"ratio": float("nan"), "list": [1.0, float("inf")]}))
    assert read(path)[0].result == {"ratio": None, "list": [1.0, None]}


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nothing\.jsonl: cannot be read"):
        read(tmp_path / "nothing.jsonl")


def test_a_place_that_takes_no_records_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path, tmp_path / "file" / "run.jsonl", Path("/dev/full")):
        with pytest.raises(InputError, match=r": cannot be written to \(.*\); name another place"):
            append(place, record(1))
