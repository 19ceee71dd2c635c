"""plait bench compare: what became faster or slower between two runs, beyond the machine's own drift.

A change is judged against three things. The series's own noise: how far its visits within a run were apart (a
run that visited once: thirds of its samples). The drift of its kind: most series of two runs are the same
code, so the middle of the ratios of similar series (bound by the host or not, of the same direction, of about
the same time) is the machine's shift there, and their scatter around it what happens without a change. And
the number of series: of many, some are far out by chance (Benjamini and Hochberg 1995).
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, stdev
from typing import Any

from plait.errors import InputError
from plait.measure import Record, Timing, speedup

__all__ = ["CROWDED", "Change", "Comparison", "compare"]

# A smaller change is not reported whatever the intervals say: a share, and what a clock or a launch jitters.
_LEAST = math.log(1.05)
_JITTER_SECONDS = {"cpu": 1e-6, "cuda": 5e-6}
# Share of the reported changes that may be none.
_FALSE_SHARE = 0.1
# Degrees of freedom of the noise: few visits know it badly, and drift has heavy tails.
_FREEDOM = 6
_MAD_TO_SIGMA = 1.4826
# Similar series that determine the drift, and the number below which they do not.
_ALIKE = 24
_ENOUGH = 8
_PARTS = 3  # a single visit is split into
# Share of the processor others used, above which a median is not compared.
CROWDED = 0.1
# A GPU operation is the host's when issuing it takes this share of its time.
_HOST_SHARE = 0.7


@dataclass(frozen=True)
class _Line:
    """One timed thing of a run."""

    case: Mapping[str, Any]
    seconds: Mapping[str, Any]
    is_crowded: bool

    @property
    def median(self) -> float:
        return float(self.seconds["median_seconds"])

    @property
    def is_hosts(self) -> bool:
        """Whether the time is that of Python and launches rather than of the GPU."""
        host: Any = self.seconds.get("host_seconds")
        return bool(host) and float(host) >= _HOST_SHARE * self.median

    @property
    def visits(self) -> list[float]:
        """Logarithms of the medians of the visits to it, or of the parts of one; empty without samples."""
        samples: Any = self.seconds.get("samples_seconds") or []
        counts: Any = self.seconds.get("visit_repeats")
        if not counts:
            size = len(samples) // _PARTS
            counts = [size] * _PARTS if size else []
        ends = list(itertools.accumulate(counts))
        parts = [samples[end - count : end] for count, end in zip(counts, ends, strict=True)]
        return [math.log(median(part)) for part in parts if part]

    @property
    def interval(self) -> tuple[float, float]:
        low, high = self.seconds.get("interval_seconds") or (self.median, self.median)
        return float(low), float(high)


@dataclass(frozen=True)
class Change:
    """One series in both runs: time after / time before, its 95% interval, and what to make of it."""

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
    """All series two runs have in common; `shift` and `drift` (a factor) are the machine's own."""

    changes: tuple[Change, ...]
    shift: float
    drift: float
    only_before: int
    only_after: int

    def count(self, verdict: str) -> int:
        """How many series have that verdict: faster, slower, same or crowded."""
        return sum(change.verdict == verdict for change in self.changes)


def compare(before: Sequence[Record], after: Sequence[Record]) -> Comparison:
    """The series of two runs matched by case; InputError when they have none in common."""
    old, new = _lines(before), _lines(after)
    common = [key for key in old if key in new]
    if not common:
        raise InputError(
            "A and B have no timed case in common; compare runs of the same suite, device and threads"
        )
    pairs = [(old[key], new[key]) for key in common]
    drifts = _drifts(pairs)
    doubts = [_doubt(a, b, drift) for (a, b), drift in zip(pairs, drifts, strict=True)]
    judged = [
        doubt for (a, b), doubt in zip(pairs, doubts, strict=True) if not (a.is_crowded or b.is_crowded)
    ]
    most = _most_doubt(judged)
    changes = [
        _change(a, b, drift, doubt <= most)
        for (a, b), drift, doubt in zip(pairs, drifts, doubts, strict=True)
    ]
    whole = _drift([math.log(b.median / a.median) for a, b in pairs])
    return Comparison(
        tuple(changes),
        math.exp(whole.shift),
        math.exp(whole.scatter),
        len(old) - len(common),
        len(new) - len(common),
    )


@dataclass(frozen=True)
class _Drift:
    """What happens to similar series without a change, in logarithms."""

    shift: float
    scatter: float


def _drift(ratios: Sequence[float]) -> _Drift:
    if len(ratios) < _ENOUGH:
        return _Drift(0.0, 0.0)
    shift = median(ratios)
    return _Drift(shift, _MAD_TO_SIGMA * median(abs(ratio - shift) for ratio in ratios))


def _drifts(pairs: Sequence[tuple[_Line, _Line]]) -> list[_Drift]:
    """For every pair the drift of similar ones: the nearest in time of its class, or all if there are few."""
    ratios = [math.log(b.median / a.median) for a, b in pairs]
    sizes = [math.log(a.median) for a, _ in pairs]
    classes = [(a.is_hosts or b.is_hosts, str(a.case.get("direction"))) for a, b in pairs]
    whole, found = _drift(ratios), []
    for k, own in enumerate(classes):
        alike = [j for j, other in enumerate(classes) if other == own]
        if len(alike) < _ENOUGH:
            alike = [j for j, other in enumerate(classes) if other[0] == own[0]]
        alike = sorted(alike, key=lambda j: abs(sizes[j] - sizes[k]))[:_ALIKE]
        found.append(_drift([ratios[j] for j in alike]) if len(alike) >= _ENOUGH else whole)
    return found


def _doubt(old: _Line, new: _Line, drift: _Drift) -> float:
    """The chance of a ratio this far from the drift without a change, by Student's distribution."""
    away = abs(math.log(new.median / old.median) - drift.shift)
    # the scatter of similar series has the noise of a usual series in it
    noise = max(drift.scatter, math.hypot(_own_noise(old), _own_noise(new)))
    return _student_tails(away / noise) if noise > 0.0 else float(away == 0.0)


def _own_noise(line: _Line) -> float:
    """Standard error of a series's time by its visits, or by its interval where it kept no samples."""
    visits = line.visits
    if len(visits) < 2:
        low, high = line.interval
        return (high - low) / (3.92 * line.median)
    return stdev(visits) / math.sqrt(len(visits))


def _student_tails(t: float) -> float:
    """Both tails of Student's t with _FREEDOM (even) degrees of freedom beyond t, as a finite sum."""
    cosine = 1.0 / math.sqrt(1.0 + t * t / _FREEDOM)
    term = total = 1.0
    for k in range(1, _FREEDOM // 2):
        term *= (2 * k - 1) / (2 * k) * cosine * cosine
        total += term
    return max(0.0, 1.0 - t / math.sqrt(_FREEDOM + t * t) * total)


def _most_doubt(doubts: Sequence[float]) -> float:
    """The largest doubt of those to report, so that at most _FALSE_SHARE of them are false."""
    limit = -1.0
    for rank, doubt in enumerate(sorted(doubts), start=1):
        if doubt <= _FALSE_SHARE * rank / len(doubts):
            limit = doubt
    return limit


def _change(old: _Line, new: _Line, drift: _Drift, is_beyond: bool) -> Change:
    ratio, low, high = _ratio(old, new)
    verdict = _verdict(old, new, math.log(ratio), drift, is_beyond)
    return Change(new.case, old.median, new.median, ratio, low, high, verdict)


def _verdict(old: _Line, new: _Line, ratio: float, drift: _Drift, is_beyond: bool) -> str:
    if old.is_crowded or new.is_crowded:
        return "crowded"
    jitter = _JITTER_SECONDS.get(str(new.case.get("device")), 0.0)
    least = max(_LEAST, math.log1p(jitter / min(old.median, new.median)))
    # both beyond the machine's own shift, and a change of its own
    if not is_beyond or abs(ratio) <= least or abs(ratio - drift.shift) <= least:
        return "same"
    return "slower" if ratio > 0 else "faster"


def _ratio(old: _Line, new: _Line) -> tuple[float, float, float]:
    """(ratio, low, high); without the samples the interval is that of the two intervals' ends."""
    if "samples_seconds" in old.seconds and "samples_seconds" in new.seconds:
        return speedup(Timing.from_dict(new.seconds), Timing.from_dict(old.seconds))
    ratio = new.median / old.median
    return ratio, new.interval[0] / old.interval[1], new.interval[1] / old.interval[0]


def _lines(records: Sequence[Record]) -> dict[str, _Line]:
    """Every timed series by its case; a case measured twice in a run counts its measurements."""
    found: dict[str, _Line] = {}
    seen: Counter[str] = Counter()
    for record in records:
        for line in _timed(record):
            if not line.median > 0.0:
                continue
            key = json.dumps({**line.case, "kind": record.kind}, sort_keys=True, default=str)
            seen[key] += 1
            found[f"{key}#{seen[key]}"] = line
    return found


def _timed(record: Record) -> Iterator[_Line]:
    busy: Any = record.result.get("busy_elsewhere")
    # a processor's clock does not see the others
    is_crowded = bool(busy) and float(busy) > CROWDED and record.result.get("clock") != "processor"
    case = {name: value for name, value in record.case.items() if name != "suite"}
    seconds: Any = record.result.get("seconds")
    if isinstance(seconds, Mapping) and "median_seconds" in seconds:
        yield _Line(case, {**seconds, "host_seconds": record.result.get("host_seconds")}, is_crowded)
    peers: Any = record.result.get("peers")
    for name, line in peers.items() if isinstance(peers, Mapping) else ():
        # a peer that does what another does carries that one's time
        if line.get("status") == "timed" and "median_seconds" in line:
            yield _Line({**case, "variant": name}, line, is_crowded)
