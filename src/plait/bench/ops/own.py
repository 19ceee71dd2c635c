"""plait's kernels as variants: prepared once per graph, each call writing a fresh tensor as torch's do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from plait.bench.ops.inputs import Inputs
from plait.bench.ops.operation import Unsupported

if TYPE_CHECKING:
    from plait.kernels.spmm import Pattern

__all__ = ["WHY_CPU", "gemm", "product", "reduced", "sddmm"]

WHY_CPU = "plait's kernels run on the CPU"


@dataclass(frozen=True)
class _Forms:
    """A graph as the kernels want it, both ways, with the weights of its edges and rows."""

    reduce: str
    pattern: Pattern
    transpose: Pattern
    edge: Tensor | None
    transpose_edge: Tensor | None
    scale: Tensor | None


def product(inputs: Inputs, reduce: str, is_weighted: bool) -> Callable[[], Tensor]:
    """x -> the sum, mean or maximum of its rows over every target's edges."""
    _require_floats(inputs["x"])
    forms = inputs.once(("plait", reduce, is_weighted), lambda: _forms(inputs, reduce, is_weighted))
    x = inputs["x"]
    return lambda: _Product.apply(x, forms)  # type: ignore[no-untyped-call]


def reduced(inputs: Inputs, reduce: str) -> Callable[[], Tensor]:
    """The rows of src reduced over equal targets, in the order that was sorted once."""
    from plait.kernels.spmm import spmm

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
    from plait.kernels.spmm import weight_gradient

    x, y = inputs["x"], inputs["y"]
    _require_floats(x)
    order, pointer = inputs.by_target
    pattern = _pattern(pointer, inputs["source"][order], x.shape[0])
    return lambda: weight_gradient(pattern, x, y, torch.empty(pattern.num_edges, dtype=x.dtype))


def gemm(inputs: Inputs, bias: str | None = None) -> Callable[[], Tensor]:
    """x @ w, and the bias where there is one."""
    from plait.kernels.gemm import gemm as dense

    x, w = inputs["x"], inputs["w"]
    _require_floats(x)
    added = None if bias is None else inputs[bias]

    def call() -> Tensor:
        return dense(x, w, torch.empty((x.shape[0], w.shape[1]), dtype=x.dtype), bias=added)

    return call


def _require_floats(x: Tensor) -> None:
    if x.dtype not in (torch.float32, torch.float64):
        raise Unsupported(f"plait's kernels have no {str(x.dtype).removeprefix('torch.')}")


def _forms(inputs: Inputs, reduce: str, is_weighted: bool) -> _Forms:
    order, pointer = inputs.by_target
    back, back_pointer = inputs.by_source
    x, source, target = inputs["x"], inputs["source"], inputs["target"]
    value = inputs["value"].detach() if is_weighted else None
    scale = (1.0 / pointer.diff().clamp(min=1)).to(x.dtype) if reduce == "mean" else None
    return _Forms(
        reduce="sum" if reduce == "mean" else reduce,
        pattern=_pattern(pointer, source[order], x.shape[0]),
        transpose=_pattern(back_pointer, target[back], inputs.case.rows_out),
        edge=None if value is None else value[order],
        transpose_edge=None if value is None else value[back],
        scale=scale,
    )


def _pattern(pointer: Tensor, indices: Tensor, num_columns: int) -> Pattern:
    from plait.kernels.spmm import Pattern

    return Pattern(pointer.int().numpy(), indices.int().numpy(), num_columns)


class _Product(torch.autograd.Function):
    """The sparse product and its gradient, each one kernel call (two for extrema)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forms: _Forms) -> Tensor:
        from plait.kernels.spmm import extremum, spmm

        out = torch.empty((forms.pattern.num_rows, x.shape[1]), dtype=x.dtype)
        ctx.forms = forms
        if forms.reduce == "sum":
            return spmm(forms.pattern, x, out, edge=forms.edge, target=forms.scale)
        ties = torch.empty_like(out)
        ctx.save_for_backward(x, out, ties)
        return extremum(forms.pattern, x, out, ties, forms.reduce)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        from plait.kernels.spmm import extremum_gather, spmm

        forms: _Forms = ctx.forms
        grad = grad.contiguous()
        out = torch.empty((forms.transpose.num_rows, grad.shape[1]), dtype=grad.dtype)
        if forms.reduce == "sum":
            spmm(forms.transpose, grad, out, edge=forms.transpose_edge, source=forms.scale)
        else:
            x, best, ties = ctx.saved_tensors
            extremum_gather(forms.transpose, x, best, grad / ties, out)
        return out, None
