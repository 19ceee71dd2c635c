"""distributed/trace.py: spans as events that chrome://tracing reads."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from plait.distributed.trace import Trace, merged
from plait.errors import InputError


def test_spans_are_events_in_microseconds_since_the_first() -> None:
    trace = Trace(3)
    trace.add("stall", 10.0, 10.5)
    trace.add("compute", 10.5, 12.0)
    name, first, second = trace.events()
    assert name["args"] == {"name": "rank 3"}
    assert (first["name"], first["ts"], first["dur"]) == ("stall", 0.0, 0.5e6)
    assert (second["name"], second["ts"], second["dur"]) == ("compute", 0.5e6, 1.5e6)
    assert {first["pid"], second["pid"]} == {3}
    assert first["tid"] == second["tid"] == 0


def test_threads_have_lanes_of_their_own_and_a_span_ends_with_its_error() -> None:
    trace = Trace(0)
    with pytest.raises(ValueError, match="lost"), trace.span("exchange"):
        raise ValueError("lost")
    other = threading.Thread(target=lambda: trace.add("sampling", 0.0, 1.0))
    other.start()
    other.join()
    assert [(e["name"], e["tid"]) for e in trace.events()[1:]] == [("exchange", 0), ("sampling", 1)]


def test_files_of_ranks_are_merged(tmp_path: Path) -> None:
    paths = []
    for rank in range(2):
        trace = Trace(rank)
        trace.add("compute", 0.0, 1.0)
        paths.append(trace.write(tmp_path / "run.json"))
    assert [path.name for path in paths] == ["run-0.json", "run-1.json"]
    assert {event["pid"] for event in merged(paths)["traceEvents"]} == {0, 1}
    with pytest.raises(InputError, match="--trace"):
        trace.write(tmp_path / "missing" / "run.json")


def test_without_spans_a_trace_is_empty() -> None:
    assert len(Trace(0).events()) == 1
