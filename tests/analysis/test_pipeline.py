"""analysis/pipeline.py: the schedule and the closed forms against a simulation event by event."""

from __future__ import annotations

import heapq
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.analysis.pipeline import MODES, Mode, makespan, schedule
from plait.errors import InputError

modes = st.sampled_from(MODES)
seconds = st.integers(0, 9).map(float)


def simulate(times: Any, mode: Mode) -> float:
    """A clock, a heap of endings, and workers that take the next partition when what it needs has ended."""
    layers, partitions = len(times), len(times[0][0])
    done: set[tuple[int, int, int]] = set()
    started: set[tuple[int, int, int]] = set()
    busy: set[tuple[int, int]] = set()
    clock, endings = 0.0, []

    def everyone(layer: int, stage: int) -> list[tuple[int, int, int]]:
        return [(layer, stage, p) for p in range(partitions)]

    def needs(layer: int, stage: int, p: int) -> list[tuple[int, int, int]]:
        own = [(layer, stage, p - 1)] if p else []  # partitions pass a worker in order
        if stage == 0 and layer:
            own += [(layer - 1, 2, p)] if mode.is_macro_async else everyone(layer - 1, 2)
        if stage == 1:
            own += [(layer, 0, p)] if mode.is_micro_async else everyone(layer, 0)
        if stage == 2:
            own += [(layer, 1, p)]
        return own

    every = [(l, s, p) for l in range(layers) for s in range(3) for p in range(partitions)]
    while len(done) < len(every):
        for run in every:
            if run not in started and run[:2] not in busy and all(need in done for need in needs(*run)):
                started.add(run)
                busy.add(run[:2])
                heapq.heappush(endings, (clock + times[run[0]][run[1]][run[2]], run))
        clock, run = heapq.heappop(endings)
        done.add(run)
        busy.discard(run[:2])
    return clock


@st.composite
def stage_times(draw: Any) -> list[list[list[float]]]:
    partitions = draw(st.integers(1, 4))
    row = st.lists(seconds, min_size=partitions, max_size=partitions)
    return draw(st.lists(st.lists(row, min_size=3, max_size=3), min_size=1, max_size=3))


@settings(deadline=None, max_examples=200)
@given(stage_times(), modes)
def test_the_schedule_is_that_of_a_simulation(times: Any, mode: Mode) -> None:
    assert schedule(times, mode).makespan == simulate(times, mode)


@settings(deadline=None, max_examples=300)
@given(st.integers(1, 4), st.integers(1, 6), st.lists(seconds, min_size=3, max_size=3), modes)
def test_closed_forms_are_the_simulation_where_stages_descend(
    layers: int, partitions: int, stages: list[float], mode: Mode
) -> None:
    graph, neural, activation = sorted(stages, reverse=True)
    times = [[[graph] * partitions, [neural] * partitions, [activation] * partitions]] * layers
    told = makespan(layers, partitions, graph, neural, activation, mode)
    assert told == simulate(times, mode)
    assert told == schedule(times, mode).makespan


@given(stage_times())
def test_waiting_for_fewer_is_never_slower(times: Any) -> None:
    took = {(m.is_micro_async, m.is_macro_async): schedule(times, m).makespan for m in MODES}
    assert took[True, True] <= took[True, False] <= took[False, False]
    assert took[True, True] <= took[False, True] <= took[False, False]


@given(stage_times(), modes)
def test_workers_never_do_two_things_at_once_and_the_bubble_is_a_share(times: Any, mode: Mode) -> None:
    found = schedule(times, mode)
    assert 0.0 <= found.bubble <= (1.0 if found.makespan else 0.0)
    for one in found.runs:
        for other in found.runs:
            if one is not other and (one.layer, one.stage) == (other.layer, other.stage):
                assert one.end <= other.start or other.end <= one.start


def test_asynchrony_gains_up_to_its_limit() -> None:
    sync, free = MODES[0], MODES[3]
    assert (sync.name, free.name) == ("sync micro, sync macro", "async micro, async macro")
    gains = [makespan(3, P, 4, 2, 1, sync) / makespan(3, P, 4, 2, 1, free) for P in (1, 10, 10_000)]
    assert gains == sorted(gains)
    assert gains[0] == 1.0
    assert gains[-1] == pytest.approx(3 * (1 + 2 / 4), rel=1e-3)  # L (1 + neural / graph)


@pytest.mark.parametrize("times", [[], [[[1.0], [1.0]]], [[[1.0], [1.0, 2.0], [1.0]]], [[[], [], []]]])
def test_ragged_times_are_refused(times: Any) -> None:
    with pytest.raises(InputError, match="times: give seconds"):
        schedule(times, MODES[0])


def test_what_the_closed_forms_and_the_clock_cannot_do_is_said() -> None:
    with pytest.raises(InputError, match="do not descend"):
        makespan(1, 1, 1.0, 2.0, 0.5, MODES[0])
    with pytest.raises(InputError, match="less than no time"):
        schedule([[[-1.0], [1.0], [1.0]]], MODES[0])
