"""plait bench batches: sampling, loading, planned batches, the feature cache and what they leave behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from plait.bench.batches.caching import advisor, lookup, simulation, throttled
from plait.bench.batches.leak import leaks
from plait.bench.batches.part import KIND, Bar, Options, Part, recorded
from plait.bench.batches.sampling import loading, sampling
from plait.bench.batches.training import gathering, training
from plait.measure import Record, append

__all__ = ["KIND", "PARTS", "Bar", "Options", "run"]

PARTS: dict[str, Part] = {
    "sampling": sampling,
    "loading": loading,
    "training": training,
    "gathering": gathering,
    "simulation": simulation,
    "lookup": lookup,
    "throttled": throttled,
    "advisor": advisor,
    "leak": leaks,
}


def run(
    parts: Sequence[str], options: Options, output: Path | None, watch: Callable[[Record], None]
) -> list[Record]:
    """A record for everything these parts measure, handed to `watch` and appended to the file as taken."""
    found: list[Record] = []
    for record in _all(parts, options):
        if output is not None:
            append(output, record)
        found.append(record)
        watch(record)
    return found


def _all(parts: Sequence[str], options: Options) -> Iterator[Record]:
    for name in parts:
        yield from recorded(name, PARTS[name], options)
