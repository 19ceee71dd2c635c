"""Where the time of an epoch goes on every rank: a trace of it, and what the analysis predicts beside it."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from plait.analysis.analysis import Options, analyse
from plait.analysis.models import layers_by_name
from plait.analysis.network import Network
from plait.analysis.statistics import Statistics
from plait.errors import InputError
from plait.kernels import launch
from plait.runtime.machine import machine_in_use

__all__ = ["Prediction", "Trace", "merged", "predicted"]

MINI_BATCH = "mini-batch, dependent"


class Trace:
    """Spans of one rank by thread, in the format of chrome://tracing and Perfetto.

    Without a trace being asked for nothing is kept: `span` of None is free of locks and lists.
    """

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
        """The spans as events of the format, in microseconds since the first; threads numbered as they came."""
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
        try:
            own.write_text(json.dumps({"traceEvents": self.events()}), encoding="utf-8")
        except OSError as error:
            raise InputError(f"--trace: cannot write {own} ({error.strerror})") from None
        return own


def merged(paths: Sequence[str | os.PathLike[str]]) -> dict[str, Any]:
    """The traces of several ranks as one; each counts its time from its own first span."""
    found = [json.loads(Path(path).read_text(encoding="utf-8"))["traceEvents"] for path in paths]
    return {"traceEvents": [event for events in found for event in events]}


@dataclass(frozen=True)
class Prediction:
    """What the analysis says of one epoch: seconds of the slowest rank, bytes of all, nothing kept in a cache."""

    seconds: float
    bytes_of_rows: float

    def beside(self, seconds: float, size: float) -> str:
        """The prediction and how the measured compares, in a few words."""
        return (
            f"predicted {self.seconds:.2f} s ({self.seconds / max(seconds, 1e-9):.2f} of measured), rows "
            f"without a cache {self.bytes_of_rows / 1e6:.1f} MB ({size / max(self.bytes_of_rows, 1.0):.2f} sent)"
        )


def predicted(
    session: Any, loader: Any, model: str, widths: Sequence[int], network: Network, seeds: Any
) -> Prediction:
    """An epoch of mini-batches over the session's parts, as plait analyze prices it."""
    statistics, machine = Statistics.of(session.graph), machine_in_use()
    threads = launch.num_threads()
    layers = layers_by_name(model, tuple(widths), statistics, machine, threads=threads)
    owner = np.repeat(np.arange(session.size), np.diff(session.bounds))
    options = Options(
        workers=(session.size,),
        network=network,
        partitions={session.size: owner} if session.size > 1 else {},
        batch_size=loader.batch_size * len(session.owned),
        fanouts=tuple(loader.fanouts),
        seeds=np.asarray(seeds, np.int64),
        train_share=len(seeds) / max(1, statistics.nodes),
        threads=threads,
    )
    found = analyse(model, layers, statistics, machine, options)
    name = MINI_BATCH if session.size > 1 else "one worker"
    strategy = next(s for s in found.strategies if s.name == name)
    return Prediction(strategy.seconds_per_epoch, sum(t.total for t in strategy.traffic_per_layer))
