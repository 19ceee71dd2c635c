"""runtime/bind.py: a step finds its kernel on a device, or says why there is none."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch_geometric.nn import GCNConv

import plait
from plait.errors import PlanError
from plait.ops.operation import TABLE
from plait.ops.program import Program, Step
from plait.runtime import linear, spread
from plait.runtime.bind import Binding, bind, kernel, kernels_of
from plait.runtime.buffers import Buffers

assert linear
assert spread


class _Outline:
    prices: ClassVar[dict[str, Any]] = {}


class _Run:
    def __init__(self, device: str) -> None:
        self.outline, self.buffers, self.place = _Outline(), Buffers(), SimpleNamespace(type=device)


def binding(device: str, *steps: Step) -> Binding:
    run: Any = _Run(device)
    return Binding(Program(steps, (), {}, {}), run)


def test_every_operation_has_a_kernel_on_a_cpu() -> None:
    missing = [name for name in TABLE if not kernels_of(name, "cpu")]
    assert not missing


def test_a_step_without_a_kernel_on_its_device_says_so() -> None:
    step = Step("gemm", "v0", (("x", "X"), ("w", "W")))
    with pytest.raises(PlanError, match=r"gemm -> v0 cannot run on abacus: there is no kernel"):
        bind(binding("abacus", step), step, False)


def test_what_is_bound_does_not_keep_its_run() -> None:
    """Else the two would wait for the collector, and with them the graph."""
    run: Any = _Run("cpu")
    bound = Binding(Program((), (), {}, {}), run)
    assert bound.run is run
    before = weakref.ref(run)
    del run
    assert before() is None


def test_the_first_kernel_that_takes_a_step_runs_it_and_reasons_are_given_where_none_does() -> None:
    device, step = "slide rule", Step("gemm", "v0", (("x", "X"), ("w", "W")))

    @kernel("gemm", device, "short", lambda b, s: "too many digits")
    def short(b: Binding, s: Step, owns: bool) -> Any:
        raise AssertionError

    with pytest.raises(PlanError, match="short: too many digits"):
        bind(binding(device, step), step, False)

    @kernel("gemm", device, "long")
    def long(b: Binding, s: Step, owns: bool) -> Any:
        return lambda env: "moved"

    assert bind(binding(device, step), step, False)({}) == "moved"


def test_small_products_of_a_matrix_expression_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[tuple[int, ...]] = []
    gemm = linear.dense.gemm
    monkeypatch.setattr(
        linear.dense,
        "gemm",
        lambda x, *rest, **named: called.append(tuple(x.shape)) or gemm(x, *rest, **named),
    )
    monkeypatch.setenv("PLAIT_ASIDE", "0")
    for nodes, are_torchs in ((20, True), (2000, False)):
        layer, edge_index = GCNConv(40, 40), torch.randint(0, nodes, (2, 4 * nodes))
        fast, x = plait.compile(layer), torch.randn(nodes, 40)
        with torch.no_grad():
            for _ in range(4):  # the product with the graph is computed once
                torch.testing.assert_close(fast(x, edge_index), layer(x, edge_index))
        assert (not called) == are_torchs
