"""measure/device: clocks, bandwidth, memory and cold caches of the CPU, and of a GPU where there is one."""

from __future__ import annotations

import sys
import time

import pytest
import torch

from plait.measure.device import clock_of, cuda_clock, flusher, free_bytes, peak_bytes, stream_bytes_per_s
from plait.measure.timer import processor_clock, wall_clock


def test_each_device_has_its_clock() -> None:
    assert clock_of("cpu") is wall_clock
    assert clock_of("cuda") is cuda_clock


def test_the_processor_clock_leaves_out_waits() -> None:
    assert wall_clock(lambda: time.sleep(0.02), 1) > 0.015
    assert processor_clock(lambda: time.sleep(0.02), 1) < 0.01


def test_a_copy_has_a_plausible_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.measure.device._COPY_BYTES", {"cpu": 1 << 20})
    assert 1e6 < stream_bytes_per_s("cpu", budget_seconds=0.01) < 1e13


def test_the_peak_of_a_call_is_what_it_allocates() -> None:
    x = torch.zeros(1000)
    # beside the tensor itself, what torch keeps of the number that is added
    assert 4000 <= peak_bytes(lambda: x + 1.0, "cpu") < 5000


def test_flushing_touches_more_than_the_last_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.measure.device._cache_bytes", lambda device: 1 << 10)
    flushed = flusher("cpu")()
    assert isinstance(flushed, torch.Tensor)
    assert flushed.numel() == 2 << 10


@pytest.mark.skipif(sys.platform != "linux", reason="other systems may not tell")
def test_free_memory_is_known_on_linux() -> None:
    free = free_bytes("cpu")
    assert free is not None
    assert free > 0


@pytest.mark.gpu
def test_the_gpu_clock_waits_for_the_work() -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    x = torch.randn(4096, 4096, device="cuda")
    assert cuda_clock(lambda: x @ x, 10) > 0.0
    assert peak_bytes(lambda: x + 1.0, "cuda") >= 4 * x.numel()
    assert (free_bytes("cuda") or 0) > 0
