"""What a device adds to a measurement: its clock, cold caches, its copy bandwidth, its memory."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from plait.measure.environment import available_bytes
from plait.measure.memory import peak_tensor_bytes
from plait.measure.timer import Clock, time_calls, wall_clock

__all__ = [
    "cache_sizes", "clock_of", "cuda_clock", "flusher", "free_bytes", "host_seconds", "peak_bytes",
    "stream_bytes_per_s",
]  # fmt: skip

Call = Callable[[], object]

_COPY_BYTES = {"cpu": 128 << 20, "cuda": 1 << 30}
_CACHE_GUESS = 64 << 20


def _torch() -> Any:
    # by name: importing plait.measure is no reason to load torch
    return importlib.import_module("torch")


def cuda_clock(call: Call, count: int) -> float:
    """Seconds of `count` calls in a row between two events of the GPU's own stream.

    Calls shorter than their launch are timed as a program sees them: one launch after the other.
    """
    torch = _torch()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def host_seconds(call: Call, count: int = 5) -> float:
    """Seconds the host takes to issue a call on the GPU: Python and launches, without waiting for the end."""
    torch = _torch()
    samples = []
    for _ in range(count):
        torch.cuda.synchronize()
        samples.append(wall_clock(call, 1))
    torch.cuda.synchronize()
    return sorted(samples)[count // 2]


def clock_of(device: str) -> Clock:
    """The clock `time_calls` wants for a device."""
    return cuda_clock if device == "cuda" else wall_clock


def flusher(device: str) -> Call:
    """A call that fills the device's last cache with other data, to be run before every sample."""
    torch = _torch()
    other = torch.zeros(2 * _cache_bytes(device), dtype=torch.int8, device=device)
    return lambda: other.add_(1)


def stream_bytes_per_s(device: str, clock: Clock | None = None, budget_seconds: float = 0.5) -> float:
    """Bytes a second of a copy, reads plus writes, larger than every cache: what others are shares of."""
    torch = _torch()
    count = min(_COPY_BYTES[device], (free_bytes(device) or 8 << 30) // 8) // 4
    a = torch.zeros(count, device=device)
    b = torch.empty_like(a)
    copy: dict[str, Call] = {"copy": lambda: b.copy_(a)}
    timing = time_calls(copy, warmup=2, budget_seconds=budget_seconds, clock=clock or clock_of(device))
    return 8.0 * count / timing["copy"].p20


def free_bytes(device: str) -> int | None:
    """Memory that can be taken on a device now; None where the system does not say."""
    if device != "cuda":
        return available_bytes()
    return int(_torch().cuda.mem_get_info()[0])


def peak_bytes(call: Call, device: str) -> int:
    """Most bytes of tensors alive at once during the call, beyond those alive before it."""
    if device != "cuda":
        return peak_tensor_bytes(call, collect=False)
    torch = _torch()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = call()
    torch.cuda.synchronize()
    peak = int(torch.cuda.max_memory_allocated())
    del kept
    return max(0, peak - int(before))


def _cache_bytes(device: str) -> int:
    if device == "cuda":
        return int(getattr(_torch().cuda.get_device_properties(0), "L2_cache_size", 0)) or _CACHE_GUESS
    return max((size for _, size in cache_sizes()), default=_CACHE_GUESS // 2)


def cache_sizes() -> list[tuple[str, int]]:
    """(level, bytes) of the processor's data caches, where the system tells."""
    found = []
    for index in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        try:
            level, text, kind = ((index / name).read_text().strip() for name in ("level", "size", "type"))
        except OSError:
            continue
        factor = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:], 1)
        if kind != "Instruction":
            found.append((level, int(text.rstrip("KM") or 0) * factor))
    return found
