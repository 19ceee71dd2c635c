"""report/table: alignment, the width limit, and numbers with units."""

from __future__ import annotations

import math

import pytest

from plait.report.table import Table, amount, bytes_text, count_text, ratio_text, seconds_text


def test_text_is_left_and_numbers_are_right() -> None:
    table = Table(["name", "ms"])
    table.add("a", "1.5")
    table.add("longer", "100")
    assert str(table).splitlines() == ["name     ms", "------  ---", "a       1.5", "longer  100"]


def test_align_decides_over_the_cells() -> None:
    table = Table(["what", "found"], align="ll")
    table.add("version", "1.2.3")
    assert str(table).splitlines()[-1] == "version  1.2.3"


def test_no_line_is_wider_than_the_table() -> None:
    table = Table(["a", "b", "c"], width=40)
    table.add("x" * 50, "y" * 30, "z")
    assert all(len(line) <= 40 for line in str(table).splitlines())
    assert "…" in str(table)


def test_missing_cells_are_empty_and_rules_cross() -> None:
    table = Table(["a", "b"], title="title")
    table.add("x")
    table.rule()
    table.add(None, 3)
    lines = str(table).splitlines()
    assert lines[0] == "title"
    assert lines[3] == "x"
    assert set(lines[4]) == {"-", " "}
    assert lines[5].strip() == "3"


def test_a_table_without_rows_is_its_header() -> None:
    assert str(Table(["a", "b"])).splitlines() == ["a  b", "-  -"]


def test_too_many_cells_are_refused() -> None:
    with pytest.raises(ValueError, match="3 cells under 2 columns"):
        Table(["a", "b"]).add(1, 2, 3)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0000412, "0.041 ms"),
        (0.000412, "0.41 ms"),
        (0.03524, "35.2 ms"),
        (0.3524, "352 ms"),
        (2.314, "2.31 s"),
        (math.inf, "-"),
    ],
)
def test_seconds_have_three_digits_and_a_unit(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


def test_sizes_rates_and_ratios_have_units() -> None:
    assert bytes_text(12_400_000) == "12.4 MB"
    assert bytes_text(1.25e9) == "1.25 GB"
    assert bytes_text(4.52e12) == "4.52 TB"
    assert amount(2.41e9, "FLOP/s") == "2.41 GFLOP/s"
    assert amount(12.0, "B/s") == "12.0 B/s"
    assert amount(math.nan, "B/s") == "- B/s"
    assert ratio_text(1.254) == "1.25x"
    assert ratio_text(math.nan) == "-"


def test_one_thing_is_named_in_the_singular() -> None:
    assert [count_text(count, "rank") for count in (0, 1, 1500)] == ["0 ranks", "1 rank", "1,500 ranks"]
    assert count_text(2, "batch", "batches") == "2 batches"
