"""What layers lowered to pieces share: the call they look at, and the plan they show."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn.aggr import MeanAggregation, SumAggregation

from plait.graph import Graph
from plait.kernels import launch
from plait.plan.fused import FusedPlan
from plait.plan.pieces import Pieces
from plait.pyg import active
from plait.pyg.edges import read
from plait.pyg.layers.base import has_hooks, not_plain
from plait.pyg.layers.fused import (
    cost_matrix,
    csr_order,
    edges_of,
    is_training,
    planned,
    refused_edges,
    refused_features,
)
from plait.runtime.buffers import Buffers
from plait.runtime.orders import EdgeOrders
from plait.runtime.session import Edges, Session, machine_in_use

__all__ = ["PiecesCall", "as_listed", "is_elementwise", "mean_scale", "read_call", "show"]

_ELEMENTWISE = (nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softplus)
_FUNCTIONS = (torch.relu, torch.tanh, torch.sigmoid, nn.functional.relu, nn.functional.elu)


@dataclass(frozen=True)
class PiecesCall:
    """A call of such a layer: features of both ends, the graph, features of edges by target."""

    module: Any
    source: Tensor
    own: Tensor | None  # features of the targets
    is_pair: bool
    edges: Edges
    attr: Tensor | None = None

    @property
    def orders(self) -> EdgeOrders:
        return self.edges.orders

    @property
    def buffers(self) -> Buffers:
        buffers: Buffers = active.session().buffers
        return buffers


def read_call(
    module: Any,
    given: Mapping[str, Any],
    *linears: str,
    has_loops: bool = False,
    attr: Any = None,
    also: tuple[Tensor | None, ...] = (),
    relations: tuple[Tensor, int] | None = None,
) -> PiecesCall | str:
    """The call, or why it runs in PyG; `attr` holds values of the listed edges, `linears` are plain maps.

    relations: the relation of every edge, and how many there are. Nodes are then (node, relation) pairs.
    """
    x, edge_index = given["x"], given["edge_index"]
    is_pair = not isinstance(x, Tensor)
    parts = list(x) if isinstance(x, tuple | list) and len(x) == 2 else [x, x]
    if not isinstance(parts[0], Tensor) or any(p is not None and p.dim() != 2 for p in parts):
        return ": x is not [nodes, width] or a pair of such"
    reason = refused_edges(edge_index) or refused_features(module, *parts, attr, *also)
    if reason is not None:
        return reason
    if is_pair and module.flow != "source_to_target":
        return f"(flow={module.flow!r}): pairs of features are lowered source_to_target only"
    size = given.get("size")
    if parts[1] is None and size is None:
        return ": the number of target nodes is not known; pass size= or x as a pair"
    stop = not_plain(module, *linears)
    if stop is not None:
        return stop.reason.removeprefix(type(module).__name__)
    num_targets = int(size[1]) if size is not None and size[1] is not None else parts[1].shape[0]
    if relations is not None:
        edges = _edges_of_relations(module, edge_index, *relations, num_targets, parts[0].shape[0])
    else:
        edges = edges_of(module, edge_index, num_targets, parts[0].shape[0], has_loops)
    if attr is not None:
        attr = csr_order(edges, attr)
    return PiecesCall(module, parts[0], parts[1], is_pair, edges, attr)


def _edges_of_relations(
    module: Any, edge_index: Tensor, edge_type: Tensor, count: int, num_targets: int, num_sources: int
) -> Edges:
    """Edges between pairs (node, relation), numbered node * count + relation; unknown relations are none."""
    is_swapped = module.flow == "target_to_source"
    handed = read(edge_index, edge_type, num_targets, num_sources, is_swapped)

    def build() -> tuple[Graph, None]:
        kind = edge_type.numpy()
        is_known = (kind >= 0) & (kind < count)
        pairs = edge_index.as_subclass(Tensor).numpy()[:, is_known] * count + kind[is_known]
        source, target = pairs[::-1] if is_swapped else pairs
        return Graph.from_edge_index(source, target, num_targets * count, num_sources * count), None

    session: Session = active.session()
    return session.edges_for(
        (*handed.key, *handed.weight_key, "pairs", count), (*handed.owners, edge_type), build
    )


def is_elementwise(act: Any) -> bool:
    """Whether a map is known to treat every number alone."""
    return act in _FUNCTIONS if not isinstance(act, nn.Module) else (
        type(act) in _ELEMENTWISE and not has_hooks(act)
    )  # fmt: skip


def mean_scale(call: PiecesCall) -> Tensor | str | None:
    """What sums are multiplied by: nothing, 1 / degree, or why the aggregation is not lowered."""
    kind = type(call.module.aggr_module)
    if kind is SumAggregation:
        return None
    if kind is MeanAggregation:
        return call.orders.inverse_degrees.to(call.source.dtype)
    return f"(aggr={call.module.aggr!r}): lowered with sums and means only"


def as_listed(edges: Edges, values: Tensor) -> Tensor:
    """Values of edges by target, in the order of the listed edges."""
    order = edges.graph.order
    if order is None:
        return values
    back = torch.empty(len(order), dtype=torch.int64)
    back[torch.from_numpy(order).long()] = torch.arange(len(order))
    return values[back]


def show(
    call: PiecesCall, kind: str, text: str, because: str, width: int, describe: Callable[[Pieces], object]
) -> None:
    """Make the plan of this call, once for its graph and shapes, and hand it to explain."""
    module, source = call.module, call.source
    training = is_training(module, source, call.own, call.attr)
    wants_input = source.requires_grad
    edge_width = 0 if call.attr is None else call.attr.shape[-1]

    def make() -> FusedPlan:
        pieces = Pieces(
            active.name_of(module), cost_matrix(call.edges), machine_in_use(), is_training=training,
            wants_input_grad=wants_input, float_bytes=source.element_size(), threads=launch.num_threads(),
            memory_limit=active.session().dial.room(active.name_of(module), training),
        )  # fmt: skip
        describe(pieces)
        sizes = {"N": pieces.matrix.rows, "E": pieces.matrix.edges, "K1": source.shape[1], "F": width}
        return pieces.plan(kind, text, because, sizes)

    planned(module, call.edges, (source.shape, source.dtype, edge_width, training, wants_input), make)
