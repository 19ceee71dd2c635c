"""measure/memory: known allocations are seen, by torch's count and by the system's."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch

from plait.measure.memory import peak_tensor_bytes, step_peak

MEGA = 1_000_000


def allocate() -> None:
    first = torch.ones(2 * MEGA)
    del first
    second = torch.ones(5 * MEGA)
    third = torch.ones(MEGA)
    del second, third


def test_the_tensor_peak_counts_what_is_alive_at_once() -> None:
    assert peak_tensor_bytes(allocate) == pytest.approx(24 * MEGA, rel=0.001)


def test_the_tensor_peak_sees_backward() -> None:
    x = torch.ones(MEGA, requires_grad=True)

    def step() -> None:
        x.grad = None
        (x * x).sum().backward()

    assert peak_tensor_bytes(step) >= 8 * MEGA


def test_a_step_counts_what_its_preparation_kept_but_not_what_it_only_used() -> None:
    def prepare() -> Callable[[], object]:
        used = torch.ones(20 * MEGA)
        kept = torch.ones(3 * MEGA)
        del used
        return lambda: kept * 2

    peak = step_peak(prepare)
    assert peak.tensor_bytes == pytest.approx(24 * MEGA, rel=0.001)
    if sys.platform == "linux":  # other systems may not tell
        assert peak.process_bytes is not None
        assert 20 * MEGA < peak.process_bytes < 50 * MEGA
