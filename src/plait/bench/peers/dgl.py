"""DGL 1.1.3 on int32 graphs with every format built beforehand: its own layers, and its operators by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from plait.bench.cases import LEARNED
from plait.bench.peers.runner import Runner, Unavailable, named_gradients
from plait.bench.problem import Problem
from plait.bench.trial import first_line

__all__ = ["dgl_graph", "operators", "stock"]


def stock(problem: Problem, mode: str) -> Runner:
    """DGL's own layer with the weights of the PyG one."""
    if problem.kind in LEARNED:
        raise Unavailable("compared with PyG only")
    if problem.kind not in _STOCK:
        raise Unavailable("DGL has no such layer; see dgl-ops")
    if problem.kind == "tag" and _has_silent_sources(problem):
        raise Unavailable("DGL scales sources without in-edges by 1, PyG by 0; see dgl-ops")
    return _STOCK[problem.kind](_library(), problem)


def operators(problem: Problem, mode: str) -> Runner:
    """The layer written with dgl.ops in the order DGL's own layers use, degrees counted once.

    Row scaling around an unweighted sum: DGL's unweighted kernel is 2 to 6 times as fast as its weighted one.
    """
    if problem.kind in LEARNED:
        raise Unavailable("compared with PyG only")
    if problem.kind not in _OPERATORS:
        raise Unavailable("nothing to gain over DGL's own layer")
    _library()
    layer: Any = copy.deepcopy(problem.layer)
    forward = _OPERATORS[problem.kind](layer, problem)
    return Runner(forward, tuple(layer.parameters()), named_gradients(layer))


def dgl_graph(problem: Problem) -> Any:
    """An int32 DGL graph, CSR and CSC built so that no step pays for them, loops where PyG adds them."""
    has_loops = problem.kind in ("gcn", "sgc", "gat", "gatv2")

    def make() -> Any:
        source, target = problem.normalised[0] if has_loops else problem.edge_index
        graph = _library().graph((source.int(), target.int()), num_nodes=problem.num_nodes)
        graph.create_formats_()
        return graph

    return problem.forms.once(("dgl", has_loops), make)


def _has_silent_sources(problem: Problem) -> bool:
    """Whether a node sends and receives nothing."""
    source, target = problem.edge_index
    receives = torch.bincount(target, minlength=problem.num_nodes)
    return bool((receives[source] == 0).any())


def _scaled_sum(problem: Problem) -> Callable[[Tensor], Tensor]:
    """x -> D^-1/2 A D^-1/2 x with in-degrees D, and 0 where a degree is 0: PyG's normalisation."""
    from dgl import ops

    graph = dgl_graph(problem)
    scale = _inverse(graph.in_degrees(), -0.5)
    return lambda x: ops.copy_u_sum(graph, x * scale) * scale


def _library() -> Any:
    try:
        import dgl
        import dgl.nn.pytorch
    except Exception as error:  # a DGL built for another torch fails in many ways while it loads
        raise Unavailable(f"not installed ({first_line(error)}); pip install dgl==1.1.3") from None
    return dgl


def _inverse(degrees: Tensor, power: float) -> Tensor:
    scale = degrees.float().pow(power)
    return scale.masked_fill(degrees == 0, 0.0).unsqueeze(1)


def _copy(target: nn.Parameter, source: Tensor) -> None:
    with torch.no_grad():
        target.copy_(source)


def _stock_gcn(dgl: Any, problem: Problem) -> Runner:
    graph = dgl_graph(problem)
    source: Any = problem.layer
    # out-degrees on the left, in-degrees on the right: PyG's norm only when the graph is symmetric
    is_symmetric = problem.forms.is_symmetric
    layer = dgl.nn.pytorch.GraphConv(
        problem.width_in,
        problem.width_out,
        norm="both" if is_symmetric else "none",
        allow_zero_in_degree=True,
    )
    _copy(layer.weight, source.lin.weight.t())
    _copy(layer.bias, source.bias)
    weights = {} if is_symmetric else {"edge_weight": problem.normalised[1]}
    return Runner(
        lambda x: layer(graph, x, **weights),
        tuple(layer.parameters()),
        lambda: {"lin.weight": layer.weight.grad.t(), "bias": layer.bias.grad},
    )


def _stock_sage(dgl: Any, problem: Problem) -> Runner:
    graph = dgl_graph(problem)
    source: Any = problem.layer
    layer = dgl.nn.pytorch.SAGEConv(problem.width_in, problem.width_out, "mean")
    _copy(layer.fc_neigh.weight, source.lin_l.weight)
    _copy(layer.fc_self.weight, source.lin_r.weight)
    _copy(layer.fc_self.bias, source.lin_l.bias)
    return Runner(
        lambda x: layer(graph, x),
        tuple(layer.parameters()),
        lambda: {
            "lin_l.weight": layer.fc_neigh.weight.grad,
            "lin_l.bias": layer.fc_self.bias.grad,
            "lin_r.weight": layer.fc_self.weight.grad,
        },
    )


def _stock_gin(dgl: Any, problem: Problem) -> Runner:
    graph = dgl_graph(problem)
    source: Any = copy.deepcopy(problem.layer)
    layer = dgl.nn.pytorch.GINConv(source.nn, "sum")
    return Runner(lambda x: layer(graph, x), tuple(source.parameters()), named_gradients(source))


def _stock_sgc(dgl: Any, problem: Problem) -> Runner:
    graph = dgl_graph(problem)
    source: Any = copy.deepcopy(problem.layer)
    layer = dgl.nn.pytorch.SGConv(problem.width_in, problem.width_out, k=source.K, allow_zero_in_degree=True)
    layer.fc = source.lin
    return Runner(lambda x: layer(graph, x), tuple(source.parameters()), named_gradients(source))


def _stock_tag(dgl: Any, problem: Problem) -> Runner:
    graph = dgl_graph(problem)
    source: Any = problem.layer
    hops = len(source.lins)
    layer = dgl.nn.pytorch.TAGConv(problem.width_in, problem.width_out, k=hops - 1)
    _copy(layer.lin.weight, torch.cat([lin.weight for lin in source.lins], dim=1))
    _copy(layer.lin.bias, source.bias)

    def gradients() -> dict[str, Tensor]:
        parts = layer.lin.weight.grad.split(problem.width_in, dim=1)
        return {"bias": layer.lin.bias.grad} | {f"lins.{k}.weight": parts[k] for k in range(hops)}

    return Runner(lambda x: layer(graph, x), tuple(layer.parameters()), gradients)


def _stock_gat(dgl: Any, problem: Problem) -> Runner:
    graph = dgl_graph(problem)
    source: Any = problem.layer
    layer = dgl.nn.pytorch.GATConv(
        problem.width_in, source.out_channels, source.heads, negative_slope=source.negative_slope
    )
    _copy(layer.fc.weight, source.lin.weight)
    _copy(layer.attn_l, source.att_src)
    _copy(layer.attn_r, source.att_dst)
    _copy(layer.bias, source.bias)
    return Runner(
        lambda x: layer(graph, x).flatten(1),
        tuple(layer.parameters()),
        lambda: {
            "lin.weight": layer.fc.weight.grad,
            "att_src": layer.attn_l.grad,
            "att_dst": layer.attn_r.grad,
            "bias": layer.bias.grad,
        },
    )


def _stock_gatv2(dgl: Any, problem: Problem) -> Runner:
    """DGL's layer has no bias after the sum: it is added, as PyG's layer does."""
    graph = dgl_graph(problem)
    source: Any = problem.layer
    layer = dgl.nn.pytorch.GATv2Conv(
        problem.width_in, source.out_channels, source.heads, negative_slope=source.negative_slope
    )
    bias = copy.deepcopy(source.bias)
    for own, given in ((layer.fc_src, source.lin_l), (layer.fc_dst, source.lin_r)):
        _copy(own.weight, given.weight)
        _copy(own.bias, given.bias)
    _copy(layer.attn, source.att)
    return Runner(
        lambda x: layer(graph, x).flatten(1) + bias,
        (*layer.parameters(), bias),
        lambda: {
            "lin_l.weight": layer.fc_src.weight.grad,
            "lin_l.bias": layer.fc_src.bias.grad,
            "lin_r.weight": layer.fc_dst.weight.grad,
            "lin_r.bias": layer.fc_dst.bias.grad,
            "att": layer.attn.grad,
            "bias": bias.grad,
        },
    )


def _operators_transformer(layer: Any, problem: Problem) -> Callable[[Tensor], Tensor]:
    """DGL's DotGatConv shares one map between query, key and value; this is the same with three."""
    from dgl import ops

    graph = dgl_graph(problem)
    shape = (-1, layer.heads, layer.out_channels)
    scale = layer.out_channels**-0.5

    def forward(x: Tensor) -> Tensor:
        query, key = layer.lin_query(x).view(shape) * scale, layer.lin_key(x).view(shape)
        weight = ops.edge_softmax(graph, ops.u_dot_v(graph, key, query))
        summed = ops.u_mul_e_sum(graph, layer.lin_value(x).view(shape), weight)
        out: Tensor = summed.flatten(1) + layer.lin_skip(x)
        return out

    return forward


def _operators_gcn(layer: Any, problem: Problem) -> Callable[[Tensor], Tensor]:
    aggregate = _scaled_sum(problem)
    if problem.width_in > problem.width_out:
        return lambda x: aggregate(layer.lin(x)) + layer.bias
    return lambda x: linear(aggregate(x), layer.lin.weight, layer.bias)


def _operators_sage_mean(layer: Any, problem: Problem) -> Callable[[Tensor], Tensor]:
    from dgl import ops

    graph = dgl_graph(problem)
    share = _inverse(graph.in_degrees(), -1.0)
    if problem.width_in > problem.width_out:
        weight, bias = layer.lin_l.weight, layer.lin_l.bias
        return lambda x: ops.copy_u_sum(graph, linear(x, weight)) * share + bias + layer.lin_r(x)
    return lambda x: layer.lin_l(ops.copy_u_sum(graph, x) * share) + layer.lin_r(x)


def _operators_sage_max(layer: Any, problem: Problem) -> Callable[[Tensor], Tensor]:
    from dgl import ops

    graph = dgl_graph(problem)
    has_empty_rows = bool((graph.in_degrees() == 0).any())

    def forward(x: Tensor) -> Tensor:
        best = ops.copy_u_max(graph, x)
        if has_empty_rows:  # dgl.ops leaves -inf there, DGL's message passing and PyG put 0
            best = best.masked_fill(best == float("-inf"), 0.0)
        out: Tensor = layer.lin_l(best) + layer.lin_r(x)
        return out

    return forward


def _operators_sgc(layer: Any, problem: Problem) -> Callable[[Tensor], Tensor]:
    aggregate = _scaled_sum(problem)

    def forward(x: Tensor) -> Tensor:
        for _ in range(layer.K):
            x = aggregate(x)
        out: Tensor = layer.lin(x)
        return out

    return forward


def _operators_tag(layer: Any, problem: Problem) -> Callable[[Tensor], Tensor]:
    aggregate = _scaled_sum(problem)

    def forward(x: Tensor) -> Tensor:
        powers = [x]
        for _ in layer.lins[1:]:
            powers.append(aggregate(powers[-1]))
        weight = torch.cat([lin.weight for lin in layer.lins], dim=1)
        return linear(torch.cat(powers, dim=1), weight, layer.bias)

    return forward


_STOCK: dict[str, Callable[[Any, Problem], Runner]] = {
    "gcn": _stock_gcn,
    "sage-mean": _stock_sage,
    "gin": _stock_gin,
    "sgc": _stock_sgc,
    "tag": _stock_tag,
    "gat": _stock_gat,
    "gatv2": _stock_gatv2,
}
_OPERATORS: dict[str, Callable[[Any, Problem], Callable[[Tensor], Tensor]]] = {
    "gcn": _operators_gcn,
    "sage-mean": _operators_sage_mean,
    "sage-max": _operators_sage_max,
    "sgc": _operators_sgc,
    "tag": _operators_tag,
    "transformer": _operators_transformer,
}
