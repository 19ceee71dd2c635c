"""Clocks on steps for explain(analyze=True), and ranges while a PyTorch profiler runs; otherwise nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch.profiler import record_function

from plait.plan.plan import Measured

__all__ = ["Clock", "clock", "is_profiling", "start", "timed"]

# whether a PyTorch profiler is running in this thread: 50 ns, so it is asked at every step
is_profiling = torch._C._autograd._profiler_enabled

Trace = list[tuple[str, Measured]]


@dataclass(frozen=True)
class Clock:
    """Where the seconds of one layer's steps go."""

    layer: str
    trace: Trace


_clock: ContextVar[Clock | None] = ContextVar("clock", default=None)


def start(layer: str, trace: Trace | None) -> None:
    """The steps that follow are this layer's; without a trace they are not timed."""
    _clock.set(None if trace is None else Clock(layer, trace))


def clock() -> Clock | None:
    """The clock of the layer that runs now; a forward pass keeps it for its backward pass."""
    return _clock.get()


@contextmanager
def timed(own: Clock | None, *steps: str) -> Iterator[None]:
    """Adds the seconds spent inside to `steps`, named as FusedStep.name is: "fwd attend".

    Steps of one pass share its seconds evenly: they are products of one size on the same rows.
    """
    if own is None:
        if is_profiling():
            with record_function(f"plait {', '.join(steps)}"):
                yield
            return
        yield
        return
    started = time.perf_counter()
    yield
    seconds = (time.perf_counter() - started) / len(steps)
    for step in steps:
        _add(own.trace, f"{own.layer}\0{step}", seconds)


def _add(trace: Trace, name: str, seconds: float) -> None:
    for k, (other, before) in enumerate(trace):
        if other == name:
            trace[k] = (name, Measured(before.seconds + seconds))
            return
    trace.append((name, Measured(seconds)))
