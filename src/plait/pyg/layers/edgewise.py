"""EdgeConv and DynamicEdgeConv: a learned map of [x_i, x_j - x_i], its first layer split into both ends.

W [x_i, x_j - x_i] = (W_1 - W_2) x_i + W_2 x_j: two projections of nodes instead of one of edges.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch_geometric.nn import DynamicEdgeConv, EdgeConv

from plait.plan.edgewise import EdgeMap, ways
from plait.pyg import active
from plait.pyg.edges import from_edge_list
from plait.pyg.layers.base import aggregation, has_hooks, is_parametrized, is_plain_linear
from plait.pyg.layers.fused import Run, check_width, edges_of, fused, refused_edges, refused_features
from plait.runtime.edges import Edges
from plait.runtime.nearest import nearest
from plait.runtime.placed import PlacedGraph
from plait.runtime.project import Projector
from plait.runtime.ways import Programs

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
    can_mark: bool = False  # by_edge ends in a linear layer after one that is not, under an extremum


@fused(EdgeConv)
def prepare(module: Any, given: Mapping[str, Any]) -> Run | str:
    """The call made ready to run, or why it runs in PyG."""
    x, edge_index = given["x"], given["edge_index"]
    parts = _pair(x)
    found = refused_edges(edge_index) or _map_of(module, parts)
    if isinstance(found, str):
        return found
    if parts[0] is not parts[1] and module.flow != "source_to_target":
        return f"(flow={module.flow!r}): pairs of features are planned source_to_target only"
    edges = edges_of(module, edge_index, parts[1].shape[0], parts[0].shape[0])
    return functools.partial(_run, module, edges, found, parts[0], None if parts[0] is parts[1] else parts[1])


@fused(DynamicEdgeConv)
def prepare_dynamic(module: Any, given: Mapping[str, Any]) -> Run | str:
    """The call made ready to run: the k nearest neighbours are found exactly, again in every call."""
    parts, batch = _pair(given["x"]), given.get("batch")
    found = _map_of(module, parts)
    if isinstance(found, str):
        return found
    batches = batch if isinstance(batch, tuple) else (batch, batch)
    sources, targets = nearest(parts[0], parts[1], module.k, *batches)
    sizes = parts[1].shape[0], parts[0].shape[0]
    edges = Edges(from_edge_list(torch.stack([sources, targets]), *sizes, False), ())
    target = None if parts[0] is parts[1] else parts[1]
    return functools.partial(_run, module, edges, found, parts[0], target)


def _pair(x: Any) -> list[Any]:
    """[sources, targets], the same tensor twice for one node set; nothing where x is neither."""
    return [x, x] if isinstance(x, Tensor) else list(x) if isinstance(x, tuple | list) and len(x) == 2 else []


def _map_of(module: Any, parts: list[Any]) -> _Map | str:
    """The layer's map by its parts, or why the call runs in PyG."""
    if not parts or not all(isinstance(part, Tensor) and part.dim() == 2 for part in parts):
        return ": x is not [nodes, width], nor a pair of such"
    found = refused_features(module, *parts) or _taken_apart(module)
    if isinstance(found, _Map):
        for part in parts:
            check_width(module, part, found.first.weight.shape[1] // 2)
    return found


def _taken_apart(module: Any) -> _Map | str:
    """The layer's map by its parts, or why it is none that can be taken apart."""
    reduce = aggregation(module)
    if reduce is None:
        return f"(aggr={module.aggr!r}): the aggregation is not planned"
    layers = _flat(module.nn)
    if layers is None or not layers or not is_plain_linear(layers[0]):
        return ": nn does not begin with a plain linear layer, or is no Sequential without hooks"
    if is_parametrized(module):
        return ": a weight is parametrized, and PyG computes it at every read"
    stop = next((reason for reason in map(_not_by_row, layers[1:]) if reason), None)
    if stop is not None:
        return stop
    first, rest = layers[0], [layer for layer in layers[1:] if not _is_nothing(layer)]
    if not rest:
        return _Map("linear", first, ())
    if reduce not in ("sum", "mean"):
        return _Map("blocks", first, tuple(rest), can_mark=len(rest) > 1 and is_plain_linear(rest[-1]))
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
        return ": BatchNorm needs all edges at once, but plait computes them in blocks"
    return f": {type(layer).__name__} inside nn is not known to map edges one by one"


def _run(module: Any, edges: Edges, map_: _Map, source: Tensor, target: Tensor | None) -> Tensor:
    session, is_placed = active.session(), isinstance(edges.graph, PlacedGraph)
    if is_placed and map_.can_mark:
        map_ = replace(map_, can_mark=False)  # marks are a CPU's
    values, given = _values(session.project, map_, source, target)
    reduce = str(aggregation(module))
    # of a graph on a GPU nobody waits to hear whether every target has an edge
    is_all = not is_placed and not len(edges.orders.bare)
    sizes = _sizes(map_, reduce, source, target, values, is_all)
    if sizes.counts_bias:
        values["c"] = values["c"].unsqueeze(0)
        values["T"] = edges.orders.counts(source.dtype, is_once=reduce != "sum")
    programs = Programs(
        active.name_of(module), ("edge map", sizes), lambda wrt: ways(sizes, wrt is not None),
        diagonals=lambda: {"t": edges.orders.inverse_degrees.to(source.dtype)},
    )  # fmt: skip
    return programs.value(session, edges, values, given)


def _values(
    project: Projector, map_: _Map, source: Tensor, target: Tensor | None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(the tensors that the map's program reads, its functions of edges' rows) by name."""
    inner, weight, bias = source.shape[1], map_.first.weight, map_.first.bias
    far, near = weight[:, inner:].t(), (weight[:, :inner] - weight[:, inner:]).t()
    is_joined = target is None and map_.kind != "linear"
    values = {"X": source, **({"W": torch.cat([far, near], 1)} if is_joined else {"F": far, "N": near})}
    if target is not None:
        values["X1"] = target
    if bias is not None:
        values["b"] = torch.cat([torch.zeros_like(bias), bias]) if is_joined else bias
    given: dict[str, Any] = {}
    layers, last = map_.by_edge, map_.last
    if map_.can_mark:
        layers, last = layers[:-1], layers[-1]
    if map_.kind == "blocks":
        given["map"], parameters = _joined(project, layers)
        values |= {f"P{k}": value for k, value in enumerate(parameters)}
        if map_.can_mark:
            given["whole map"] = functools.partial(_then_linear, project, given["map"], last.bias is not None)
    if last is not None:
        values |= {"V": last.weight.t(), **({} if last.bias is None else {"c": last.bias})}
    return values, given


def _then_linear(
    project: Projector, map_: Callable[..., Tensor], has_bias: bool, rows: Tensor, *values: Tensor
) -> Tensor:
    """The map and the linear layer after it, whose weight and bias are the last of the parameters."""
    own, bias = (values[:-1], values[-1]) if has_bias else (values, None)
    return project(map_(rows, *own[:-1]), own[-1], bias)


def _sizes(
    map_: _Map, reduce: str, source: Tensor, target: Tensor | None, values: Mapping[str, Tensor], is_all: bool
) -> EdgeMap:
    """The map in numbers; is_all: every target has an edge."""
    linears = [layer.weight.shape[::-1] for layer in map_.by_edge if is_plain_linear(layer)]
    width = map_.first.weight.shape[0]
    parameters = [value for name, value in values.items() if name[0] == "P"]
    return EdgeMap(
        map_.kind, reduce, source.shape[1], None if target is None else target.shape[1], width,
        by_edge=tuple((int(a), int(b)) for a, b in linears),
        parameters=tuple((1, *value.shape)[-2:] for value in parameters),
        last=None if map_.last is None else map_.last.weight.shape[0],
        has_bias=map_.first.bias is not None, has_last_bias="c" in values,
        can_mark=map_.can_mark, act="relu" if _is_rectified(map_) else "", is_everywhere=is_all,
    )  # fmt: skip


def _is_rectified(map_: _Map) -> bool:
    """Whether ReLU is all there is between two linear layers."""
    return map_.can_mark and [type(layer) for layer in map_.by_edge[:-1]] == [nn.ReLU]


def _joined(project: Projector, layers: tuple[Any, ...]) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """(the layers as one function of rows and parameters, those parameters, each once).

    Parameters are arguments: functional_call may have put others in their place when gradients are computed.
    """
    given: dict[int, Tensor] = {}  # by identity: a layer that is there twice has one gradient
    calls = [_call(project, layer, given) for layer in layers]
    places = {key: k for k, key in enumerate(given)}

    def rest(rows: Tensor, *values: Tensor) -> Tensor:
        for names, call in calls:
            rows = call(rows, *[None if name is None else values[places[name]] for name in names])
        return rows

    return rest, [*given.values()]


def _call(
    project: Projector, layer: Any, given: dict[int, Tensor]
) -> tuple[list[int | None], Callable[..., Tensor]]:
    """(keys of the layer's parameters, the layer as a function of rows and these); adds them to `given`."""

    def keys(values: Iterable[Tensor | None]) -> list[int | None]:
        listed = [*values]
        given.update({id(value): value for value in listed if value is not None})
        return [None if value is None else id(value) for value in listed]

    if is_plain_linear(layer):
        return keys((layer.weight, layer.bias)), lambda rows, w, b: project(rows, w.t(), b)
    layer = copy.copy(layer)  # it runs again in the backward pass, by when the mode may have changed
    if getattr(layer, "inplace", False):  # rows that need a gradient are not written to
        layer.inplace = False
    named = dict(layer.named_parameters())
    if not named:
        return [], layer
    return keys(named.values()), lambda rows, *values: functional_call(
        layer, dict(zip(named, values, strict=True)), (rows,)
    )
