"""Sums by scores of edges: AGNN (fused), SuperGAT's attention, FAConv and GMMConv (in pieces)."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn import AGNNConv, FAConv, GMMConv, SuperGATConv
from torch_geometric.nn.aggr import SumAggregation
from torch_geometric.utils import add_self_loops, remove_self_loops

from plait.kernels.attention import padded
from plait.plan.attention import unit_ways
from plait.pyg import active
from plait.pyg.layers.fused import Run, as_listed, csr_order, fused, not_plain
from plait.pyg.layers.pieces import Pieces, PiecesCall, mean_scale, read_call
from plait.runtime.placed import column_of
from plait.runtime.ways import Programs

__all__ = ["agnn", "fa", "gmm", "super_gat"]


def _not_summed(module: Any) -> str | None:
    if type(module.aggr_module) is not SumAggregation:
        return f"(aggr={module.aggr!r}): planned with sums only"
    return None


# AGNN ----------------------------------------------------------------------------------------------


@fused(AGNNConv)
def agnn(module: Any, given: Mapping[str, Any]) -> Run | str:
    """softmax(beta cos(x_i, x_j)) x_j: the fused pass of dots, on unit rows."""
    if not isinstance(given["x"], Tensor):
        return ": x is not a tensor"
    call = read_call(module, given, has_loops=bool(module.add_self_loops))
    return call if isinstance(call, str) else _not_summed(module) or functools.partial(_agnn, call)


def _agnn(call: PiecesCall) -> Tensor:
    x = call.source
    unit = nn.functional.normalize(x, p=2.0, dim=-1)
    inputs = {"X": x, "F": unit, "B": call.module.beta * unit}
    width = x.shape[1]
    ways = functools.partial(unit_ways, width, column_of(call.edges.graph))
    programs = Programs(active.name_of(call.module), ("agnn",), ways)
    return programs.value(active.session(), call.edges, inputs)


# SuperGAT ------------------------------------------------------------------------------------------


@fused(SuperGATConv)
def super_gat(module: Any, given: Mapping[str, Any]) -> Run | str:
    """The attention path; what training keeps for the loss, scores of sampled edges, is made by PyG."""
    if module.__class__.get_attention is not SuperGATConv.get_attention:
        return ": get_attention is not that of SuperGATConv, so the rule does not hold"
    if not isinstance(given["x"], Tensor):
        return ": x is not a tensor"
    # PyG cuts what lin makes into heads, and into more rows where it is wider
    stop = not_plain(module, "lin", width=module.heads * module.out_channels)
    if stop is not None:
        return stop.reason.removeprefix(type(module).__name__)
    call = read_call(module, given, has_loops=bool(module.add_self_loops))
    sampled = (given["edge_index"], given.get("neg_edge_index"), given.get("batch"))
    return (
        call if isinstance(call, str) else _not_summed(module) or functools.partial(_super_gat, call, sampled)
    )


def _keep_for_the_loss(
    module: Any, z: Tensor, edge_index: Tensor, negative: Tensor | None, batch: Tensor | None
) -> None:
    """SuperGAT's att_x and att_y, as its forward leaves them for get_attention_loss in training."""
    if module.add_self_loops:
        edge_index, _ = remove_self_loops(edge_index)
        edge_index, _ = add_self_loops(edge_index, num_nodes=z.shape[0])
    positive = module.positive_sampling(edge_index)
    if negative is None:
        negative = module.negative_sampling(edge_index, z.shape[0], batch)
    rows = z.view(-1, module.heads, module.out_channels)
    logits = [
        module.get_attention(target, rows[target], rows[source], z.shape[0], return_logits=True)
        for source, target in (positive, negative)
    ]
    module.att_x = torch.cat(logits)
    module.att_y = torch.zeros_like(module.att_x[:, 0])
    module.att_y[: positive.shape[1]] = 1.0


def _super_gat(call: PiecesCall, sampled: tuple[Tensor, Tensor | None, Tensor | None]) -> Tensor:
    module = call.module
    heads, width = module.heads, module.out_channels
    pieces = Pieces(module, call.edges)
    z = pieces.project("values", call.source, module.lin.weight.t(), rows="M")
    scores = pieces.dots("products", heads, z, z)
    if module.attention_type == "MX":
        by_head = z.view(-1, heads, width)
        far, near = (by_head * module.att_l).sum(-1), (by_head * module.att_r).sum(-1)
        scores = pieces.pairs("scores", heads, near, far) * scores.sigmoid()
    else:
        scores = scores / math.sqrt(width)
    weight = pieces.softmax("weights", nn.functional.leaky_relu(scores, module.negative_slope))
    weight = nn.functional.dropout(weight, module.dropout, module.training)
    out = pieces.sums("sums", heads, weight, z)
    if module.training:
        _keep_for_the_loss(module, z, *sampled)
    out = out if module.concat else out.view(-1, heads, width).mean(1)
    return out if module.bias is None else out + module.bias


# FAConv --------------------------------------------------------------------------------------------


@fused(FAConv)
def fa(module: Any, given: Mapping[str, Any]) -> Run | str:
    """Sums by tanh(a x_i + b x_j) times the symmetric norm, plus eps x_0."""
    weight, first = given.get("edge_weight"), given.get("x_0")
    if module.cached:
        return "(cached=True): PyG keeps the first graph"
    if not isinstance(first, Tensor) or not isinstance(given["x"], Tensor):
        return ": x and x_0 are not tensors"
    if (weight is not None) == bool(module.normalize):
        return ": edge_weight is needed with normalize=False, and only then"
    has_loops = bool(module.normalize and module.add_self_loops)
    call = read_call(module, given, "att_l", "att_r", has_loops=has_loops, attr=weight, also=(first,))
    if isinstance(call, str):
        return call
    listed = given["edge_index"]
    is_asked = isinstance(given.get("return_attention_weights"), bool)
    if is_asked and has_loops:
        listed = add_self_loops(remove_self_loops(listed)[0], num_nodes=call.source.shape[0])[0]
    return _not_summed(module) or functools.partial(_fa, call, first, listed if is_asked else None)


def _fa(call: PiecesCall, first: Tensor, listed: Tensor | None) -> Any:
    module, x = call.module, call.source
    pieces = Pieces(module, call.edges)
    alpha, asked = pieces.pairs("scores", 1, module.att_r(x), module.att_l(x)).tanh(), None
    if listed is not None:  # the sums read what the caller gets, so that gradients of the output reach it
        asked = as_listed(call.edges, alpha).view(-1)
        alpha = csr_order(call.edges, asked.view(-1, 1))
    norm = call.orders.symmetric_norm.to(x.dtype) if call.attr is None else call.attr
    weight = nn.functional.dropout(alpha, module.dropout, module.training) * norm.view(-1, 1)
    out = pieces.sums("sums", 1, weight, x)
    out = out if module.eps == 0.0 else out + module.eps * first
    return out if asked is None else (out, (listed, asked))


# GMMConv -------------------------------------------------------------------------------------------


@fused(GMMConv)
def gmm(module: Any, given: Mapping[str, Any]) -> Run | str:
    """Sums of kernel_size projections of a source, each by its Gaussian of the edge's features."""
    attr = given.get("edge_attr")
    if module.separate_gaussians:
        return "(separate_gaussians=True): one matrix per edge is not planned"
    if not isinstance(attr, Tensor) or attr.dim() != 2 or attr.shape[1] != module.dim:
        return f"(dim={module.dim}): edge_attr is not [edges, dim]"
    call = read_call(module, given, *(["root"] if module.root_weight else []), attr=attr)
    if isinstance(call, str):
        return call
    if not module.root_weight and call.own is not None:
        return "(root_weight=False): PyG reads the root weight nevertheless"
    scale = mean_scale(call)
    return scale if isinstance(scale, str) else functools.partial(_gmm, call, scale)


def _gmm(call: PiecesCall, scale: Tensor | None) -> Tensor:
    module, attr = call.module, call.attr
    assert attr is not None
    count, width = module.kernel_size, module.out_channels
    pieces = Pieces(module, call.edges)
    z = pieces.project("values", call.source, module.g, rows="M")
    gap = (attr.unsqueeze(1) - module.mu).square() / (1e-15 + module.sigma.square())
    weight = torch.exp((-0.5 * gap).sum(-1))
    weight = nn.functional.pad(weight, (0, padded(count) - count))
    out = pieces.sums("sums", count, weight, z).view(-1, count, width).sum(1)
    out = out if scale is None else out * scale.unsqueeze(1)
    if call.own is not None:
        out = out + module.root(call.own)
    return out if module.bias is None else out + module.bias
