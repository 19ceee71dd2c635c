"""The edges of a call, whatever PyG form they come in: graph, weights, what recognises them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plait.errors import InputError
from plait.graph import Graph

__all__ = ["Given", "read"]


@dataclass(frozen=True)
class Given:
    """Edges as they were handed over; `build` makes the graph (and a matrix's weights) when first met."""

    key: tuple[Any, ...]
    owners: tuple[Any, ...]
    weight: Tensor | None
    weight_key: tuple[Any, ...]
    is_sparse: bool
    build: Callable[[], tuple[Graph, Tensor | None]]


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    # tensors made under inference_mode cannot be written to in place and carry no version
    return id(tensor), tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version, tuple(tensor.shape)


def read(
    edge_index: Any, edge_weight: Tensor | None, num_nodes: int, num_sources: int, is_swapped: bool
) -> Given:
    """The edges of a call on `num_sources` source rows and `num_nodes` target rows."""
    sizes = (num_nodes, num_sources, is_swapped)
    if isinstance(edge_index, Tensor) and edge_index.layout == torch.strided:
        _check_edge_list(edge_index, edge_weight)
        plain = edge_index.as_subclass(Tensor)
        key = (*_identity(edge_index), *sizes)
        weight_key = () if edge_weight is None else _identity(edge_weight)
        return Given(
            key, (edge_index, edge_weight), edge_weight, weight_key, False,
            lambda: (_from_edge_list(plain, num_nodes, num_sources, is_swapped), edge_weight),
        )  # fmt: skip
    return _read_matrix(edge_index, sizes)


def _check_edge_list(edge_index: Tensor, edge_weight: Tensor | None) -> None:
    if edge_index.dim() != 2 or edge_index.shape[0] != 2:
        raise InputError(f"edge_index: shape {tuple(edge_index.shape)}; pass [2, E], sources above targets")
    if edge_index.dtype.is_floating_point or edge_index.dtype.is_complex or edge_index.dtype == torch.bool:
        raise InputError(f"edge_index: {edge_index.dtype} is not an index type; convert it with .long()")
    if edge_weight is not None and edge_weight.shape[0] != edge_index.shape[1]:
        raise InputError(
            f"edge_weight: {edge_weight.shape[0]} weights for {edge_index.shape[1]} edges; "
            "pass one for each edge"
        )


def _from_edge_list(edge_index: Tensor, num_nodes: int, num_sources: int, is_swapped: bool) -> Graph:
    source, target = edge_index.numpy()
    if is_swapped:
        source, target = target, source
    return Graph.from_edge_index(source, target, num_nodes, num_sources)


def _read_matrix(adj_t: Tensor, sizes: tuple[int, int, bool]) -> Given:
    """A torch CSR or COO matrix: rows are targets."""
    if tuple(adj_t.shape) != sizes[:2]:
        raise InputError(
            f"edge_index: a {adj_t.shape[0]} x {adj_t.shape[1]} matrix on {sizes[1]} source and {sizes[0]} "
            "target rows of x; pass adj_t, whose rows are targets"
        )
    # entries and values of one and the same form: coalescing sorts and joins them
    matrix = adj_t.coalesce() if adj_t.layout == torch.sparse_coo else adj_t
    values = matrix.values()
    version = 0 if adj_t.is_inference() else adj_t._version
    return Given(
        (id(adj_t), version, *sizes), (adj_t,), None, (version,), True,
        lambda: (Graph.from_any(matrix), None if _are_ones(values) else values),
    )  # fmt: skip


def _are_ones(values: Tensor) -> bool:
    return bool((values.detach() == 1).all()) and not values.requires_grad


def check_weight(weight: Tensor) -> None:
    """NaN in a weight would silently spread; it is refused when the graph is first met."""
    if bool(torch.isnan(weight).any()):
        where = int(np.flatnonzero(torch.isnan(weight).numpy())[0])
        raise InputError(f"edge_weight: NaN at edge {where}; fill it in or drop the edge")
