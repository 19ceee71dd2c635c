"""Attention layers: GAT, GATv2 and Transformer on the fused passes, or why a call runs in PyG."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch_geometric.nn import GATConv, GATv2Conv, TransformerConv
from torch_geometric.nn.aggr import SumAggregation
from torch_geometric.utils import add_self_loops, remove_self_loops, softmax

from plait.kernels.attention import MOST_HEADS, Dropout, padded
from plait.plan.attention import Attention, base_of, ways
from plait.pyg import active
from plait.pyg.layers.fused import (
    FUSED,
    Ready,
    Run,
    as_listed,
    csr_order,
    edges_of,
    handed,
    is_training,
    layer_of,
    not_plain,
    refused_edges,
    refused_features,
)
from plait.pyg.layers.pieces import Pieces
from plait.runtime import executor
from plait.runtime.edges import Edges
from plait.runtime.placed import column_of
from plait.runtime.ways import Programs

__all__ = ["prepare"]

_ADDED = ("res", "lin_skip")  # the last of a layer's maps: torch adds what they make where heads are averaged
_EDGE_ROWS_BYTES = 4 << 30  # of projected edge features; with their gradient twice that


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
    is_listed = edge_attr is not None or wants_weights or module.heads > MOST_HEADS
    edges = edges_of(module, edge_index, num_targets, num_sources, has_loops, is_listed)
    if edge_attr is not None and not edges.graph.num_edges:
        return ": without edges PyG leaves the gradients of its edge features out"
    listed = edge_index
    if has_loops and (edge_attr is not None or wants_weights):
        listed, edge_attr = remove_self_loops(edge_index, edge_attr)
        listed, edge_attr = add_self_loops(
            listed, edge_attr, fill_value=module.fill_value, num_nodes=min(num_sources, num_targets)
        )
    call = AttentionCall(source, target, is_bipartite, edges, listed, edge_attr, wants_weights)
    reason = layer.stop(module, call)
    if reason is not None:
        return reason
    if is_bipartite or edge_attr is not None or wants_weights:
        return functools.partial(layer.run, module, call)

    def value(module: Any, x: Tensor, edge_index: Tensor) -> Any:
        return layer.run(module, AttentionCall(x, None, False, edges, edge_index, None, False))

    return functools.partial(Ready(value, edges), module, x, edge_index)


def _refused_matrix(module: Any, edge_index: Any, edge_attr: Any, wants_weights: bool) -> str | None:
    """Why attention cannot take these edges: it takes edge lists and torch matrices (ignoring values)."""
    is_matrix = isinstance(edge_index, Tensor) and edge_index.layout in (torch.sparse_csr, torch.sparse_coo)
    if not is_matrix:
        return refused_edges(edge_index)
    if edge_index.layout == torch.sparse_coo and not edge_index.is_coalesced():
        return ": a sparse adj_t that is not coalesced runs in PyG"
    if edge_attr is not None or wants_weights or edge_index.values().dim() != 1:
        return ": a sparse adj_t with edge features or return_attention_weights runs in PyG"
    if module.flow != "source_to_target" or edge_index.device.type != "cpu":
        return f"(flow={module.flow!r}): a sparse adj_t is planned source_to_target, on the CPU"
    return None


def _refused(
    module: Any, layer: _Layer, x: Any, edge_index: Any, edge_attr: Any, wants_weights: bool
) -> str | None:
    """Why the fused path does not take this call."""
    parts = [x] if isinstance(x, Tensor) else list(x) if isinstance(x, tuple | list) and len(x) == 2 else []
    if not parts or not isinstance(parts[0], Tensor):
        return ": x is not a tensor or a pair of tensors"
    reason = _refused_matrix(module, edge_index, edge_attr, wants_weights)
    takes_halves = edge_attr is None and not wants_weights and module.heads <= MOST_HEADS
    reason = reason or refused_features(module, *parts, edge_attr, takes_halves=takes_halves)
    if reason is not None:
        return reason
    if any(part is not None and part.dim() != 2 for part in parts):
        return ": x is not [nodes, width]"
    if type(module.aggr_module) is not SumAggregation:
        return f"(aggr={module.aggr!r}): attention is planned with sums only"
    if len(parts) == 2 and module.flow != "source_to_target":
        return f"(flow={module.flow!r}): pairs of features are planned source_to_target only"
    present = [name for name in layer.linears if getattr(module, name, None) is not None]
    added = [] if module.concat else [present.pop() for name in _ADDED if name in present]
    stop = not_plain(module, *present, width=module.heads * module.out_channels)
    if added and stop is None:
        stop = not_plain(module, *added)
    return None if stop is None else stop.reason.removeprefix(type(module).__name__)


def _dropout(module: Any, call: AttentionCall) -> Dropout | None:
    """This call's draw of attention dropout, if the layer has any.

    On a GPU the seed is drawn there, by torch's generator: nobody waits, and a CUDA graph draws again.
    """
    if not module.training or module.dropout <= 0.0:
        return None
    if column_of(call.edges.graph) == "cpu":
        return Dropout(int(torch.randint(0, (1 << 63) - 1, (1,)).item()), float(module.dropout))
    seed = torch.randint(0, (1 << 63) - 1, (1,), device=call.source.device)
    return Dropout(seed, float(module.dropout))


def _run(module: Any, call: AttentionCall, layer: Attention, edge: Tensor | None = None) -> executor.Run:
    """The layer's program on this graph; parameters need gradients all together or not at all."""
    wrt: tuple[str, ...] = ()
    if is_training(module, call.source, call.target, edge):
        own = {"X": call.source, "X1": call.target, "E": edge}
        unwanted = {name for name, value in own.items() if value is None or not value.requires_grad}
        wrt = tuple(name for name in _INPUTS if name not in unwanted)
    programs = Programs(active.name_of(module), (layer,), functools.partial(ways, layer))
    return programs.run(active.session(), call.edges, call.source, wrt)


_INPUTS = ("X", "X1", "E", "W", "W1", "b", "b1", "U", "T", "R", "M", "q", "v", "S", "s", "a", "c")


def _apply(run: executor.Run, dropout: Dropout | None, **inputs: Tensor | None) -> Tensor:
    given = None if dropout is None else {"dropout": dropout}
    return executor.apply(run, {name: t for name, t in inputs.items() if t is not None}, given)


def _joined(module: Any, out: Tensor, addend: Tensor | None, bias: Tensor | None) -> Tensor:
    """Heads averaged where the layer does not put them side by side; then what else is added."""
    if not module.concat:
        out = out.view(-1, module.heads, module.out_channels).mean(dim=1)
    if addend is not None:
        out = out + addend
    return out if bias is None else out + bias


# GAT -----------------------------------------------------------------------------------------------


def _folded(weight: Tensor, vectors: tuple[Tensor, ...], lanes: int) -> Tensor:
    """W a by head, side by side: [in, lanes each] of weight [heads * out, in] and vectors [1, heads, out]."""
    heads, width = vectors[0].shape[1:]
    att = torch.cat(vectors) if len(vectors) > 1 else vectors[0]
    by_head = torch.bmm(att.transpose(0, 1), weight.view(heads, width, -1))  # [heads, vectors, in]
    if lanes > heads:
        by_head = nn.functional.pad(by_head, (0, 0, 0, 0, 0, lanes - heads))
    return by_head.permute(2, 1, 0).reshape(weight.shape[1], -1)


def _spread(att: Tensor, lanes: int) -> Tensor:
    """att as a block-diagonal matrix [heads * out, lanes]: projected rows times it are the scores."""
    heads, width = att.shape[1:]
    places = torch.eye(heads, lanes, dtype=att.dtype, device=att.device).unsqueeze(1)
    return (att[0].unsqueeze(2) * places).reshape(heads * width, lanes)


def _gat_stop(module: Any, call: AttentionCall) -> str | None:
    if call.edge_attr is not None and module.lin_edge is not None and call.edge_attr.dim() > 2:
        return ": edge_attr has more than two dimensions"
    return None


def _gat(module: Any, call: AttentionCall) -> Any:
    dropout, own = _dropout(module, call), call.own
    is_traced = dropout is not None or torch.is_grad_enabled()  # the sums then read the weights handed out
    if module.heads > MOST_HEADS or (call.wants_weights and is_traced):
        return _gat_pieces(module, call)
    is_single = not call.is_bipartite and module.lin is not None
    is_inside = module.concat and not call.wants_weights
    layer = Attention(
        "gat", call.source.shape[1], module.out_channels, module.heads, float(module.negative_slope),
        outer=None if not call.is_bipartite else 0 if own is None else own.shape[1], is_single=is_single,
        has_targets=own is not None, has_edge=call.edge_attr is not None and module.lin_edge is not None,
        has_residual=is_inside and module.res is not None and own is not None,
        has_bias=is_inside and module.bias is not None, device=column_of(call.edges.graph),
    )  # fmt: skip
    edge = _gat_edge_scores(module, call, layer.lanes)
    run, maps = _run(module, call, layer, edge), _gat_maps(module, call)
    inputs: dict[str, Tensor | None] = {"X": call.source, "E": edge}
    inputs |= _gat_inputs(module, call, layer, run, maps)
    if call.is_bipartite:
        inputs["X1"] = own
    if is_inside:
        inputs |= {"c": module.bias, "R": module.res.weight.t() if layer.has_residual else None}
        return _apply(run, dropout, **inputs)
    residual = module.res(own) if module.res is not None and own is not None else None
    out = _joined(module, _apply(run, dropout, **inputs), residual, module.bias)
    if not call.wants_weights:
        return out
    return out, (call.listed, _gat_weights(module, call, edge, maps))


def _gat_maps(module: Any, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    """The weights of the sources and of the targets, read once: reading a parametrization may change it."""
    if module.lin is None:
        return module.lin_src.weight, None if call.own is None else module.lin_dst.weight
    weight = module.lin.weight
    return weight, weight


def _gat_inputs(
    module: Any,
    call: AttentionCall,
    layer: Attention,
    run: executor.Run,
    maps: tuple[Tensor, Tensor | None],
) -> dict[str, Tensor | None]:
    """The weights as the way reads them: attention vectors next to W, folded in, or applied to raw rows."""
    lanes, choice = layer.lanes, base_of(run.plan.choice)
    weight, own_weight = maps
    if layer.is_single:
        if choice == "gat":
            vectors = torch.cat([_spread(module.att_src, lanes), _spread(module.att_dst, lanes)], 1)
            return {"W": weight.t(), "a": vectors}
        if choice == "recompute":
            return {"W": weight.t(), "a": _folded(weight, (module.att_src, module.att_dst), lanes)}
        return {"W": torch.cat([weight.t(), _folded(weight, (module.att_src, module.att_dst), lanes)], 1)}
    folded = {"W": torch.cat([weight.t(), _folded(weight, (module.att_src,), lanes)], 1)}
    if own_weight is None or not layer.has_targets:
        return {**folded, "T": call.source.new_zeros((call.edges.graph.num_nodes, lanes))}
    return {**folded, "U": _folded(own_weight, (module.att_dst,), lanes)}


def _gat_pieces(module: Any, call: AttentionCall) -> Any:
    """With more heads than the fused passes take, or where the weights that are summed are asked for."""
    heads, pieces, own = module.heads, Pieces(module, call.edges), call.own
    weight, own_weight = _gat_maps(module, call)
    value = pieces.project("values", call.source, weight.t(), rows="M")
    far = call.source @ _folded(weight, (module.att_src,), heads)
    near = far.new_zeros((call.edges.graph.num_nodes, heads))
    if own is not None and own_weight is not None:
        near = own @ _folded(own_weight, (module.att_dst,), heads)
    scores = pieces.pairs("scores", heads, near, far)
    edge = _gat_edge_scores(module, call, padded(heads))
    scores = nn.functional.leaky_relu(scores if edge is None else scores + edge, module.negative_slope)
    kept = nn.functional.dropout(pieces.softmax("weights", scores), module.dropout, module.training)
    listed, kept = handed(call.edges, kept, heads) if call.wants_weights else (None, kept)
    out = pieces.sums("sums", heads, kept, value)
    out = _joined(
        module, out, module.res(own) if module.res is not None and own is not None else None, module.bias
    )
    return out if listed is None else (out, (call.listed, listed))


def _gat_edge_scores(module: Any, call: AttentionCall, lanes: int) -> Tensor | None:
    """One score per edge and head from its features: W a is multiplied first, so no edge is projected."""
    attr = call.edge_attr
    if attr is None or module.lin_edge is None:
        return None
    attr = attr.view(-1, 1) if attr.dim() == 1 else attr
    return csr_order(call.edges, attr @ _folded(module.lin_edge.weight, (module.att_edge,), lanes))


def _gat_weights(
    module: Any, call: AttentionCall, edge: Tensor | None, maps: tuple[Tensor, Tensor | None]
) -> Tensor:
    """The attention weights edge by edge, in the order of the listed edges."""
    source, target = call.listed.flip(0) if module.flow == "target_to_source" else call.listed
    heads, (weight, own_weight) = module.heads, maps
    scores = (call.source @ _folded(weight, (module.att_src,), heads))[source]
    if call.own is not None and own_weight is not None:
        scores = scores + (call.own @ _folded(own_weight, (module.att_dst,), heads))[target]
    if edge is not None:
        scores = scores + as_listed(call.edges, edge)[:, :heads]
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
    own, dropout = call.own, _dropout(module, call)
    assert own is not None
    edge = _rows_of_edges(module, call)
    if (call.edge_attr is not None and edge is None) or call.wants_weights or module.heads > MOST_HEADS:
        return _gatv2_pieces(module, call, own)
    left, right, is_inside = module.lin_l, module.lin_r, bool(module.concat)
    layer = Attention(
        "leaky", call.source.shape[1], module.out_channels, module.heads, float(module.negative_slope),
        outer=own.shape[1] if call.is_bipartite else None, is_near_far=bool(module.share_weights),
        has_residual=is_inside and module.res is not None, has_bias=is_inside and module.bias is not None,
        has_projection_bias=left.bias is not None, has_edge=edge is not None,
        device=column_of(call.edges.graph),
    )  # fmt: skip
    inputs: dict[str, Tensor | None] = {"X": call.source, "a": module.att.reshape(-1), "E": edge}
    if call.is_bipartite:
        inputs |= {"W": left.weight.t(), "b": left.bias, "X1": own, "W1": right.weight.t(), "b1": right.bias}
    elif module.share_weights:
        inputs |= {"W": left.weight.t(), "b": left.bias}
    else:
        inputs["W"], inputs["b"] = _side_by_side(left, right)
    if layer.has_residual:
        inputs["R"] = module.res.weight.t()
    if layer.has_bias:
        inputs["c"] = module.bias
    out = _apply(_run(module, call, layer, edge), dropout, **inputs)
    if is_inside:
        return out
    return _joined(module, out, None if module.res is None else module.res(own), module.bias)


def _rows_of_edges(module: Any, call: AttentionCall) -> Tensor | None:
    """[edges, heads * width]: projected edge features, for the fused passes of a GPU.

    None where there are none, or where they would take too much memory: the layer then runs in pieces, which
    keep one number per edge and head.
    """
    attr, has_limit = call.edge_attr, active.session().options.memory_limit is not None
    if attr is None or call.wants_weights or column_of(call.edges.graph) == "cpu" or has_limit:
        return None
    if attr.shape[0] * module.heads * module.out_channels * attr.element_size() > _EDGE_ROWS_BYTES:
        return None
    rows = _edge_rows(call)
    return None if rows is None else rows @ module.lin_edge.weight.t()


def _gatv2_pieces(module: Any, call: AttentionCall, own: Tensor) -> Any:
    """With edge features inside leaky, or with the weights asked for."""
    pieces, heads, left, right = Pieces(module, call.edges), module.heads, module.lin_l, module.lin_r
    far = pieces.project("sources", call.source, left.weight.t(), left.bias, rows="M")
    is_same = module.share_weights and not call.is_bipartite
    near, of_targets = (far, None) if is_same else (own, (right.weight.t(), right.bias))
    attr = _edge_rows(call)
    of_edges = None if attr is None else (attr, module.lin_edge.weight.t())
    spread, slope = _spread(module.att, padded(heads)), float(module.negative_slope)
    weight = pieces.leaky_softmax("weights", slope, near, far, spread, of_edges, of_targets)
    weight = nn.functional.dropout(weight, module.dropout, module.training)
    listed, weight = handed(call.edges, weight, heads) if call.wants_weights else (None, weight)
    out = pieces.sums("sums", heads, weight, far)
    out = _joined(module, out, None if module.res is None else module.res(own), module.bias)
    return out if listed is None else (out, (call.listed, listed))


def _edge_rows(call: AttentionCall) -> Tensor | None:
    """Edge features as rows, edges by target."""
    attr = call.edge_attr
    if attr is None:
        return None
    return csr_order(call.edges, attr.view(-1, 1) if attr.dim() == 1 else attr).contiguous()


def _side_by_side(*linears: Any) -> tuple[Tensor, Tensor | None]:
    """Weights [in, sum of outs] and biases of linear maps of one input."""
    weight = torch.cat([linear.weight for linear in linears]).t()
    return weight, None if linears[0].bias is None else torch.cat([linear.bias for linear in linears])


# Transformer ---------------------------------------------------------------------------------------


def _transformer(module: Any, call: AttentionCall) -> Any:
    own, dropout = call.own, _dropout(module, call)
    assert own is not None
    edge = _rows_of_edges(module, call)
    if (call.edge_attr is not None and edge is None) or call.wants_weights or module.heads > MOST_HEADS:
        return _transformer_pieces(module, call, own)
    has_skip = bool(module.root_weight and module.concat and module.lin_beta is None)
    has_bias = module.lin_key.bias is not None
    layer = Attention(
        "dot", call.source.shape[1], module.out_channels, module.heads, 0.0,
        outer=own.shape[1] if call.is_bipartite else None, has_skip=has_skip, has_projection_bias=has_bias,
        has_query_bias=has_bias, has_value_bias=has_bias,
        has_skip_bias=has_skip and module.lin_skip.bias is not None, can_recompute=dropout is None,
        has_edge=edge is not None, device=column_of(call.edges.graph),
    )  # fmt: skip
    run = _run(module, call, layer, edge)
    is_raw = base_of(run.plan.choice) == "dot recompute"
    inputs = _raw_inputs(module, has_skip) if is_raw else _dot_inputs(module, call, has_skip)
    if call.is_bipartite:
        inputs["X1"] = own
    out = _apply(run, dropout, X=call.source, E=edge, **inputs)
    return out if has_skip else _transformer_end(module, own, out)


def _dot_inputs(module: Any, call: AttentionCall, has_skip: bool) -> dict[str, Tensor | None]:
    """[keys | values] of the sources, [queries | skip] of the targets, all side by side on one node set."""
    sources = [(module.lin_key.weight, module.lin_key.bias), (module.lin_value.weight, module.lin_value.bias)]
    targets = [_scaled_query(module), *([(module.lin_skip.weight, module.lin_skip.bias)] if has_skip else [])]
    if not call.is_bipartite:
        w, b = _beside(sources + targets)
        return {"W": w, "b": b}
    (w, b), (w1, b1) = _beside(sources), _beside(targets)
    return {"W": w, "b": b, "W1": w1, "b1": b1}


def _raw_inputs(module: Any, has_skip: bool) -> dict[str, Tensor | None]:
    """Queries times keys in one weight by head: (x_i Q) . (x_j K) = (x_i (Q Kᵀ)) . x_j.

    What the key's bias adds to a score is the same for all edges of a target, and the softmax drops it: its
    gradient is zero, not None.
    """
    key, value, skip = module.lin_key, module.lin_value, module.lin_skip
    weight, bias = _scaled_query(module)
    by_head = (module.heads, module.out_channels, -1)
    keys = key.weight.view(by_head)
    m = torch.bmm(weight.view(by_head).transpose(1, 2), keys).transpose(0, 1).flatten(1)
    inputs: dict[str, Tensor | None] = {"M": m, "W": value.weight.t(), "v": value.bias}
    if bias is not None:
        per_head = torch.bmm(bias.view(module.heads, 1, -1), keys).flatten()
        inputs["q"] = per_head + 0.0 * key.bias.sum()
    return inputs | ({"S": skip.weight.t(), "s": skip.bias} if has_skip else {})


def _scaled_query(module: Any) -> tuple[Tensor, Tensor | None]:
    """The query's map; it takes the scores' 1 / sqrt(width)."""
    scale, query = 1.0 / math.sqrt(module.out_channels), module.lin_query
    return query.weight * scale, None if query.bias is None else query.bias * scale


def _transformer_pieces(module: Any, call: AttentionCall, own: Tensor) -> Any:
    """With edge features, which meet W once per node: q . (W e) = (q W) . e, sum(W e) = W sum(e)."""
    pieces, heads = Pieces(module, call.edges), module.heads
    query = pieces.project("queries", own, *_beside([_scaled_query(module)]), rows="N")
    key = pieces.project("keys", call.source, module.lin_key.weight.t(), module.lin_key.bias, rows="M")
    value = pieces.project(
        "values", call.source, module.lin_value.weight.t(), module.lin_value.bias, rows="M"
    )
    attr, bent = _edge_rows(call), None
    w: Any = None
    if attr is not None:
        w = module.lin_edge.weight.view(heads, module.out_channels, -1)
        bent = _each_head(call, query, w)
    kept = pieces.dot_softmax("weights", heads, query, key, bent, attr)
    listed, kept = handed(call.edges, kept, heads) if call.wants_weights else (None, kept)
    weight = nn.functional.dropout(kept, module.dropout, module.training)
    out = pieces.sums("sums", heads, weight, value)
    if attr is not None:
        means = pieces.sums_of_edges("sums of edges", heads, weight, attr)
        out = out + _each_head(call, means, w.transpose(1, 2))
    out = _transformer_end(module, own, out)
    return out if listed is None else (out, (call.listed, listed))


def _each_head(call: AttentionCall, rows: Tensor, w: Tensor) -> Tensor:
    """Rows of heads side by side, each by its own matrix of w[heads, in, out].

    On a GPU as one product with a block-diagonal matrix: the gradient of w then is one product over all rows,
    not a batch of narrow ones whose long sums run on few threads.
    """
    if column_of(call.edges.graph) != "cpu":
        whole: Tensor = torch.block_diag(*w)  # type: ignore[no-untyped-call]
        return rows @ whole
    return torch.einsum("nhc,hcd->nhd", rows.view(rows.shape[0], *w.shape[:2]), w).flatten(1)


def _transformer_end(module: Any, own: Tensor, out: Tensor) -> Tensor:
    """Heads averaged where they are not side by side, and the target's own part."""
    if not module.concat:
        out = out.view(-1, module.heads, module.out_channels).mean(dim=1)
    if module.root_weight:
        skip: Tensor = module.lin_skip(own)
        if module.lin_beta is None:
            return out + skip
        beta = module.lin_beta(torch.cat([out, skip, out - skip], dim=-1)).sigmoid()
        out = beta * skip + (1 - beta) * out
    return out


def _beside(maps: list[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor | None]:
    """Weights [in, sum of outs] and biases of linear maps of one input; all of them have one or none."""
    biases = [bias for _, bias in maps if bias is not None]
    return torch.cat([weight for weight, _ in maps]).t(), torch.cat(biases) if biases else None


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
        ("lin_key", "lin_query", "lin_value", "lin_edge", "lin_skip"),
        lambda m: False,
    ),
}
FUSED.update(dict.fromkeys(_LAYERS, prepare))
