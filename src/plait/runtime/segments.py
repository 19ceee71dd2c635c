"""Sums, extrema and softmax over each target's edges in torch's own operations, differentiable to any order.

`index` is the target of each row. These run where derivatives of derivatives are asked for, nowhere else.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["segment_extremum", "segment_softmax", "segment_sum"]


def segment_sum(rows: Tensor, index: Tensor, count: int) -> Tensor:
    """[count, ...]: the sum of the rows of each index."""
    return rows.new_zeros((count, *rows.shape[1:])).index_add(0, index, rows)


def _extreme(rows: Tensor, index: Tensor, count: int, reduce: str) -> Tensor:
    """The largest (smallest) entry of each index and column, as numbers without a gradient."""
    place = index.long()[:, None].expand_as(rows)
    blank = rows.new_zeros((count, rows.shape[1]))
    return blank.scatter_reduce(0, place, rows.detach(), f"a{reduce}", include_self=False)


def segment_extremum(
    rows: Tensor, index: Tensor, count: int, reduce: str, counts_zero: bool = True
) -> Tensor:
    """The max or min of each index, 0 where it has no row; rows that tie share the gradient.

    counts_zero: as in scatter_reduce, and so PyG, its zero-filled output ties with a result of 0.
    """
    with torch.no_grad():
        best = _extreme(rows, index, count, reduce)
        attains = (rows == best.index_select(0, index)).to(rows.dtype)
        ties = segment_sum(attains, index, count)
        ties = ties + (best == 0) if counts_zero else ties
        share = attains / ties.index_select(0, index)
    return segment_sum(rows * share, index, count)


def segment_softmax(scores: Tensor, index: Tensor, count: int) -> Tensor:
    """exp(score) over the sum of those of its index."""
    top = _extreme(scores, index, count, "max")  # cancels
    powers = (scores - top.index_select(0, index)).exp()
    return powers / segment_sum(powers, index, count).index_select(0, index)
