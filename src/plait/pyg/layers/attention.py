"""Attention layers: GAT, GATv2 and Transformer on the fused passes, or why a call runs in PyG."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch_geometric.nn import GATConv, GATv2Conv, TransformerConv
from torch_geometric.nn.aggr import SumAggregation
from torch_geometric.utils import add_self_loops, remove_self_loops, softmax

from plait.kernels import launch
from plait.kernels.attention import MOST_HEADS, Dropout, padded
from plait.plan.attention import AttentionProblem, choose, without_lean
from plait.plan.fused import FusedPlan
from plait.pyg import active
from plait.pyg.layers.base import not_plain
from plait.pyg.layers.fused import (
    FUSED,
    Run,
    cost_matrix,
    csr_order,
    edges_of,
    is_training,
    layer_of,
    planned,
    refused_edges,
    refused_features,
)
from plait.runtime.attention import AttentionRun, Columns, attend_gat, attend_rows
from plait.runtime.attention_raw import attend_raw, attend_raw_dot, merged
from plait.runtime.pieces import edge_dots, edge_softmax, edge_sums, leaky_scores, pair_scores
from plait.runtime.project import project
from plait.runtime.session import Edges, machine_in_use

__all__ = ["prepare"]


@dataclass(frozen=True)
class AttentionCall:
    """A call of an attention layer, ready to run."""

    source: Tensor
    target: Tensor | None  # the second of a pair; None: one node set, or a pair without targets' features
    is_bipartite: bool
    edges: Edges
    listed: Tensor  # the edge list with the layer's self loops, in PyG's order
    edge_attr: Tensor | None
    wants_weights: bool

    @property
    def own(self) -> Tensor | None:
        """The features of the targets."""
        return self.target if self.is_bipartite else self.source


@dataclass(frozen=True)
class _Layer:
    """How a layer class is run, and what stops it."""

    run: Callable[[Any, AttentionCall], Any]
    stop: Callable[[Any, AttentionCall], str | None]
    linears: tuple[str, ...]
    has_loops: Callable[[Any], bool]


def prepare(module: Any, given: Mapping[str, Any]) -> Run | str:
    """The call made ready to run, or why it runs in PyG."""
    layer = _LAYERS[cast("type[nn.Module]", layer_of(module))]
    x, edge_index, edge_attr = given["x"], given["edge_index"], given.get("edge_attr")
    wants_weights = given.get("return_attention_weights") is not None
    if isinstance(module, GATConv | GATv2Conv):
        wants_weights = bool(given.get("return_attention_weights"))
    reason = _refused(module, layer, x, edge_index, edge_attr, wants_weights)
    if reason is not None:
        return reason
    is_bipartite = not isinstance(x, Tensor)
    source, target = (x[0], x[1]) if is_bipartite else (x, None)
    size = given.get("size")
    num_sources = source.shape[0]
    if is_bipartite and target is None and size is None:
        return ": the number of target nodes is not known; pass size= or x as a pair"
    num_targets = int(size[1]) if size is not None else (source if target is None else target).shape[0]
    has_loops = layer.has_loops(module)
    edges = edges_of(module, edge_index, num_targets, num_sources, has_loops)
    if edge_attr is not None and not edges.graph.num_edges:
        return ": without edges PyG leaves the gradients of its edge features out"
    listed = edge_index
    if has_loops and (edge_attr is not None or wants_weights):
        listed, edge_attr = remove_self_loops(edge_index, edge_attr)
        listed, edge_attr = add_self_loops(
            listed, edge_attr, fill_value=module.fill_value, num_nodes=min(num_sources, num_targets)
        )
    call = AttentionCall(source, target, is_bipartite, edges, listed, edge_attr, wants_weights)
    return layer.stop(module, call) or functools.partial(layer.run, module, call)


def _refused_matrix(module: Any, edge_index: Any, edge_attr: Any, wants_weights: bool) -> str | None:
    """Why edges are none that attention takes: an edge list, or a torch matrix whose values it ignores."""
    is_matrix = isinstance(edge_index, Tensor) and edge_index.layout in (torch.sparse_csr, torch.sparse_coo)
    if not is_matrix:
        return refused_edges(edge_index)
    if edge_index.layout == torch.sparse_coo and not edge_index.is_coalesced():
        return ": a sparse adj_t that is not coalesced is PyG's"
    if edge_attr is not None or wants_weights or edge_index.values().dim() != 1:
        return ": a sparse adj_t with edge features, or with the weights asked for, is PyG's"
    if module.flow != "source_to_target" or edge_index.device.type != "cpu":
        return f"(flow={module.flow!r}): a sparse adj_t is lowered source_to_target, on the CPU"
    return None


def _refused(
    module: Any, layer: _Layer, x: Any, edge_index: Any, edge_attr: Any, wants_weights: bool
) -> str | None:
    """What the fused path does not take."""
    parts = [x] if isinstance(x, Tensor) else list(x) if isinstance(x, tuple | list) and len(x) == 2 else []
    if not parts or not isinstance(parts[0], Tensor):
        return ": x is not a tensor or a pair of tensors"
    reason = _refused_matrix(module, edge_index, edge_attr, wants_weights)
    reason = reason or refused_features(module, *parts, edge_attr)
    if reason is not None:
        return reason
    if any(part is not None and part.dim() != 2 for part in parts):
        return ": x is not [nodes, width]"
    if type(module.aggr_module) is not SumAggregation:
        return f"(aggr={module.aggr!r}): attention is lowered with sums only"
    if len(parts) == 2 and module.flow != "source_to_target":
        return f"(flow={module.flow!r}): pairs of features are lowered source_to_target only"
    present = [name for name in layer.linears if getattr(module, name, None) is not None]
    stop = not_plain(module, *present)
    return None if stop is None else stop.reason.removeprefix(type(module).__name__)


def _plan(
    module: Any,
    call: AttentionCall,
    kind: str,
    parts: int,
    can_recompute: bool,
    *,
    is_in_pieces: bool = False,
) -> FusedPlan:
    """The plan of this call."""
    training, wants_input = is_training(module, call.source), call.source.requires_grad
    attr = call.edge_attr
    edge_width = 0 if attr is None else attr.shape[-1] if attr.dim() > 1 else 1
    key = (
        call.source.shape, module.heads, module.out_channels, training, wants_input, can_recompute,
        is_in_pieces, edge_width,
    )  # fmt: skip

    def make() -> FusedPlan:
        return choose(
            AttentionProblem(
                layer=active.name_of(module), kind=kind, matrix=cost_matrix(call.edges),
                inner=call.source.shape[1], width=module.out_channels, heads=module.heads, parts=parts,
                machine=machine_in_use(), is_training=training, wants_input_grad=wants_input,
                can_recompute=can_recompute, can_be_lean=attr is None, is_in_pieces=is_in_pieces,
                edge_width=edge_width,
                float_bytes=call.source.element_size(), threads=launch.num_threads(),
                memory_limit=active.session().options.memory_limit,
            )
        )  # fmt: skip

    return planned(module, call.edges, key, make)


def _run_of(module: Any, call: AttentionCall) -> AttentionRun:
    dropout = None
    if module.training and module.dropout > 0.0:
        seed = int(torch.randint(0, (1 << 63) - 1, (1,)).item())
        dropout = Dropout(seed, float(module.dropout))
    slope = float(getattr(module, "negative_slope", 0.0))
    return AttentionRun(call.edges.orders, active.session().buffers, module.heads, slope, dropout)


def _leanly(run: AttentionRun, plan: FusedPlan) -> tuple[AttentionRun, str]:
    """(the run as the plan wants its backward pass, the choice but for that)."""
    choice = without_lean(plan.choice)
    return replace(run, is_lean=choice != plan.choice), choice


def _joined(module: Any, out: Tensor, addend: Tensor | None, bias: Tensor | None) -> Tensor:
    """Heads averaged where the layer does not put them side by side; then what else is added."""
    if not module.concat:
        out = out.view(-1, module.heads, module.out_channels).mean(dim=1)
    if addend is not None:
        out = out + addend
    return out if bias is None else out + bias


# GAT -----------------------------------------------------------------------------------------------


def _padded(values: Tensor, lanes: int) -> Tensor:
    return nn.functional.pad(values, (0, lanes - values.shape[-1]))


def _folded(weight: Tensor, att: Tensor, lanes: int) -> Tensor:
    """W a by head: [in, lanes] from weight [heads * out, in] and att [1, heads, out]."""
    heads, width = att.shape[1:]
    return _padded(torch.einsum("hfk,hf->kh", weight.view(heads, width, -1), att[0]), lanes)


def _spread(att: Tensor, lanes: int) -> Tensor:
    """att as a block-diagonal matrix [heads * out, lanes]: projected rows times it are the scores."""
    heads, width = att.shape[1:]
    places = torch.eye(heads, lanes, dtype=att.dtype).unsqueeze(1)
    return (att[0].unsqueeze(2) * places).reshape(heads * width, lanes)


def _gat_stop(module: Any, call: AttentionCall) -> str | None:
    if call.edge_attr is not None and module.lin_edge is not None and call.edge_attr.dim() > 2:
        return ": edge_attr has more than two dimensions"
    return None


def _gat(module: Any, call: AttentionCall) -> Any:
    run, heads, width, lanes = _run_of(module, call), module.heads, module.out_channels, padded(module.heads)
    buffers = run.buffers
    own = call.own
    if module.heads > MOST_HEADS or (call.wants_weights and run.dropout is not None):
        return _gat_pieces(module, call, run)
    is_single = not call.is_bipartite and module.lin is not None
    run, choice = _leanly(run, _plan(module, call, "gat", 1, is_single and not call.wants_weights))
    edge = _gat_edge_scores(module, call, lanes)
    res = module.res
    addend = None if res is None or own is None else project(buffers, own, res.weight.t())
    is_inside = module.concat and not call.wants_weights
    inside: dict[str, Any] = {"addend": addend, "bias": module.bias} if is_inside else {}
    if is_single and choice == "recompute":
        weight = module.lin.weight
        vectors = torch.cat(
            [_folded(weight, module.att_src, lanes), _folded(weight, module.att_dst, lanes)], 1
        )
        out = attend_raw(run, call.source, weight.t(), vectors, edge=edge, bias=inside.get("bias"))
        return _joined(module, out, addend, None if is_inside else module.bias)
    if is_single and choice == "gat" and not call.wants_weights:
        z = project(buffers, call.source, module.lin.weight.t())
        vectors = torch.cat([_spread(module.att_src, lanes), _spread(module.att_dst, lanes)], 1)
        out = attend_gat(run, width, z, vectors=vectors, edge=edge, **inside)
    else:
        z, target = _gat_folded_rows(module, call, run, is_single, lanes)
        out = attend_gat(run, width, z, target=target, edge=edge, **inside)
    if is_inside:
        return out
    out = _joined(module, out, addend, module.bias)
    if not call.wants_weights:
        return out
    columns = heads * width
    near = z[:, columns + lanes :] if target is None else target
    return out, (call.listed, _gat_weights(module, call, z[:, columns : columns + lanes], near, edge))


def _gat_pieces(module: Any, call: AttentionCall, run: AttentionRun) -> Any:
    """With more heads than the fused passes take, or with the weights that dropout left asked for."""
    heads, width, orders, own = module.heads, module.out_channels, run.edges, call.own
    _plan(module, call, "gat", 1, False, is_in_pieces=True)
    z, target = _gat_folded_rows(module, call, run, False, heads)
    value, far = z[:, : heads * width], z[:, heads * width :]
    assert target is not None
    scores = pair_scores(orders, run.buffers, heads, target, far)
    edge = _gat_edge_scores(module, call, run.lanes)
    scores = nn.functional.leaky_relu(scores if edge is None else scores + edge, module.negative_slope)
    weight = nn.functional.dropout(edge_softmax(orders, scores), module.dropout, module.training)
    out = edge_sums(orders, run.buffers, heads, weight, value)
    addend = None
    if module.res is not None and own is not None:
        addend = project(run.buffers, own, module.res.weight.t())
    out = _joined(module, out, addend, module.bias)
    return (out, (call.listed, _as_listed(call, weight)[:, :heads])) if call.wants_weights else out


def _gat_folded_rows(
    module: Any, call: AttentionCall, run: AttentionRun, is_single: bool, lanes: int
) -> tuple[Tensor, Tensor | None]:
    """(rows with their scores beside them, scores of the targets where these are other nodes or weights)."""
    weight = module.lin.weight if module.lin is not None else module.lin_src.weight
    parts = [weight.t(), _folded(weight, module.att_src, lanes)]
    if is_single:
        parts.append(_folded(weight, module.att_dst, lanes))
        return project(run.buffers, call.source, torch.cat(parts, 1)), None
    z = project(run.buffers, call.source, torch.cat(parts, 1))
    own = call.own
    if own is None:
        return z, z.new_zeros((run.num_targets, lanes))
    weight = module.lin.weight if module.lin is not None else module.lin_dst.weight
    return z, project(run.buffers, own, _folded(weight, module.att_dst, lanes))


def _gat_edge_scores(module: Any, call: AttentionCall, lanes: int) -> Tensor | None:
    """One score an edge and head from its features: they meet W and a first, so no edge is projected."""
    attr = call.edge_attr
    if attr is None or module.lin_edge is None:
        return None
    attr = attr.view(-1, 1) if attr.dim() == 1 else attr
    return csr_order(call.edges, attr @ _folded(module.lin_edge.weight, module.att_edge, lanes))


def _gat_weights(module: Any, call: AttentionCall, far: Tensor, near: Tensor, edge: Tensor | None) -> Tensor:
    """The attention weights edge by edge, in the order of the listed edges."""
    source, target = call.listed.flip(0) if module.flow == "target_to_source" else call.listed
    heads = module.heads
    scores = far[source, :heads] + near[target, :heads]
    if edge is not None:
        scores = scores + _as_listed(call, edge)[:, :heads]
    scores = nn.functional.leaky_relu(scores, module.negative_slope)
    weights: Tensor = softmax(scores, target, num_nodes=call.edges.graph.num_nodes)
    return weights


# GATv2 ---------------------------------------------------------------------------------------------


def _rows_stop(module: Any, call: AttentionCall) -> str | None:
    attr = call.edge_attr
    if attr is not None and (module.lin_edge is None or attr.dim() > 2):
        return ": edge_attr is not [edges, edge_dim], or the layer has no edge_dim"
    needs_attr = isinstance(module, TransformerConv) and module.lin_edge is not None
    if needs_attr and (attr is None or attr.dim() != 2):
        return f"(edge_dim={module.edge_dim}): edge_attr is not [edges, edge_dim]"
    if call.own is None:
        return ": x[1] is None; the layer needs the features of the targets"
    return None


def _gatv2(module: Any, call: AttentionCall) -> Any:
    run, columns = _run_of(module, call), module.heads * module.out_channels
    own = call.own
    assert own is not None
    if call.edge_attr is not None or call.wants_weights or module.heads > MOST_HEADS:
        return _gatv2_pieces(module, call, run, own)
    run, _ = _leanly(run, _plan(module, call, "leaky", 1 if module.share_weights else 2, False))
    addend = None if module.res is None else project(run.buffers, own, module.res.weight.t())
    left, right = module.lin_l, module.lin_r
    target: Tensor | None = None
    if call.is_bipartite:
        z = project(run.buffers, call.source, left.weight.t(), left.bias)
        target = project(run.buffers, own, right.weight.t(), right.bias)
        where = Columns(0, 0, 0)
    elif module.share_weights:
        z = project(run.buffers, call.source, left.weight.t(), left.bias)
        where = Columns(0, 0, 0)
    else:
        z = project(run.buffers, call.source, *_side_by_side(left, right))
        where = Columns(0, 0, columns)
    is_inside = module.concat and addend is None
    att = module.att.reshape(-1)
    out = attend_rows(
        run, "leaky", where, columns, z, target, att=att, bias=module.bias if is_inside else None
    )
    return out if is_inside else _joined(module, out, addend, module.bias)


def _gatv2_pieces(module: Any, call: AttentionCall, run: AttentionRun, own: Tensor) -> Any:
    """With features of edges inside leaky, or with the weights asked for."""
    _plan(module, call, "leaky", 1 if module.share_weights else 2, False, is_in_pieces=True)
    orders, heads = run.edges, module.heads
    left, right = module.lin_l, module.lin_r
    far = near = project(run.buffers, call.source, left.weight.t(), left.bias)
    if call.is_bipartite or not module.share_weights:
        near = project(run.buffers, own, right.weight.t(), right.bias)
    attr, w = _edge_rows(call), None
    if attr is not None:
        w = module.lin_edge.weight.t().contiguous()
    spread = _spread(module.att, run.lanes)
    weight = edge_softmax(orders, leaky_scores(orders, run.slope, near, far, spread, attr, w))
    weight = nn.functional.dropout(weight, module.dropout, module.training)
    out = edge_sums(orders, run.buffers, heads, weight, far)
    addend = None if module.res is None else project(run.buffers, own, module.res.weight.t())
    out = _joined(module, out, addend, module.bias)
    return (out, (call.listed, _as_listed(call, weight)[:, :heads])) if call.wants_weights else out


def _edge_rows(call: AttentionCall) -> Tensor | None:
    """Features of edges as rows, edges by target."""
    attr = call.edge_attr
    if attr is None:
        return None
    return csr_order(call.edges, attr.view(-1, 1) if attr.dim() == 1 else attr).contiguous()


def _as_listed(call: AttentionCall, values: Tensor) -> Tensor:
    """Values of edges by target, in the order of the listed edges."""
    order = call.edges.graph.order
    if order is None:
        return values
    back = torch.empty(len(order), dtype=torch.int64)
    back[torch.from_numpy(order).long()] = torch.arange(len(order))
    return values[back]


def _side_by_side(*linears: Any) -> tuple[Tensor, Tensor | None]:
    """Weights [in, sum of outs] and biases of linear maps of one input."""
    weight = torch.cat([linear.weight for linear in linears]).t()
    return weight, None if linears[0].bias is None else torch.cat([linear.bias for linear in linears])


# Transformer ---------------------------------------------------------------------------------------


def _transformer(module: Any, call: AttentionCall) -> Any:
    run, columns = _run_of(module, call), module.heads * module.out_channels
    own = call.own
    assert own is not None
    if call.edge_attr is not None or call.wants_weights or module.heads > MOST_HEADS:
        return _transformer_pieces(module, call, run, own)
    has_skip = module.root_weight and module.concat and module.lin_beta is None
    run, choice = _leanly(run, _plan(module, call, "dot", 4 if has_skip else 3, run.dropout is None))
    if choice == "dot recompute":
        out = _transformer_raw(module, call, run, has_skip)
        return out if has_skip else _transformer_end(module, run, own, out)
    query = _scaled_query(module)
    sources = [(module.lin_key.weight, module.lin_key.bias), (module.lin_value.weight, module.lin_value.bias)]
    targets = [query, *([(module.lin_skip.weight, module.lin_skip.bias)] if has_skip else [])]
    if call.is_bipartite:
        z, t = _projected(run, call.source, sources), _projected(run, own, targets)
        where = Columns(0, columns, 0, columns if has_skip else -1)
    else:
        z, t = _projected(run, call.source, sources + targets), None
        where = Columns(0, columns, 2 * columns, 3 * columns if has_skip else -1)
    out = attend_rows(run, "dot", where, columns, z, t)
    return out if has_skip else _transformer_end(module, run, own, out)


def _transformer_raw(module: Any, call: AttentionCall, run: AttentionRun, has_skip: bool) -> Tensor:
    """Raw rows are the keys and values of all heads."""
    key, value, skip = module.lin_key, module.lin_value, module.lin_skip
    weight, bias = _scaled_query(module)
    if bias is not None:
        weight = torch.cat([weight, bias.unsqueeze(1)], 1)
    by_head = (module.heads, module.out_channels, -1)
    m = merged(weight.view(by_head), key.weight.view(by_head), key.bias)
    return attend_raw_dot(
        run, call.source, call.target, m, value.weight.t(), bias=value.bias,
        skip=(skip.weight.t(), skip.bias) if has_skip else None,
    )  # fmt: skip


def _scaled_query(module: Any) -> tuple[Tensor, Tensor | None]:
    """The query's map; it takes the scores' 1 / sqrt(width)."""
    scale, query = 1.0 / math.sqrt(module.out_channels), module.lin_query
    return query.weight * scale, None if query.bias is None else query.bias * scale


def _transformer_pieces(module: Any, call: AttentionCall, run: AttentionRun, own: Tensor) -> Any:
    """With features of edges, which meet W once a node: q . (W e) = (q W) . e, sum(W e) = W sum(e)."""
    _plan(module, call, "dot", 3, False, is_in_pieces=True)
    orders, heads, buffers = run.edges, module.heads, run.buffers
    query = _projected(run, own, [_scaled_query(module)])
    key = project(buffers, call.source, module.lin_key.weight.t(), module.lin_key.bias)
    value = project(buffers, call.source, module.lin_value.weight.t(), module.lin_value.bias)
    scores = edge_dots(orders, buffers, heads, query, key)
    attr, w = _edge_rows(call), None
    if attr is not None:
        w = module.lin_edge.weight.view(heads, module.out_channels, -1)
        bent = torch.einsum("nhc,hcd->nhd", query.view(-1, heads, module.out_channels), w).flatten(1)
        scores = scores + edge_dots(orders.incidence, buffers, heads, bent, attr, is_shared=True)
    kept = edge_softmax(orders, scores)
    weight = nn.functional.dropout(kept, module.dropout, module.training)
    out = edge_sums(orders, buffers, heads, weight, value)
    if attr is not None:
        means = edge_sums(orders.incidence, buffers, heads, weight, attr, is_shared=True)
        out = out + torch.einsum("nhd,hcd->nhc", means.view(out.shape[0], heads, -1), w).reshape(out.shape)
    out = _transformer_end(module, run, own, out)
    return (out, (call.listed, _as_listed(call, kept)[:, :heads])) if call.wants_weights else out


def _transformer_end(module: Any, run: AttentionRun, own: Tensor, out: Tensor) -> Tensor:
    """Heads averaged where they are not side by side, and the target's own part."""
    if not module.concat:
        out = out.view(-1, module.heads, module.out_channels).mean(dim=1)
    if module.root_weight:
        skip = project(run.buffers, own, module.lin_skip.weight.t(), module.lin_skip.bias)
        if module.lin_beta is None:
            return out + skip
        beta = module.lin_beta(torch.cat([out, skip, out - skip], dim=-1)).sigmoid()
        out = beta * skip + (1 - beta) * out
    return out


def _projected(run: AttentionRun, x: Tensor, maps: list[tuple[Tensor, Tensor | None]]) -> Tensor:
    biases = [bias for _, bias in maps if bias is not None]
    bias = torch.cat(biases) if biases else None
    return project(run.buffers, x, torch.cat([weight for weight, _ in maps]).t(), bias)


_LAYERS: dict[type[nn.Module], _Layer] = {
    GATConv: _Layer(
        _gat, _gat_stop, ("lin", "lin_src", "lin_dst", "lin_edge", "res"), lambda m: bool(m.add_self_loops)
    ),
    GATv2Conv: _Layer(
        _gatv2, _rows_stop, ("lin_l", "lin_r", "lin_edge", "res"), lambda m: bool(m.add_self_loops)
    ),
    TransformerConv: _Layer(
        _transformer,
        _rows_stop,
        ("lin_key", "lin_query", "lin_value", "lin_skip", "lin_edge"),
        lambda m: False,
    ),
}
FUSED.update(dict.fromkeys(_LAYERS, prepare))
