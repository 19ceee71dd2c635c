"""The pace of sparse products on this machine: a small one of rows just written, timed again and again.

And the clock and the threads that times are taken with.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np
import torch

from plait.kernels.spmm import Pattern, spmm
from plait.measure import Pace, processor_clock, wall_clock
from plait.measure.timer import Clock

__all__ = ["at_pace", "clock", "pace", "patient", "threads"]

T = TypeVar("T")

# a megabyte of short rows: each neighbour is one line to wait for, and waiting is what neighbours make longer
_ROWS, _DEGREE, _WIDTH = 16_384, 4, 16


@functools.cache
def pace() -> Pace:
    """One for the whole process: it knows the shortest time its product ever took."""
    indices = np.random.default_rng(0).integers(0, _ROWS, _ROWS * _DEGREE, dtype=np.int32)
    pattern = Pattern(np.arange(0, _ROWS * _DEGREE + 1, _DEGREE, dtype=np.int32), indices, _ROWS)
    with torch.inference_mode(False):  # they outlive the mode that the first caller is in
        written, rows, out = (torch.ones(_ROWS, _WIDTH) for _ in range(3))

    def probe() -> float:
        rows.copy_(written)
        start = time.perf_counter()
        spmm(pattern, rows, out)
        return time.perf_counter() - start

    return Pace(probe)


def clock() -> Clock:
    """Of the processor for one thread, which other programs do not move; of the wall for several."""
    return processor_clock if torch.get_num_threads() == 1 else wall_clock


@contextlib.contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Within it torch has so many threads; None leaves them as they are."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def patient(seconds: float) -> Pace:
    """The same, with so much patience for what is timed next."""
    found = pace()
    found.patience_seconds = seconds
    return found


def at_pace(measure: Callable[[], T]) -> T:
    """What `measure` returns; measured again where the machine fell behind and patience is left."""
    while True:
        start = time.perf_counter()
        result = measure()
        if pace().is_kept() or not pace().wait(time.perf_counter() - start):
            return result
