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

from plait.cost.machine import default_profile
from plait.graph import Graph
from plait.ir import Dense, Sparse
from plait.kernels import launch
from plait.plan.plan import LayerPlan
from plait.plan.search import Problem, search
from plait.runtime import executor
from plait.runtime.buffers import Buffers
from plait.runtime.constants import Constants

if TYPE_CHECKING:
    from plait.runtime.folded import Classes

__all__ = ["Groups", "scatter_add", "segment_reduce"]

_MOST_KEPT = 4
_POOLED = Sparse("A", "N", "M", is_weighted=True) @ Dense("X", "M", "K")


class Groups:
    """R @ P, with counts, ready to multiply rows; `sizes` are the nodes of every group."""

    def __init__(self, group: np.ndarray[Any, Any], num_groups: int, classes: Classes):
        members, num_classes = classes.twins.members, classes.twins.num_classes
        keys, counts = np.unique(group * np.int64(num_classes) + members, return_counts=True)
        rows, columns = np.divmod(keys, num_classes)
        indptr = np.zeros(num_groups + 1, np.int64)
        np.cumsum(np.bincount(rows, minlength=num_groups), out=indptr[1:])
        self.graph = Graph.from_csr(indptr, columns, num_classes, validate=False)
        self.counts = torch.from_numpy(counts.astype(np.float64))
        self.sizes = torch.from_numpy(np.bincount(group, minlength=num_groups))
        self._buffers = Buffers()
        self._runs: dict[tuple[torch.dtype, int, bool], executor.Run] = {}

    def sums(self, rows: Tensor) -> Tensor:
        """[groups, width]: (R @ P) @ rows, where rows hold one for each class."""
        wants_grad = torch.is_grad_enabled() and rows.requires_grad
        key = (rows.dtype, rows.shape[1], wants_grad)
        run = self._runs.get(key)
        if run is None:
            constants = Constants(self.graph, self.counts.to(rows.dtype), {}, rows.dtype)
            run = executor.Run(_plan(constants, rows, wants_grad), constants, self._buffers)
            self._runs[key] = run
        return executor.apply(run, {"X": rows})


def _plan(constants: Constants, rows: Tensor, wants_grad: bool) -> LayerPlan:
    """The plan of the product. There is one way to compute it, so no machine's prices are asked for."""
    graph = constants.graph
    problem = Problem(
        forms=(_POOLED,),
        sizes={"N": graph.num_nodes, "M": graph.num_sources, "K": rows.shape[1]},
        matrices=constants.cost_matrix,
        machine=default_profile(),
        wrt=("X",) if wants_grad else None,
        float_bytes=rows.element_size(),
        threads=launch.num_threads(),
        layer="pooling",
    )
    return search(problem)


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
    pooled = groups.sums(held)
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
    return out.add_(groups.sums(held))


def _groups(classes: Classes, key: Tensor, group: Any, num_groups: int) -> Groups:
    """The groups a tensor describes, found again by what it says: nothing else tells every change of it."""
    for known, number, groups in classes.groups:
        if number == num_groups and torch.equal(known, key):
            return groups
    del classes.groups[: len(classes.groups) - _MOST_KEPT + 1]
    groups = Groups(np.asarray(group(), np.int64), num_groups, classes)
    classes.groups.append((key.clone(), num_groups, groups))
    return groups
