"""Milliseconds of a call on the GPU, and how far a result is from the one it should be."""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["milliseconds", "relative_error"]


def milliseconds(call: Callable[[], object], repeats: int = 10, warmup: int = 3) -> float:
    """The median time of a call between two events of its stream."""
    for _ in range(warmup):
        call()
    samples = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        samples.append(float(start.elapsed_time(end)))
    return sorted(samples)[repeats // 2]


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """norm(got - want) / norm(want); NaN where a number was not written."""
    want = want.double()
    return float((got.double() - want).norm() / want.norm().clamp(min=1e-30))
