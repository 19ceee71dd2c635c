"""Learned maps of edges under torch autograd: the first layer is done by node, the rest in blocks of edges.

A block is a run of targets with few enough edges that their rows stay in cache: rows of both ends are added,
mapped and reduced to their targets at once, so nothing of edges x width outlives a block. The backward pass
computes each block again. Products run on plait's own kernel, whose bits do not depend on a row's place: an
edge that attained the maximum attains it again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plait.kernels import edgewise as kernel
from plait.kernels import gate
from plait.kernels import gemm as dense
from plait.kernels import spmm as sparse
from plait.runtime.buffers import Buffers
from plait.runtime.orders import EdgeBlock, EdgeOrders
from plait.runtime.project import contiguous_rows, weight_gradient
from plait.runtime.segments import segment_extremum, segment_sum
from plait.runtime.twice import differentiable

__all__ = ["EdgewiseRun", "attained", "blocks_of", "mapped", "rectified"]

_BLOCK_BYTES = 2 << 20  # of the widest rows of a block; a second-level cache and a bit
_LEAST_EDGES = 256


def blocks_of(edges: EdgeOrders, row_bytes: int) -> list[EdgeBlock]:
    """The graph's edges in blocks whose rows of `row_bytes` fit a cache."""
    return edges.blocks(max(_LEAST_EDGES, _BLOCK_BYTES // max(1, row_bytes)))


@dataclass(frozen=True)
class EdgewiseRun:
    """One pass on one graph: z holds [far | near] rows of `width`, or [far], with near in another tensor."""

    edges: EdgeOrders
    buffers: Buffers
    width: int  # columns of the ends' rows
    reduce: str = "sum"
    rest: Callable[..., Tensor] | None = None  # (rows, *parameters), row by row, `width` columns to `outer`
    outer: int = 0
    widest: int = 0  # columns of the widest row inside `rest`

    def ends(self, z: Tensor, t: Tensor | None) -> tuple[Tensor, Tensor]:
        """(far, near) as columns of z and t."""
        return z[:, : self.width], z[:, self.width :] if t is None else t

    def blank(self, z: Tensor, t: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Buffers of the gradients of z and t."""
        to_t = None if t is None else self.buffers.take(t.shape[0], t.shape[1], t.dtype)
        return self.buffers.take(z.shape[0], z.shape[1], z.dtype), to_t


# The rest of the map in blocks ---------------------------------------------------------------------------


class _Mapped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: EdgewiseRun, z: Tensor, t: Tensor | None, *parameters: Tensor) -> Tensor:
        far, near = run.ends(z, t)
        rows = run.edges.pattern.num_rows
        out = run.buffers.take(rows, run.outer, z.dtype)
        has_ties = run.reduce != "sum" and any(ctx.needs_input_grad)
        ties = run.buffers.take(rows, run.outer, z.dtype) if has_ties else None
        for block in blocks_of(run.edges, run.widest * z.element_size()):
            own = slice(block.first, block.last)
            y = (
                _rest(run, _paired(run, block, near, far), parameters)
                if block.num_edges
                else z.new_empty((0, run.outer))
            )
            if ties is None:
                sparse.spmm(block.to_targets, y, out[own], reduce=run.reduce)
            else:
                sparse.extremum(block.to_targets, y, out[own], ties[own], run.reduce)
        ctx.run = run
        ctx.save_for_backward(z, t, out, ties, *parameters)
        return out

    @staticmethod
    @differentiable(lambda *given: _mapped_again(*given))
    def backward(ctx: Any, grad: Tensor) -> Any:
        run: EdgewiseRun = ctx.run
        z, t, out, ties, *parameters = ctx.saved_tensors
        far, near = run.ends(z, t)
        grad = contiguous_rows(grad, run.buffers)
        if ties is not None:
            grad = torch.div(grad, ties, out=run.buffers.take(out.shape[0], out.shape[1], out.dtype))
        to_z, to_t = run.blank(z, t)
        to_far, to_near = run.ends(to_z, to_t)
        to_far.zero_()
        parameters, totals = _fresh(parameters, ctx.needs_input_grad[3:])
        for block in blocks_of(run.edges, run.widest * z.element_size()):
            rows = slice(block.first, block.last)
            if not block.num_edges:
                to_near[rows].zero_()
                continue
            with torch.enable_grad():
                pairs = _paired(run, block, near, far).requires_grad_()
                y = _rest(run, pairs, parameters)
            to_y = _to_edges(run, block, y.detach(), out[rows], grad[rows])
            to_pairs = _shared_out(y, to_y, pairs, parameters, totals)
            _to_ends(run, block, to_pairs, to_near[rows], to_far)
        return None, to_z, to_t, *totals


def _fresh(parameters: Sequence[Tensor], wanted: Sequence[bool]) -> tuple[list[Tensor], list[Tensor | None]]:
    """(the parameters cut off from where they came from, room for the gradients of those that want one)."""
    cut = [p.detach().requires_grad_(wants) for p, wants in zip(parameters, wanted, strict=True)]
    return cut, [torch.zeros_like(p) if p.requires_grad else None for p in cut]


def _shared_out(
    y: Tensor, to_y: Tensor, pairs: Tensor, parameters: list[Tensor], totals: list[Tensor | None]
) -> Tensor:
    """The gradient of a block's rows; those of the parameters are added to their totals."""
    leaves = [pairs, *(p for p in parameters if p.requires_grad)]
    to_pairs, *more = torch.autograd.grad(y, leaves, to_y)
    for total, part in zip((total for total in totals if total is not None), more, strict=True):
        total.add_(part)
    return to_pairs


def _paired(run: EdgewiseRun, block: EdgeBlock, near: Tensor, far: Tensor) -> Tensor:
    rows = run.buffers.take(block.num_edges, run.width, far.dtype)
    return kernel.pair(run.edges.pattern, block.first, block.last, near, far, rows)


def _to_ends(run: EdgewiseRun, block: EdgeBlock, to_pairs: Tensor, to_near: Tensor, to_far: Tensor) -> None:
    """The gradients of a block's rows, summed for its targets and added to the sources."""
    to_pairs = contiguous_rows(to_pairs, run.buffers)
    sparse.spmm(block.to_targets, to_pairs, to_near)
    kernel.scatter(block.groups, to_pairs, to_far)


def _rest(run: EdgewiseRun, rows: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    assert run.rest is not None
    y = run.rest(rows, *parameters)
    return y if y.stride(1) == 1 else y.contiguous()


def _to_edges(run: EdgewiseRun, block: EdgeBlock, y: Tensor, out: Tensor, share: Tensor) -> Tensor:
    """The targets' shares as gradients of the block's edges: of a sum to all, else to who attains it."""
    to_y = run.buffers.take(block.num_edges, run.outer, y.dtype)
    if run.reduce == "sum":
        return sparse.spmm(block.to_edges, share, to_y)
    return sparse.extremum_gather(block.to_edges, y, out, share, to_y)


def _ends_added(run: EdgewiseRun, z: Tensor, t: Tensor | None) -> Tensor:
    """[edges, width]: near[i] + far[j] of every edge, recorded by torch."""
    far, near = run.ends(z, t)
    return near.index_select(0, run.edges.targets) + far.index_select(0, run.edges.sources)


def _reduced(run: EdgewiseRun, rows: Tensor, count: int) -> Tensor:
    if run.reduce == "sum":
        return segment_sum(rows, run.edges.targets, count)
    return segment_extremum(rows, run.edges.targets, count, run.reduce)


def _mapped_again(ctx: Any, grad: Tensor, saved: Sequence[Any]) -> tuple[Tensor, tuple[Any, ...]]:
    z, t, _, _, *parameters = saved
    rows = _rest(ctx.run, _ends_added(ctx.run, z, t), parameters)
    return _reduced(ctx.run, rows, len(grad)), (None, z, t, *parameters)


def mapped(run: EdgewiseRun, z: Tensor, t: Tensor | None, parameters: list[Tensor]) -> Tensor:
    """out[i] = the sum, max or min over edges of rest(near[i] + far[j], *parameters); 0 without edges."""
    return _Mapped.apply(run, z, t, *parameters)  # type: ignore[no-any-return, no-untyped-call]


# A last linear layer under an extremum ---------------------------------------------------------------------


class _Attained(torch.autograd.Function):
    """rest, then rows @ w + bias, reduced; one bit an edge and column remembers who attained the extremum."""

    @staticmethod
    def forward(
        ctx: Any, run: EdgewiseRun, z: Tensor, t: Tensor | None, w: Tensor, bias: Tensor | None, *more: Tensor
    ) -> Tensor:
        ctx.run, ctx.has_bias = run, bias is not None
        given, w = w, w.contiguous()
        far, near = run.ends(z, t)
        rows, outer = run.edges.pattern.num_rows, w.shape[1]
        out, ties = (run.buffers.take(rows, outer, z.dtype) for _ in range(2))
        marks = torch.empty((run.edges.pattern.num_edges, kernel.mark_bytes(outer)), dtype=torch.uint8)
        for block in blocks_of(run.edges, run.widest * z.element_size()):
            own = slice(block.first, block.last)
            y = run.buffers.take(block.num_edges, outer, z.dtype)
            if block.num_edges:
                dense.gemm(_rest(run, _paired(run, block, near, far), more), w, y, bias=bias)
            sparse.extremum(block.to_targets, y, out[own], ties[own], run.reduce)
            kernel.mark(block.to_targets, out[own], y, marks[block.start : block.end])
        ctx.save_for_backward(z, t, ties, marks, given, bias, *more)
        return out

    @staticmethod
    @differentiable(lambda *given: _attained_again(*given))
    def backward(ctx: Any, grad: Tensor) -> Any:
        run: EdgewiseRun = ctx.run
        z, t, ties, marks, w, _, *parameters = ctx.saved_tensors
        far, near = run.ends(z, t)
        grad = contiguous_rows(grad, run.buffers)
        share = torch.div(grad, ties, out=run.buffers.take(grad.shape[0], grad.shape[1], grad.dtype))
        to_z, to_t = run.blank(z, t)
        to_far, to_near = run.ends(to_z, to_t)
        to_far.zero_()
        to_w, to_bias = torch.zeros_like(w), w.new_zeros(w.shape[1])
        parameters, totals = _fresh(parameters, ctx.needs_input_grad[5:])
        back = w.t().contiguous()
        for block in blocks_of(run.edges, run.widest * z.element_size()):
            rows = slice(block.first, block.last)
            if not block.num_edges:
                to_near[rows].zero_()
                continue
            to_y = run.buffers.take(block.num_edges, w.shape[1], z.dtype)
            kernel.unmark(block.to_targets, share[rows], marks[block.start : block.end], to_y)
            with torch.enable_grad():
                pairs = _paired(run, block, near, far).requires_grad_()
                h = _rest(run, pairs, parameters)
            to_w.add_(weight_gradient(h.detach(), to_y))
            if ctx.has_bias:
                to_bias.add_(dense.column_sums(to_y))
            to_h = dense.gemm(to_y, back, run.buffers.take(block.num_edges, w.shape[0], z.dtype))
            to_pairs = _shared_out(h, to_h, pairs, parameters, totals)
            _to_ends(run, block, to_pairs, to_near[rows], to_far)
        return None, to_z, to_t, to_w, to_bias if ctx.has_bias else None, *totals


def _attained_again(ctx: Any, grad: Tensor, saved: Sequence[Any]) -> tuple[Tensor, tuple[Any, ...]]:
    z, t, _, _, w, bias, *parameters = saved
    rows = _rest(ctx.run, _ends_added(ctx.run, z, t), parameters) @ w
    out = _reduced(ctx.run, rows if bias is None else rows + bias, len(grad))
    return out, (None, z, t, w, bias, *parameters)


def attained(
    run: EdgewiseRun, z: Tensor, t: Tensor | None, w: Tensor, bias: Tensor | None, parameters: list[Tensor]
) -> Tensor:
    """out[i] = max (min) over edges of rest(near[i] + far[j]) @ w + bias; the product is not done again."""
    return _Attained.apply(run, z, t, w, bias, *parameters)  # type: ignore[no-any-return, no-untyped-call]


# A ReLU and a sum: no block at all -------------------------------------------------------------------------


class _Rectified(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: EdgewiseRun, z: Tensor, t: Tensor | None) -> Tensor:
        far, near = run.ends(z, t)
        rows = run.edges.pattern.num_rows
        out = run.buffers.take(rows, run.width, z.dtype)
        counts = run.buffers.take(rows, run.width, z.dtype) if any(ctx.needs_input_grad) else None
        gate.gate(run.edges.pattern, "relu", near, far, None, out=out, slopes=counts)
        ctx.run = run
        ctx.save_for_backward(z, t, counts)
        return out

    @staticmethod
    @differentiable(lambda *given: _rectified_again(*given))
    def backward(ctx: Any, grad: Tensor) -> Any:
        run: EdgewiseRun = ctx.run
        z, t, counts = ctx.saved_tensors
        far, near = run.ends(z, t)
        grad = contiguous_rows(grad, run.buffers)
        to_z, to_t = run.blank(z, t)
        to_far, to_near = run.ends(to_z, to_t)
        gate.gate_sources(run.edges.transpose, "relu", near, far, None, grad, to_far, None)
        torch.mul(counts, grad, out=to_near)
        return None, to_z, to_t


def _rectified_again(ctx: Any, grad: Tensor, saved: Sequence[Any]) -> tuple[Tensor, tuple[Any, ...]]:
    z, t, _ = saved
    rows = _ends_added(ctx.run, z, t).relu()
    return segment_sum(rows, ctx.run.edges.targets, len(grad)), (None, z, t)


def rectified(run: EdgewiseRun, z: Tensor, t: Tensor | None) -> Tensor:
    """out[i] = sum over edges of relu(near[i] + far[j])."""
    return _Rectified.apply(run, z, t)  # type: ignore[no-any-return, no-untyped-call]
