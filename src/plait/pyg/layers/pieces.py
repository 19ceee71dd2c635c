"""What layers lowered to pieces share: the call they look at, and the pieces, each planned separately."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn.aggr import MeanAggregation, SumAggregation

from plait.graph import Graph
from plait.kernels.attention import padded
from plait.plan.pieces import Dots, DotSoftmax, Leaky, Piece, Product, Softmax, Sums, ways
from plait.pyg import active
from plait.pyg.edges import from_edge_list, plain, read
from plait.pyg.layers.base import has_hooks
from plait.pyg.layers.fused import csr_order, edges_of, not_plain, refused_edges, refused_features
from plait.runtime.edges import Edges
from plait.runtime.orders import EdgeOrders
from plait.runtime.session import Session
from plait.runtime.ways import Programs

__all__ = ["Pieces", "PiecesCall", "is_elementwise", "mean_scale", "read_call"]

_ELEMENTWISE = (nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softplus)
_FUNCTIONS = (torch.relu, torch.tanh, torch.sigmoid, nn.functional.relu, nn.functional.elu)


@dataclass(frozen=True)
class PiecesCall:
    """A call of such a layer: features of both ends, the graph, edge features by target."""

    module: Any
    source: Tensor
    own: Tensor | None  # features of the targets
    is_pair: bool
    edges: Edges
    attr: Tensor | None = None

    @property
    def orders(self) -> EdgeOrders:
        return self.edges.orders


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
        return f"(flow={module.flow!r}): pairs of features are planned source_to_target only"
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
        edges = edges_of(module, edge_index, num_targets, parts[0].shape[0], has_loops, is_listed=True)
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
        is_known = (edge_type >= 0) & (edge_type < count)
        pairs = plain(edge_index)[:, is_known] * count + edge_type[is_known]
        return from_edge_list(pairs, num_targets * count, num_sources * count, is_swapped), None

    session: Session = active.session()
    return session.edges_for(
        (*handed.key, *handed.weight_key, "pairs", count), (*handed.owners, edge_type), build
    )


def is_elementwise(act: Any) -> bool:
    """Whether a map is known to be elementwise."""
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
    return f"(aggr={call.module.aggr!r}): planned with sums and means only"


class Pieces:
    """The pieces of one layer's call, each a separate program, named after the layer and its result."""

    def __init__(self, module: Any, edges: Edges):
        self._layer, self._edges, self._session = active.name_of(module), edges, active.session()

    def project(self, what: str, x: Tensor, w: Tensor, bias: Tensor | None = None, *, rows: str) -> Tensor:
        """x w + bias; rows: "N" where they are the targets', "M" where they are the sources'."""
        piece = Product(rows, w.shape[0], w.shape[1], bias is not None)
        return self._made(what, piece, {"X": x, "W": w} if bias is None else {"X": x, "W": w, "b": bias})

    def dots(self, what: str, heads: int, near: Tensor, far: Tensor) -> Tensor:
        """[edges, lanes]: near[i, h] . far[j, h] by edge and head, edges by target."""
        return self._made(what, Dots(heads, padded(heads), near.shape[1]), {"X": far, "X1": near})

    def pairs(self, what: str, heads: int, near: Tensor, far: Tensor) -> Tensor:
        """[edges, lanes]: near[i, h] + far[j, h], as dots of (near, 1) and (1, far)."""
        left = torch.stack([near, torch.ones_like(near)], -1).flatten(1)
        right = torch.stack([torch.ones_like(far), far], -1).flatten(1)
        return self.dots(what, heads, left, right)

    def dot_softmax(
        self, what: str, heads: int, near: Tensor, far: Tensor, bent: Tensor | None, attr: Tensor | None
    ) -> Tensor:
        """[edges, lanes]: softmax(near[i, h] . far[j, h] + bent[i, h] . attr[edge]) by target."""
        inputs = {"X": far, "X1": near}
        if bent is None or attr is None:
            return self._made(what, DotSoftmax(heads, padded(heads), near.shape[1]), inputs)
        piece = DotSoftmax(heads, padded(heads), near.shape[1], attr.shape[1])
        return self._made(what, piece, {**inputs, "Y": bent, "E": attr})

    def softmax(self, what: str, scores: Tensor) -> Tensor:
        """The softmax of [edges, lanes] over the edges of each target."""
        return self._made(what, Softmax(scores.shape[1]), {"X": scores})

    def leaky_softmax(
        self,
        what: str,
        slope: float,
        near: Tensor,
        far: Tensor,
        spread: Tensor,
        of_edges: tuple[Tensor, Tensor] | None,
        of_targets: tuple[Tensor, Tensor | None] | None,
    ) -> Tensor:
        """[edges, lanes]: softmax(leaky(near[i] + far[j] + attr[edge] w) spread) by target.

        of_edges: (attr, w); of_targets: (weight, bias) that the targets' rows are multiplied by before.
        """
        columns, lanes = spread.shape
        inputs = {"X": far, "X1": near, "a": spread}
        width = inner = bias = None
        if of_edges is not None:
            inputs["E"], inputs["W"] = of_edges
            width = inputs["E"].shape[1]
        if of_targets is not None:
            inputs["U"], bias = of_targets
            inner = near.shape[1]
        if bias is not None:
            inputs["c"] = bias
        piece = Leaky(lanes, columns, slope, width, inner, bias is not None)
        return self._made(what, piece, inputs)

    def sums(self, what: str, heads: int, weight: Tensor, far: Tensor) -> Tensor:
        """[targets, heads * width]: sums of far[j, h] by weight[edge, h]."""
        piece = Sums(heads, padded(heads), far.shape[1])
        return self._made(what, piece, {"X": far, "E": weight})

    def sums_of_edges(self, what: str, heads: int, weight: Tensor, attr: Tensor) -> Tensor:
        """[targets, heads * width]: sums of attr[edge] by weight[edge, h]."""
        piece = Sums(heads, padded(heads), heads * attr.shape[1], of_edges=True)
        return self._made(what, piece, {"X": attr, "E": weight})

    def _made(self, what: str, piece: Piece, inputs: Mapping[str, Tensor]) -> Tensor:
        programs = Programs(f"{self._layer} {what}", (piece,), lambda _: ways(piece))
        return programs.value(self._session, self._edges, inputs)
