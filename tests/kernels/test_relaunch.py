"""A kernel is compiled once for all arguments that Triton would not tell apart."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from plait.kernels.relaunch import Launcher


class Kernel:
    """Counts what it compiles and what it launches."""

    def __init__(self, *free: str):
        self.params = [SimpleNamespace(do_not_specialize=name in free) for name in ("x", "stride", "count")]
        self.compiled: list[Any] = []
        self.launched: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def compile_and_launch(*arguments: Any, num_warps: int, **constants: Any) -> Any:
            self.compiled.append((arguments, constants, num_warps))
            launch = lambda grid: lambda *found: self.launched.append((grid, found))  # noqa: E731
            return type("Compiled", (), {"__getitem__": lambda _, grid: launch(grid)})()

        return compile_and_launch


def test_equal_facts_are_launched_without_compiling() -> None:
    kernel = Kernel("count")
    run, x, other = Launcher(kernel), torch.ones(8), torch.zeros(4)
    run((5,), (x, 32, 1), {"SLOTS": 2}, 1)
    run((7, 2), (other, 48, 99), {"SLOTS": 2}, 1)
    assert len(kernel.compiled) == 1
    assert kernel.launched == [((7, 2, 1), (other, 48, 99, 2))]


def test_facts_that_triton_compiles_for_are_told_apart() -> None:
    kernel = Kernel("count")
    run, x = Launcher(kernel), torch.ones(8)
    calls = [
        ((x, 32, 1), {"SLOTS": 2}, 1), ((x, 33, 1), {"SLOTS": 2}, 1), ((x, 1, 1), {"SLOTS": 2}, 1),
        ((x, 1 << 40, 1), {"SLOTS": 2}, 1), ((x, 32, 1 << 40), {"SLOTS": 2}, 1),
        ((x[1:], 32, 1), {"SLOTS": 2}, 1),
        ((x.double(), 32, 1), {"SLOTS": 2}, 1), ((x, None, 1), {"SLOTS": 2}, 1),
        ((x, 32, 1), {"SLOTS": 4}, 1),
        ((x, 32, 1), {"SLOTS": 2}, 2),
    ]  # fmt: skip
    for arguments, constants, warps in calls * 2:
        run((1,), arguments, constants, warps)
    assert len(kernel.compiled) == len(kernel.launched) == len(calls)


def test_what_cannot_be_compiled_is_called_as_it_is() -> None:
    """Triton's interpreter has no parameters."""
    kernel = Kernel()
    del kernel.params
    run = Launcher(kernel)
    for _ in range(2):
        run((1,), (torch.ones(1), 2, 3), {}, 1)
    assert len(kernel.compiled) == 2


def test_a_memo_spares_the_look_at_the_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches with the same memo go straight to the compiled kernel; what is not aligned is looked at."""
    kernel, runs = Kernel("count"), []
    run, x = Launcher(kernel), torch.ones(8)
    ready = (lambda *found: runs.append(found), "function", "metadata")
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
    run((5,), (x, 32, 1), {"SLOTS": 2}, 1, memo="m")
    assert len(kernel.compiled) == 1
    run._ready["m"] = ready
    run((5, 3), (x, 32, 1), {"SLOTS": 2}, 1, memo="m")
    assert runs == [(5, 3, 1, 7, "function", "metadata", None, None, None, x, 32, 1, 2)]
    run((5,), (x[1:], 32, 1), {"SLOTS": 2}, 1, memo="m")
    assert len(runs) == 1
    assert len(kernel.compiled) == 2
