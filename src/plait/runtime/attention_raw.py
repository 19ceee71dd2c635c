"""Attention layers whose raw rows are gathered once for all heads and projected after, under torch autograd.

Head h is (weights[h] @ x) @ w[:, h]: for inputs narrower than the output.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from plait.kernels import attention as kernel
from plait.kernels import gemm as dense
from plait.kernels.attention import Scores
from plait.runtime.attention import TARGETS_STEP, AttentionRun
from plait.runtime.project import contiguous_rows, weight_gradient
from plait.runtime.trace import clock, timed

__all__ = ["attend_raw"]


class _GatRaw(torch.autograd.Function):
    """Raw rows are aggregated once per head and projected after: for inputs narrower than the output."""

    @staticmethod
    def forward(
        ctx: Any,
        run: AttentionRun,
        x: Tensor,
        w: Tensor,
        vectors: Tensor,
        edge: Tensor | None,
        bias: Tensor | None,
    ) -> Tensor:
        x, w = contiguous_rows(x, run.buffers), w.contiguous()
        inner, lanes, heads = x.shape[1], run.lanes, run.heads
        ctx.clock = clock()
        with timed(ctx.clock, "fwd scores of raw rows"):
            all_scores = dense.gemm(x, vectors, run.take(x.shape[0], 2 * lanes, x))
        statistics = run.statistics(x, all_scores[:, lanes:])
        edge = None if edge is None else edge.contiguous()
        scores = Scores("gat", all_scores[:, :lanes], edge=edge, slope=run.slope, dropout=run.dropout)
        means = run.take(run.num_targets, heads * inner, x)
        with timed(ctx.clock, "fwd attend"):
            kernel.attend(run.edges.pattern, scores, x, means, statistics, heads, is_shared=True)
        out = run.take(run.num_targets, w.shape[1], x)
        width = w.shape[1] // heads
        for h in range(heads):
            own = slice(h * width, (h + 1) * width)
            own_bias = None if bias is None else bias[own]
            with timed(ctx.clock, "fwd project each head"):
                dense.gemm(means[:, h * inner : (h + 1) * inner], w[:, own], out[:, own], bias=own_bias)
        ctx.run, ctx.has_bias = run, bias is not None
        ctx.save_for_backward(x, w, vectors, all_scores, statistics, edge, means)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        run: AttentionRun = ctx.run
        x, w, vectors, all_scores, statistics, edge, means = ctx.saved_tensors
        inner, lanes, heads = x.shape[1], run.lanes, run.heads
        width = w.shape[1] // heads
        grad = contiguous_rows(grad, run.buffers)
        to_means, to_w = run.like(means), torch.empty_like(w)
        for h in range(heads):
            own, raw = slice(h * width, (h + 1) * width), slice(h * inner, (h + 1) * inner)
            with timed(ctx.clock, "bwd gradient of each head's mean"):
                dense.gemm(grad[:, own], w[:, own].t(), to_means[:, raw])
            with timed(ctx.clock, "bwd weight gradient by head"):
                to_w[:, own] = weight_gradient(means[:, raw], grad[:, own])
        scores = Scores("gat", all_scores[:, :lanes], edge=edge, slope=run.slope, dropout=run.dropout)
        to_x, to_scores, slopes = run.like(x), run.like(all_scores), run.slopes(x)
        with timed(ctx.clock, "bwd attendᵀ"):
            kernel.output_dots(to_means, means, statistics, heads)
            kernel.attend_sources(
                run.edges.transpose, run.source_order(scores), scores, x, to_means, statistics, slopes,
                to_x, to_scores[:, :lanes], heads, is_shared=True,
            )  # fmt: skip
        with timed(ctx.clock, TARGETS_STEP[run.is_lean]):
            run.target_score_gradient(
                scores, x, to_means, statistics, slopes, to_scores[:, lanes:], is_shared=True
            )
        with timed(ctx.clock, "bwd gradient through the scores"):
            dense.gemm(to_scores, vectors.t(), to_x, addend=to_x)
        with timed(ctx.clock, "bwd weight gradient of the scores"):
            to_vectors = weight_gradient(x, to_scores)
        to_edge = None
        if edge is not None and slopes is not None and ctx.needs_input_grad[4]:
            to_edge = slopes[torch.from_numpy(run.edges.inverse.astype(np.int64))]
        return None, to_x, to_w, to_vectors, to_edge, dense.column_sums(grad) if ctx.has_bias else None


def attend_raw(
    run: AttentionRun,
    x: Tensor,
    w: Tensor,
    vectors: Tensor,
    *,
    edge: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """GAT's output by aggregating x itself: head h is (weights[h] @ x) @ w[:, h]; scores are x @ vectors."""
    return _GatRaw.apply(run, x, w, vectors, edge, bias)  # type: ignore[no-any-return, no-untyped-call]
