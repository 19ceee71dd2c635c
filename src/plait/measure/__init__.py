"""The one way to time, to record and to watch anything in plait."""

from __future__ import annotations

from plait.measure.environment import BusyElsewhere, environment
from plait.measure.memory import StepPeak, peak_process_bytes, peak_tensor_bytes, step_peak
from plait.measure.progress import Meter, progress
from plait.measure.record import Record, append, read, write
from plait.measure.timer import Clock, Timing, speedup, time_calls, wall_clock

__all__ = [
    "BusyElsewhere",
    "Clock",
    "Meter",
    "Record",
    "StepPeak",
    "Timing",
    "append",
    "environment",
    "peak_process_bytes",
    "peak_tensor_bytes",
    "progress",
    "read",
    "speedup",
    "step_peak",
    "time_calls",
    "wall_clock",
    "write",
]
