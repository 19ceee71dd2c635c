"""Layers with messages of their own, in blocks of edges: GENConv, FiLMConv, CGConv; and GatedGraphConv."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus
from torch_geometric.nn import CGConv, FiLMConv, GatedGraphConv, GENConv
from torch_geometric.nn.aggr import PowerMeanAggregation, SoftmaxAggregation

from plait.plan.pieces import Pieces
from plait.pyg.layers.base import is_plain_linear
from plait.pyg.layers.fused import Run, fused
from plait.pyg.layers.pieces import PiecesCall, is_elementwise, mean_scale, read_call, show
from plait.runtime.messages import message_max, message_sums, neighbour_sums
from plait.runtime.pieces import edge_sums
from plait.runtime.project import project

__all__ = ["crystal", "film", "gated_graph", "gen"]

_BLOCKS = (
    "projections are done once per node; messages are made in blocks of edges and made again for gradients"
)


def _scaled(out: Tensor, scale: Tensor | None) -> Tensor:
    return out if scale is None else out * scale.unsqueeze(1)


# GENConv -------------------------------------------------------------------------------------------


@fused(GENConv)
def gen(module: Any, given: Mapping[str, Any]) -> Run | str:
    """relu(x_j + e) + eps, by a softmax over each channel or a power mean."""
    attr = given.get("edge_attr")
    if type(module.aggr_module) not in (SoftmaxAggregation, PowerMeanAggregation):
        return f"(aggr={module.aggr!r}): lowered with softmax and powermean only"
    if attr is not None and (attr.dim() != 2 or not _fits(module, attr)):
        return ": edge_attr is not [edges, edge_dim], or not as wide as the messages"
    linears = [name for name in ("lin_src", "lin_edge") if hasattr(module, name)]
    call = read_call(module, given, *linears, attr=attr)
    return call if isinstance(call, str) else functools.partial(_gen, call)


def _fits(module: Any, attr: Tensor) -> bool:
    return hasattr(module, "lin_edge") or attr.shape[1] == module.out_channels


def _gen(call: PiecesCall) -> Tensor:
    module, own = call.module, call.own
    width = module.out_channels
    edge_width = 0 if call.attr is None else width
    is_soft = type(module.aggr_module) is SoftmaxAggregation
    text = "softmax(t M) M" if is_soft else "mean(Mᵖ)^(1/p)"

    def describe(pieces: Pieces) -> None:
        if hasattr(module, "lin_src"):
            pieces.project(call.source.shape[0], call.source.shape[1], width)
        if is_soft or edge_width:
            pieces.blocks((2 if is_soft else 1) * width, 2 * width, edge_width, edge_width)
        else:
            pieces.gather("sums of neighbours", "fwd", width).gather("sums of neighbours", "bwd", width)

    show(
        call, "gen", f"{text} by channel, M = relu(X + E) + ε, in blocks", _BLOCKS, width,
        describe,
    )  # fmt: skip
    x = call.source
    if hasattr(module, "lin_src"):
        x = project(call.buffers, x, module.lin_src.weight.t(), module.lin_src.bias)
    attr = call.attr
    if attr is not None and hasattr(module, "lin_edge"):
        attr = project(call.buffers, attr, module.lin_edge.weight.t(), module.lin_edge.bias)
    out = (_soft if is_soft else _power)(call, x, attr)
    if hasattr(module, "msg_norm"):
        # PyG hands over x[1] as it came, before lin_dst, and the projected x[0] where there is none
        out = module.msg_norm(own if own is not None else x, out)
    if own is not None:
        out = out + (module.lin_dst(own) if hasattr(module, "lin_dst") else own)
    result: Tensor = module.mlp(out)
    return result


def _message(eps: float, far: Tensor, edge: Tensor | None) -> Tensor:
    return (far if edge is None else far + edge).relu() + eps


def _soft(call: PiecesCall, x: Tensor, attr: Tensor | None) -> Tensor:
    """Sums of exp(t m - largest) and of m times it; the largest cancels, so it needs no gradient."""
    module = call.module
    aggr, eps = module.aggr_module, module.eps
    t = aggr.t if isinstance(aggr.t, Tensor) else x.new_tensor([float(aggr.t)])

    def score(near: Any, far: Tensor, edge: Tensor | None, t: Tensor) -> Tensor:
        return _message(eps, far, edge) * t

    top = message_max(call.orders, score, None, x, attr, t)

    def powers(near: Tensor, far: Tensor, edge: Tensor | None, t: Tensor) -> Tensor:
        m = _message(eps, far, edge)
        soft = m.detach() if aggr.semi_grad and not aggr.learn else m
        e = (soft * t - near).exp()
        return torch.cat([e, e * m], 1)

    total, weighted = message_sums(call.orders, powers, top, x, attr, t).chunk(2, 1)
    return weighted / torch.where(total > 0, total, torch.ones_like(total))


def _power(call: PiecesCall, x: Tensor, attr: Tensor | None) -> Tensor:
    module = call.module
    aggr, eps = module.aggr_module, module.eps
    p = aggr.p if isinstance(aggr.p, Tensor) else x.new_tensor([float(aggr.p)])
    is_mean = not isinstance(aggr.p, Tensor) and aggr.p == 1
    low, high = aggr.min_value, aggr.max_value

    def raised(near: Any, far: Tensor, edge: Tensor | None, p: Tensor) -> Tensor:
        m = _message(eps, far, edge)
        return m if is_mean else m.clamp(low, high).pow(p)

    scale = call.orders.inverse_degrees.to(x.dtype)
    if attr is None:
        out = neighbour_sums(call.orders, call.buffers, raised(None, x, None, p), scale)
    else:
        out = _scaled(message_sums(call.orders, raised, None, x, attr, p), scale)
    return out if is_mean else out.clamp(low, high).pow(1.0 / p)


# FiLMConv ------------------------------------------------------------------------------------------


@fused(FiLMConv)
def film(module: Any, given: Mapping[str, Any]) -> Run | str:
    """act(gamma_i x_j + beta_i), gamma and beta from the target; every relation has its own, and its mean."""
    kind, relations = given.get("edge_type"), None
    if module.num_relations > 1:
        if (
            not isinstance(kind, Tensor)
            or kind.is_floating_point()
            or kind.shape != given["edge_index"].shape[1:]
        ):
            return f"(num_relations={module.num_relations}): edge_type is not one number for each edge"
        relations = (kind, module.num_relations)
    if module.act is not None and not is_elementwise(module.act):
        return f"(act={module.act}): this activation is not known to treat every number alone"
    if not all(map(is_plain_linear, module.lins)):
        return ": one of lins is watched by hooks or was replaced"
    call = read_call(module, given, relations=relations)
    if isinstance(call, str):
        return call
    if call.own is None:
        return ": x[1] is None; the layer needs the features of the targets"
    scale = mean_scale(call)
    return scale if isinstance(scale, str) else functools.partial(_film, call, scale)


def _film(call: PiecesCall, scale: Tensor | None) -> Tensor:
    module, own = call.module, call.own
    assert own is not None
    width, act = module.out_channels, module.act
    is_linear = act is None
    count = len(module.lins)
    text = "γ ∘ (A X W) + β" if is_linear else "Σ act(γᵢ (X W)ⱼ + βᵢ), in blocks"
    text += ", by relation" if count > 1 else ""
    because = "γ and β are the target's: they leave the sum" if is_linear else _BLOCKS

    def describe(pieces: Pieces) -> None:
        pieces.project(call.source.shape[0], call.source.shape[1], count * width)
        if is_linear:
            pieces.gather("sums of neighbours", "fwd", width).gather("sums of neighbours", "bwd", width)
        else:
            pieces.blocks(width, 3 * width)

    show(
        call, "film", text, because, width,
        describe,
    )  # fmt: skip
    beta, gamma = module.film_skip(own).split(width, dim=-1)
    skip = gamma * module.lin_skip(own) + beta
    skip = skip if act is None else act(skip)
    # rows of (node, relation) pairs
    near = torch.stack([film(own) for film in module.films], 1).view(-1, 2 * width)
    weight = torch.cat([linear.weight for linear in module.lins])
    far = project(call.buffers, call.source, weight.t()).view(-1, width)
    if is_linear:
        beta, gamma = torch.split(near, width, dim=-1)
        degrees = torch.from_numpy(call.edges.graph.degrees).to(far.dtype).unsqueeze(1)
        out = gamma * neighbour_sums(call.orders, call.buffers, far) + degrees * beta
    else:

        def message(near: Tensor, far: Tensor, edge: None) -> Tensor:
            made: Tensor = act(near[:, width:] * far + near[:, :width])
            return made

        out = message_sums(call.orders, message, near, far, None)
    result: Tensor = skip + _scaled(out, scale).view(-1, count, width).sum(1)
    return result


# CGConv --------------------------------------------------------------------------------------------


@fused(CGConv)
def crystal(module: Any, given: Mapping[str, Any]) -> Run | str:
    """sigma(W_f z) softplus(W_s z), z = [x_i, x_j, e]: the maps split into parts of nodes and edges."""
    attr = given.get("edge_attr")
    if (attr is not None and attr.dim() != 2) or (attr is None) != (module.dim == 0):
        return f"(dim={module.dim}): edge_attr is not [edges, dim]"
    call = read_call(module, given, "lin_f", "lin_s", attr=attr)
    if isinstance(call, str):
        return call
    if call.own is None:
        return ": x[1] is None; the layer needs the features of the targets"
    scale = mean_scale(call)
    return scale if isinstance(scale, str) else functools.partial(_crystal, call, scale)


def _crystal(call: PiecesCall, scale: Tensor | None) -> Tensor:
    module, own = call.module, call.own
    assert own is not None
    width, inner, dim = own.shape[1], call.source.shape[1], module.dim
    show(
        call, "crystal", "Σ σ(Fᵢ + Fⱼ + E Wf) ∘ softplus(Sᵢ + Sⱼ + E Ws), in blocks", _BLOCKS, width,
        lambda pieces: (
            pieces
            .project(own.shape[0], width, 2 * width)
            .project(call.source.shape[0], inner, 2 * width)
            .blocks(width, 4 * width, dim * 2 * width, dim)
        ),
    )  # fmt: skip
    weight = torch.cat([module.lin_f.weight, module.lin_s.weight])
    bias = None if module.lin_f.bias is None else torch.cat([module.lin_f.bias, module.lin_s.bias])
    near = project(call.buffers, own, weight[:, :width].t(), bias)
    far = project(call.buffers, call.source, weight[:, width : width + inner].t())

    def message(near: Tensor, far: Tensor, edge: Tensor | None, *w: Tensor) -> Tensor:
        rows = near + far if edge is None else near + far + edge @ w[0]
        return rows[:, :width].sigmoid() * softplus(rows[:, width:])

    more = () if dim == 0 else (weight[:, width + inner :].t(),)
    out = _scaled(message_sums(call.orders, message, near, far, call.attr, *more), scale)
    out = out if module.bn is None else module.bn(out)
    return out + own


# GatedGraphConv ------------------------------------------------------------------------------------


@fused(GatedGraphConv)
def gated_graph(module: Any, given: Mapping[str, Any]) -> Run | str:
    """num_layers times: a projection, a sum over neighbours, a GRU cell."""
    x, weight = given["x"], given.get("edge_weight")
    if not isinstance(x, Tensor) or x.dim() != 2 or x.shape[1] > module.out_channels:
        return ": x is not [nodes, at most out_channels]"
    if weight is not None and weight.dim() != 1:
        return ": edge_weight is not one number for each edge"
    call = read_call(module, given, attr=weight)
    if isinstance(call, str):
        return call
    scale = mean_scale(call)
    return scale if isinstance(scale, str) else functools.partial(_gated_graph, call, scale)


def _gated_graph(call: PiecesCall, scale: Tensor | None) -> Tensor:
    module, x = call.module, call.source
    width, rows = module.out_channels, call.source.shape[0]

    def describe(pieces: Pieces) -> None:
        for _ in range(module.num_layers):
            pieces.project(rows, width, width)
            pieces.gather("sums of neighbours", "fwd", width)
            pieces.gather("sums of neighbours", "bwd", width)

    show(
        call, "gated graph", "GRU(A (X Wₖ), X), repeated", "projections before the sums; the cell is torch's",
        width, describe,
    )  # fmt: skip
    if x.shape[1] < width:
        x = torch.cat([x, x.new_zeros(rows, width - x.shape[1])], 1)
    for k in range(module.num_layers):
        m = project(call.buffers, x, module.weight[k])
        if call.attr is None:
            m = neighbour_sums(call.orders, call.buffers, m, scale)
        else:
            m = _scaled(edge_sums(call.orders, call.buffers, 1, call.attr.view(-1, 1), m), scale)
        x = module.rnn(m, x)
    return x
