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
from plait.kernels import launch
from plait.plan.fused import FusedPlan
from plait.plan.relational import RelationalProblem, choose
from plait.pyg import active
from plait.pyg.edges import read
from plait.pyg.layers.base import aggregation, is_parametrized
from plait.pyg.layers.fused import (
    Run,
    cost_matrix,
    fused,
    is_training,
    planned,
    refused_edges,
    refused_features,
)
from plait.runtime.project import project
from plait.runtime.relational import Product, RelationalRun, Relations, relate, relate_bases
from plait.runtime.session import Edges, machine_in_use

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
        source = torch.arange(module.in_channels_l)
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
        return f"(num_blocks={module.num_blocks}): PyG takes no row numbers here"
    if not isinstance(edge_type, Tensor) or edge_type.device.type != "cpu" or edge_type.is_floating_point():
        return ": edge_type is not a tensor of relation numbers on the CPU"
    if edge_type.dim() != 1 or edge_type.shape[0] != edge_index.shape[1]:
        return ": edge_type is not one number for each edge"
    if aggregation(module) not in ("sum", "mean"):
        return f"(aggr={module.aggr!r}): relations are lowered with sums and means"
    if target is not None and module.flow != "source_to_target":
        return f"(flow={module.flow!r}): pairs of features are lowered source_to_target only"
    if is_parametrized(module):
        return ": a weight is parametrized, and PyG computes it as often as it reads it"
    return None


def _relations_of(
    module: Any, edge_index: Tensor, edge_type: Tensor, num_targets: int, num_sources: int
) -> tuple[Edges, Relations]:
    """The graph and its edges by relation, built when first met; relations out of range are passed over."""
    session, count = active.session(), module.num_relations
    is_swapped = module.flow == "target_to_source"
    given = read(edge_index, edge_type, num_targets, num_sources, is_swapped)

    def build() -> tuple[Graph, None]:
        kind = edge_type.numpy()
        is_known = (kind >= 0) & (kind < count)
        source, target = edge_index.as_subclass(Tensor).numpy()[:: -1 if is_swapped else 1]
        if is_known.all():
            shared = session.edges_for(given.key, given.owners, given.build).graph
            graph = shared.with_order(shared.order)  # of its own: other relations may share the edges
        else:
            source, target, kind = source[is_known], target[is_known], kind[is_known]
            graph = Graph.from_edge_index(source, target, num_targets, num_sources)
        _RELATIONS[graph] = Relations(source, target, kind, num_targets, num_sources, count)
        return graph, None

    key = (*given.key, *given.weight_key, "relations", count)
    edges: Edges = session.edges_for(key, (*given.owners, edge_type), build)
    return edges, _RELATIONS[edges.graph]


def _run(module: Any, call: RelationalCall) -> Tensor:
    is_mean = aggregation(module) == "mean"
    buffers = active.session().buffers
    relations = call.relations
    if not call.source.is_floating_point():
        return _run_rows(module, call, is_mean)
    plan = _plan(module, call, is_mean)
    bases = module.num_bases
    if plan.choice == "bases":
        w = module.weight.reshape(-1, module.out_channels)
        out = relate_bases(relations, is_mean, buffers, call.source, module.comp, w)
        if module.root is not None:
            return out + project(buffers, call.own, module.root, module.bias)
        return out if module.bias is None else out + module.bias
    weight = module.weight
    if bases is not None:
        weight = _mixed(module)
    if weight.dim() == 3:
        weight = weight.unsqueeze(1)
    run, w = _arranged(module, call, plan.choice, is_mean, weight)
    return relate(run, call.source, call.target, w, root=module.root, bias=module.bias)


def _run_rows(module: Any, call: RelationalCall, is_mean: bool) -> Tensor:
    """x names rows of the weights: these are the projected rows already."""
    relations, width = call.relations, module.out_channels
    _plan(module, call, is_mean, True)
    weight = module.weight
    if module.num_bases is not None:
        weight = _mixed(module)
    rows = weight.permute(1, 0, 2)[call.source].reshape(len(call.source), -1)
    spread = relations.get("transform", is_mean)[1]
    run = RelationalRun(
        None, spread, (), relations.num_targets, width, rows.shape[1], rows.shape[1],
        active.session().buffers,
    )  # fmt: skip
    root = None if module.root is None else module.root[call.own]
    return relate(run, rows, None, None, bias=module.bias, addend=root)


def _mixed(module: Any) -> Tensor:
    """[relations, in, out]: the relations' weights from the bases, on plait's own product."""
    bases = module.weight
    mixed = project(active.session().buffers, module.comp, bases.view(bases.shape[0], -1))
    return mixed.view(-1, *bases.shape[1:])


def _arranged(
    module: Any, call: RelationalCall, choice: str, is_mean: bool, weight: Tensor
) -> tuple[RelationalRun, Tensor]:
    """The candidate's matrices and products, and the weights as it reads them from [R, blocks, in, out]."""
    relations = call.relations
    collect, spread, bounds = relations.get(choice, is_mean)
    count, blocks, inner, width = weight.shape
    inners, widths = blocks * inner, blocks * width
    everything = slice(None)
    if blocks == 1 and choice == "transform":
        w = weight[:, 0].permute(1, 0, 2).reshape(inner, -1)
        products = [Product(everything, everything, everything, everything)]
    else:
        w = weight.reshape(-1, width)
        if blocks == 1 and choice == "aggregate":
            products = [Product(everything, everything, everything, everything)]
        else:
            products = [
                _product(choice, bounds, r, b, count, blocks, inner, width)
                for r in range(count)
                for b in range(blocks)
            ]
    run = RelationalRun(
        collect, spread, tuple(products), relations.num_targets, widths,
        inners * (count if choice == "aggregate" else 1), widths * (count if choice == "transform" else 1),
        active.session().buffers,
    )  # fmt: skip
    return run, w


def _product(
    choice: str, bounds: tuple[int, ...], r: int, b: int, count: int, blocks: int, inner: int, width: int
) -> Product:
    """Relation r's block b: columns of h and z by the candidate's layout."""
    at_inner = (r * blocks + b if choice == "aggregate" else b) * inner
    at_outer = (r * blocks + b if choice == "transform" else b) * width
    first = (r * blocks + b) * inner
    return Product(
        slice(bounds[r], bounds[r + 1]) if bounds else slice(None),
        slice(at_inner, at_inner + inner),
        slice(at_outer, at_outer + width),
        slice(first, first + inner),
        is_first_out=bool(bounds) or choice != "aggregate" or r == 0,
        is_first_in=bool(bounds) or choice != "transform" or r == 0,
    )


def _plan(module: Any, call: RelationalCall, is_mean: bool, is_rows: bool = False) -> FusedPlan:
    source, relations = call.source, call.relations
    training, wants_input = is_training(module, source, call.target), source.requires_grad
    inner = 1 if is_rows else source.shape[1]

    def make() -> FusedPlan:
        return choose(
            RelationalProblem(
                layer=active.name_of(module), matrix=cost_matrix(call.edges), relations=relations.count,
                target_pairs=relations.num_target_pairs, source_pairs=relations.num_source_pairs,
                inner=inner, width=module.out_channels, machine=machine_in_use(), is_mean=is_mean,
                blocks=module.num_blocks or 1, bases=module.num_bases or 0, has_root=module.root is not None,
                is_rows=is_rows, is_training=training, wants_input_grad=wants_input,
                float_bytes=module.weight.element_size(), threads=launch.num_threads(),
                memory_limit=active.session().dial.room(active.name_of(module), training),
            )
        )  # fmt: skip

    return planned(module, call.edges, (source.shape, source.dtype, training, wants_input), make)
