"""Sums and means over groups of nodes, read off one row for each class of twins.

What a graph-level model does after its last layer: torch.segment_reduce, or PyG's global_add_pool and
global_mean_pool, which scatter rows into groups. With R the groups' 0/1 matrix, R @ (P @ rows) is
(R @ P) @ rows, and R @ P counts how many nodes of a class a group has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from plait.kernels.spmm import Pattern, spmm

if TYPE_CHECKING:
    from plait.runtime.folded import Classes

__all__ = ["Groups", "scatter_add", "segment_reduce"]

_MOST_KEPT = 4


class Groups:
    """R @ P as CSR with counts, and its transpose; `sizes` are the nodes of every group."""

    def __init__(self, group: np.ndarray[Any, Any], num_groups: int, classes: Classes):
        members, num_classes = classes.twins.members, classes.twins.num_classes
        keys, counts = np.unique(group * np.int64(num_classes) + members, return_counts=True)
        rows, columns = np.divmod(keys, num_classes)
        self.forward = _csr(rows, columns, num_groups, num_classes)
        self.counts = torch.from_numpy(counts.astype(np.float64))
        self.order = torch.from_numpy(np.argsort(columns, kind="stable"))
        self.backward = _csr(columns[self.order.numpy()], rows[self.order.numpy()], num_classes, num_groups)
        self.sizes = torch.from_numpy(np.bincount(group, minlength=num_groups))


def _csr(rows: Any, columns: Any, num_rows: int, num_columns: int) -> Pattern:
    indptr = np.zeros(num_rows + 1, np.int64)
    np.cumsum(np.bincount(rows, minlength=num_rows), out=indptr[1:])
    return Pattern(indptr, columns.astype(np.int64), num_columns)


class _Pool(torch.autograd.Function):
    """(R @ P) @ rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, groups: Groups) -> Tensor:
        ctx.groups = groups
        out = rows.new_empty((groups.forward.num_rows, rows.shape[1]))
        return spmm(groups.forward, rows.contiguous(), out, edge=groups.counts.to(rows.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        groups: Groups = ctx.groups
        out = grad.new_empty((groups.backward.num_rows, grad.shape[1]))
        edge = groups.counts[groups.order].to(grad.dtype)
        return spmm(groups.backward, grad.contiguous(), out, edge=edge), None


def segment_reduce(
    held: Tensor,
    classes: Classes,
    reduce: str,
    *,
    lengths: Tensor | None = None,
    indices: Tensor | None = None,
    offsets: Tensor | None = None,
    axis: int = 0,
    unsafe: bool = False,
    initial: Any = None,
) -> Tensor | None:
    """torch.segment_reduce of a folded matrix; None where the whole matrix is needed."""
    given = offsets if offsets is not None else lengths
    if reduce not in ("sum", "mean") or given is None or given.dim() != 1 or axis != 0:
        return None
    if initial is not None or indices is not None or (lengths is not None and offsets is not None):
        return None
    sizes = (given.diff() if given is offsets else given).numpy()
    if (sizes < 0).any() or sizes.sum() != len(classes.place) or (given is offsets and int(given[0]) != 0):
        return None
    groups = _groups(classes, given, lambda: np.repeat(np.arange(len(sizes)), sizes), len(sizes))
    pooled: Tensor = _Pool.apply(held, groups)  # type: ignore[no-untyped-call]
    if reduce == "sum":
        return pooled
    return pooled / groups.sizes.to(pooled.dtype).unsqueeze(1)  # an empty segment's mean is NaN in torch too


def scatter_add(out: Tensor, dim: int, index: Tensor, held: Tensor, classes: Classes) -> Tensor | None:
    """out.scatter_add_(dim, index, matrix) with one group for each node; None where that is not so."""
    shape = (len(classes.place), held.shape[1])
    is_by_node = index.dim() == 2 and (index.stride(1) == 0 or index.shape[1] == 1)
    if dim != 0 or not is_by_node or index.shape != shape or index.dtype != torch.int64:
        return None
    if out.dim() != 2 or out.requires_grad or out.dtype != held.dtype or out.shape[1] != shape[1]:
        return None
    group = index[:, 0] if shape[1] else index.new_empty(0)
    if len(group) and not 0 <= int(group.min()) <= int(group.max()) < out.shape[0]:
        return None
    groups = _groups(classes, group, lambda: group.numpy(), out.shape[0])
    return out.add_(_Pool.apply(held, groups))  # type: ignore[no-untyped-call]


def _groups(classes: Classes, key: Tensor, group: Any, num_groups: int) -> Groups:
    """The groups a tensor describes, found again by what it says: nothing else tells every change of it."""
    for known, number, groups in classes.groups:
        if number == num_groups and torch.equal(known, key):
            return groups
    del classes.groups[: len(classes.groups) - _MOST_KEPT + 1]
    groups = Groups(np.asarray(group(), np.int64), num_groups, classes)
    classes.groups.append((key.clone(), num_groups, groups))
    return groups
