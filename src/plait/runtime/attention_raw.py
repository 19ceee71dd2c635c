"""Attention layers whose raw rows are gathered once for all heads and projected after, under torch autograd.

Head h is (weights[h] @ x) @ w[:, h]: for inputs narrower than the output. Transformer's keys are never
formed: (x_i Q) . (x_j K) = (x_i (Q Kᵀ)) . x_j, so the raw row is key and value of every head; what the key's
bias adds to a score is the same for all edges of a target, and the softmax drops it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import leaky_relu

from plait.kernels import attention as kernel
from plait.kernels import gemm as dense
from plait.kernels.attention import Scores
from plait.kernels.heads import project_heads, project_heads_backward
from plait.runtime.attention import TARGETS_STEP, AttentionRun, attended
from plait.runtime.project import contiguous_rows, weight_gradient
from plait.runtime.trace import clock, timed
from plait.runtime.twice import added, differentiable

__all__ = ["attend_raw", "attend_raw_dot", "merged"]


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
        given = x, w, vectors, edge
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
        with timed(ctx.clock, "fwd project each head"):
            project_heads(means, w, out, heads, bias=bias)
        ctx.run, ctx.has_bias = run, bias is not None
        ctx.save_for_backward(*given, all_scores, statistics, means)
        return out

    @staticmethod
    @differentiable(lambda *given: _raw_again(*given))
    def backward(ctx: Any, grad: Tensor) -> Any:
        run: AttentionRun = ctx.run
        x, w, vectors, edge, all_scores, statistics, means = ctx.saved_tensors
        x, w = contiguous_rows(x, run.buffers), w.contiguous()
        edge = None if edge is None else edge.contiguous()
        lanes, heads = run.lanes, run.heads
        grad = contiguous_rows(grad, run.buffers)
        to_means = run.like(means)
        with timed(ctx.clock, "bwd gradients by head"):
            to_w, _, sums = project_heads_backward(grad, means, w, to_means, heads)
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
        return None, to_x, to_w, to_vectors, to_edge, sums if ctx.has_bias else None


def _projected(means: Tensor, w: Tensor, heads: int) -> Tensor:
    """[targets, heads * width]: every head's mean times its own columns of w."""
    inner, width = w.shape[0], w.shape[1] // heads
    by_head = means.view(len(means), heads, inner).transpose(0, 1)
    return torch.bmm(by_head, w.view(inner, heads, width).transpose(0, 1)).transpose(0, 1).flatten(1)


def _raw_again(ctx: Any, grad: Tensor, saved: Sequence[Any]) -> tuple[Tensor, tuple[Any, ...]]:
    run: AttentionRun = ctx.run
    x, w, vectors, edge, *_ = saved
    scores, heads, (sources, targets) = x @ vectors, run.heads, (run.edges.sources, run.edges.targets)
    near, far = (
        scores[:, run.lanes :].index_select(0, targets),
        scores[:, : run.lanes].index_select(0, sources),
    )
    given = (near + far if edge is None else near + far + edge)[:, :heads]
    means = attended(run, leaky_relu(given, run.slope), x.index_select(0, sources).unsqueeze(1))
    bias = added(grad.shape[1:], grad) if ctx.has_bias else None
    out = _projected(means, w, heads)
    return out if bias is None else out + bias, (None, x, w, vectors, edge, bias)


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


class _DotRaw(torch.autograd.Function):
    """x = source rows, own = target rows (None: the same tensor); m and w by head side by side."""

    @staticmethod
    def forward(
        ctx: Any,
        run: AttentionRun,
        x: Tensor,
        own: Tensor | None,
        m: Tensor,
        w: Tensor,
        bias: Tensor | None,
        skip: Tensor | None,
        skip_bias: Tensor | None,
    ) -> Tensor:
        given = x, own, m, w, skip
        x, m, w = contiguous_rows(x, run.buffers), m.contiguous(), w.contiguous()
        own = None if own is None else contiguous_rows(own, run.buffers)
        skip = None if skip is None else skip.contiguous()
        near = x if own is None else own
        ctx.clock = clock()
        with timed(ctx.clock, "fwd queries of raw rows"):
            query = run.take(run.num_targets, m.shape[1], x)
            dense.gemm(near, m[: near.shape[1]], query, bias=m[-1] if _has_constant(m, near) else None)
        means = run.take(run.num_targets, m.shape[1], x)
        scores, statistics = Scores("dot", x, query, is_shared=True), run.statistics(x, None)
        with timed(ctx.clock, "fwd attend"):
            kernel.attend(run.edges.pattern, scores, x, means, statistics, run.heads, is_shared=True)
        out = run.take(run.num_targets, w.shape[1], x)
        with timed(ctx.clock, "fwd project each head"):
            project_heads(means, w, out, run.heads, bias=bias, own=near, skip=skip, skip_bias=skip_bias)
        if bias is not None and len(run.edges.bare):
            out[run.edges.bare] -= bias
        ctx.run = run
        ctx.save_for_backward(*given, query, means, statistics)
        return out

    @staticmethod
    @differentiable(lambda *given: _dot_again(*given))
    def backward(ctx: Any, grad: Tensor) -> Any:
        run: AttentionRun = ctx.run
        x, own, m, w, skip, query, means, statistics = ctx.saved_tensors
        x, m, w = contiguous_rows(x, run.buffers), m.contiguous(), w.contiguous()
        own = None if own is None else contiguous_rows(own, run.buffers)
        skip = None if skip is None else skip.contiguous()
        _, wants_x, wants_own, _, _, wants_bias, _, wants_skip_bias = ctx.needs_input_grad
        near = x if own is None else own
        grad = contiguous_rows(grad, run.buffers)
        to_means = run.like(means)
        with timed(ctx.clock, "bwd gradients by head"):
            to_w, to_skip, sums = project_heads_backward(
                grad, means, w, to_means, run.heads, own=None if skip is None else near
            )
        scores, slopes, to_x = Scores("dot", x, query, is_shared=True), run.slopes(x), None
        with timed(ctx.clock, "bwd attendᵀ"):
            kernel.output_dots(to_means, means, statistics, run.heads)
            if wants_x or slopes is not None:
                to_x = run.like(x)
                kernel.attend_sources(
                    run.edges.transpose, None, scores, x, to_means, statistics, slopes, to_x, to_x, run.heads,
                    is_shared=True,
                )  # fmt: skip
        to_query = run.like(query)
        with timed(ctx.clock, "bwd targets again" if slopes is None else "bwd gradient of the targets"):
            if slopes is None:
                kernel.attend_again(
                    run.edges.pattern, scores, x, to_means, statistics, to_query, run.heads, is_shared=True
                )
            else:
                kernel.attend_targets(
                    run.edges.pattern, run.edges.inverse, scores, slopes, to_query, run.heads
                )
        to_near = to_x if own is None else run.like(own) if wants_own else None
        if to_near is not None and (wants_x or wants_own):
            with timed(ctx.clock, "bwd input gradient"):
                weight = m[: near.shape[1]].t()
                dense.gemm(to_query, weight, to_near, addend=to_near if own is None else None)
                if skip is not None:
                    dense.gemm(grad, skip.t(), to_near, addend=to_near)
        with timed(ctx.clock, "bwd weight gradient"):
            to_m = weight_gradient(near, to_query)
        if _has_constant(m, near):
            to_m = torch.cat([to_m, dense.column_sums(to_query)[None]])
        to_bias = sums - grad[run.edges.bare].sum(0) if wants_bias else None
        return (
            None, to_x if wants_x else None, None if own is None else to_near, to_m, to_w, to_bias, to_skip,
            sums if wants_skip_bias else None,
        )  # fmt: skip


def _dot_again(ctx: Any, grad: Tensor, saved: Sequence[Any]) -> tuple[Tensor, tuple[Any, ...]]:
    run: AttentionRun = ctx.run
    x, own, m, w, skip, *_ = saved
    near = x if own is None else own
    query = near @ m[: near.shape[1]]
    query = (query + m[-1] if _has_constant(m, near) else query).index_select(0, run.edges.targets)
    rows = x.index_select(0, run.edges.sources).unsqueeze(1)
    scores = (query.view(len(query), run.heads, x.shape[1]) * rows).sum(-1)
    out = _projected(attended(run, scores, rows), w, run.heads)
    bias, skip_bias = (added(grad.shape[1:], grad) if ctx.needs_input_grad[k] else None for k in (5, 7))
    if bias is not None:
        out = out + bias * out.new_ones(len(out), 1).index_fill(0, run.edges.bare, 0.0)
    out = out if skip is None else out + near @ skip
    return out if skip_bias is None else out + skip_bias, (None, x, own, m, w, bias, skip, skip_bias)


def _has_constant(m: Tensor, near: Tensor) -> bool:
    """Whether m has a row more than the targets have columns: what every query gets."""
    return m.shape[0] > near.shape[1]


def attend_raw_dot(
    run: AttentionRun,
    x: Tensor,
    own: Tensor | None,
    m: Tensor,
    w: Tensor,
    *,
    bias: Tensor | None = None,
    skip: tuple[Tensor, Tensor | None] | None = None,
) -> Tensor:
    """Transformer's output by aggregating x itself: head h is softmax((own m[h]) . x) x w[:, h] + bias.

    own: the targets' rows (None: x). m: [columns of own, heads * columns of x], with a last row more where
    the queries have a bias (see `merged`). Targets without edges get no bias. skip: weight and bias of own
    rows that are added. Without dropout: only weights that add up to 1 make a value's bias the output's.
    """
    weight, skip_bias = (None, None) if skip is None else skip
    return _DotRaw.apply(run, x, own, m, w, bias, weight, skip_bias)  # type: ignore[no-any-return, no-untyped-call]


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, key_bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(query, key, key_bias)
        ctx.clock = clock()
        with timed(ctx.clock, "fwd one weight of queries and keys"):
            return torch.bmm(query.transpose(1, 2), key).transpose(0, 1).flatten(1)

    @staticmethod
    @differentiable(lambda *given: _merged_again(*given))
    def backward(ctx: Any, grad: Tensor) -> Any:
        query, key, key_bias = ctx.saved_tensors
        with timed(ctx.clock, "bwd gradients of queries and keys"):
            by_head = grad.view(grad.shape[0], len(key), -1).transpose(0, 1)
            to_query, to_key = torch.bmm(key, by_head.transpose(1, 2)), torch.bmm(query, by_head)
        return to_query, to_key, None if key_bias is None else torch.zeros_like(key_bias)


def _merged_again(ctx: Any, grad: Tensor, saved: Sequence[Any]) -> tuple[Tensor, tuple[Any, ...]]:
    query, key, key_bias = saved
    return torch.bmm(query.transpose(1, 2), key).transpose(0, 1).flatten(1), (query, key, key_bias)


def merged(query: Tensor, key: Tensor, key_bias: Tensor | None = None) -> Tensor:
    """queryᵀ key by head, side by side: [a, heads * b] from [heads, width, a] and [heads, width, b].

    The key's bias changes nothing but that it gets its gradient, which is zero.
    """
    return _Merged.apply(query, key, key_bias)  # type: ignore[no-any-return, no-untyped-call]
