"""EdgeConv and DynamicEdgeConv: a learned map of [x_i, x_j - x_i], its first layer split into both ends.

W [x_i, x_j - x_i] = (W_1 - W_2) x_i + W_2 x_j: two projections of nodes instead of one of edges.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch_geometric.nn import DynamicEdgeConv, EdgeConv

from plait.graph import Graph
from plait.kernels import launch
from plait.ops.work import Matrix, Uniform
from plait.plan.edgewise import EdgewiseProblem, choose
from plait.plan.fused import FusedPlan
from plait.pyg import active
from plait.pyg.layers.base import aggregation, has_hooks, is_parametrized, is_plain_linear
from plait.pyg.layers.fused import (
    Run,
    cost_matrix,
    edges_of,
    fused,
    is_training,
    planned,
    refused_edges,
    refused_features,
)
from plait.runtime.edgewise import EdgewiseRun, attained, mapped, rectified
from plait.runtime.nearest import nearest
from plait.runtime.pna import Layout, aggregate_all
from plait.runtime.project import project
from plait.runtime.session import Edges, machine_in_use

__all__ = ["prepare"]

# maps of single rows: what they make of an edge does not depend on the others in its block
_BY_ROW = (
    nn.ReLU, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid,
    nn.Softplus, nn.Hardtanh, nn.ReLU6, nn.Identity, nn.LayerNorm,
)  # fmt: skip


@dataclass(frozen=True)
class _Map:
    """The layer's map taken apart: first layer, what is done by edge, a linear layer that follows a sum."""

    kind: str
    first: Any
    by_edge: tuple[Any, ...]
    last: Any = None


@fused(EdgeConv)
def prepare(module: Any, given: Mapping[str, Any]) -> Run | str:
    """The call made ready to run, or why it runs in PyG."""
    x, edge_index = given["x"], given["edge_index"]
    parts = _pair(x)
    reason = refused_edges(edge_index) or _refused_input(module, parts)
    if reason is not None:
        return reason
    found = _taken_apart(module)
    if isinstance(found, str):
        return found
    if parts[0] is not parts[1] and module.flow != "source_to_target":
        return f"(flow={module.flow!r}): pairs of features are lowered source_to_target only"
    edges = edges_of(module, edge_index, parts[1].shape[0], parts[0].shape[0])
    return functools.partial(_run, module, edges, found, parts[0], None if parts[0] is parts[1] else parts[1])


@fused(DynamicEdgeConv)
def prepare_dynamic(module: Any, given: Mapping[str, Any]) -> Run | str:
    """The call made ready to run: the k nearest neighbours are found exactly, anew in every call."""
    parts, batch = _pair(given["x"]), given.get("batch")
    reason = _refused_input(module, parts)
    if reason is not None:
        return reason
    found = _taken_apart(module)
    if isinstance(found, str):
        return found
    batches = batch if isinstance(batch, tuple) else (batch, batch)
    sources, targets = nearest(parts[0], parts[1], module.k, *batches)
    sizes = parts[1].shape[0], parts[0].shape[0]
    edges = Edges(Graph.from_edge_index(sources.numpy(), targets.numpy(), *sizes), ())
    target = None if parts[0] is parts[1] else parts[1]
    return functools.partial(_run, module, edges, found, parts[0], target, _evenly_drawn)


def _evenly_drawn(edges: Edges) -> Matrix:
    """A graph that lives for one call is not worth its statistics."""
    rows, columns = edges.graph.num_nodes, edges.graph.num_sources
    return Matrix(rows, columns, edges.graph.num_edges, True, Uniform(columns), Uniform(rows))


def _pair(x: Any) -> list[Any]:
    """[sources, targets], the same tensor twice for one node set; nothing where x is neither."""
    return [x, x] if isinstance(x, Tensor) else list(x) if isinstance(x, tuple | list) and len(x) == 2 else []


def _refused_input(module: Any, parts: list[Any]) -> str | None:
    if not parts or not all(isinstance(part, Tensor) and part.dim() == 2 for part in parts):
        return ": x is not [nodes, width], nor a pair of such"
    return refused_features(module, *parts)


def _taken_apart(module: Any) -> _Map | str:
    """The layer's map by its parts, or why it is none that can be taken apart."""
    reduce = aggregation(module)
    if reduce is None:
        return f"(aggr={module.aggr!r}): the aggregation is not lowered"
    layers = _flat(module.nn)
    if layers is None or not layers or not is_plain_linear(layers[0]):
        return ": nn does not begin with a plain linear layer, or is no Sequential without hooks"
    if is_parametrized(module):
        return ": a weight is parametrized, and PyG computes it as often as it reads it"
    stop = next((reason for reason in map(_not_by_row, layers[1:]) if reason), None)
    if stop is not None:
        return stop
    first, rest = layers[0], [layer for layer in layers[1:] if not _is_nothing(layer)]
    if not rest:
        return _Map("linear", first, ())
    if reduce not in ("sum", "mean"):
        return _Map("blocks", first, tuple(rest))
    last = rest.pop() if is_plain_linear(rest[-1]) else None
    if all(is_plain_linear(layer) for layer in rest):
        return ": nn is several linear layers in a row; join them"
    return _Map(
        "rectified" if [type(layer) for layer in rest] == [nn.ReLU] else "blocks", first, tuple(rest), last
    )


def _flat(map_: Any) -> list[Any] | None:
    """The layers of nested Sequentials in order; None where something watches one."""
    if has_hooks(map_):
        return None
    if type(map_) is not nn.Sequential:
        return [map_]
    layers: list[Any] = []
    for part in map_:
        inner = _flat(part)
        if inner is None:
            return None
        layers += inner
    return layers


def _is_nothing(layer: Any) -> bool:
    return type(layer) is nn.Identity or (type(layer) is nn.Dropout and not (layer.training and layer.p > 0))


def _not_by_row(layer: Any) -> str | None:
    if type(layer) in _BY_ROW or is_plain_linear(layer) or _is_nothing(layer):
        return None
    if type(layer) is nn.BatchNorm1d:
        if not layer.training and layer.running_mean is not None:
            return None
        return ": BatchNorm takes its statistics over all edges, which are never all there at once"
    return f": {type(layer).__name__} inside nn is not known to map edges one by one"


def _run(
    module: Any,
    edges: Edges,
    map_: _Map,
    source: Tensor,
    target: Tensor | None,
    matrix_of: Callable[[Edges], Matrix] = cost_matrix,
) -> Tensor:
    plan = _plan(module, edges, map_, source, target, matrix_of)
    buffers, reduce = active.session().buffers, aggregation(module)
    inner, width = source.shape[1], map_.first.weight.shape[0]
    weight, bias = map_.first.weight, map_.first.bias
    far, near = weight[:, inner:].t(), (weight[:, :inner] - weight[:, inner:]).t()
    if map_.kind == "linear":
        v = project(buffers, source, far)
        own = project(buffers, source if target is None else target, near, bias)
        often = _weights(edges, reduce, source.dtype)
        summed = aggregate_all(edges.orders, buffers, Layout((str(reduce),), width), v)
        if not edges.graph.degrees.all():  # no message, no NaN: 0 * own would have those of own
            own = own.masked_fill(often == 0, 0.0)
        return summed + own * often
    if target is None:
        shift = None if bias is None else torch.cat([torch.zeros_like(bias), bias])
        z, t = project(buffers, source, torch.cat([far, near], 1), shift), None
    else:
        z, t = project(buffers, source, far), project(buffers, target, near, bias)
    out = _reduced(buffers, edges, map_, plan.choice, "sum" if reduce == "mean" else str(reduce), z, t)
    if reduce == "mean":
        degree = torch.from_numpy(edges.graph.degrees).to(z.dtype).clamp(min=1)
        out = out / degree[:, None]
    if map_.last is None:
        return out
    out = project(buffers, out, map_.last.weight.t())
    return out if map_.last.bias is None else out + _weights(edges, reduce, z.dtype) * map_.last.bias


def _weights(edges: Edges, reduce: str | None, dtype: torch.dtype) -> Tensor:
    """[targets, 1]: how often a summand of every message enters a target: degree times a sum, else once."""
    degree = torch.from_numpy(edges.graph.degrees).to(dtype)[:, None]
    return degree if reduce == "sum" else degree.clamp(max=1)


def _reduced(
    buffers: Any, edges: Edges, map_: _Map, choice: str, reduce: str, z: Tensor, t: Tensor | None
) -> Tensor:
    width = map_.first.weight.shape[0]
    if map_.kind == "rectified":
        return rectified(EdgewiseRun(edges.orders, buffers, width), z, t)
    widths = [width, *(layer.weight.shape[0] for layer in map_.by_edge if is_plain_linear(layer))]
    is_marked = choice == "marked"
    rest, parameters = _joined(buffers, map_.by_edge[:-1] if is_marked else map_.by_edge)
    run = EdgewiseRun(edges.orders, buffers, width, reduce, rest, widths[-1], max(widths))
    if is_marked:
        last = map_.by_edge[-1]
        return attained(run, z, t, last.weight.t(), last.bias, parameters)
    return mapped(run, z, t, parameters)


def _joined(buffers: Any, layers: tuple[Any, ...]) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """(the layers as one function of rows and parameters, those parameters, each once).

    Parameters are arguments: functional_call may have put others in their place when gradients are computed.
    """
    given: dict[int, Tensor] = {}  # by identity: a layer that is there twice has one gradient
    calls = [_call(buffers, layer, given) for layer in layers]
    places = {key: k for k, key in enumerate(given)}

    def rest(rows: Tensor, *values: Tensor) -> Tensor:
        for names, call in calls:
            rows = call(rows, *[None if name is None else values[places[name]] for name in names])
        return rows

    return rest, [*given.values()]


def _call(
    buffers: Any, layer: Any, given: dict[int, Tensor]
) -> tuple[list[int | None], Callable[..., Tensor]]:
    """(keys of the layer's parameters, the layer as a function of rows and these); adds them to `given`."""

    def keys(values: Iterable[Tensor | None]) -> list[int | None]:
        listed = [*values]
        given.update({id(value): value for value in listed if value is not None})
        return [None if value is None else id(value) for value in listed]

    if is_plain_linear(layer):
        return keys((layer.weight, layer.bias)), lambda rows, w, b: project(buffers, rows, w.t(), b)
    if getattr(layer, "inplace", False):  # rows that want a gradient are not written to
        layer = copy.copy(layer)
        layer.inplace = False
    named = dict(layer.named_parameters())
    if not named:
        return [], layer
    return keys(named.values()), lambda rows, *values: functional_call(
        layer, dict(zip(named, values, strict=True)), (rows,)
    )


def _can_mark(module: Any, map_: _Map) -> bool:
    """True where the map ends in a linear layer by edge, after one that is not, under an extremum."""
    ends = map_.by_edge[-2:]
    return aggregation(module) in ("max", "min") and len(ends) == 2 and is_plain_linear(ends[1])


def _plan(
    module: Any,
    edges: Edges,
    map_: _Map,
    source: Tensor,
    target: Tensor | None,
    matrix_of: Callable[[Edges], Matrix],
) -> FusedPlan:
    training, wants_input = is_training(module, source, target), source.requires_grad

    def sizes(layers: Any) -> tuple[tuple[int, int], ...]:
        return tuple((layer.weight.shape[1], layer.weight.shape[0]) for layer in layers)

    def make() -> FusedPlan:
        return choose(
            EdgewiseProblem(
                layer=active.name_of(module), kind=map_.kind, matrix=matrix_of(edges), inner=source.shape[1],
                width=map_.first.weight.shape[0], by_edge=sizes(filter(is_plain_linear, map_.by_edge)),
                by_node=sizes([] if map_.last is None else [map_.last]), machine=machine_in_use(),
                can_mark=_can_mark(module, map_), is_training=training, wants_input_grad=wants_input,
                float_bytes=source.element_size(), threads=launch.num_threads(),
                memory_limit=active.session().dial.room(active.name_of(module), training),
            )
        )  # fmt: skip

    return planned(module, edges, (source.shape, source.dtype, map_.kind, training, wants_input), make)
