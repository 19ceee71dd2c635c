"""RGCNConv: edges of several relations, planned together."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch_geometric.nn import RGCNConv

from plait.graph import Graph
from plait.plan.relational import RelationalLayer, ways
from plait.plan.ways import Way
from plait.pyg import active
from plait.pyg.edges import from_edge_list, plain, read
from plait.pyg.layers.base import aggregation, is_parametrized
from plait.pyg.layers.fused import Run, fused, refused_edges, refused_features
from plait.runtime.cuda_relations import PlacedRelations
from plait.runtime.edges import Edges
from plait.runtime.placed import PlacedGraph
from plait.runtime.relational import Relations
from plait.runtime.ways import Programs

__all__ = ["prepare"]

# what a graph's relations were taken apart into lives as long as the graph
_RELATIONS: WeakKeyDictionary[Graph, Relations] = WeakKeyDictionary()


@dataclass(frozen=True)
class RelationalCall:
    """A call of a relational layer, ready to run; source and target are features or row numbers."""

    source: Tensor
    target: Tensor | None  # None: the sources themselves
    edges: Edges
    relations: Relations

    @property
    def own(self) -> Tensor:
        return self.source if self.target is None else self.target


@fused(RGCNConv)
def prepare(module: Any, given: Mapping[str, Any]) -> Run | str:
    """The call made ready to run, or why it runs in PyG."""
    x, edge_index, edge_type = given["x"], given["edge_index"], given.get("edge_type")
    source, target = (x[0], x[1]) if isinstance(x, tuple) else (x, None)
    if source is None:
        source = torch.arange(module.in_channels_l, device=edge_index.device)
    reason = refused_edges(edge_index) or _refused(module, source, target, edge_index, edge_type)
    if reason is not None:
        return reason
    assert edge_type is not None
    num_targets = (source if target is None else target).shape[0]
    edges, relations = _relations_of(module, edge_index, edge_type, num_targets, source.shape[0])
    return functools.partial(_run, module, RelationalCall(source, target, edges, relations))


def _refused(module: Any, source: Any, target: Any, edge_index: Tensor, edge_type: Any) -> str | None:
    parts = [source] if target is None else [source, target]
    if not all(isinstance(part, Tensor) for part in parts):
        return ": x is not a tensor or a pair of tensors"
    if len({part.is_floating_point() for part in parts}) > 1:
        return ": one of x is row numbers and the other features"
    is_index = not source.is_floating_point()
    reason = refused_features(module, *([] if is_index else parts))
    if reason is not None:
        return reason
    if any(part.dim() != (1 if is_index else 2) for part in parts):
        return ": x is not [nodes, width], nor a vector of row numbers"
    if is_index and module.num_blocks is not None:
        return f"(num_blocks={module.num_blocks}): PyG does not take row numbers here"
    if not isinstance(edge_type, Tensor) or edge_type.is_floating_point():
        return ": edge_type is not a tensor of relation numbers"
    if any(value.device != source.device for value in (edge_type, edge_index)):
        return ": edge_type or edge_index is not on the device of x"
    if edge_type.dim() != 1 or edge_type.shape[0] != edge_index.shape[1]:
        return ": edge_type is not one number for each edge"
    if aggregation(module) not in ("sum", "mean"):
        return f"(aggr={module.aggr!r}): relations are planned with sums and means"
    if target is not None and module.flow != "source_to_target":
        return f"(flow={module.flow!r}): pairs of features are planned source_to_target only"
    if is_parametrized(module):
        return ": a weight is parametrized, and PyG computes it at every read"
    if any(getattr(module, name).shape != shape for name, shape in _shapes(module).items()):
        return ": a weight was replaced by one of another size"
    default = torch.get_default_dtype()
    if torch.promote_types(default, module.weight.dtype) != module.weight.dtype:
        return f": PyG's result has torch's default type, {default}"
    return None


def _shapes(module: Any) -> dict[str, tuple[int, ...]]:
    """The shapes of the weights as the layer makes them; PyG stretches some others and refuses the rest."""
    made = module.in_channels if isinstance(module.in_channels, tuple) else (module.in_channels,) * 2
    wide, out, relations = made[0], module.out_channels, module.num_relations
    shapes: dict[str, tuple[int, ...]] = {"weight": (relations, wide, out)}
    if module.num_bases is not None:
        shapes |= {"weight": (module.num_bases, wide, out), "comp": (relations, module.num_bases)}
    elif module.num_blocks is not None:
        blocks = module.num_blocks
        shapes["weight"] = (relations, blocks, wide // blocks, out // blocks)
    more = {"root": (made[1], out), "bias": (out,)}
    return shapes | {name: shape for name, shape in more.items() if getattr(module, name) is not None}


def _relations_of(
    module: Any, edge_index: Tensor, edge_type: Tensor, num_targets: int, num_sources: int
) -> tuple[Edges, Relations]:
    """The graph and its edges by relation, built when first met; relations out of range are passed over."""
    session, count = active.session(), module.num_relations
    is_swapped = module.flow == "target_to_source"
    given = read(edge_index, edge_type, num_targets, num_sources, is_swapped)

    def build() -> tuple[Graph, None]:
        kind, ends = edge_type, plain(edge_index)
        is_known = (kind >= 0) & (kind < count)
        if bool(is_known.all()):
            shared = session.edges_for(given.key, given.owners, given.build).graph
            graph = shared.with_order(shared.order)  # of its own: other relations may share the edges
        else:
            ends, kind = ends[:, is_known], kind[is_known]
            graph = from_edge_list(ends, num_targets, num_sources, is_swapped)
        ends = ends.flip(0) if is_swapped else ends
        _RELATIONS[graph] = relations_on(graph, ends, kind, count)
        return graph, None

    key = (*given.key, *given.weight_key, "relations", count)
    edges: Edges = session.edges_for(key, (*given.owners, edge_type), build)
    return edges, _RELATIONS[edges.graph]


def relations_on(graph: Graph, ends: Tensor, kind: Tensor, count: int) -> Relations:
    """The edges of a graph, as they are listed, by relation, where the graph is."""
    made = PlacedRelations if isinstance(graph, PlacedGraph) else Relations
    return made(ends[0], ends[1], kind, graph.num_nodes, graph.num_sources, count, graph.order)


def _run(module: Any, call: RelationalCall) -> Tensor:
    of = _layer(module, call)
    relations = call.relations
    inputs: dict[str, Tensor] = {} if module.bias is None else {"b": module.bias}
    if of.is_rows:
        inputs["X"] = _rows(module, call)
        if module.root is not None:
            inputs["B"] = module.root[call.own]
    else:
        inputs["X"] = call.source
        if module.root is not None:
            inputs |= {"R": module.root} | ({} if call.target is None else {"X1": call.target})
    wants = (module.weight.requires_grad, module.num_bases is not None and module.comp.requires_grad)

    def make(wrt: tuple[str, ...] | None) -> list[Way]:
        return ways(of, relations.sizes)

    own = None if of.is_rows else functools.partial(_weights, module)
    programs = Programs(active.name_of(module), ("relational", of, wants), make, own, relations)
    return programs.value(active.session(), call.edges, inputs)


def _layer(module: Any, call: RelationalCall) -> RelationalLayer:
    is_rows = not call.source.is_floating_point()
    outer = None if call.target is None else 1 if is_rows else call.target.shape[1]
    return RelationalLayer(
        inner=1 if is_rows else call.source.shape[1], width=module.out_channels,
        relations=call.relations.count, is_mean=aggregation(module) == "mean", blocks=module.num_blocks or 1,
        bases=module.num_bases or 0, outer=outer, has_root=module.root is not None,
        has_bias=module.bias is not None, is_rows=is_rows,
    )  # fmt: skip


def _rows(module: Any, call: RelationalCall) -> Tensor:
    """[sources, relations * width]: x names rows of the weights; these are the projected rows already."""
    weight = module.weight if module.num_bases is None else _mixed(module)
    return weight.permute(1, 0, 2)[call.source].reshape(len(call.source), -1)


def _weights(module: Any, choice: str) -> dict[str, Tensor]:
    """The weights as a way reads them."""
    width = module.out_channels
    if choice == "bases":
        return {"K": module.comp, "V": module.weight.reshape(-1, width)}
    weight = module.weight if module.num_bases is None else _mixed(module)
    if choice == "transform" and (module.num_blocks or 1) == 1:
        whole = weight.reshape(len(weight), -1, width)  # a single block is a block too
        return {"T": whole.permute(1, 0, 2).reshape(whole.shape[1], -1)}
    return {"W": weight.reshape(-1, weight.shape[-1])}


def _mixed(module: Any) -> Tensor:
    """[relations, in, out]: the relations' weights from the bases, on plait's own product."""
    bases = module.weight
    mixed = active.session().project(module.comp, bases.view(bases.shape[0], -1))
    return mixed.view(-1, *bases.shape[1:])
