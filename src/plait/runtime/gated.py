"""Gated sums under torch autograd: projected rows in, one row a target out, gradients by recomputation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plait.kernels import gate as kernel
from plait.kernels.gemm import column_sums
from plait.runtime.buffers import Buffers
from plait.runtime.orders import EdgeOrders
from plait.runtime.project import contiguous_rows
from plait.runtime.segments import segment_sum
from plait.runtime.twice import added, differentiable

__all__ = ["GatedRun", "gated_sum"]


@dataclass(frozen=True)
class GatedRun:
    """One gated pass on one graph: z holds [Q | V]; [K | S] follow in z itself or lie in another tensor."""

    edges: EdgeOrders
    buffers: Buffers
    width: int
    has_skip: bool
    keeps_slopes: bool

    def sources(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """(Q, V) as columns of z."""
        return z[:, : self.width], z[:, self.width : 2 * self.width]

    def targets(self, z: Tensor, t: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """(K, S) as columns of the targets' rows; S is None without a skip."""
        own, first = (z, 2 * self.width) if t is None else (t, 0)
        skip = own[:, first + self.width :] if self.has_skip else None
        return own[:, first : first + self.width], skip


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: GatedRun, z: Tensor, t: Tensor | None, bias: Tensor | None) -> Tensor:
        (q, v), (k, skip) = run.sources(z), run.targets(z, t)
        rows = run.edges.pattern.num_rows
        out = run.buffers.take(rows, run.width, z.dtype)
        slopes = run.buffers.take(rows, run.width, z.dtype) if run.keeps_slopes else None
        kernel.gate(run.edges.pattern, "sigmoid", k, q, v, out=out, slopes=slopes, addend=skip, bias=bias)
        ctx.run, ctx.has_bias = run, bias is not None
        ctx.save_for_backward(z, t, slopes)
        return out

    @staticmethod
    @differentiable(lambda *given: _gated_again(*given))
    def backward(ctx: Any, grad: Tensor) -> Any:
        run: GatedRun = ctx.run
        z, t, slopes = ctx.saved_tensors
        (q, v), (k, _) = run.sources(z), run.targets(z, t)
        grad = contiguous_rows(grad, run.buffers)
        to_z = run.buffers.take(z.shape[0], z.shape[1], z.dtype)
        to_t = None if t is None else run.buffers.take(t.shape[0], t.shape[1], t.dtype)
        (to_q, to_v), (to_k, to_skip) = run.sources(to_z), run.targets(to_z, to_t)
        kernel.gate_sources(run.edges.transpose, "sigmoid", k, q, v, grad, to_q, to_v)
        if slopes is None:
            kernel.gate(run.edges.pattern, "sigmoid", k, q, v, slopes=to_k)
            to_k.mul_(grad)
        else:
            torch.mul(slopes, grad, out=to_k)
        if to_skip is not None:
            to_skip.copy_(grad)
        return None, to_z, to_t, column_sums(grad) if ctx.has_bias else None


def _gated_again(ctx: Any, grad: Tensor, saved: Sequence[Any]) -> tuple[Tensor, tuple[Any, ...]]:
    run: GatedRun = ctx.run
    z, t, _ = saved
    (q, v), (k, skip) = run.sources(z), run.targets(z, t)
    sources, targets = run.edges.sources, run.edges.targets
    gates = (k.index_select(0, targets) + q.index_select(0, sources)).sigmoid()
    out = segment_sum(gates * v.index_select(0, sources), targets, len(grad))
    bias = added(grad.shape[1:], grad) if ctx.has_bias else None
    for term in (skip, bias):
        out = out if term is None else out + term
    return out, (None, z, t, bias)


def gated_sum(run: GatedRun, z: Tensor, t: Tensor | None, bias: Tensor | None) -> Tensor:
    """out[i] = sum over edges of sigmoid(K[i] + Q[j]) * V[j] + S[i] + bias."""
    return _Gated.apply(run, z, t, bias)  # type: ignore[no-any-return, no-untyped-call]
