"""The one way to time, to record and to watch anything in plait."""

from __future__ import annotations

from plait.measure.device import clock_of, flusher, free_bytes, host_seconds, peak_bytes, stream_bytes_per_s
from plait.measure.environment import BusyElsewhere, environment
from plait.measure.memory import StepPeak, peak_tensor_bytes, step_peak
from plait.measure.pace import Pace
from plait.measure.progress import Meter, progress
from plait.measure.record import Record, append, read
from plait.measure.timer import Clock, Timing, processor_clock, speedup, time_calls, wall_clock

__all__ = [
    "BusyElsewhere", "Clock", "Meter", "Pace", "Record", "StepPeak", "Timing", "append", "clock_of",
    "environment", "flusher", "free_bytes", "host_seconds", "peak_bytes",
    "peak_tensor_bytes", "processor_clock", "progress", "read", "speedup", "step_peak", "stream_bytes_per_s",
    "time_calls", "wall_clock",
]  # fmt: skip
