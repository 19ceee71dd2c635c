"""The k nearest rows, exactly: distances in blocks that fit a cache, no tree and no approximation."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["nearest"]

_BLOCK = 1 << 20  # distances at once


def nearest(
    x: Tensor, y: Tensor, k: int, batch_x: Tensor | None = None, batch_y: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(sources, targets): for every row of y the k nearest rows of x, itself included where x is y.

    Batches (ascending) keep rows of different examples apart; a batch with fewer than k rows gives them all.
    """
    with torch.no_grad():
        pairs = [_within(x, y, k, *bounds) for bounds in _bounds(x, y, batch_x, batch_y)]
    if not pairs:
        none = torch.empty(0, dtype=torch.int64, device=x.device)
        return none, none
    return torch.cat([source for source, _ in pairs]), torch.cat([target for _, target in pairs])


def _bounds(
    x: Tensor, y: Tensor, batch_x: Tensor | None, batch_y: Tensor | None
) -> list[tuple[int, int, int, int]]:
    """(first, last) rows of x and of y for every batch."""
    if batch_x is None or batch_y is None:
        return [(0, x.shape[0], 0, y.shape[0])]
    count = 1 + max((int(batch[-1]) for batch in (batch_x, batch_y) if len(batch)), default=-1)
    numbers = torch.arange(count + 1, device=batch_x.device)
    starts_x = torch.searchsorted(batch_x.contiguous(), numbers.to(batch_x.dtype)).tolist()
    starts_y = torch.searchsorted(batch_y.contiguous(), numbers.to(batch_y.dtype)).tolist()
    return [(starts_x[b], starts_x[b + 1], starts_y[b], starts_y[b + 1]) for b in range(count)]


def _within(x: Tensor, y: Tensor, k: int, x0: int, x1: int, y0: int, y1: int) -> tuple[Tensor, Tensor]:
    few = min(k, x1 - x0)
    found = []
    step = max(1, _BLOCK // max(1, x1 - x0))
    for first in range(y0, y1, step):
        # not by a product: its cancellation would make a row miss itself
        own = y[first : min(y1, first + step)]
        distance = torch.cdist(own, x[x0:x1], compute_mode="donot_use_mm_for_euclid_dist")
        found.append(distance.topk(few, largest=False).indices)
    source = (
        torch.cat(found).reshape(-1) + x0 if found else torch.empty(0, dtype=torch.int64, device=x.device)
    )
    return source, torch.arange(y0, y1, device=x.device).repeat_interleave(few)
