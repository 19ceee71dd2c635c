"""Layers with special passes over the edges: how they register, and what a call needs.

A layer here is more than a matrix expression (attention, gates, relations, learned messages). Its module
under `pyg/layers` names a `prepare` that takes the call's arguments by name and answers with the call made
ready to run, or with the reason why it runs in PyG.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from plait.errors import InputError
from plait.graph import Graph
from plait.pyg import active
from plait.pyg.edges import is_placed, read
from plait.pyg.layers import base
from plait.pyg.layers.base import NotLowered, bound_to_torch
from plait.runtime.adjoint import mapped
from plait.runtime.cuda import why_not
from plait.runtime.cuda_orders import with_listed_loops
from plait.runtime.edges import Edges
from plait.runtime.placed import PlacedGraph, index_of
from plait.runtime.session import Session

__all__ = [
    "FUSED", "Prepare", "Ready", "Run", "as_listed", "check_width", "check_widths", "csr_order", "degrees_of",
    "edges_of", "fused", "handed", "is_training", "layer_of", "not_plain", "refused_edges",
    "refused_features",
]  # fmt: skip

Run = Callable[[], Any]
Prepare = Callable[[Any, Mapping[str, Any]], "Run | str"]
"""(module, arguments by name) -> the call ready to run, or ": why not" to follow the layer's name."""

_ON_CPU = (torch.float32, torch.float64)
_ON_GPU = (*_ON_CPU, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Ready:
    """A call on x and edge_index alone, as ready for any other features of this size on the same graph.

    It is kept with the graph, so it holds neither the layer nor tensors of the user's.
    """

    value: Callable[[Any, Tensor, Tensor], Any]
    """(module, x, edge_index) -> output"""
    edges: Edges

    def __call__(self, module: Any, x: Tensor, edge_index: Tensor) -> Any:
        return self.value(module, x, edge_index)


FUSED: dict[type[nn.Module], Prepare] = {}
_ONLY: dict[type[nn.Module], Callable[[Any], bool]] = {}


def fused(layer: type[nn.Module], only: Callable[[Any], bool] | None = None) -> Callable[[Prepare], Prepare]:
    """Registers a layer class with special passes; `only` picks its modules where the rest have a rule."""

    def register(prepare: Prepare) -> Prepare:
        FUSED[layer] = prepare
        if only is not None:
            _ONLY[layer] = only
        return prepare

    return register


def layer_of(module: nn.Module) -> type[nn.Module] | None:
    """The registered class this module is an instance of, or None."""
    found = next((cls for cls in type(module).__mro__ if cls in FUSED), None)
    return None if found is None or (found in _ONLY and not _ONLY[found](module)) else found


def check_widths(module: Any, given: Mapping[str, Any]) -> None:
    """InputError where x does not have the width the layer expects; kernels read rows by address."""
    taken = getattr(module, "in_channels", getattr(module, "channels", None))
    x = given.get("x")
    widths = taken if isinstance(taken, tuple) else (taken, taken)
    for value, width in zip(x if isinstance(x, tuple | list) else (x,), widths, strict=False):
        is_matrix = isinstance(value, Tensor) and value.dim() == 2
        if is_matrix and isinstance(width, int) and width > 0:
            check_width(module, value, width)


def check_width(module: Any, x: Tensor, width: int) -> None:
    """InputError where x has another number of columns than the layer takes."""
    if x.shape[1] != width:
        raise InputError(
            f"{active.name_of(module)}: x has {x.shape[1]} columns, the layer takes {width}; "
            "check the widths of x and the layer"
        )


def refused_edges(edge_index: Any) -> str | None:
    """Why such layers cannot take these edges: they need an edge list."""
    if not isinstance(edge_index, Tensor) or edge_index.layout != torch.strided:
        return ": a sparse adj_t is not planned for this layer; pass edge_index"
    if edge_index.device.type not in ("cpu", "cuda") or edge_index.dim() != 2 or edge_index.shape[0] != 2:
        return ": edge_index is not an edge list"
    if edge_index.dtype not in (torch.int64, torch.int32):
        return f": edge_index is {edge_index.dtype}"
    return None


def refused_features(module: nn.Module, *values: Tensor | None, takes_halves: bool = False) -> str | None:
    """Why such layers cannot take these tensors: they must be dense and of the parameters' type.

    takes_halves: whether the layer's kernels on a GPU take 16-bit numbers.
    """
    dtypes = {p.dtype for p in active.parameters_of(module)}
    for value in values:
        if value is None:
            continue
        if value.device.type not in ("cpu", "cuda") or value.layout != torch.strided:
            return ": features are not dense tensors on the CPU or a GPU"
        if value.is_cuda and (reason := why_not()) is not None:
            return f": {reason}"
        known = _ON_GPU if value.is_cuda and takes_halves else _ON_CPU
        if value.dtype not in known or dtypes - {value.dtype}:
            return f": features are {value.dtype}; the layer is planned in float32 and float64"
    reason = bound_to_torch()
    return None if reason is None else f": {reason}"


def not_plain(module: nn.Module, *names: str, width: int | None = None) -> NotLowered | None:
    """The reason against a layer one of whose linear maps is more than that; found out once."""
    record = active.record_of(module)
    if record is not None and (names, width) in record.lowered:
        return None
    stop = base.not_plain(module, *names, width=width)
    if stop is None and record is not None:
        record.lowered[names, width] = True
    return stop


def edges_of(
    module: Any,
    edge_index: Tensor,
    num_targets: int,
    num_sources: int,
    has_loops: bool = False,
    is_listed: bool = False,
) -> Edges:
    """The graph of a call, built when first needed; has_loops: with self loops replaced by one per node.

    is_listed: values of edges come with the call or are asked for. A graph on a GPU is then exact and knows
    its edges' numbers, which making it waits for; without, it may hold loops behind its last row.

    The graph with loops is derived from the one without, which every layer on edge_index shares and which a
    loader's batch brings along.
    """
    session: Session = active.session()
    given = read(edge_index, None, num_targets, num_sources, module.flow == "target_to_source")
    if not has_loops:
        return session.edges_for(given.key, given.owners, given.build)

    def build() -> tuple[Graph, None]:
        graph = session.edges_for(given.key, given.owners, given.build).graph
        if isinstance(graph, PlacedGraph) and is_listed:
            return cast(Graph, with_listed_loops(graph)), None
        return graph.with_loops_last(), None

    kind = "listed loops" if is_listed and is_placed(edge_index) else "loops"
    return session.edges_for((*given.key, kind), given.owners, build)


def csr_order(edges: Edges, values: Tensor) -> Tensor:
    """Values in the order of the listed edges, in the order of the rows."""
    if values.shape[0] != edges.graph.num_edges:
        raise InputError(
            f"edge_attr: {values.shape[0]} rows for {edges.graph.num_edges} edges; pass one for each edge"
        )
    if edges.listed is None:
        return values
    order, places = edges.listed
    return _permuted(values, order, places)


def as_listed(edges: Edges, values: Tensor) -> Tensor:
    """Values of edges by target, in the order of the listed edges."""
    if edges.listed is None:
        return values
    order, places = edges.listed
    return _permuted(values, places, order)


def handed(edges: Edges, weights: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """(attention weights as the caller gets them, the same as sums read them: by row, in lanes).

    The second are made from the first: gradients of the output reach what the caller holds, as in PyG.
    """
    listed = as_listed(edges, weights)[:, :heads]
    return listed, csr_order(edges, functional.pad(listed, (0, weights.shape[1] - heads)))


def _permuted(values: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """values[order]; torch would add gradients up one by one, where a permutation's are gathered too."""
    return mapped(values, lambda x: x.index_select(0, order), lambda x: x.index_select(0, inverse))


def degrees_of(edges: Edges, dtype: torch.dtype) -> Tensor:
    """The number of edges of every target, where the graph is."""
    return index_of(edges.graph.degrees).to(dtype)


def is_training(module: nn.Module, *inputs: Tensor | None) -> bool:
    """True when a gradient of the call can be asked for."""
    return torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (*inputs, *active.tensors_of(module))
    )
