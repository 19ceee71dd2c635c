"""plait's kernels as variants: prepared once per graph, each call writing a fresh tensor as torch's do."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from plait.bench.ops.inputs import Inputs
from plait.bench.ops.operation import FORWARD, Make, Unsupported, Variant
from plait.graph import Graph
from plait.ir import Diagonal, Sparse
from plait.kernels.gemm import gemm as dense
from plait.kernels.spmm import Pattern, spmm, weight_gradient
from plait.ops.program import Program
from plait.plan.draft import Draft
from plait.plan.ways import direct
from plait.runtime import executor
from plait.runtime.buffers import Buffers
from plait.runtime.constants import Constants
from plait.runtime.executor import Run

__all__ = ["WHY_CPU", "forward_variant", "gemm", "product", "reduced", "sddmm"]

WHY_CPU = "plait's kernels run on the CPU"


def forward_variant(make: Make) -> Variant:
    """plait's kernel as a variant without a gradient."""
    return Variant("plait", make, devices=("cpu",), directions=FORWARD, why=f"forward only; {WHY_CPU}")


def product(inputs: Inputs, reduce: str, is_weighted: bool) -> Callable[[], Tensor]:
    """x -> the sum, mean or maximum of its rows over every target's edges."""
    x = inputs["x"]
    _require_floats(x)
    run = inputs.once(("plait", reduce, is_weighted), lambda: _bound(inputs, reduce, is_weighted))
    return lambda: executor.apply(run, {"X": x})


def reduced(inputs: Inputs, reduce: str) -> Callable[[], Tensor]:
    """The rows of src reduced over equal targets, in the order that was sorted once."""
    src = inputs["src"]
    _require_floats(src)
    order, pointer = inputs.by_target
    pattern = _pattern(pointer, order, src.shape[0])
    degree = pointer.diff()
    scale = (1.0 / degree.clamp(min=1)).to(src.dtype) if reduce == "mean" else None
    kind = "sum" if reduce == "mean" else reduce

    def call() -> Tensor:
        out = torch.empty((pattern.num_rows, src.shape[1]), dtype=src.dtype)
        return spmm(pattern, src, out, reduce=kind, target=scale)

    return call


def sddmm(inputs: Inputs) -> Callable[[], Tensor]:
    """One dot product per edge, in the order of the sorted edges."""
    x, y = inputs["x"], inputs["y"]
    _require_floats(x)
    order, pointer = inputs.by_target
    pattern = _pattern(pointer, inputs["source"][order], x.shape[0])
    return lambda: weight_gradient(pattern, x, y, torch.empty(pattern.num_edges, dtype=x.dtype))


def gemm(inputs: Inputs, bias: str | None = None) -> Callable[[], Tensor]:
    """x @ w, and the bias where there is one."""
    x, w = inputs["x"], inputs["w"]
    _require_floats(x)
    added = None if bias is None else inputs[bias]

    def call() -> Tensor:
        return dense(x, w, torch.empty((x.shape[0], w.shape[1]), dtype=x.dtype), bias=added)

    return call


def _require_floats(x: Tensor) -> None:
    if x.dtype not in (torch.float32, torch.float64):
        raise Unsupported(f"plait's kernels have no {str(x.dtype).removeprefix('torch.')}")


def _bound(inputs: Inputs, reduce: str, is_weighted: bool) -> Run:
    """The product as a program on the graph of the inputs, its gradient where the case takes one."""
    x, ends = inputs["x"], (inputs["source"].numpy(), inputs["target"].numpy())
    graph = Graph.from_edge_index(*ends, inputs.case.rows_out, x.shape[0])
    weight = inputs["value"].detach() if is_weighted else None
    if weight is not None and graph.order is not None:
        weight = weight[torch.from_numpy(graph.order.astype("int64"))]
    means = {"p": 1.0 / torch.from_numpy(graph.degrees).clamp(min=1).to(x.dtype)} if reduce == "mean" else {}
    plan = direct(_program(reduce, is_weighted), ("X",) if x.requires_grad else ())
    return Run(plan, Constants(graph, weight, means, x.dtype), _fresh())


def _program(reduce: str, is_weighted: bool) -> Program:
    draft, shape = Draft("M"), ("N", "K")
    matrix = draft.constant(Sparse("A", "N", "M", is_weighted))
    reads: dict[str, str | None] = {"matrix": matrix, "x": draft.input("X", "M", "K")}
    if reduce in ("max", "min"):
        return draft.program(draft.add("extremum", reads, shape, more=[("ties", shape)], reduce=reduce))
    reads["target"] = draft.constant(Diagonal("p", "N")) if reduce == "mean" else None
    return draft.program(draft.add("spmm", reads, shape))


def _fresh() -> Buffers:
    """Memory of its own for every result, as torch's operations have it."""

    class Fresh(Buffers):
        def take(self, rows: int, cols: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(rows, cols, dtype=dtype)

    return Fresh()


def _pattern(pointer: Tensor, indices: Tensor, num_columns: int) -> Pattern:
    return Pattern(pointer.int().numpy(), indices.int().numpy(), num_columns)
