"""Why a strategy wins, and where it would lose: at which bandwidth, number of workers or width."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from plait.analysis.network import Network
from plait.analysis.strategies import Cluster, Strategy, price
from plait.analysis.workload import Workload

__all__ = ["TIE", "Advice", "BreakEven", "advise", "bandwidth_at_par", "tied"]

_MOST_WORKERS = 1024
_WIDTHS = (2.0, 4.0, 8.0, 16.0)
TIE = 0.1
"""Strategies whose prices differ by less than this share were measured in either order."""


@dataclass(frozen=True)
class BreakEven:
    """Where the winner stops winning: "below 1.2e8 bytes per second one worker is faster"."""

    what: str  # bandwidth, workers or width
    side: str  # "below" or "from" (for workers and width: at that value)
    value: float
    instead: str

    def to_dict(self) -> dict[str, Any]:
        """The limit as plain data."""
        return {"what": self.what, "side": self.side, "value": self.value, "instead": self.instead}


@dataclass(frozen=True)
class Advice:
    """The winner, the reason, and its limits."""

    winner: str
    because: str
    break_even: tuple[BreakEven, ...]
    tied: tuple[str, ...] = ()  # too close to the winner to tell which is faster

    def to_dict(self) -> dict[str, Any]:
        """The advice as plain data."""
        found = [limit.to_dict() for limit in self.break_even]
        return {
            "winner": self.winner,
            "because": self.because,
            "break_even": found,
            "tied": list(self.tied),
        }


def advise(
    work: Workload, cluster: Cluster, strategies: Sequence[Strategy], memory: float,
    cluster_of: Callable[[int], Cluster],
) -> Advice:  # fmt: skip
    """The fastest strategy that computes the same numbers and fits, and where another one takes over.

    Sampling and stale rows, which change the training, are advised only where nothing else fits.
    """
    candidates = _contenders(strategies, memory)
    best = candidates[0]
    limits = [
        _bandwidth(best, candidates, cluster.network),
        *_workers(best, work, cluster, memory, cluster_of),
        *_widths(best, work, cluster, memory),
    ]
    found = tuple(limit for limit in limits if limit is not None)
    because = _because(best, candidates, strategies, memory)
    return Advice(best.name, because, found, tied(best, candidates))


def tied(best: Strategy, others: Sequence[Strategy]) -> tuple[str, ...]:
    """The strategies whose price is too close to the best one's to tell which is faster."""
    limit = best.seconds_per_epoch * (1 + TIE)
    return tuple(s.name for s in others if s is not best and s.seconds_per_epoch <= limit)


def _contenders(strategies: Sequence[Strategy], memory: float) -> list[Strategy]:
    """The candidates for the advice: same numbers and fitting; else fitting; else same numbers."""
    fit = [s for s in strategies if s.memory_per_worker <= memory]
    return _same(fit) or fit or _same(strategies)


def _same(strategies: Sequence[Strategy]) -> list[Strategy]:
    return [strategy for strategy in strategies if strategy.same_numbers]


def _because(
    best: Strategy, candidates: Sequence[Strategy], everyone: Sequence[Strategy], memory: float
) -> str:
    parts = []
    if len(candidates) > 1:
        rival = candidates[1]
        ratio = rival.seconds_per_epoch / max(best.seconds_per_epoch, 1e-300)
        parts.append(
            f"{_seconds(best.seconds_per_epoch)} per epoch, {_compared(ratio)} {rival.name}: "
            f"{_seconds(best.compute_seconds)} of computing and "
            f"{_seconds(best.communication_seconds)} on the network, against "
            f"{_seconds(rival.compute_seconds)} and {_seconds(rival.communication_seconds)}"
        )
    alone = next((s for s in everyone if s.workers == 1), None)
    if alone is not None and best is not alone:
        gain = alone.seconds_per_epoch / max(best.seconds_per_epoch, 1e-300)
        parts.append(f"{_compared(gain)} one worker")
    if alone is not None and alone.memory_per_worker > memory:
        parts.append(f"one worker would need {alone.memory_per_worker / 1e9:.1f} GB")
    own = next((s for s in candidates if s.run_by), None)
    if best.run_by:
        parts.append(f"{best.run_by} runs it")
    elif own is not None:
        fastest = f"{own.name}, {_seconds(own.seconds_per_epoch)} ({own.run_by})"
        parts.append(f"plait cannot run it: the fastest strategy it runs is {fastest}")
    if not best.same_numbers:
        parts.append("it does not compute what one worker computes, but no other strategy fits in memory")
    if best.memory_per_worker > memory:
        parts.append(
            f"no strategy fits in {memory / 1e9:.1f} GB per worker; this one needs "
            f"{best.memory_per_worker / 1e9:.1f}"
        )
    return "; ".join(parts) or "there is nothing else to choose"


def _compared(ratio: float) -> str:
    """How a strategy compares with one that takes `ratio` times as long."""
    if 0.995 <= ratio < 1.005:
        return "as fast as"
    return f"{ratio:.2f} x as fast as" if ratio > 1 else f"{1 / ratio:.2f} x slower than"


def _seconds(seconds: float) -> str:
    if seconds >= 999.5:
        return f"{seconds:,.0f} s"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def bandwidth_at_par(one: Strategy, other: Strategy, network: Network) -> float | None:
    """Bytes per second at which two strategies take equally long; None where one always wins."""
    more = one.traffic.busiest - other.traffic.busiest
    less = other.compute_seconds - one.compute_seconds
    less += (other.traffic.messages - one.traffic.messages) * network.latency
    less += (other.traffic.meetings - one.traffic.meetings) * network.meeting
    if more == 0 or less == 0 or (more > 0) != (less > 0):
        return None
    return more / less


def _bandwidth(best: Strategy, candidates: Sequence[Strategy], network: Network) -> BreakEven | None:
    """The nearest bandwidth at which another strategy takes over."""
    found = []
    for other in candidates[1:]:
        value = bandwidth_at_par(best, other, network)
        if value is not None:
            side = "below" if value < network.bytes_per_s else "from"
            found.append(BreakEven("bandwidth", side, value, other.name))
    return min(found, key=lambda b: abs(math.log(b.value / network.bytes_per_s)), default=None)


def _winner(work: Workload, cluster: Cluster, memory: float) -> Strategy:
    return _contenders(price(work, cluster), memory)[0]


def _is_too_large(winner: Strategy, best: Strategy, memory: float) -> bool:
    """Whether nothing fits any more: then no strategy counts as the best."""
    return best.memory_per_worker <= memory < winner.memory_per_worker


def _workers(
    best: Strategy, work: Workload, cluster: Cluster, memory: float, cluster_of: Callable[[int], Cluster]
) -> list[BreakEven]:
    """The nearest smaller and larger numbers of workers (halves and doubles) where another strategy wins."""
    found = []
    for step in (0.5, 2.0):
        count = cluster.workers * step
        while 2 <= count <= min(_MOST_WORKERS, work.nodes):
            winner = _winner(work, cluster_of(int(count)), memory)
            if _is_too_large(winner, best, memory):
                break
            if winner.name != best.name:
                side = "below" if step < 1 else "from"
                found.append(BreakEven("workers", side, float(int(count)), winner.name))
                break
            count *= step
    return found


def _widths(best: Strategy, work: Workload, cluster: Cluster, memory: float) -> list[BreakEven]:
    """The nearest factors on all widths where another strategy wins.

    Plans of ranks are those of one width: others are estimated, if estimates have the same winner here.
    """
    found: list[BreakEven] = []
    cluster = replace(cluster, shards={})
    if _winner(work, cluster, memory).name != best.name:
        return found
    for factors in (tuple(1 / f for f in _WIDTHS), _WIDTHS):
        for factor in factors:
            winner = _winner(work.widened(factor), cluster, memory)
            if _is_too_large(winner, best, memory):
                break
            if winner.name != best.name:
                side = "below" if factor < 1 else "from"
                found.append(BreakEven("width", side, factor, winner.name))
                break
    return found
