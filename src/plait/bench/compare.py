"""plait bench compare: what became faster or slower between two runs, beyond what the machine does by itself.

Intervals within a run know nothing of the drift between runs (another clock frequency, another placement of
pages). That drift is taken from the runs themselves: most lanes of two runs are the same code, so the middle
of all ratios is the shift of the machine, and their scatter around it what a ratio must exceed to mean
anything.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from plait.errors import InputError
from plait.measure import Record, Timing, speedup

__all__ = ["CROWDED", "Change", "Comparison", "compare"]

# A smaller change is not reported whatever the intervals say.
_LEAST = math.log(1.05)
# Robust standard deviations of the drift a change must exceed.
_SIGMAS = 3.0
_MAD_TO_SIGMA = 1.4826
# Fewer common lanes than this say nothing about the drift.
_ENOUGH = 8
# Share of the processor others used, above which a median is not compared.
CROWDED = 0.1


@dataclass(frozen=True)
class _Lane:
    """One timed thing of a run."""

    case: Mapping[str, Any]
    seconds: Mapping[str, Any]
    is_crowded: bool

    @property
    def median(self) -> float:
        return float(self.seconds["median_seconds"])

    @property
    def interval(self) -> tuple[float, float]:
        low, high = self.seconds.get("interval_seconds") or (self.median, self.median)
        return float(low), float(high)


@dataclass(frozen=True)
class Change:
    """One lane in both runs: time after / time before, its 95% interval, and what to make of it."""

    case: Mapping[str, Any]
    before_seconds: float
    after_seconds: float
    ratio: float
    low: float
    high: float
    verdict: str

    @property
    def is_changed(self) -> bool:
        """Whether it is faster or slower beyond noise."""
        return self.verdict in ("faster", "slower")


@dataclass(frozen=True)
class Comparison:
    """All lanes two runs have in common; `shift` and `drift` (a factor) are the machine's own."""

    changes: tuple[Change, ...]
    shift: float
    drift: float
    only_before: int
    only_after: int

    def count(self, verdict: str) -> int:
        """How many lanes have that verdict: faster, slower, same or crowded."""
        return sum(change.verdict == verdict for change in self.changes)


def compare(before: Sequence[Record], after: Sequence[Record]) -> Comparison:
    """The lanes of two runs matched by case; InputError when they have none in common."""
    old, new = _lanes(before), _lanes(after)
    common = [key for key in old if key in new]
    if not common:
        raise InputError(
            "A and B have no timed case in common; compare runs of the same suite, device and threads"
        )
    ratios = [math.log(new[key].median / old[key].median) for key in common]
    shift = median(ratios) if len(ratios) >= _ENOUGH else 0.0
    spread = median(abs(ratio - shift) for ratio in ratios) if len(ratios) >= _ENOUGH else 0.0
    drift = _MAD_TO_SIGMA * spread
    changes = [_change(old[key], new[key], shift, drift) for key in common]
    return Comparison(
        tuple(changes), math.exp(shift), math.exp(drift), len(old) - len(common), len(new) - len(common)
    )


def _change(old: _Lane, new: _Lane, shift: float, drift: float) -> Change:
    ratio, low, high = _ratio(old, new)
    return Change(
        new.case,
        old.median,
        new.median,
        ratio,
        low,
        high,
        _verdict(old, new, (ratio, low, high), shift, drift),
    )


def _verdict(old: _Lane, new: _Lane, interval: tuple[float, float, float], shift: float, drift: float) -> str:
    if old.is_crowded or new.is_crowded:
        return "crowded"
    ratio, low, high = (math.log(value) for value in interval)
    spread = sum((lane.interval[1] - lane.interval[0]) / (2.0 * lane.median) for lane in (old, new))
    room = max(_LEAST, _SIGMAS * drift, spread)
    are_apart = old.interval[1] < new.interval[0] or new.interval[1] < old.interval[0]
    if not are_apart or low <= shift <= high:
        return "same"
    # both beyond the machine's own shift, and a change of its own
    if ratio - shift > room and ratio > _LEAST:
        return "slower"
    return "faster" if shift - ratio > room and ratio < -_LEAST else "same"


def _ratio(old: _Lane, new: _Lane) -> tuple[float, float, float]:
    """(ratio, low, high); without the samples the interval is that of the two intervals' ends."""
    if "samples_seconds" in old.seconds and "samples_seconds" in new.seconds:
        return speedup(Timing.from_dict(new.seconds), Timing.from_dict(old.seconds))
    ratio = new.median / old.median
    return ratio, new.interval[0] / old.interval[1], new.interval[1] / old.interval[0]


def _lanes(records: Sequence[Record]) -> dict[str, _Lane]:
    """Every timed lane by its case; a case measured twice in a run counts its measurements."""
    found: dict[str, _Lane] = {}
    seen: Counter[str] = Counter()
    for record in records:
        for lane in _timed(record):
            if not lane.median > 0.0:
                continue
            key = json.dumps({**lane.case, "kind": record.kind}, sort_keys=True, default=str)
            seen[key] += 1
            found[f"{key}#{seen[key]}"] = lane
    return found


def _timed(record: Record) -> Iterator[_Lane]:
    busy: Any = record.result.get("busy_elsewhere")
    # a processor's clock does not see the others
    is_crowded = bool(busy) and float(busy) > CROWDED and record.result.get("clock") != "processor"
    case = {name: value for name, value in record.case.items() if name != "suite"}
    seconds: Any = record.result.get("seconds")
    if isinstance(seconds, Mapping) and "median_seconds" in seconds:
        yield _Lane(case, seconds, is_crowded)
    peers: Any = record.result.get("peers")
    for name, line in peers.items() if isinstance(peers, Mapping) else ():
        # a peer that does what another does carries that one's time
        if line.get("status") == "timed" and "median_seconds" in line:
            yield _Lane({**case, "variant": name}, line, is_crowded)
