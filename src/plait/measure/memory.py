"""Measures the most memory a call holds at once, as torch's allocator sees it and as the system sees it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["StepPeak", "peak_tensor_bytes", "step_peak"]

Call = Callable[[], object]

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class StepPeak:
    """Most bytes held during one step, what was prepared for it included."""

    tensor_bytes: int
    process_bytes: int | None


def peak_tensor_bytes(call: Call, *, collect: bool = True) -> int:
    """Most bytes of CPU tensors alive at once during the call, beyond those alive before it.

    Taken from the allocation events of torch's profiler: exact and repeatable, backward included, and blind
    to memory that is not torch's (numpy arrays, a library's own buffers). collect=False spares the garbage
    collection (0.3 s once PyG is loaded): for calls that leave no cycles behind.
    """
    return _tensor_bytes(call, collect)[0]


def step_peak(prepare: Callable[[], Call], warmup: int = 2) -> StepPeak:
    """The peak of one step of `prepare()`, counted from before the preparation, after `warmup` steps.

    So what a peer keeps from step to step (a transpose, buffers, a product computed once) counts, and what
    it only needs while preparing does not. tensor_bytes is torch's view, process_bytes the system's.
    """
    made: list[Call] = []

    def get_ready() -> None:
        made.append(prepare())
        for _ in range(warmup):
            made[0]()
        gc.collect()

    _, kept = _tensor_bytes(get_ready)
    peak, _ = _tensor_bytes(made[0])
    made.clear()
    return StepPeak(kept + peak, _process_step_peak(get_ready, made))


def _process_step_peak(get_ready: Call, made: list[Call]) -> int | None:
    """By the system's own high-water mark (VmHWM), so everything counts, also what torch does not know of.

    Freed memory the C library still holds would hide growth: it is handed back first. None where the system
    keeps no such mark.
    """
    gc.collect()
    _hand_back()
    try:
        before = _status("VmRSS")
        get_ready()
        _hand_back()
        _CLEAR.write_text("5")
        made[0]()
        return max(0, _status("VmHWM") - before)
    except OSError:
        return None


def _tensor_bytes(call: Call, collect: bool = True) -> tuple[int, int]:
    """(peak, alive at the end) bytes of CPU tensors, both beyond those alive before the call."""
    # read when the profiler first starts; without it kineto writes two lines of its own per call
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from torch.profiler import ProfilerActivity, profile

    if collect:
        gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    results = profiler.profiler.kineto_results
    events = [event for event in results.events() if event.name() == "[memory]"]
    alive = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak, alive


def _hand_back() -> None:
    with contextlib.suppress(OSError, AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)


def _status(field: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{_STATUS} has no {field}")
