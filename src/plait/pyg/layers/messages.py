"""Layers with messages of their own: GENConv, FiLMConv, CGConv; and GatedGraphConv."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus
from torch_geometric.nn import CGConv, FiLMConv, GatedGraphConv, GENConv
from torch_geometric.nn.aggr import PowerMeanAggregation, SoftmaxAggregation

from plait.ir import Expr
from plait.plan.messages import End, Messages, ways
from plait.pyg import active
from plait.pyg.layers.base import (
    Apply,
    Call,
    Lowered,
    NotLowered,
    is_plain_linear,
    linear_size,
    neighbours,
    rule,
    weight,
)
from plait.pyg.layers.fused import Run, degrees_of, fused
from plait.pyg.layers.neighbourhood import operator, reduction
from plait.pyg.layers.pieces import Pieces, PiecesCall, is_elementwise, mean_scale, read_call
from plait.runtime.ways import Programs

__all__ = ["crystal", "film", "gen", "lowered"]

_BY_EDGE = "projections are done once per node; messages are added up when made, and made again for gradients"


def lowered(
    call: PiecesCall,
    layer: Messages,
    inputs: Mapping[str, Tensor | None],
    text: str,
    because: str = _BY_EDGE,
    **functions: Any,
) -> Tensor:
    """The value of a layer's messages by their program; `functions` of edges' rows by name."""
    values = {name: value for name, value in inputs.items() if value is not None}
    programs = Programs(
        active.name_of(call.module), (layer,), lambda _: ways(layer, text, because),
        sizes={"S": call.source.shape[0]},
        diagonals=lambda: {"t": call.orders.inverse_degrees.to(call.source.dtype)},
    )  # fmt: skip
    return programs.value(active.session(), call.edges, values, functions)


def _is_relu(act: Any) -> bool:
    return type(act) is torch.nn.ReLU or act in (torch.relu, torch.nn.functional.relu)


# GENConv -------------------------------------------------------------------------------------------


@fused(GENConv)
def gen(module: Any, given: Mapping[str, Any]) -> Run | str:
    """relu(x_j + e) + eps, by a softmax over each channel or a power mean."""
    attr = given.get("edge_attr")
    if type(module.aggr_module) not in (SoftmaxAggregation, PowerMeanAggregation):
        return f"(aggr={module.aggr!r}): planned with softmax and powermean only"
    if attr is not None and (attr.dim() != 2 or not _fits(module, attr)):
        return ": edge_attr is not [edges, edge_dim], or not as wide as the messages"
    linears = [name for name in ("lin_src", "lin_edge") if hasattr(module, name)]
    call = read_call(module, given, *linears, attr=attr)
    return call if isinstance(call, str) else functools.partial(_gen, call)


def _fits(module: Any, attr: Tensor) -> bool:
    return hasattr(module, "lin_edge") or attr.shape[1] == module.out_channels


def _gen(call: PiecesCall) -> Tensor:
    module, own = call.module, call.own
    is_soft = type(module.aggr_module) is SoftmaxAggregation
    out = (_soft if is_soft else _power)(call)
    if hasattr(module, "msg_norm"):
        # PyG hands over x[1] as it came, before lin_dst, and the projected x[0] where there is none
        out = module.msg_norm(own if own is not None else _source(call), out)
    if own is not None:
        out = out + (module.lin_dst(own) if hasattr(module, "lin_dst") else own)
    result: Tensor = module.mlp(out)
    return result


def _source(call: PiecesCall) -> Tensor:
    """The sources' rows as messages read them."""
    linear = getattr(call.module, "lin_src", None)
    if linear is None:
        return call.source
    pieces = Pieces(call.module, call.edges)
    return pieces.project("sources", call.source, linear.weight.t(), linear.bias, rows="M")


def _ends(call: PiecesCall) -> tuple[dict[str, End | None], dict[str, Tensor | None]]:
    """(what messages read of sources and edges, the tensors of it) by name."""
    module, width = call.module, call.module.out_channels
    ends: dict[str, End | None] = {"far": End(width), "attr": None}
    inputs: dict[str, Tensor | None] = {"X": call.source, "E": call.attr}
    if hasattr(module, "lin_src"):
        bias = module.lin_src.bias
        ends["far"] = End(width, call.source.shape[1], bias is not None)
        inputs |= {"W": module.lin_src.weight.t(), "b": bias}
    if call.attr is not None:
        ends["attr"] = End(width)
        if hasattr(module, "lin_edge"):
            bias = module.lin_edge.bias
            ends["attr"] = End(width, call.attr.shape[1], bias is not None)
            inputs |= {"V": module.lin_edge.weight.t(), "d": bias}
    return ends, inputs


def _message(eps: float, far: Tensor, edge: Tensor | None) -> Tensor:
    return (far if edge is None else far + edge).relu() + eps


def _soft(call: PiecesCall) -> Tensor:
    """Sums of exp(t m - largest) and of m times it; the largest cancels, so it needs no gradient."""
    aggr, eps = call.module.aggr_module, call.module.eps
    ends, inputs = _ends(call)
    t = aggr.t if isinstance(aggr.t, Tensor) else call.source.new_tensor([float(aggr.t)])

    def score(near: Any, far: Tensor, edge: Tensor | None, t: Tensor) -> Tensor:
        return _message(eps, far, edge) * t

    def powers(near: Tensor, far: Tensor, edge: Tensor | None, t: Tensor) -> Tensor:
        m = _message(eps, far, edge)
        soft = m.detach() if aggr.semi_grad and not aggr.learn else m
        e = (soft * t - near).exp()
        return torch.cat([e, e * m], 1)

    is_known = t.numel() == 1 and not aggr.semi_grad
    layer = Messages(
        "softmax", 2 * call.module.out_channels, **ends,  # type: ignore[arg-type]
        parameters=((1, t.numel()),), is_pair=call.is_pair,
        form=("softmax", float(eps)) if is_known else None,
    )  # fmt: skip
    text = "softmax(t M) M by channel, M = relu(X + E) + ε"
    made = lowered(call, layer, inputs | {"P0": t}, text, score=score, message=powers)
    total, weighted = made.chunk(2, 1)
    return weighted / torch.where(total > 0, total, torch.ones_like(total))


def _power(call: PiecesCall) -> Tensor:
    aggr, eps = call.module.aggr_module, call.module.eps
    width = call.module.out_channels
    p = aggr.p if isinstance(aggr.p, Tensor) else call.source.new_tensor([float(aggr.p)])
    is_mean = not isinstance(aggr.p, Tensor) and aggr.p == 1
    low, high = aggr.min_value, aggr.max_value

    def raised(near: Any, far: Tensor, edge: Tensor | None, p: Tensor) -> Tensor:
        m = _message(eps, far, edge)
        return m if is_mean else m.clamp(low, high).pow(p)

    text = "mean(Mᵖ)^(1/p) by channel, M = relu(X + E) + ε"
    if call.attr is None:  # a function of the source alone: once per node
        layer = Messages("sums", width, End(width), is_mean=True, is_pair=call.is_pair)
        rows = raised(None, _source(call), None, p)
        out = lowered(
            call, layer, {"X": rows}, text, "messages are functions of the source: made once per node"
        )
    else:
        ends, inputs = _ends(call)
        layer = Messages(
            "messages", width, **ends,  # type: ignore[arg-type]
            parameters=((1, p.numel()),), is_mean=True, is_pair=call.is_pair,
        )  # fmt: skip
        out = lowered(call, layer, inputs | {"P0": p}, text, message=raised)
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
        return f"(act={module.act}): this activation is not known to be elementwise"
    if any(not is_plain_linear(lin) or linear_size(lin)[0] != module.out_channels for lin in module.lins):
        return ": one of lins has hooks or was replaced"
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
    width, act, count = module.out_channels, module.act, len(module.lins)
    is_linear = act is None
    beta, gamma = module.film_skip(own).split(width, dim=-1)
    skip = gamma * module.lin_skip(own) + beta
    skip = skip if act is None else act(skip)
    near, of_near = (End(2 * width), {}) if is_linear else _film_near(call, own)
    layer = Messages(
        "sums" if is_linear else "messages", width, End(count * width, call.source.shape[1]),
        None if is_linear else near, is_mean=scale is not None and not is_linear,
        is_pair=call.is_pair, relations=count, form=("film", 0.0) if _is_relu(act) else None,
    )  # fmt: skip
    weights = [linear.weight for linear in module.lins]
    inputs = {"X": call.source, "W": (weights[0] if count == 1 else torch.cat(weights)).t()}
    text = "γ ∘ (A X W) + β" if is_linear else "Σ act(γᵢ (X W)ⱼ + βᵢ)"
    text += ", by relation" if count > 1 else ""
    if is_linear:
        sums = lowered(call, layer, inputs, text, "γ and β are the target's: they leave the sum")
        beta, gamma = torch.split(_film_rows(module, own), width, dim=-1)
        degrees = degrees_of(call.edges, sums.dtype).unsqueeze(1)
        out = gamma * sums + degrees * beta
        out = out if scale is None else out * scale.unsqueeze(1)
    else:

        def message(near: Tensor, far: Tensor, edge: None) -> Tensor:
            made: Tensor = act(near[:, width:] * far + near[:, :width])
            return made

        out = lowered(call, layer, inputs | of_near, text, message=message)
    result: Tensor = skip + (out if count == 1 else out.view(-1, count, width).sum(1))
    return result


def _film_rows(module: Any, own: Tensor) -> Tensor:
    """[β | γ], rows of (node, relation) pairs."""
    return torch.stack([film(own) for film in module.films], 1).flatten(0, 1)


def _film_near(call: PiecesCall, own: Tensor) -> tuple[End, dict[str, Tensor | None]]:
    """[β | γ] as the program reads them: one relation's are a projection of its own."""
    module, width = call.module, 2 * call.module.out_channels
    film = module.films[0]
    if len(module.films) > 1 or not is_plain_linear(film):
        return End(width), {"Y": _film_rows(module, own)}
    given = {"U": film.weight.t(), "c": film.bias, "Y": own if call.is_pair else None}
    return End(width, own.shape[1], film.bias is not None), given


# CGConv --------------------------------------------------------------------------------------------


@fused(CGConv)
def crystal(module: Any, given: Mapping[str, Any]) -> Run | str:
    """sigma(W_f z) softplus(W_s z), z = [x_i, x_j, e]: the maps split into parts of nodes and edges."""
    attr = given.get("edge_attr")
    if (attr is None) != (module.dim == 0) or (attr is not None and attr.shape[1:] != (module.dim,)):
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
    weights = torch.cat([module.lin_f.weight, module.lin_s.weight])
    bias = None if module.lin_f.bias is None else torch.cat([module.lin_f.bias, module.lin_s.bias])

    def message(near: Tensor, far: Tensor, edge: Tensor | None, *w: Tensor) -> Tensor:
        rows = near + far if edge is None else near + far + edge @ w[0]
        return rows[:, :width].sigmoid() * softplus(rows[:, width:])

    of_edges = () if dim == 0 else ((dim, 2 * width),)
    layer = Messages(
        "messages", width, End(2 * width, inner), End(2 * width, width, bias is not None),
        None if dim == 0 else End(dim), parameters=of_edges, products=of_edges, is_mean=scale is not None,
        is_pair=call.is_pair, form=("crystal", 0.0),
    )  # fmt: skip
    inputs = {
        "X": call.source, "W": weights[:, width : width + inner].t(), "U": weights[:, :width].t(), "c": bias,
        "Y": own if call.is_pair else None, "E": call.attr,
        "P0": None if dim == 0 else weights[:, width + inner :].t(),
    }  # fmt: skip
    out = lowered(call, layer, inputs, "Σ σ(Fᵢ + Fⱼ + E Wf) ∘ softplus(Sᵢ + Sⱼ + E Ws)", message=message)
    out = out if module.bn is None else module.bn(out)
    return out + own


# GatedGraphConv ------------------------------------------------------------------------------------


@functools.cache
def _gated_forms(reduce: str, call: Call) -> tuple[Expr, ...]:
    return (neighbours(reduce, call) @ weight(),)


@rule(GatedGraphConv)
def _gated_graph(module: Any, call: Call) -> Lowered | NotLowered:
    """num_layers times: a projection, a sum over neighbours, a GRU cell."""
    reduce = reduction(module, call)
    if isinstance(reduce, NotLowered):
        return reduce
    if reduce not in ("sum", "mean") or call.is_bipartite:
        return NotLowered(
            f"GatedGraphConv(aggr={module.aggr!r}): planned for one feature matrix, with sums and means only"
        )
    return Lowered(operator(reduce), functools.partial(_run_gated_graph, _gated_forms(reduce, call)))


def _run_gated_graph(
    forms: tuple[Expr, ...], module: Any, apply: Apply, x: Tensor, root: Tensor | None
) -> Tensor:
    missing = module.out_channels - x.shape[1]
    if missing < 0:
        raise ValueError(
            "The number of input channels is not allowed to be larger than the number of output channels"
        )
    if missing:
        x = torch.cat([x, x.new_zeros(x.shape[0], missing)], 1)
    for k in range(module.num_layers):
        x = module.rnn(apply(forms, {"X": x, "W": module.weight[k]}), x)
    return x
