"""report/loops.py: a table for each number of threads, the mean and the worst loop below it."""

from __future__ import annotations

from plait.measure import Record
from plait.report.loops import loop_line, loops_text


def record(loop: str, pyg: float, own: float, threads: int = 1) -> Record:
    peers = {
        name: {"status": "ok", "median_seconds": seconds} for name, seconds in (("pyg", pyg), ("plait", own))
    }
    ratio = pyg / own
    result = {"peers": peers, "ratio": ratio, "ratio_low": 0.9 * ratio, "ratio_high": 1.1 * ratio}
    return Record("bench-loops", {"loop": loop, "threads": threads}, result, {})


def test_the_line_of_a_loop_has_its_times_and_the_interval() -> None:
    line = loop_line(record("new weights", 4e-3, 2e-3))
    assert line.startswith("new weights, threads 1: ")
    assert "pyg 4" in line
    assert "plait 2" in line
    assert "(1.80 to 2.20)" in line


def test_the_worst_loop_and_the_slower_ones_are_named() -> None:
    text = loops_text([record("good", 4e-3, 1e-3), record("bad", 1e-3, 2e-3), record("two", 2e-3, 1e-3, 2)])
    assert "worst: bad" in text
    assert "1 of 2 loops slower than PyG" in text
    assert "0 of 1 loops slower than PyG" in text
    assert "2 threads" in text


def test_no_records_are_said_to_be_none() -> None:
    assert loops_text([]) == "no loops measured"
