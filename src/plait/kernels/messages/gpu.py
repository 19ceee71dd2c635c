"""Sums of known messages on a GPU by Triton, and their gradients: no row of an edge is written but its own.

The programs are those of kernels/spmm/gpu.py: SLOTS short rows, or one piece of a long row. Rows of nodes and
edges hold one or two sections of `width` columns side by side (kernels/messages/reference.py: FORMS); a
column of a message reads that column of every section.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from plait.kernels.csr.gpu import Rows  # first: it says so where triton is missing
from plait.kernels.messages.reference import FORMS
from plait.kernels.relaunch import Launcher
from plait.kernels.spmm.gpu import (
    Tiles,
    accumulator,
    add_parts,
    close_rows,
    rows_on,
    slots_of,
    stride_of,
    tiles_of,
)

# isort: split
import triton
import triton.language as tl

if TYPE_CHECKING:
    from plait.kernels.spmm import Pattern

__all__ = ["FORMS", "sums", "sums_sources", "sums_targets"]

_COUNTS = ("num_pieces", "num_items")


@triton.jit
def _logistic(z):  # type: ignore[no-untyped-def]
    return 1.0 / (1.0 + tl.exp(-z))


@triton.jit
def _softplus(z):  # type: ignore[no-untyped-def]
    """max(z, 0) + log(1 + u), u = exp(-|z|); what 1 + u rounds off is put back."""
    u = tl.exp(-tl.abs(z))
    sum_ = 1.0 + u
    log = tl.where(sum_ == 1.0, u, tl.log(sum_) * (u / tl.where(sum_ == 1.0, 1.0, sum_ - 1.0)))
    return tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL) + log


@triton.jit  # type: ignore[untyped-decorator]
def _made(n0, n1, f0, f1, e0, e1, t, EPS: tl.constexpr, FORM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Both sections of a message; the second is the first where there is one."""
    if FORM == "film":
        first = tl.maximum(n1 * f0 + n0, 0.0, propagate_nan=tl.PropagateNan.ALL)
        second = first
    elif FORM == "crystal":
        first = _logistic(n0 + f0 + e0) * _softplus(n1 + f1 + e1)
        second = first
    elif FORM == "gated":
        first = _logistic(n0 + f0 + e0) * (f1 + e1)
        second = first
    else:
        m = tl.maximum(f0 + e0, 0.0, propagate_nan=tl.PropagateNan.ALL) + EPS
        first = tl.exp(t * m - n0)
        second = first * m
    return first, second


@triton.jit  # type: ignore[untyped-decorator]
def _slopes(  # type: ignore[no-untyped-def]
    n0, n1, f0, f1, e0, e1, t, g0, g1, EPS: tl.constexpr, FORM: tl.constexpr
):
    """The gradients of near's and of far's sections; those of an edge's are far's."""
    if FORM == "film":
        d0 = tl.where(n1 * f0 + n0 > 0, g0, 0.0)
        to_n0, to_n1, to_f0, to_f1 = d0, d0 * f0, d0 * n1, d0
    elif FORM == "crystal":
        s0, z1 = _logistic(n0 + f0 + e0), n1 + f1 + e1
        d0 = g0 * s0 * (1.0 - s0) * _softplus(z1)
        d1 = g0 * s0 * _logistic(z1)
        to_n0, to_n1, to_f0, to_f1 = d0, d1, d0, d1
    elif FORM == "gated":
        s0 = _logistic(n0 + f0 + e0)
        d0 = g0 * s0 * (1.0 - s0) * (f1 + e1)
        to_n0, to_n1, to_f0, to_f1 = d0, d0, d0, g0 * s0
    else:
        z = f0 + e0
        m = tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL) + EPS
        power = tl.exp(t * m - n0)
        d0 = tl.where(z > 0, g0 * t * power + g1 * power * (1.0 + m * t), 0.0)
        to_n0, to_n1, to_f0, to_f1 = d0, d0, d0, d0
    return to_n0, to_n1, to_f0, to_f1


@triton.jit  # type: ignore[untyped-decorator]
def _sections(  # type: ignore[no-untyped-def]
    p_rows, m_both, width, COUNT: tl.constexpr, ACC: tl.constexpr
):
    """Two sections of some rows; the first twice where there is one."""
    first = tl.load(p_rows, mask=m_both, other=0.0).to(ACC)
    second = first
    if COUNT == 2:
        second = tl.load(p_rows + width, mask=m_both, other=0.0).to(ACC)
    return first, second


@triton.jit(do_not_specialize=_COUNTS)  # type: ignore[untyped-decorator]
def _forward(  # type: ignore[no-untyped-def]
    p_near, p_far, p_edge, p_t, p_out, p_parts, p_other_parts, p_indptr, p_indices, p_items,
    near_stride, far_stride, edge_stride, out_stride, num_pieces, num_items, width,
    NEAR: tl.constexpr, FAR: tl.constexpr, EDGE: tl.constexpr, OUT: tl.constexpr,
    EPS: tl.constexpr, FORM: tl.constexpr, ACC: tl.constexpr, SLOTS: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    i_program = tl.program_id(0)
    o_column = tl.program_id(1) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    m_column = o_column < width
    row, first, last, part, step, rounds = slots_of(p_items, i_program, num_pieces, num_items, SLOTS)
    m_own = (row >= 0)[:, None] & m_column[None, :]
    n0, n1 = _sections(
        p_near + row.to(tl.int64)[:, None] * near_stride + o_column[None, :], m_own, width, NEAR, ACC
    )
    t = tl.load(p_t).to(ACC)
    total = tl.zeros((SLOTS, BLOCK_WIDTH), ACC)
    other_total = tl.zeros((SLOTS, BLOCK_WIDTH), ACC)
    for k in range(0, rounds):
        o_edge = first + k * step
        m_edge = o_edge < last
        m_both = m_edge[:, None] & m_column[None, :]
        source = tl.load(p_indices + o_edge, mask=m_edge, other=0).to(tl.int64)[:, None]
        f0, f1 = _sections(p_far + source * far_stride + o_column[None, :], m_both, width, FAR, ACC)
        if p_edge is not None:
            p_own = p_edge + o_edge.to(tl.int64)[:, None] * edge_stride + o_column[None, :]
            e0, e1 = _sections(p_own, m_both, width, EDGE, ACC)
        else:
            e0, e1 = tl.zeros((SLOTS, BLOCK_WIDTH), ACC), tl.zeros((SLOTS, BLOCK_WIDTH), ACC)
        made, other = _made(n0, n1, f0, f1, e0, e1, t, EPS, FORM)
        total += tl.where(m_both, made, 0.0)
        if OUT == 2:
            other_total += tl.where(m_both, other, 0.0)
    is_piece = i_program < num_pieces
    close_rows(total, row, part, is_piece, o_column, m_column,
               p_out, p_parts, p_indptr, None, None, out_stride, width, 0)  # fmt: skip
    if OUT == 2:
        close_rows(other_total, row, part, is_piece, o_column, m_column,
                   p_out + width, p_other_parts, p_indptr, None, None, out_stride, width, 0)  # fmt: skip


@triton.jit(do_not_specialize=_COUNTS)  # type: ignore[untyped-decorator]
def _targets(  # type: ignore[no-untyped-def]
    p_near, p_far, p_edge, p_t, p_grad, p_near_grad, p_parts, p_other_parts, p_edge_grad,
    p_indptr, p_indices, p_items,
    near_stride, far_stride, edge_stride, grad_stride, near_grad_stride, edge_grad_stride,
    num_pieces, num_items, width,
    NEAR: tl.constexpr, FAR: tl.constexpr, EDGE: tl.constexpr, OUT: tl.constexpr,
    EPS: tl.constexpr, FORM: tl.constexpr, ACC: tl.constexpr, SLOTS: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    i_program = tl.program_id(0)
    o_column = tl.program_id(1) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    m_column = o_column < width
    row, first, last, part, step, rounds = slots_of(p_items, i_program, num_pieces, num_items, SLOTS)
    m_own, node = (row >= 0)[:, None] & m_column[None, :], row.to(tl.int64)[:, None]
    n0, n1 = _sections(p_near + node * near_stride + o_column[None, :], m_own, width, NEAR, ACC)
    g0, g1 = _sections(p_grad + node * grad_stride + o_column[None, :], m_own, width, OUT, ACC)
    t = tl.load(p_t).to(ACC)
    total = tl.zeros((SLOTS, BLOCK_WIDTH), ACC)
    other_total = tl.zeros((SLOTS, BLOCK_WIDTH), ACC)
    for k in range(0, rounds):
        o_edge = first + k * step
        m_edge = o_edge < last
        m_both = m_edge[:, None] & m_column[None, :]
        source = tl.load(p_indices + o_edge, mask=m_edge, other=0).to(tl.int64)[:, None]
        f0, f1 = _sections(p_far + source * far_stride + o_column[None, :], m_both, width, FAR, ACC)
        if p_edge is not None:
            p_own = p_edge + o_edge.to(tl.int64)[:, None] * edge_stride + o_column[None, :]
            e0, e1 = _sections(p_own, m_both, width, EDGE, ACC)
        else:
            e0, e1 = tl.zeros((SLOTS, BLOCK_WIDTH), ACC), tl.zeros((SLOTS, BLOCK_WIDTH), ACC)
        to_n0, to_n1, to_f0, to_f1 = _slopes(n0, n1, f0, f1, e0, e1, t, g0, g1, EPS, FORM)
        total += tl.where(m_both, to_n0, 0.0)
        if NEAR == 2:
            other_total += tl.where(m_both, to_n1, 0.0)
        if p_edge_grad is not None:
            p_other = p_edge_grad + o_edge.to(tl.int64)[:, None] * edge_grad_stride + o_column[None, :]
            tl.store(p_other, to_f0, mask=m_both)
            if EDGE == 2:
                tl.store(p_other + width, to_f1, mask=m_both)
    is_piece = i_program < num_pieces
    if p_near_grad is not None:
        close_rows(total, row, part, is_piece, o_column, m_column,
                   p_near_grad, p_parts, p_indptr, None, None, near_grad_stride, width, 0)  # fmt: skip
        if NEAR == 2:
            close_rows(other_total, row, part, is_piece, o_column, m_column, p_near_grad + width,
                       p_other_parts, p_indptr, None, None, near_grad_stride, width, 0)  # fmt: skip


@triton.jit(do_not_specialize=_COUNTS)  # type: ignore[untyped-decorator]
def _sources(  # type: ignore[no-untyped-def]
    p_near, p_far, p_t, p_grad, p_far_grad, p_parts, p_other_parts, p_indptr, p_indices, p_items,
    near_stride, far_stride, grad_stride, far_grad_stride, num_pieces, num_items, width,
    NEAR: tl.constexpr, FAR: tl.constexpr, OUT: tl.constexpr,
    EPS: tl.constexpr, FORM: tl.constexpr, ACC: tl.constexpr, SLOTS: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    i_program = tl.program_id(0)
    o_column = tl.program_id(1) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    m_column = o_column < width
    row, first, last, part, step, rounds = slots_of(p_items, i_program, num_pieces, num_items, SLOTS)
    m_own, node = (row >= 0)[:, None] & m_column[None, :], row.to(tl.int64)[:, None]
    f0, f1 = _sections(p_far + node * far_stride + o_column[None, :], m_own, width, FAR, ACC)
    t = tl.load(p_t).to(ACC)
    none = tl.zeros((SLOTS, BLOCK_WIDTH), ACC)
    total = tl.zeros((SLOTS, BLOCK_WIDTH), ACC)
    other_total = tl.zeros((SLOTS, BLOCK_WIDTH), ACC)
    for k in range(0, rounds):
        o_edge = first + k * step
        m_edge = o_edge < last
        m_both = m_edge[:, None] & m_column[None, :]
        target = tl.load(p_indices + o_edge, mask=m_edge, other=0).to(tl.int64)[:, None]
        n0, n1 = _sections(p_near + target * near_stride + o_column[None, :], m_both, width, NEAR, ACC)
        g0, g1 = _sections(p_grad + target * grad_stride + o_column[None, :], m_both, width, OUT, ACC)
        _to_n0, _to_n1, to_f0, to_f1 = _slopes(n0, n1, f0, f1, none, none, t, g0, g1, EPS, FORM)
        total += tl.where(m_both, to_f0, 0.0)
        if FAR == 2:
            other_total += tl.where(m_both, to_f1, 0.0)
    is_piece = i_program < num_pieces
    close_rows(total, row, part, is_piece, o_column, m_column,
               p_far_grad, p_parts, p_indptr, None, None, far_grad_stride, width, 0)  # fmt: skip
    if FAR == 2:
        close_rows(other_total, row, part, is_piece, o_column, m_column, p_far_grad + width,
                   p_other_parts, p_indptr, None, None, far_grad_stride, width, 0)  # fmt: skip


_run_forward, _run_targets, _run_sources = Launcher(_forward), Launcher(_targets), Launcher(_sources)


class _Launch:
    """What the launches of a kind share: tiles, programs, partial results, constants."""

    def __init__(
        self, pattern: Pattern | Rows, form: str, far: torch.Tensor, eps: float, tiles: Tiles | None
    ):
        self.near, self.far, self.edge, self.out = FORMS[form]
        self.width = far.shape[1] // self.far
        self.rows = rows_on(pattern, far.device)
        self.is_empty = not self.width or not self.rows.num_rows
        tiles = tiles_of(min(max(1, self.width), 128), far.element_size()) if tiles is None else tiles
        self.warps = tiles.warps
        self.items = self.rows.items(tiles.short, tiles.most)
        self.grid = (self.items.grid(tiles.slots), -(-self.width // tiles.columns))
        sums_, acc = accumulator(far.dtype)
        self.parts = [
            far.new_empty((max(1, self.items.num_parts), self.width), dtype=sums_) for _ in range(2)
        ]
        self.counts = (self.items.num_pieces, self.items.num_pieces + self.items.num_short, self.width)
        self.edges = (self.rows.indptr, self.rows.indices, self.items.items)
        self.constants: dict[str, Any] = {
            "NEAR": self.near,
            "FAR": self.far,
            "EDGE": self.edge,
            "OUT": self.out,
        }
        self.constants |= {"EPS": eps, "FORM": form, "ACC": acc, "SLOTS": tiles.slots}
        self.constants |= {"BLOCK_WIDTH": tiles.columns}

    def close(self, out: torch.Tensor, sections: int) -> None:
        """Add up the rows that were split."""
        for k, parts in enumerate(self.parts[:sections]):
            part = out[:, k * self.width : (k + 1) * self.width]
            add_parts(self.items, self.rows.indptr, parts, part)


def sums(
    pattern: Pattern | Rows,
    form: str,
    near: torch.Tensor,
    far: torch.Tensor,
    edge: torch.Tensor | None,
    t: torch.Tensor,
    out: torch.Tensor,
    eps: float = 0.0,
    tiles: Tiles | None = None,
) -> torch.Tensor:
    """out[i] = the sum of the messages of row i's edges: kernels/messages/reference.py; t: one number."""
    of = _Launch(pattern, form, far, eps, tiles)
    if not of.is_empty:
        arguments = (
            near, far, edge, t, out, *of.parts, *of.edges, near.stride(0), far.stride(0), stride_of(edge),
            out.stride(0), *of.counts,
        )  # fmt: skip
        _run_forward(of.grid, arguments, of.constants, of.warps)
        of.close(out, of.out)
    return out


def sums_targets(
    pattern: Pattern | Rows,
    form: str,
    near: torch.Tensor,
    far: torch.Tensor,
    edge: torch.Tensor | None,
    t: torch.Tensor,
    grad: torch.Tensor,
    near_grad: torch.Tensor | None,
    edge_grad: torch.Tensor | None,
    eps: float = 0.0,
    tiles: Tiles | None = None,
) -> None:
    """The gradients of the targets' rows and of the edges', where they are needed."""
    of = _Launch(pattern, form, far, eps, tiles)
    if of.is_empty:
        return
    arguments = (
        near, far, edge, t, grad, near_grad, *of.parts, edge_grad, *of.edges, near.stride(0), far.stride(0),
        stride_of(edge), grad.stride(0), stride_of(near_grad), stride_of(edge_grad), *of.counts,
    )  # fmt: skip
    _run_targets(of.grid, arguments, of.constants, of.warps)
    if near_grad is not None:
        of.close(near_grad, of.near)


def sums_sources(
    transpose: Pattern | Rows,
    form: str,
    near: torch.Tensor,
    far: torch.Tensor,
    t: torch.Tensor,
    grad: torch.Tensor,
    far_grad: torch.Tensor,
    eps: float = 0.0,
    tiles: Tiles | None = None,
) -> torch.Tensor:
    """The gradients of the sources' rows, of messages without rows per edge."""
    of = _Launch(transpose, form, far, eps, tiles)
    if not of.is_empty:
        arguments = (
            near, far, t, grad, far_grad, *of.parts, *of.edges, near.stride(0), far.stride(0),
            grad.stride(0), far_grad.stride(0), *of.counts,
        )  # fmt: skip
        constants = {name: value for name, value in of.constants.items() if name != "EDGE"}
        _run_sources(of.grid, arguments, constants, of.warps)
        of.close(far_grad, of.far)
    return far_grad
