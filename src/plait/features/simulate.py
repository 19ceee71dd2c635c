"""Replays a trace against a cache of a given size: how many rows would have been fetched from far away."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from plait.errors import InputError
from plait.features.policies import LookAhead, MassiveGNN, NoCache, Policy, Recency, Static
from plait.features.trace import Trace, pack

__all__ = ["POLICIES", "Outcome", "make_policy", "policy_name", "simulate"]

Array = NDArray[Any]

STATIC = ("degree", "presample", "vip")
POLICIES = (
    "none",
    "random",
    *STATIC,
    "massivegnn",
    "lru",
    "lfu",
    "clock",
    "sieve",
    "s3fifo",
    "lookahead",
    "belady",
    "auto",
)

# How far look-ahead sees by default: batches that ask for 32 times the capacity, at least 32. Measured on
# three real graphs in 4 parts, batches of 32 to 1000: at 8 times the capacity it fetches up to 4% more than
# Belady.
WINDOW_ROWS = 32
WINDOW_BATCHES = 32

# What `auto` tries, the first of equals winning: on a short prefix nothing is evicted yet and all are equal.
_CANDIDATES = ("lookahead", "presample", "sieve", "s3fifo", "lfu", "lru")

_PARAMS = {
    "random": {"seed"},
    "massivegnn": {"gamma", "delta", "rounded", "halo"},
    "s3fifo": {"small"},
    "lookahead": {"window"},
    "auto": {"window"},
}


@dataclass(frozen=True)
class Outcome:
    """What a replay counted, in rows. `policy` is the one that ran: the chosen one for auto.

    remote_rows are all rows fetched from the slow source: those a batch missed and those fetched ahead of
    need (`prefetched`, part of MassiveGNN's rule only).
    """

    policy: str
    capacity: int
    requests: int
    hits: int
    remote_rows: int
    evictions: int
    prefetched: int = 0

    @property
    def hit_rate(self) -> float:
        """Hits per request; 0 when there were none."""
        return self.hits / self.requests if self.requests else 0.0


def simulate(
    trace: Iterable[ArrayLike] | Trace,
    capacity: int,
    policy: str,
    *,
    scores: ArrayLike | None = None,
    **params: Any,
) -> Outcome:
    """The outcome of replaying `trace` (one array of row ids per batch) with room for `capacity` rows.

    A batch is looked up as a whole; its rows are available whether or not they are kept. The cache starts
    empty, so every row costs at least one fetch. `scores` (one number per id, larger is hotter, 0 for rows
    never to be chosen) serve degree, presample, vip and massivegnn; without them they are counted from the
    first tenth of the trace. Parameters: random(seed), massivegnn(gamma, delta, rounded, halo),
    s3fifo(small), lookahead(window: batches known beyond the current one; by default enough to ask for 32
    times the capacity), auto(window; 0 when the future is not known).
    """
    packed = pack(trace)
    name = _checked(policy, capacity, params)
    hot = _scores(packed, scores)
    if name == "auto":
        name = _advise(packed, capacity, hot, params)
        params = params if name == "lookahead" else {}
    return _replay(packed, capacity, name, hot, params)


def make_policy(
    name: str, capacity: int, num_ids: int, scores: ArrayLike | None = None, **params: Any
) -> Policy:
    """The rule of that name for ids below num_ids; static rules and massivegnn need scores."""
    name = _checked(name, capacity, params)
    if name == "none":
        return NoCache(num_ids)
    if name == "random":
        rng = np.random.default_rng(params.get("seed", 0))
        return Static(capacity, num_ids, rng.random(num_ids) + 1)
    if name in Recency.RULES:
        return Recency(capacity, num_ids, name, **params)
    if name == "lookahead":
        return LookAhead(capacity, num_ids, params.get("window", WINDOW_BATCHES))
    if name in ("auto", "belady"):
        raise InputError(f"policy={name!r} needs the whole trace; use simulate, or make 'lookahead'")
    if scores is None:
        raise InputError(
            f"policy={name!r} needs scores: degrees, presampled counts or inclusion probabilities"
        )
    hot = np.zeros(num_ids)
    given = np.asarray(scores)[:num_ids]
    hot[: given.size] = given
    return (
        MassiveGNN(capacity, num_ids, hot, **params)
        if name == "massivegnn"
        else Static(capacity, num_ids, hot)
    )


def _replay(trace: Trace, capacity: int, name: str, scores: Array, params: dict[str, Any]) -> Outcome:
    """Steps the rule through the trace; belady is look-ahead that knows all of it."""
    window = len(trace) if name == "belady" else min(_window(trace, capacity, params), len(trace))
    if name in ("lookahead", "belady"):
        rule: Policy = LookAhead(capacity, trace.num_ids, window)
    else:
        rule = make_policy(name, capacity, trace.num_ids, scores, **params)
    prefetched = rule.prefill().size
    hits = evictions = 0
    for b in range(len(trace)):
        if isinstance(rule, LookAhead):
            for ahead in range(b + rule.known, min(b + window + 1, len(trace))):
                rule.reveal(trace.batch(ahead))
        step = rule.step(trace.batch(b))
        hits += step.hits
        evictions += step.evicted
        prefetched += step.extra.size
    remote = trace.requests - hits + prefetched
    return Outcome(name, capacity, trace.requests, hits, remote, evictions, prefetched)


def _advise(trace: Trace, capacity: int, scores: Array, params: dict[str, Any]) -> str:
    """The candidate that fetches least on the first quarter of the trace."""
    prefix = trace.first(min(len(trace), max(8, len(trace) // 4)))
    names = [n for n in _CANDIDATES if n != "lookahead" or params.get("window") != 0]
    rows = {
        n: _replay(prefix, capacity, n, scores, params if n == "lookahead" else {}).remote_rows for n in names
    }
    return min(names, key=lambda n: rows[n])


def _window(trace: Trace, capacity: int, params: dict[str, Any]) -> int:
    """The batches look-ahead sees: as given, else by the capacity and the size of a batch."""
    given = params.get("window")
    if given is not None:
        if isinstance(given, bool) or not isinstance(given, int | np.integer) or given < 0:
            raise InputError(f"window={given!r}: give the number of batches known ahead, 0 or more")
        return int(given)
    rows_per_batch = max(1, trace.requests // len(trace))
    return max(WINDOW_BATCHES, WINDOW_ROWS * capacity // rows_per_batch)


def _scores(trace: Trace, scores: ArrayLike | None) -> Array:
    if scores is not None:
        return trace.by_row(scores)
    return trace.first(max(1, len(trace) // 10)).counts().astype(np.float64)


def policy_name(policy: str) -> str:
    """The policy's name as POLICIES has it; InputError where it is none of them."""
    name = str(policy).lower().replace("-", "").replace("_", "").replace(" ", "")
    if name not in POLICIES:
        raise InputError(f"policy={policy!r} is unknown; choose one of {', '.join(POLICIES)}")
    return name


def _checked(policy: str, capacity: int, params: dict[str, Any]) -> str:
    name = policy_name(policy)
    if isinstance(capacity, bool) or not isinstance(capacity, int | np.integer) or capacity < 0:
        raise InputError(f"capacity={capacity!r}: give a whole number of rows")
    if capacity == 0 and name != "none":
        raise InputError("capacity=0: a cache holds at least one row; use policy='none' to see no cache")
    unknown = set(params) - _PARAMS.get(name, set())
    if unknown:
        known = ", ".join(sorted(_PARAMS.get(name, set()))) or "none"
        raise InputError(f"{', '.join(sorted(unknown))}: no parameter of policy {name!r}, which has: {known}")
    return name
