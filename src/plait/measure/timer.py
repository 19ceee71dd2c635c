"""Times several variants of the same work side by side, until the medians are known well enough."""

from __future__ import annotations

import gc
import math
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from plait.errors import InputError
from plait.measure.pace import Pace

__all__ = ["Clock", "Timing", "processor_clock", "speedup", "time_calls", "wall_clock"]

Call = Callable[[], object]
# Seconds that `count` calls in a row take. On a GPU this is where events and a synchronisation go.
Clock = Callable[[Call, int], float]

_RESAMPLES = 1000
_CONFIDENCE = 0.95
# A variant this many times slower than the fastest needs no third digit: it gets one warm-up call and few
# samples, so that the time goes to the close calls (PyG's max on a 2.7 M-edge graph takes 10 s per step).
_SLOW_RATIO = 8.0
_SLOW_REPEATS = 3
_PATIENCE = 3.0


@dataclass(frozen=True)
class Timing:
    """What the clock saw of one variant: seconds per call, one sample per round."""

    samples: tuple[float, ...]
    warmup: int
    calls_per_sample: int = 1
    interval: tuple[float, float] = field(init=False)

    def __post_init__(self) -> None:
        if not self.samples:
            raise InputError("samples is empty; a timing needs at least one")
        object.__setattr__(self, "interval", _median_interval(np.asarray(self.samples)))

    @property
    def repeats(self) -> int:
        """Number of samples."""
        return len(self.samples)

    @property
    def median(self) -> float:
        """The middle sample, seconds per call."""
        return float(np.median(self.samples))

    @property
    def p20(self) -> float:
        """The sample a fifth of all stay below."""
        return float(np.quantile(self.samples, 0.2))

    @property
    def p80(self) -> float:
        """The sample a fifth of all exceed."""
        return float(np.quantile(self.samples, 0.8))

    def to_dict(self) -> dict[str, object]:
        """Plain numbers for a record; `Timing.from_dict` reads them back."""
        return {
            "median_seconds": self.median,
            "p20_seconds": self.p20,
            "p80_seconds": self.p80,
            "interval_seconds": list(self.interval),
            "repeats": self.repeats,
            "warmup": self.warmup,
            "calls_per_sample": self.calls_per_sample,
            "samples_seconds": list(self.samples),
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, object]) -> Timing:
        """The timing that `to_dict` wrote."""
        samples, warmup, calls = (fields.get(k) for k in ("samples_seconds", "warmup", "calls_per_sample"))
        if not isinstance(samples, list) or not isinstance(warmup, int) or not isinstance(calls, int):
            raise InputError("fields: a timing needs samples_seconds, warmup and calls_per_sample")
        return cls(tuple(float(s) for s in samples), warmup, calls)


def wall_clock(call: Call, count: int) -> float:
    """Seconds of `count` calls in a row by the steady clock of the processor."""
    start = time.perf_counter()
    for _ in range(count):
        call()
    return time.perf_counter() - start


def processor_clock(call: Call, count: int) -> float:
    """Processor seconds of `count` calls in a row, waits left out.

    For one thread on a machine that is not quiet: time taken by others does not count, though what they do
    to caches and memory does. With several threads it adds up their times.
    """
    start = time.process_time()
    for _ in range(count):
        call()
    return time.process_time() - start


def time_calls(
    variants: Mapping[str, Call],
    *,
    warmup: int = 3,
    repeats: int | None = None,
    budget_seconds: float = 10.0,
    min_repeats: int = 5,
    max_repeats: int = 200,
    target_spread: float = 0.02,
    min_sample_seconds: float = 0.002,
    before: Call | Mapping[str, Call] | None = None,
    is_settled: bool = False,
    pace: Pace | None = None,
    clock: Clock = wall_clock,
) -> dict[str, Timing]:
    """The timing of every variant, taken in interleaved rounds so that a slow spell of the machine hits all.

    A round takes one sample of each variant, in a new random order: which variant runs after which matters
    (the same product took 12% longer always behind another's). A sample is as many
    calls in a row as fill `min_sample_seconds`: a 50 µs call is timed warm, as a training loop runs it,
    and above the noise of the clock. Rounds go on until the 95% interval of every variant's median reaches
    less than `target_spread` of it to either side, but at least `min_repeats` and at most until
    `budget_seconds` (over all variants) or `max_repeats` are used up; `repeats` fixes the number instead.
    Variants stop together: one that stopped early would be compared with times of another hour. Only a
    variant over 8 times slower than the fastest stops after 3 samples, and its time is not taken from the
    budget of the close ones.

    `before` runs ahead of every sample, off the clock (flushing a cache, say), or ahead of those of the
    variants it names. `is_settled` makes an untimed call of the same variant ahead of each of its samples: in
    a training loop the step before is one's own, not another's that filled the caches with its data (the
    first call behind another took 12-20% longer than those after it); the slow ones are spared. A round in
    which the machine fell behind its `pace` is taken again, the slow variants' samples apart, while there is
    patience left. `clock` measures a sample.
    """
    _check(variants, warmup, repeats, min_repeats, budget_seconds)
    rounds = max(min_repeats, 1) if repeats is None else repeats
    limit = max_repeats if repeats is None else repeats
    collects = gc.isenabled()
    gc.disable()
    try:
        lanes = _warm_up(variants, warmup, min_sample_seconds, rounds, clock, repeats is None)
        used, order = 0.0, random.Random(0)
        for number in range(limit):
            running = _running(lanes, target_spread, repeats)
            if not running:
                break
            # on a crowded machine a call can take 100 times what the warm-up saw: then fewer rounds must do
            enough = rounds if used <= _PATIENCE * budget_seconds else _SLOW_REPEATS
            if repeats is None and number >= enough and used > budget_seconds:
                break
            taken = _round(order.sample(running, len(running)), before, is_settled, clock)
            while pace is not None and not pace.is_kept() and pace.wait(_spent(taken)):
                close = [lane for lane in running if not lane.is_slow]
                taken |= _round(order.sample(close, len(close)), before, is_settled, clock)
            used += _spent(taken)
            for lane, seconds in taken.items():
                lane.samples.append(seconds / lane.count)
    finally:
        if collects:
            gc.enable()
    return {lane.name: Timing(tuple(lane.samples), lane.warmup, lane.count) for lane in lanes}


def speedup(slower: Timing, faster: Timing) -> tuple[float, float, float]:
    """Ratio of the medians slower / faster with its 95% bootstrap interval: (ratio, low, high)."""
    rng = np.random.default_rng(0)
    top = _resampled_medians(np.asarray(slower.samples), rng)
    bottom = _resampled_medians(np.asarray(faster.samples), rng)
    low, high = np.quantile(top / bottom, _tails())
    return slower.median / faster.median, float(low), float(high)


@dataclass(eq=False)
class _Lane:
    """One variant on its way through the rounds."""

    name: str
    call: Call
    warmup: int
    needed: int
    count: int
    is_slow: bool
    next_look: int = 0
    samples: list[float] = field(default_factory=list)

    def is_done(self, target_spread: float, repeats: int | None) -> bool:
        if len(self.samples) < self.needed:
            return False
        if repeats is not None or self.is_slow:
            return True
        # an interval takes milliseconds: looked at when there are a fifth more samples, not after each
        if len(self.samples) < self.next_look:
            return False
        self.next_look = math.ceil(1.2 * len(self.samples))
        low, high = _median_interval(np.asarray(self.samples))
        return high - low <= 2.0 * target_spread * float(np.median(self.samples))


def _round(
    lanes: list[_Lane], before: Call | Mapping[str, Call] | None, is_settled: bool, clock: Clock
) -> dict[_Lane, float]:
    """The seconds of one sample of each series."""
    taken = {}
    for lane in lanes:
        ahead = before.get(lane.name) if isinstance(before, Mapping) else before
        if ahead is not None:
            ahead()
        if is_settled and not lane.is_slow:
            lane.call()
        taken[lane] = clock(lane.call, lane.count)
    return taken


def _spent(taken: Mapping[_Lane, float]) -> float:
    """Seconds that count against a budget: those of the close series."""
    return sum(seconds for lane, seconds in taken.items() if not lane.is_slow)


def _running(lanes: list[_Lane], target_spread: float, repeats: int | None) -> list[_Lane]:
    """The series of the next round: the close ones while any of them is not done, the slow ones apart."""
    close = [lane for lane in lanes if not lane.is_slow]
    settled = [lane.is_done(target_spread, repeats) for lane in close]  # a list: all take their look together
    if all(settled):
        close = []
    slow = [lane for lane in lanes if lane.is_slow and not lane.is_done(target_spread, repeats)]
    return [lane for lane in lanes if lane in close or lane in slow]


def _warm_up(
    variants: Mapping[str, Call],
    warmup: int,
    min_sample_seconds: float,
    rounds: int,
    clock: Clock,
    spares_slow: bool,
) -> list[_Lane]:
    """One series per variant; slow ones are known after the first call and skip the rest of the warm-up."""
    seconds = {name: clock(call, 1) for name, call in variants.items()} if warmup else {}
    done = dict.fromkeys(variants, min(warmup, 1))
    for _ in range(warmup - 1):
        fastest = min(seconds.values())
        for name, call in variants.items():
            # a first call may compile or fill a cache: it proves slowness only when it is long by itself
            if seconds[name] > _SLOW_RATIO * fastest and seconds[name] > 1.0:
                continue
            seconds[name] = min(seconds[name], clock(call, 1))
            done[name] += 1
    fastest = min(seconds.values(), default=0.0)
    lanes = []
    for name, call in variants.items():
        is_slow = spares_slow and bool(seconds) and seconds[name] > _SLOW_RATIO * fastest
        once = seconds.get(name, math.inf)
        count = max(1, math.ceil(min_sample_seconds / max(once, 1e-7))) if once < min_sample_seconds else 1
        needed = min(rounds, _SLOW_REPEATS) if is_slow else rounds
        lanes.append(_Lane(name, call, done[name], needed, count, is_slow))
    return lanes


def _check(
    variants: Mapping[str, Call], warmup: int, repeats: int | None, min_repeats: int, budget_seconds: float
) -> None:
    if not variants:
        raise InputError("variants is empty; name at least one call to time")
    if warmup < 0:
        raise InputError(f"warmup is {warmup}; it counts calls and cannot be negative")
    if repeats is not None and repeats < 1:
        raise InputError(f"repeats is {repeats}; take at least one sample")
    if min_repeats < 1:
        raise InputError(f"min_repeats is {min_repeats}; take at least one sample")
    if not budget_seconds >= 0.0:
        raise InputError(f"budget_seconds is {budget_seconds}; it cannot be negative")


def _tails() -> tuple[float, float]:
    return (1.0 - _CONFIDENCE) / 2.0, (1.0 + _CONFIDENCE) / 2.0


def _resampled_medians(samples: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    picks = rng.integers(0, samples.size, size=(_RESAMPLES, samples.size))
    medians: np.ndarray = np.median(samples[picks], axis=1)
    return medians


def _median_interval(samples: np.ndarray) -> tuple[float, float]:
    """The 95% percentile bootstrap interval of the median; the same samples give the same interval."""
    low, high = np.quantile(_resampled_medians(samples, np.random.default_rng(0)), _tails())
    return float(low), float(high)
