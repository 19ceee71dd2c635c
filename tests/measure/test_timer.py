"""measure/timer: rounds, budgets and intervals, on a clock the test winds itself."""

from __future__ import annotations

import functools
import gc
import itertools
from collections.abc import Callable

import pytest

from plait.errors import InputError
from plait.measure.timer import Timing, speedup, time_calls, wall_clock


def wound(
    durations: dict[str, Callable[[], float]],
) -> tuple[dict[str, Callable[[], object]], Callable[..., float], list[str]]:
    """Variants that only log their names, and a clock that says how long each took."""
    log: list[str] = []
    variants = {name: (lambda name=name: log.append(name)) for name in durations}
    names = {id(call): name for name, call in variants.items()}

    def clock(call: Callable[[], object], count: int) -> float:
        for _ in range(count):
            call()
        return count * durations[names[id(call)]]()

    return variants, clock, log


def steady(seconds: float) -> Callable[[], float]:
    return lambda: seconds


def test_rounds_take_each_variant_once_in_an_order_drawn_anew() -> None:
    variants, clock, log = wound({"a": steady(1.0), "b": steady(1.0), "c": steady(1.0)})
    time_calls(variants, warmup=1, repeats=30, clock=clock)
    rounds = ["".join(log[k : k + 3]) for k in range(3, len(log), 3)]
    assert len(rounds) == 30
    assert all(sorted(one) == [*"abc"] for one in rounds)
    assert len(set(rounds)) == 6


def test_fixed_repeats_are_kept() -> None:
    variants, clock, _ = wound({"a": steady(1.0), "b": steady(200.0)})
    timings = time_calls(variants, repeats=7, clock=clock)
    assert {name: timing.repeats for name, timing in timings.items()} == {"a": 7, "b": 7}


def test_a_steady_variant_stops_at_the_least_number_of_repeats() -> None:
    variants, clock, _ = wound({"a": steady(0.5)})
    timing = time_calls(variants, min_repeats=5, budget_seconds=1e9, clock=clock)["a"]
    assert timing.repeats == 5
    assert timing.median == 0.5
    assert timing.interval == (0.5, 0.5)


def test_a_noisy_variant_is_repeated_until_the_budget_is_used() -> None:
    noise = itertools.cycle([1.0, 3.0])
    variants, clock, _ = wound({"a": lambda: next(noise)})
    timing = time_calls(variants, warmup=0, budget_seconds=40.0, target_spread=0.001, clock=clock)["a"]
    assert 40.0 < sum(timing.samples) <= 43.0


def test_a_noisy_variant_ends_at_max_repeats() -> None:
    noise = itertools.cycle([1.0, 3.0])
    variants, clock, _ = wound({"a": lambda: next(noise)})
    timing = time_calls(variants, budget_seconds=1e9, target_spread=0.0, max_repeats=12, clock=clock)["a"]
    assert timing.repeats == 12


def test_a_variant_far_slower_than_the_fastest_gets_three_samples() -> None:
    noise = itertools.cycle([0.9, 1.1])
    variants, clock, log = wound({"fast": lambda: next(noise), "slow": steady(100.0)})
    timings = time_calls(
        variants, warmup=3, budget_seconds=1e6, target_spread=0.0, max_repeats=20, clock=clock
    )
    assert timings["slow"].repeats == 3
    assert timings["slow"].warmup == 1
    assert timings["fast"].repeats == 20
    assert log.count("slow") == 4


def test_close_variants_stop_together() -> None:
    noise = itertools.cycle([1.0, 3.0])
    variants, clock, _ = wound({"steady": steady(1.0), "noisy": lambda: next(noise)})
    timings = time_calls(variants, budget_seconds=1e9, target_spread=0.0, max_repeats=15, clock=clock)
    assert timings["steady"].repeats == timings["noisy"].repeats == 15


def test_slow_variants_do_not_use_up_the_budget() -> None:
    noise = itertools.cycle([0.9, 1.1])
    variants, clock, _ = wound({"fast": lambda: next(noise), "slow": steady(1000.0)})
    timings = time_calls(variants, budget_seconds=10.0, target_spread=0.0, clock=clock)
    assert timings["fast"].repeats >= 10


def test_rounds_end_early_when_the_machine_became_far_slower_than_the_warm_up() -> None:
    seconds = itertools.chain([0.01] * 3, itertools.repeat(50.0))
    variants, clock, _ = wound({"a": lambda: next(seconds)})
    assert time_calls(variants, warmup=3, budget_seconds=1.0, min_repeats=30, clock=clock)["a"].repeats == 3


def test_short_calls_are_timed_many_in_a_row() -> None:
    variants, clock, _ = wound({"a": steady(1e-5), "b": steady(1.0)})
    timings = time_calls(variants, repeats=2, min_sample_seconds=0.002, clock=clock)
    assert timings["a"].calls_per_sample == 200
    assert timings["a"].median == pytest.approx(1e-5)
    assert timings["b"].calls_per_sample == 1


def test_before_runs_ahead_of_every_sample_and_off_the_clock() -> None:
    variants, clock, log = wound({"a": steady(1.0)})
    time_calls(variants, warmup=0, repeats=2, before=lambda: log.append("flush"), clock=clock)
    assert log == ["flush", "a", "flush", "a"]


def test_a_settled_variant_is_called_once_more_ahead_of_every_sample() -> None:
    calls: list[str] = []
    variants = {name: functools.partial(calls.append, name) for name in ("a", "b")}
    time_calls(variants, warmup=0, repeats=2, min_sample_seconds=0.0, is_settled=True)
    assert [calls[k] == calls[k + 1] for k in range(0, 8, 2)] == [True] * 4


def test_garbage_collection_is_back_after_an_error() -> None:
    def fails() -> None:
        raise RuntimeError("as planned")

    with pytest.raises(RuntimeError, match="as planned"):
        time_calls({"a": fails})
    assert gc.isenabled()


def test_the_interval_is_the_same_every_time_and_holds_the_median() -> None:
    samples = (1.0, 1.2, 0.9, 1.1, 5.0, 1.05, 0.95)
    first, second = Timing(samples, 3), Timing(samples, 3)
    assert first.interval == second.interval
    low, high = first.interval
    assert low <= first.median <= high
    assert first.p20 <= first.median <= first.p80


def test_a_timing_reads_back_from_its_own_fields() -> None:
    timing = Timing((1.0, 2.0, 3.0), 2, 10)
    assert Timing.from_dict(timing.to_dict()) == timing
    with pytest.raises(InputError, match="samples_seconds"):
        Timing.from_dict({"median_seconds": 1.0})


def test_speedup_has_an_interval_around_the_ratio_of_medians() -> None:
    slow, fast = Timing((2.0, 2.1, 1.9, 2.0, 2.2), 0), Timing((1.0, 1.1, 0.9, 1.0, 1.0), 0)
    ratio, low, high = speedup(slow, fast)
    assert ratio == 2.0
    assert low <= ratio <= high


def test_the_wall_clock_measures_all_calls() -> None:
    calls: list[int] = []
    assert wall_clock(lambda: calls.append(1), 5) > 0.0
    assert len(calls) == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"variants": {}}, "variants is empty"),
        ({"warmup": -1}, "warmup"),
        ({"repeats": 0}, "repeats"),
        ({"min_repeats": 0}, "min_repeats"),
        ({"budget_seconds": float("nan")}, "budget_seconds"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, object], message: str) -> None:
    given: dict[str, object] = {"variants": {"a": lambda: None}} | arguments
    with pytest.raises(InputError, match=message):
        time_calls(**given)  # type: ignore[arg-type]


def test_a_timing_needs_a_sample() -> None:
    with pytest.raises(InputError, match="samples is empty"):
        Timing((), 0)
