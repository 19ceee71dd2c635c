"""Clocks for the steps of a program: the host's on a CPU, the device's own on CUDA."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

__all__ = ["DeviceClock", "HostClock", "StepClock", "clock_of", "now"]

# The device is kept waiting this long per step, so that Python has issued all steps before the first one
# runs. A step takes Python 20 to 60 microseconds on the slowest host seen.
_AHEAD_SECONDS = 1e-4
_CYCLES_PER_SECOND = 2e9  # of current GPUs, within a third
_RESOLUTION_SECONDS = 1e-6  # events are no finer: below it a step has launched nothing

_waited_seconds = [0.0]


def now() -> float:
    """Seconds of the host's clock, less those it spent waiting for a device so that steps could be timed."""
    return time.perf_counter() - _waited_seconds[0]


class StepClock(Protocol):
    """Times the steps of one program in the order they run."""

    def time(self, call: Callable[[Any], Any], argument: Any) -> Any:
        """What the call returns."""

    def seconds(self) -> list[float]:
        """The seconds of every call so far."""


class HostClock:
    """For devices that have finished a step when its call returns."""

    def __init__(self) -> None:
        self._seconds: list[float] = []

    def time(self, call: Callable[[Any], Any], argument: Any) -> Any:
        """What the call returns."""
        started = time.perf_counter()
        result = call(argument)
        self._seconds.append(time.perf_counter() - started)
        return result

    def seconds(self) -> list[float]:
        """The seconds of every call so far."""
        return self._seconds


class DeviceClock:
    """Events around every step on the device's stream, without Python between them.

    Waiting for each step would time its launch, several times what a small kernel takes, and a layer whose
    calls are replayed as a CUDA graph pays for no launches at all. So the device sleeps while Python issues
    the steps, then runs them back to back. Steps must not read values of the device.
    """

    def __init__(self, steps: int, cuda: Any = torch.cuda) -> None:
        self._cuda = cuda
        self._begun = time.perf_counter()
        self._pairs: list[tuple[Any, Any]] = []
        cuda._sleep(int(steps * _AHEAD_SECONDS * _CYCLES_PER_SECOND))
        self._nothing = self._pair()
        for event in self._nothing:
            event.record()

    def _pair(self) -> tuple[Any, Any]:
        return self._cuda.Event(enable_timing=True), self._cuda.Event(enable_timing=True)

    def time(self, call: Callable[[Any], Any], argument: Any) -> Any:
        """What the call returns."""
        start, end = pair = self._pair()
        start.record()
        result = call(argument)
        end.record()
        self._pairs.append(pair)
        return result

    def seconds(self) -> list[float]:
        """The seconds of every call so far, less what lies between two events with nothing in between."""
        if not self._pairs:
            return []
        self._pairs[-1][1].synchronize()
        gap = _elapsed(*self._nothing)
        found = [_elapsed(*pair) - gap for pair in self._pairs]
        found = [seconds if seconds > _RESOLUTION_SECONDS else 0.0 for seconds in found]
        _waited_seconds[0] += time.perf_counter() - self._begun - sum(found)
        return found


def _elapsed(start: Any, end: Any) -> float:
    return float(start.elapsed_time(end)) / 1e3


def clock_of(place: torch.device, steps: int) -> StepClock:
    """A clock for the next program on a device."""
    return DeviceClock(steps) if place.type == "cuda" else HostClock()
