"""Whether a feature cache would pay, and which: policies replayed on a trace and priced for a network.

step = max(compute, sample + latency + rows x bytes / bandwidth): batches are prepared while the last one is
computed, so a fetch costs only the time that it exceeds the computation. That part is the stall.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import ArrayLike

from plait.errors import InputError
from plait.features.simulate import POLICIES, STATIC, simulate
from plait.features.trace import Trace, pack

__all__ = ["Advice", "Network", "Point", "advise", "parse_network"]

DEFAULT_POLICIES = ("degree", "presample", "vip", "massivegnn", "lru", "sieve", "lookahead", "belady")
DEFAULT_SHARES = (0.05, 0.1, 0.25, 0.5, 1.0)
# Within this much of the best epoch a smaller cache is as good.
_TOLERANCE = 1.05
_BITS = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


@dataclass(frozen=True)
class Network:
    """The cost of a fetch: a latency, and bytes at a rate."""

    bytes_per_second: float
    latency_seconds: float = 100e-6

    def seconds(self, num_bytes: float) -> float:
        """The time of one request of that size; nothing to fetch takes none."""
        return self.latency_seconds + num_bytes / self.bytes_per_second if num_bytes else 0.0


@dataclass(frozen=True)
class Point:
    """One policy at one capacity, per epoch; `capacity` in rows, `share` of all distinct rows requested."""

    policy: str
    capacity: int
    share: float
    hit_rate: float
    remote_rows: float
    remote_bytes: float
    epoch_seconds: float
    stall_seconds: float


@dataclass(frozen=True)
class Advice:
    """All points, the one without a cache, and the recommended one (None: no cache) with the reason."""

    none: Point
    points: tuple[Point, ...]
    recommended: Point | None
    reason: str
    batches: int
    distinct_rows: int
    row_bytes: int
    compute_seconds: float
    sample_seconds: float

    @property
    def line(self) -> str:
        """The recommendation in one line."""
        if self.recommended is None:
            return f"no cache: {self.reason}"
        best = self.recommended
        return f"policy={best.policy!r}, capacity={best.capacity}: {self.reason}"


def parse_network(text: str) -> Network:
    """A network from text: "1gbit", "25gbit", "100mbit", with a latency as in "10gbit,50us"."""
    match = re.fullmatch(r"\s*([\d.]+)\s*([kmgt])bit(?:/s)?\s*(?:,\s*([\d.]+)\s*(us|ms))?\s*", text.lower())
    if match is None or float(match[1]) <= 0:
        raise InputError(f"network={text!r}: write a rate such as 1gbit or 10gbit,50us")
    rate = float(match[1]) * _BITS[match[2]] / 8
    if match[3] is None:
        return Network(rate)
    return Network(rate, float(match[3]) * (1e-6 if match[4] == "us" else 1e-3))


def advise(
    trace: Iterable[ArrayLike] | Trace,
    row_bytes: int,
    network: Network | str = "1gbit",
    *,
    epochs: int = 1,
    compute_seconds: float = 0.05,
    sample_seconds: float = 0.0,
    shares: Sequence[float] = DEFAULT_SHARES,
    policies: Sequence[str] = DEFAULT_POLICIES,
    scores: Mapping[str, ArrayLike] | None = None,
) -> Advice:
    """What caching would do for a trace of `epochs` epochs of remote rows (one id array per batch).

    compute_seconds and sample_seconds are per batch. Capacities are `shares` of the distinct rows requested.
    `scores` by policy name serve the static rules; without them they are counted from the trace.
    """
    _check(row_bytes, epochs, compute_seconds, sample_seconds, shares, policies)
    packed = pack(trace)
    wire = parse_network(network) if isinstance(network, str) else network
    distinct = int((packed.counts() > 0).sum())
    batches = math.ceil(len(packed) / epochs)
    price = _Price(row_bytes, wire, batches, compute_seconds, sample_seconds, epochs)
    none = price.point(simulate(packed, 0, "none"), 0.0)
    points = tuple(
        price.point(simulate(packed, max(1, round(share * distinct)), name, **_given(name, scores)), share)
        for share in sorted(shares)
        for name in policies
        if distinct
    )
    recommended, reason = _choose(none, points, compute_seconds)
    return Advice(
        none, points, recommended, reason, batches, distinct, row_bytes, compute_seconds, sample_seconds
    )


@dataclass(frozen=True)
class _Price:
    row_bytes: int
    network: Network
    batches: int
    compute_seconds: float
    sample_seconds: float
    epochs: int

    def point(self, outcome: Any, share: float) -> Point:
        rows = outcome.remote_rows / self.epochs
        fetch = self.network.seconds(rows / self.batches * self.row_bytes)
        step = max(self.compute_seconds, self.sample_seconds + fetch)
        return Point(
            outcome.policy,
            outcome.capacity,
            share,
            outcome.hit_rate,
            rows,
            rows * self.row_bytes,
            step * self.batches,
            (step - self.compute_seconds) * self.batches,
        )


def _choose(none: Point, points: Sequence[Point], compute_seconds: float) -> tuple[Point | None, str]:
    """The smallest capacity, then the fastest policy, as good as any (not Belady's: it needs the future)."""
    usable = [p for p in points if p.policy != "belady"]
    if not usable:
        return None, "no remote rows are fetched"
    best = min(p.epoch_seconds for p in usable)
    if none.epoch_seconds <= best * _TOLERANCE:
        hidden = (
            "fetching is hidden behind the computation"
            if none.stall_seconds == 0
            else "no cache fetches less"
        )
        return (
            None,
            f"{hidden}; an epoch takes {none.epoch_seconds:.3g} s without, {best:.3g} s with the best",
        )
    good = [p for p in usable if p.epoch_seconds <= best * _TOLERANCE]
    chosen = min(good, key=lambda p: (p.capacity, p.remote_rows))
    saved = 1 - chosen.epoch_seconds / none.epoch_seconds
    return chosen, (
        f"{chosen.share:.0%} of the requested rows, hit rate {chosen.hit_rate:.0%}, epoch "
        f"{none.epoch_seconds:.3g} -> {chosen.epoch_seconds:.3g} s ({saved:.0%} less), "
        f"stall {chosen.stall_seconds:.3g} s"
    )


def _given(name: str, scores: Mapping[str, ArrayLike] | None) -> dict[str, Any]:
    wanted = "degree" if name == "massivegnn" else name
    has_scores = scores is not None and wanted in scores and (name in STATIC or name == "massivegnn")
    return {"scores": scores[wanted]} if has_scores and scores is not None else {}


def _check(
    row_bytes: int,
    epochs: int,
    compute_seconds: float,
    sample_seconds: float,
    shares: Sequence[float],
    policies: Sequence[str],
) -> None:
    if row_bytes < 1 or epochs < 1:
        raise InputError(f"row_bytes={row_bytes}, epochs={epochs}: both are at least 1")
    if not 0 <= compute_seconds < math.inf or not 0 <= sample_seconds < math.inf:
        raise InputError(
            f"compute_seconds={compute_seconds}, sample_seconds={sample_seconds}: give seconds, 0 or more"
        )
    if not shares or not all(0 < share <= 1 for share in shares):
        raise InputError(f"shares={list(shares)}: give shares of the requested rows, above 0 and up to 1")
    unknown = [name for name in policies if name not in POLICIES or name in ("none", "auto")]
    if unknown:
        raise InputError(
            f"policies: {', '.join(unknown)} cannot be compared; choose from {', '.join(POLICIES)}"
        )
