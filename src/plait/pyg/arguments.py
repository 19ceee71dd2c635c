"""The arguments of a layer's call: its features, its numbers of nodes, and why plait does not take them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from plait.pyg.layers.base import bound_to_torch
from plait.runtime import cuda

__all__ = ["features_of", "node_counts", "refused", "refused_edges"]

_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def features_of(x: Any) -> tuple[Tensor | None, Tensor | None, bool]:
    """(features of the sources, those of the targets, whether x is a pair); None, None for anything else."""
    if isinstance(x, Tensor):
        return x, None, False
    if isinstance(x, tuple | list) and len(x) == 2 and isinstance(x[0], Tensor):
        return x[0], x[1], True
    return None, None, False


def refused(x: Tensor, root: Tensor | None, edge_weight: Tensor | None) -> str | None:
    """Why plait does not take these arguments; PyG takes them or raises its own error."""
    for name, value in (("x", x), ("x[1]", root), ("edge_weight", edge_weight)):
        if value is None:
            continue
        if value.device.type not in ("cpu", "cuda"):
            return f"{name} is on {value.device}; plait runs on CPUs and on CUDA devices"
        if value.device != x.device:
            return f"{name} is on {value.device}, x on {x.device}; PyG raises its own error"
        if value.layout != torch.strided:
            return f"{name} is a sparse tensor, which is not planned"
    if x.dtype not in _FLOATS:
        return f"x is {x.dtype}; plait takes float32, float64 and bfloat16"
    if x.dim() != 2 or (root is not None and root.dim() != 2):
        return f"x has {x.dim()} dimensions; plait takes [nodes, width]"
    if edge_weight is not None and edge_weight.dtype != x.dtype:
        return f"edge_weight is {edge_weight.dtype} and x is {x.dtype}; PyG promotes them"
    if x.is_cuda and (reason := cuda.why_not()) is not None:
        return f"x is on {x.device}, but {reason}"
    return bound_to_torch()


def refused_edges(edge_index: Any, edge_weight: Tensor | None, x: Tensor) -> str | None:
    """Why this representation of edges is not planned."""
    if not isinstance(edge_index, Tensor):
        kind = type(edge_index).__name__
        return f"edges as {kind} are not planned; pass edge_index, torch CSR or COO"
    if edge_index.device != x.device:
        return f"edge_index is on {edge_index.device}, x on {x.device}; PyG raises its own error"
    if edge_index.layout == torch.strided:
        return None
    if x.is_cuda:
        return "a sparse matrix on a GPU is not planned yet; pass edge_index"
    if edge_index.layout not in (torch.sparse_csr, torch.sparse_coo):
        return f"a matrix of layout {edge_index.layout} is not planned; pass torch CSR or COO"
    if edge_weight is not None:
        return "edge_weight together with a sparse matrix, which has its own values, is not planned"
    return None


def node_counts(
    x: Tensor, root: Tensor | None, is_bipartite: bool, size: Any, edge_index: Any
) -> tuple[int, int | None]:
    """(sources, targets); None where only the edges tell the number of targets."""
    if size is not None and size[1] is not None:
        return x.shape[0], int(size[1])
    if not is_bipartite:
        return x.shape[0], x.shape[0]
    if root is not None:
        return x.shape[0], root.shape[0]
    is_list = edge_index.layout == torch.strided
    return x.shape[0], None if is_list else int(edge_index.shape[0])
