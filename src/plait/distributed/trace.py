"""Spans of one rank by thread, in the format of chrome://tracing and Perfetto."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from plait.measure.whole import write_whole

__all__ = ["Trace", "merged"]


class Trace:
    """What the threads of one rank did, and when."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._spans: list[tuple[str, int, float, float]] = []
        self._lock = threading.Lock()

    def add(self, name: str, begin: float, end: float) -> None:
        """One span of the calling thread, in seconds of time.perf_counter."""
        with self._lock:
            self._spans.append((name, threading.get_ident(), begin, end))

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Everything inside the block, as one span."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, begin, time.perf_counter())

    def events(self) -> list[dict[str, Any]]:
        """The spans as events, in microseconds since the first; threads numbered as they came."""
        with self._lock:
            spans = list(self._spans)
        first = min((begin for _, _, begin, _ in spans), default=0.0)
        threads = {ident: k for k, ident in enumerate(dict.fromkeys(ident for _, ident, _, _ in spans))}
        named = [{"name": "process_name", "ph": "M", "pid": self.rank, "args": {"name": f"rank {self.rank}"}}]
        return named + [
            {
                "name": name, "ph": "X", "pid": self.rank, "tid": threads[ident],
                "ts": (begin - first) * 1e6, "dur": (end - begin) * 1e6,
            }
            for name, ident, begin, end in spans
        ]  # fmt: skip

    def write(self, path: str | os.PathLike[str]) -> Path:
        """This rank's file, `path` with the rank before its ending."""
        whole = Path(path)
        own = whole.with_name(f"{whole.stem}-{self.rank}{whole.suffix or '.json'}")
        write_whole(own, json.dumps({"traceEvents": self.events()}), "--trace")
        return own


def merged(paths: Sequence[str | os.PathLike[str]]) -> dict[str, Any]:
    """The traces of several ranks as one; each counts its time from its own first span."""
    found = [json.loads(Path(path).read_text(encoding="utf-8"))["traceEvents"] for path in paths]
    return {"traceEvents": [event for events in found for event in events]}
