"""Milliseconds of a call on the GPU, and how far a result is from the one it should be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

__all__ = ["fastest_first", "milliseconds", "relative_error", "replayed_milliseconds"]


def milliseconds(call: Callable[[], object], repeats: int = 10, warmup: int = 3, in_a_row: int = 5) -> float:
    """The median time of a call, of several in a row between two events of their stream.

    A call that Python takes longer to issue than the device to run is timed as a program sees it.
    """
    for _ in range(warmup):
        call()
    samples = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(in_a_row):
            call()
        end.record()
        end.synchronize()
        samples.append(float(start.elapsed_time(end)) / in_a_row)
    return sorted(samples)[repeats // 2]


def replayed_milliseconds(call: Callable[[], object], repeats: int = 10, in_a_row: int = 5) -> float:
    """The same without Python: the call captured as a CUDA graph and replayed."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return milliseconds(graph.replay, repeats, in_a_row=in_a_row)


def fastest_first(times: Mapping[Any, float]) -> list[list[float]]:
    """The fields of every tiling and its milliseconds, fastest first."""
    ranked = sorted(times.items(), key=lambda entry: entry[1])
    return [[*vars(tiles).values(), round(ms, 5)] for tiles, ms in ranked]


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """norm(got - want) / norm(want); NaN where a number was not written."""
    want = want.double()
    return float((got.double() - want).norm() / want.norm().clamp(min=1e-30))
