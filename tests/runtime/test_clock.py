"""The clocks of steps: the host's, and that of a device which is played by a list of times here."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from plait.runtime import clock
from plait.runtime.clock import DeviceClock, HostClock, clock_of, now


class Played:
    """torch.cuda's part of it: every event lies so many milliseconds after the one before."""

    def __init__(self, *gaps: float) -> None:
        self.gaps, self.at, self.slept, self.waited = list(gaps), 0.0, 0, 0

    def _sleep(self, cycles: int) -> None:
        self.slept += cycles

    def Event(self, enable_timing: bool) -> Any:
        assert enable_timing
        return _Event(self)


class _Event:
    def __init__(self, device: Played) -> None:
        self.device, self.at = device, -1.0

    def record(self) -> None:
        self.device.at += self.device.gaps.pop(0)
        self.at = self.device.at

    def synchronize(self) -> None:
        self.device.waited += 1

    def elapsed_time(self, end: _Event) -> float:
        return end.at - self.at


def test_a_device_s_steps_are_timed_between_events_less_an_empty_pair() -> None:
    device = Played(0, 0.002, 0.01, 0.102, 0.3, 0.502, 0, 0.0024)
    timed = DeviceClock(3, device)
    assert [timed.time(lambda k: 10 * k, k) for k in range(3)] == [0, 10, 20]
    assert timed.seconds() == pytest.approx([1e-4, 5e-4, 0.0])  # below the events' resolution: nothing ran
    assert device.slept > 0
    assert device.waited == 1


def test_waiting_for_a_device_is_no_time_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([10.0, 14.0, 20.0])
    monkeypatch.setattr(clock.time, "perf_counter", lambda: next(ticks))
    monkeypatch.setattr(clock, "_waited_seconds", [0.0])
    timed = DeviceClock(1, Played(0, 0, 0, 1000))
    timed.time(lambda _: None, None)
    assert timed.seconds() == [1.0]
    assert now() == 20.0 - 3.0  # four seconds of waiting, one of them a step's


def test_no_step_is_no_time() -> None:
    assert DeviceClock(0, Played(0, 0)).seconds() == []
    assert HostClock().seconds() == []


def test_a_cpu_s_steps_are_timed_by_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([1.0, 3.0, 3.5, 4.0])
    monkeypatch.setattr(clock.time, "perf_counter", lambda: next(ticks))
    timed = clock_of(torch.device("cpu"), 2)
    assert [timed.time(abs, -k) for k in range(2)] == [0, 1]
    assert timed.seconds() == [2.0, 0.5]
