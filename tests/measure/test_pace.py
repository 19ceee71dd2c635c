"""Pace: a machine slowed by somebody else is noticed, waited for, and not for ever."""

from __future__ import annotations

from collections.abc import Iterator

from plait.measure import Pace, time_calls


def probe_of(*seconds: float) -> Iterator[float]:
    yield from seconds
    while True:
        yield seconds[-1]


def pace_of(*seconds: float, patience: float = 0.0) -> Pace:
    """A pace whose probe takes these seconds one after the other, the last one from then on."""
    times = probe_of(*seconds)
    return Pace(lambda: next(times), patience)


def test_a_probe_as_long_as_ever_keeps_the_pace() -> None:
    assert pace_of(1.0).is_kept()


def test_a_probe_twice_as_long_falls_behind_and_the_shortest_is_remembered() -> None:
    pace = pace_of(*[1.0] * 10, 2.0)
    assert not pace.is_kept()
    assert not pace.is_kept()


def test_one_interrupted_probe_is_not_taken_for_a_slow_machine() -> None:
    assert pace_of(*[1.0] * 10, 5.0, 1.0).is_kept()


def test_waiting_ends_when_the_pace_is_back() -> None:
    pace = pace_of(*[1.0] * 10, 3.0, 3.0, 1.0, patience=60.0)
    assert pace.wait()
    assert pace.patience_seconds > 59.0


def test_waiting_ends_when_patience_does() -> None:
    pace = pace_of(*[1.0] * 10, 3.0, patience=0.01)
    assert pace.wait()
    assert not pace.wait()


def test_what_has_to_be_done_again_counts_as_waiting() -> None:
    assert not pace_of(1.0, patience=1.0).wait(lost_seconds=2.0)


def test_a_round_on_a_slowed_machine_is_taken_again() -> None:
    calls: list[int] = []
    pace = pace_of(*[1.0] * 10, 3.0, 3.0, 1.0, patience=60.0)
    timing = time_calls(
        {"it": lambda: calls.append(1)}, warmup=1, repeats=2, min_sample_seconds=0.0, pace=pace
    )
    assert timing["it"].repeats == 2
    assert len(calls) == 1 + 3


def test_without_patience_a_round_stands_as_it_is() -> None:
    calls: list[int] = []
    pace = pace_of(*[1.0] * 10, 3.0)
    time_calls({"it": lambda: calls.append(1)}, warmup=1, repeats=2, min_sample_seconds=0.0, pace=pace)
    assert len(calls) == 1 + 2
