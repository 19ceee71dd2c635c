"""Attention layers under torch autograd: projections, scores, the fused passes, gradients by recomputation.

Forward keeps the projected rows and two numbers per node and head; nothing of the size of edges times width
ever exists. Where a node has few edges the backward pass begins with the targets and holds two numbers per
edge and head between its two passes. Otherwise it begins with the sources, which needs the output, and holds
one, or none (is_lean): the pass over targets then computes them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import leaky_relu

from plait.kernels import attention as kernel
from plait.kernels import gemm as dense
from plait.kernels import spmm as sparse
from plait.kernels.attention import Dropout, Scores, padded
from plait.kernels.spmm import Pattern
from plait.runtime.buffers import Buffers
from plait.runtime.identity import counts_writes
from plait.runtime.orders import EdgeOrders
from plait.runtime.project import contiguous_rows, weight_gradient
from plait.runtime.segments import segment_softmax, segment_sum
from plait.runtime.trace import clock, timed
from plait.runtime.twice import differentiable

__all__ = ["TARGETS_STEP", "AttentionRun", "Columns", "attend_gat", "attend_rows", "attended"]

# Edges a target up to which the backward pass begins with the targets: it gathers the values once more but
# neither reads the output nor computes a score twice. Both passes by sources first, one core, 4 heads of 16:
# 0.57-0.82 at 2 edges a target, 0.77-0.95 at 4.5, 0.94-1.04 at 9, 1.12-1.19 at 31.
_FEW_EDGES = 8


@dataclass(frozen=True)
class AttentionRun:
    """One attention pass on one graph: shapes and options that are no tensors."""

    edges: EdgeOrders
    buffers: Buffers
    heads: int
    slope: float = 0.2
    dropout: Dropout | None = None
    is_lean: bool = False

    @property
    def lanes(self) -> int:
        return padded(self.heads)

    @property
    def num_targets(self) -> int:
        return self.edges.pattern.num_rows

    def take(self, rows: int, cols: int, like: Tensor) -> Tensor:
        return self.buffers.take(rows, cols, like.dtype)

    def like(self, tensor: Tensor) -> Tensor:
        """A buffer of the tensor's shape."""
        return self.buffers.take(tensor.shape[0], tensor.shape[1], tensor.dtype)

    def statistics(self, like: Tensor, target_scores: Tensor | None) -> Tensor:
        """Room for what a pass over targets knows of each; what it reads itself is there."""
        made = self.take(self.num_targets, 4 * self.lanes, like).view(self.num_targets, 4, self.lanes)
        if target_scores is not None:
            made[:, 0] = target_scores
        if self.heads < self.lanes:  # for padding heads
            made[:, 3] = 0
        return made

    @property
    def begins_with_targets(self) -> bool:
        """Whether the backward pass does, see _FEW_EDGES."""
        return not self.is_lean and self.edges.pattern.num_edges <= _FEW_EDGES * self.num_targets

    def kept(self, like: Tensor) -> Tensor:
        """Room for the weights and the scores' gradients of the edges, by target."""
        return self.take(self.edges.pattern.num_edges, 2 * self.lanes, like)

    def slopes(self, like: Tensor) -> Tensor | None:
        """Room for the scores' gradients, where they are kept between the passes."""
        return None if self.is_lean else self.take(self.edges.pattern.num_edges, self.lanes, like)

    def source_order(self, scores: Scores) -> Any:
        """Where the edges of the pass over sources lie by target, if that pass needs to know."""
        return None if scores.edge is None and scores.dropout is None else self.edges.order

    def target_score_gradient(
        self,
        scores: Scores,
        value: Tensor,
        grad: Tensor,
        statistics: Tensor,
        slopes: Tensor | None,
        out: Tensor,
        *,
        is_shared: bool = False,
    ) -> None:
        """GAT: out = the gradients of the targets' scores, from the edges' or all over again."""
        if slopes is None:
            kernel.attend_again(
                self.edges.pattern, scores, value, grad, statistics, out, self.heads, is_shared=is_shared
            )
        else:
            sparse.spmm(self.edges.slopes_by_target, slopes, out)


TARGETS_STEP = {False: "bwd sum of score gradients by target", True: "bwd targets again"}


def attended(run: AttentionRun, scores: Tensor, rows: Tensor) -> Tensor:
    """[targets, heads * width] from [edges, heads] and [edges, heads or 1, width], recorded by torch."""
    targets = run.edges.targets
    weights = segment_softmax(scores, targets, run.num_targets)
    if run.dropout is not None:
        weights = weights * _dropped(run, run.dropout, scores.dtype)
    return segment_sum((weights.unsqueeze(-1) * rows).flatten(1), targets, run.num_targets)


def _dropped(run: AttentionRun, dropout: Dropout, dtype: torch.dtype) -> Tensor:
    """[edges, heads]: what the kernels multiply the weights by, found by letting each edge attend alone."""
    count, lanes, kind = run.edges.pattern.num_edges, run.lanes, run.edges.pattern.indices.dtype
    alone = Pattern(np.arange(count + 1, dtype=kind), np.zeros(count, kind), 1)
    scores = Scores("gat", torch.zeros((1, lanes), dtype=dtype), dropout=dropout)
    out, statistics = (
        torch.empty((count, run.heads), dtype=dtype),
        torch.zeros((count, 4, lanes), dtype=dtype),
    )
    return kernel.attend(alone, scores, torch.ones((1, run.heads), dtype=dtype), out, statistics, run.heads)


def _by_head(rows: Tensor, heads: int) -> Tensor:
    return rows.reshape(len(rows), heads, rows.shape[1] // heads)


@dataclass
class _Output:
    """A pass's output kept for its backward; whoever changes it in place makes us compute it again."""

    tensor: Tensor
    version: int = field(init=False)

    def __post_init__(self) -> None:
        self.tensor = self.tensor.detach()
        self.version = self.tensor._version if counts_writes(self.tensor) else 0

    @property
    def is_intact(self) -> bool:
        return not counts_writes(self.tensor) or self.tensor._version == self.version


# GAT: scores of single numbers -------------------------------------------------------------------------


class _Gat(torch.autograd.Function):
    """z = [values | source scores | target scores], or [values] with the scores as values @ vectors."""

    @staticmethod
    def forward(
        ctx: Any,
        run: AttentionRun,
        width: int,
        z: Tensor,
        vectors: Tensor | None,
        target: Tensor | None,
        edge: Tensor | None,
        addend: Tensor | None,
        bias: Tensor | None,
    ) -> Tensor:
        columns, lanes = run.heads * width, run.lanes
        value = z[:, :columns]
        ctx.clock = clock()
        if vectors is None:
            all_scores = z[:, columns:]
        else:
            with timed(ctx.clock, "fwd scores of projected rows"):
                all_scores = dense.gemm(value, vectors, run.take(z.shape[0], vectors.shape[1], z))
        statistics = run.statistics(z, all_scores[:, lanes:] if target is None else target)
        given, edge = edge, None if edge is None else edge.contiguous()
        scores = Scores("gat", all_scores[:, :lanes], edge=edge, slope=run.slope, dropout=run.dropout)
        out = run.take(run.num_targets, columns, z)
        with timed(ctx.clock, "fwd attend"):
            kernel.attend(
                run.edges.pattern, scores, value, out, statistics, run.heads, addend=addend, bias=bias
            )
        ctx.run, ctx.width, ctx.out = run, width, None if run.begins_with_targets else _Output(out)
        ctx.save_for_backward(z, vectors, all_scores, statistics, given, addend, bias, target)
        return out

    @staticmethod
    @differentiable(lambda *given: _gat_again(*given))
    def backward(ctx: Any, grad: Tensor) -> Any:
        run: AttentionRun = ctx.run
        z, vectors, all_scores, statistics, edge, addend, bias, target = ctx.saved_tensors
        columns, lanes = run.heads * ctx.width, run.lanes
        value = z[:, :columns]
        edge = None if edge is None else edge.contiguous()
        grad = contiguous_rows(grad, run.buffers)
        scores = Scores("gat", all_scores[:, :lanes], edge=edge, slope=run.slope, dropout=run.dropout)
        to_z = run.like(z)
        to_scores = to_z[:, columns:] if vectors is None else run.like(all_scores)
        to_target = to_scores[:, lanes:] if target is None else run.like(target)
        to_source = to_z[:, :columns], to_scores[:, :lanes], run.heads
        if run.begins_with_targets:
            kept = run.kept(z)
            with timed(ctx.clock, TARGETS_STEP[False]):
                kernel.attend_again(
                    run.edges.pattern, scores, value, grad, statistics, to_target, run.heads, kept=kept
                )
            with timed(ctx.clock, "bwd attendᵀ"):
                kernel.attend_sources(
                    run.edges.transpose, run.edges.order, scores, value, grad, statistics, None, *to_source,
                    kept=kept,
                )  # fmt: skip
            slopes: Tensor | None = kept[:, lanes:]
        else:
            out = ctx.out.tensor
            if not ctx.out.is_intact:
                out = run.like(out)
                kernel.attend(
                    run.edges.pattern, scores, value, out, statistics, run.heads, addend=addend, bias=bias
                )
            slopes = run.slopes(z)
            with timed(ctx.clock, "bwd attendᵀ"):
                kernel.output_dots(grad, out, statistics, run.heads, addend=addend, bias=bias)
                kernel.attend_sources(
                    run.edges.transpose, run.source_order(scores), scores, value, grad, statistics, slopes,
                    *to_source,
                )  # fmt: skip
            with timed(ctx.clock, TARGETS_STEP[run.is_lean]):
                run.target_score_gradient(scores, value, grad, statistics, slopes, to_target)
        to_vectors = None
        if vectors is not None:
            with timed(ctx.clock, "bwd gradient through the scores"):
                dense.gemm(to_scores, vectors.t(), to_z, addend=to_z)
            with timed(ctx.clock, "bwd weight gradient of the scores"):
                to_vectors = weight_gradient(value, to_scores)
        to_edge = None
        if edge is not None and slopes is not None and ctx.needs_input_grad[5]:
            to_edge = slopes
            if not run.begins_with_targets:
                to_edge = slopes[torch.from_numpy(run.edges.inverse.astype(np.int64))]
        return (
            None, None, to_z, to_vectors, None if target is None else to_target, to_edge,
            None if addend is None else grad, None if bias is None else dense.column_sums(grad),
        )  # fmt: skip


def _gat_again(ctx: Any, grad: Tensor, saved: Sequence[Any]) -> tuple[Tensor, tuple[Any, ...]]:
    run: AttentionRun = ctx.run
    z, vectors, _, _, edge, addend, bias, target = saved
    columns, heads = run.heads * ctx.width, run.heads
    value = z[:, :columns]
    scores = z[:, columns:] if vectors is None else value @ vectors
    near = scores[:, run.lanes :] if target is None else target
    given = near.index_select(0, run.edges.targets) + scores[:, : run.lanes].index_select(
        0, run.edges.sources
    )
    given = (given if edge is None else given + edge)[:, :heads]
    rows = _by_head(value.index_select(0, run.edges.sources), heads)
    out = attended(run, leaky_relu(given, run.slope), rows)
    for term in (addend, bias):
        out = out if term is None else out + term
    return out, (None, None, z, vectors, target, edge, addend, bias)


def attend_gat(
    run: AttentionRun,
    width: int,
    z: Tensor,
    *,
    vectors: Tensor | None = None,
    target: Tensor | None = None,
    edge: Tensor | None = None,
    addend: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """GAT's output from the projected rows: softmax over leaky(source + target + edge scores).

    z holds [values | source scores | target scores]; with `vectors` [heads * width, 2 lanes] the scores are
    values @ vectors instead, with `target` [targets, lanes] the target scores are given and z or vectors hold
    the source's only. Heads lie side by side.
    """
    return _Gat.apply(run, width, z, vectors, target, edge, addend, bias)  # type: ignore[no-any-return, no-untyped-call]


# GATv2 and Transformer: scores of rows -----------------------------------------------------------------


@dataclass(frozen=True)
class Columns:
    """Where the parts of a projected row begin; `near` lies in the targets' rows, `skip` < 0: none."""

    far: int
    value: int
    near: int
    skip: int = -1


class _Rows(torch.autograd.Function):
    """z = source rows, t = target rows (None: the same tensor); parts by `columns`."""

    @staticmethod
    def forward(
        ctx: Any,
        run: AttentionRun,
        kind: str,
        columns: Columns,
        width: int,
        z: Tensor,
        t: Tensor | None,
        att: Tensor | None,
        bias: Tensor | None,
    ) -> Tensor:
        given, att = att, None if att is None else att.contiguous()
        scores, value, addend = _parts(run, kind, columns, width, z, t, att)
        statistics = run.statistics(z, None)
        out = run.take(run.num_targets, width, z)
        ctx.clock = clock()
        with timed(ctx.clock, "fwd attend"):
            kernel.attend(
                run.edges.pattern, scores, value, out, statistics, run.heads, addend=addend, bias=bias
            )
        ctx.run, ctx.kind, ctx.columns, ctx.width = run, kind, columns, width
        ctx.out = None if run.begins_with_targets else _Output(out)
        ctx.save_for_backward(z, t, given, bias, statistics)
        return out

    @staticmethod
    @differentiable(lambda *given: _rows_again(*given))
    def backward(ctx: Any, grad: Tensor) -> Any:
        run: AttentionRun = ctx.run
        columns, width, heads = ctx.columns, ctx.width, run.heads
        z, t, att, bias, statistics = ctx.saved_tensors
        att = None if att is None else att.contiguous()
        grad = contiguous_rows(grad, run.buffers)
        scores, value, addend = _parts(run, ctx.kind, columns, width, z, t, att)
        to_z = run.like(z)
        to_t = to_z if t is None else run.like(t)

        def part(rows: Tensor, start: int) -> Tensor:
            return rows[:, start : start + width]

        is_joint = t is None and columns.near == columns.far
        near = run.take(z.shape[0], width, z) if is_joint else part(to_t, columns.near)
        to_far = None if ctx.kind == "leaky" else part(to_z, columns.far)
        to_source = part(to_z, columns.value), to_far, heads
        target_step = "bwd targets again" if run.is_lean else "bwd gradient of the targets"
        if run.begins_with_targets:
            kept = run.kept(z)
            with timed(ctx.clock, target_step):
                more = kernel.attend_again(
                    run.edges.pattern, scores, value, grad, statistics, near, heads, kept=kept
                )
            with timed(ctx.clock, "bwd attendᵀ"):
                to_att = kernel.attend_sources(
                    run.edges.transpose, run.edges.order, scores, value, grad, statistics, None, *to_source,
                    kept=kept,
                )  # fmt: skip
        else:
            out = ctx.out.tensor
            if not ctx.out.is_intact:
                out = run.like(out)
                kernel.attend(
                    run.edges.pattern, scores, value, out, statistics, heads, addend=addend, bias=bias
                )
            slopes = run.slopes(z)
            with timed(ctx.clock, "bwd attendᵀ"):
                kernel.output_dots(grad, out, statistics, heads, addend=addend, bias=bias)
                to_att = kernel.attend_sources(
                    run.edges.transpose, run.source_order(scores), scores, value, grad, statistics, slopes,
                    *to_source,
                )  # fmt: skip
            with timed(ctx.clock, target_step):
                if slopes is None:
                    more = kernel.attend_again(
                        run.edges.pattern, scores, value, grad, statistics, near, heads
                    )
                else:
                    more = kernel.attend_targets(
                        run.edges.pattern, run.edges.inverse, scores, slopes, near, heads
                    )
        if is_joint:
            part(to_z, columns.far).add_(near)
        if columns.skip >= 0:
            part(to_t, columns.skip).copy_(grad)
        if to_att is not None and more is not None:
            to_att = to_att + more
        return (
            None, None, None, None, to_z, None if t is None else to_t, to_att,
            None if bias is None else dense.column_sums(grad),
        )  # fmt: skip


def _parts(
    run: AttentionRun,
    kind: str,
    columns: Columns,
    width: int,
    z: Tensor,
    t: Tensor | None,
    att: Tensor | None,
) -> tuple[Scores, Tensor, Tensor | None]:
    """(scores, values, added rows): views of the projected rows."""
    own = z if t is None else t
    far, near = z[:, columns.far : columns.far + width], own[:, columns.near : columns.near + width]
    value = z[:, columns.value : columns.value + width]
    addend = own[:, columns.skip : columns.skip + width] if columns.skip >= 0 else None
    return (Scores(kind, far, near, att=att, slope=run.slope, dropout=run.dropout), value, addend)


def _rows_again(ctx: Any, grad: Tensor, saved: Sequence[Any]) -> tuple[Tensor, tuple[Any, ...]]:
    run: AttentionRun = ctx.run
    z, t, att, bias, _ = saved
    scores, value, addend = _parts(run, ctx.kind, ctx.columns, ctx.width, z, t, att)
    assert scores.near is not None
    far, near = scores.far.index_select(0, run.edges.sources), scores.near.index_select(0, run.edges.targets)
    made = near * far if att is None else leaky_relu(near + far, run.slope) * att.reshape(-1)
    rows = _by_head(value.index_select(0, run.edges.sources), run.heads)
    out = attended(run, _by_head(made, run.heads).sum(-1), rows)
    for term in (addend, bias):
        out = out if term is None else out + term
    return out, (None, None, None, None, z, t, att, bias)


def attend_rows(
    run: AttentionRun,
    kind: str,
    columns: Columns,
    width: int,
    z: Tensor,
    t: Tensor | None,
    *,
    att: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Attention whose scores are made from rows: kind leaky (GATv2) or dot (Transformer); width = all heads.

    The parts named by `columns` cover z and t: their gradients fill them.
    """
    return _Rows.apply(run, kind, columns, width, z, t, att, bias)  # type: ignore[no-any-return, no-untyped-call]
