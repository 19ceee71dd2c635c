"""Rows of a block of edges on a GPU by Triton: the sum of both ends, and which edges attained an extremum."""

from __future__ import annotations

import torch

from plait.kernels.relaunch import Launcher

# isort: split
import triton
import triton.language as tl

__all__ = ["attained", "pair"]

_EDGES = 16
_COUNTS = ("num_edges",)


@triton.jit(do_not_specialize=_COUNTS)  # type: ignore[untyped-decorator]
def _pair(  # type: ignore[no-untyped-def]
    p_near, p_far, p_targets, p_sources, p_out, near_stride, far_stride, out_stride, num_edges, width,
    BLOCK_EDGES: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    edge = tl.program_id(0).to(tl.int64) * BLOCK_EDGES + tl.arange(0, BLOCK_EDGES)
    o_column = (tl.program_id(1) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH))[None, :]
    m_edge = edge < num_edges
    m_both = m_edge[:, None] & (o_column < width)
    target = tl.load(p_targets + edge, mask=m_edge, other=0).to(tl.int64)[:, None]
    source = tl.load(p_sources + edge, mask=m_edge, other=0).to(tl.int64)[:, None]
    b_near = tl.load(p_near + target * near_stride + o_column, mask=m_both, other=0.0)
    b_far = tl.load(p_far + source * far_stride + o_column, mask=m_both, other=0.0)
    tl.store(p_out + edge[:, None] * out_stride + o_column, b_near + b_far, mask=m_both)


@triton.jit(do_not_specialize=_COUNTS)  # type: ignore[untyped-decorator]
def _attained(  # type: ignore[no-untyped-def]
    p_rows, p_best, p_share, p_targets, p_out, rows_stride, best_stride, share_stride, out_stride,
    num_edges, width, BLOCK_EDGES: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    edge = tl.program_id(0).to(tl.int64) * BLOCK_EDGES + tl.arange(0, BLOCK_EDGES)
    o_column = (tl.program_id(1) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH))[None, :]
    m_edge = edge < num_edges
    m_both = m_edge[:, None] & (o_column < width)
    target = tl.load(p_targets + edge, mask=m_edge, other=0).to(tl.int64)[:, None]
    b_row = tl.load(p_rows + edge[:, None] * rows_stride + o_column, mask=m_both, other=0.0)
    b_best = tl.load(p_best + target * best_stride + o_column, mask=m_both, other=0.0)
    b_share = tl.load(p_share + target * share_stride + o_column, mask=m_both, other=0.0)
    tl.store(
        p_out + edge[:, None] * out_stride + o_column, tl.where(b_row == b_best, b_share, 0.0), mask=m_both
    )


_run_pair, _run_attained = Launcher(_pair), Launcher(_attained)


def _cut(edges: int, width: int) -> tuple[tuple[int, int], dict[str, int]]:
    block = min(128, triton.next_power_of_2(width))
    return (triton.cdiv(edges, _EDGES), triton.cdiv(width, block)), {
        "BLOCK_EDGES": _EDGES,
        "BLOCK_WIDTH": block,
    }


def pair(
    targets: torch.Tensor, sources: torch.Tensor, near: torch.Tensor, far: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    """out[e] = near[targets[e]] + far[sources[e]]."""
    edges, width = out.shape
    if out.numel():
        grid, constants = _cut(edges, width)
        strides = near.stride(0), far.stride(0), out.stride(0)
        _run_pair(grid, (near, far, targets, sources, out, *strides, edges, width), constants)
    return out


def attained(
    targets: torch.Tensor, rows: torch.Tensor, best: torch.Tensor, share: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    """out[e] = share[targets[e]] where rows[e] == best[targets[e]], else 0."""
    edges, width = out.shape
    if out.numel():
        grid, constants = _cut(edges, width)
        strides = rows.stride(0), best.stride(0), share.stride(0), out.stride(0)
        _run_attained(grid, (rows, best, share, targets, out, *strides, edges, width), constants)
    return out
