"""What kernels/listed computes, as loops to be read."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["dense_matrix"]


def dense_matrix(
    edge_index: Tensor,
    weight: Tensor | None,
    shape: tuple[int, int],
    loops: str = "none",
    fill: float = 1.0,
    scale: str = "none",
) -> Tensor:
    """p @ (A + l) @ q as a dense matrix of doubles [targets, sources]."""
    matrix, counts = torch.zeros(shape, dtype=torch.float64), [0] * shape[0]
    own = {v: fill for v in range(shape[0])} if loops != "none" else {}
    for e, (u, v) in enumerate(edge_index.t().tolist()):
        w = 1.0 if weight is None else float(weight[e])
        if u == v and loops != "none":
            own[v] = {"remaining": w, "replace": fill, "add": own[v] + w}[loops]
        else:
            matrix[v, u] += w
            counts[v] += 1
    for v, w in own.items():
        matrix[v, v] += w
        counts[v] += 1
    if scale == "mean":
        return matrix / torch.tensor(counts, dtype=torch.float64).clamp(min=1).unsqueeze(1)
    if scale == "symmetric":
        sums = matrix.sum(1).tolist()
        p = torch.tensor([1.0 / math.sqrt(s) if s else 0.0 for s in sums], dtype=torch.float64)
        return p.unsqueeze(1) * matrix * p
    return matrix
