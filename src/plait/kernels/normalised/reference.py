"""What kernels/normalised computes, in torch's operations, so that torch differentiates it."""

from __future__ import annotations

import torch
from torch import Tensor

from plait.kernels.normalised import Places

__all__ = ["reference"]


def reference(
    places: Places, weight: Tensor, loops: str, fill: float, scale: str
) -> tuple[Tensor, Tensor | None]:
    """(values of the entries, values on the diagonal or None)."""
    rows, columns, order, loop_order, loop_nodes = (
        torch.from_numpy(part).long()
        for part in (places.rows, places.columns, places.order, places.loop_order, places.loop_nodes)
    )
    values, count = weight[order], places.num_nodes
    own = None if loops == "none" else torch.full((count,), fill, dtype=weight.dtype)
    if own is not None and loops == "remaining":
        own[loop_nodes] = weight[loop_order]  # torch gives the gradient of such a write to all that wrote
    elif own is not None and loops == "add":
        own = own.index_add(0, loop_nodes, weight[loop_order])
    if scale == "none":
        return values, own
    if scale == "mean":
        counts = torch.bincount(rows, minlength=count) + (own is not None)
        p = 1.0 / counts.to(weight.dtype).clamp(min=1)
        return values * p[rows], None if own is None else own * p
    degrees = torch.zeros(count, dtype=weight.dtype).index_add(0, rows, values)
    degrees = degrees if own is None else degrees + own
    p = degrees.pow(-0.5)
    p = p.masked_fill(p == float("inf"), 0.0)
    return values * p[rows] * p[columns], None if own is None else own * p * p
