"""PNAConv: several aggregators of linear messages in one pass, degree scalers after the weights.

A message W_a x_i + W_b x_j + b is the neighbour's part shifted by the target's: mean, max and min shift with
it, a sum degree times, variance and deviation not at all. The shift then meets the aggregators' weights as
one small matrix, so the targets' part is never computed. Ties between messages are those of the neighbours'
parts; torch counts its zero-filled output as one more where the extremum is exactly 0, which is not followed.

Features of edges are added to the neighbour's part in blocks of edges. Where messages have more than one
layer (pre_layers) nothing shifts out of them: the first layer is split by ends, the others run in blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import PNAConv
from torch_geometric.nn import aggr as pyg
from torch_geometric.nn.aggr import DegreeScalerAggregation, MultiAggregation

from plait.kernels import launch
from plait.plan.fused import FusedPlan
from plait.plan.pna import AggregatorsProblem, choose
from plait.pyg import active
from plait.pyg.layers.base import has_hooks, is_parametrized, is_plain_linear
from plait.pyg.layers.fused import (
    Run,
    cost_matrix,
    csr_order,
    edges_of,
    fused,
    is_training,
    planned,
    refused_edges,
    refused_features,
)
from plait.pyg.layers.pieces import is_elementwise
from plait.runtime.pna import Layout, aggregate_all, aggregate_messages, joined, spread_out, weighed
from plait.runtime.project import project
from plait.runtime.session import Edges, machine_in_use

__all__ = ["prepare"]

_NAMES = {
    pyg.MeanAggregation: "mean",
    pyg.SumAggregation: "sum",
    pyg.MaxAggregation: "max",
    pyg.MinAggregation: "min",
    pyg.VarAggregation: "var",
    pyg.StdAggregation: "std",
}
_SHIFTED = ("mean", "max", "min")
_SCALERS = ("identity", "amplification", "attenuation", "linear", "inverse_linear")


@fused(PNAConv)
def prepare(module: Any, given: Mapping[str, Any]) -> Run | str:
    """The call made ready to run, or why it runs in PyG."""
    x, edge_index = given["x"], given["edge_index"]
    if not isinstance(x, Tensor) or x.dim() != 2:
        return ": x is not [nodes, width]"
    attr = given.get("edge_attr")
    reason = refused_edges(edge_index) or refused_features(module, x, attr) or _refused(module, attr)
    if reason is not None:
        return reason
    edges = edges_of(module, edge_index, x.shape[0], x.shape[0])
    return functools.partial(_run, module, edges, x, None if attr is None else csr_order(edges, attr))


def _refused(module: Any, attr: Tensor | None) -> str | None:
    if (attr is None) != (module.edge_dim is None) or (attr is not None and attr.dim() != 2):
        return f"(edge_dim={module.edge_dim}): edge_attr is not [edges, edge_dim]"
    acts, maps = ([layer for nn in module.pre_nns for layer in nn[k::2]] for k in (1, 2))
    if not all(map(is_elementwise, acts)) or not all(map(is_plain_linear, maps)):
        return ": messages with this activation are not lowered, or a layer inside them was replaced"
    scaler = module.aggr_module
    if type(scaler) is not DegreeScalerAggregation or type(scaler.aggr) is not MultiAggregation:
        return ": the aggregation was replaced"
    names = _aggregators(module)
    if scaler.aggr.mode != "cat" or None in names or len(set(names)) < len(names):
        return ": one of the aggregators is not lowered, or named twice"
    if any(_is_half(aggr) for aggr in scaler.aggr.aggrs) or any(s not in _SCALERS for s in scaler.scaler):
        return ": half gradients and other scalers are not lowered"
    first = [nn[0] for nns in (module.pre_nns, module.post_nns) for nn in nns]
    first += [] if attr is None else [module.edge_encoder]
    watched = [*module.pre_nns, *module.post_nns, scaler, scaler.aggr, *scaler.aggr.aggrs]
    if not all(map(is_plain_linear, [*first, module.lin])) or any(map(has_hooks, watched)):
        return ": a part of the layer is watched by hooks or was replaced"
    if is_parametrized(module):
        return ": a weight is parametrized, and PyG computes it as often as it reads it"
    return None


def _aggregators(module: Any) -> tuple[str, ...]:
    return tuple(_NAMES.get(type(aggr)) for aggr in module.aggr_module.aggr.aggrs)  # type: ignore[misc]


def _is_half(aggr: Any) -> bool:
    return bool(getattr(getattr(aggr, "var_aggr", aggr), "semi_grad", False))


def _run(module: Any, edges: Edges, x: Tensor, attr: Tensor | None) -> Tensor:
    buffers = active.session().buffers
    names, towers, width = _aggregators(module), module.towers, module.F_in
    layout = Layout(names, width, towers)
    is_folded = towers == 1 and len(module.post_nns[0]) == 1
    plan = _plan(module, edges, x, attr, layout, is_folded)
    own = list(torch.split(x, width, dim=1)) if module.divide_input else [x] * towers
    v = _by_towers(module, buffers, own, [nn[0].weight[:, width : 2 * width].t() for nn in module.pre_nns])
    if attr is None and not _has_deep_messages(module):
        found = aggregate_all(edges.orders, buffers, layout, v)
    else:
        found = _of_messages(module, edges, buffers, layout, own, v, attr)
    columns = len(layout.kept) * width
    parts = torch.split(found, columns, dim=1) if towers > 1 else [found]
    if plan.choice == "before":
        weights = _scales(module, edges, x.dtype, False), _often(edges, names, x.dtype)
        outs = [
            _spread_tower(module, buffers, t, own[t], parts[t], *weights, is_folded) for t in range(towers)
        ]
    else:
        scales = _scales(module, edges, x.dtype, "sum" in names)
        outs = [_tower(module, buffers, t, own[t], parts[t], scales, names, is_folded) for t in range(towers)]
    outs = [_later_layers(module, t, out) for t, out in enumerate(outs)]
    out = torch.cat(outs, 1) if towers > 1 else outs[0]
    return out if is_folded else project(buffers, out, module.lin.weight.t(), module.lin.bias)


def _by_towers(module: Any, buffers: Any, own: list[Tensor], weights: list[Tensor]) -> Tensor:
    """Every tower's rows by its weights, side by side."""
    if module.divide_input and module.towers > 1:
        return torch.cat([project(buffers, part, w) for part, w in zip(own, weights, strict=True)], 1)
    return project(buffers, own[0], torch.cat(weights, 1))


def _has_deep_messages(module: Any) -> bool:
    return len(module.pre_nns[0]) > 1


def _of_messages(
    module: Any, edges: Edges, buffers: Any, layout: Layout, own: list[Tensor], v: Tensor, attr: Tensor | None
) -> Tensor:
    """The aggregates of messages made in blocks: with features of edges, or of more than one layer."""
    width, pre_nns = module.F_in, module.pre_nns
    of_edges = []
    if attr is not None:
        of_edges = [torch.cat([_edge_map(module, t) for t in range(module.towers)]).t()]

    def start(far: Tensor, edge: Tensor | None, *w: Tensor) -> Tensor:
        return far if edge is None else torch.addmm(far, edge, w[0])

    if not _has_deep_messages(module):

        def shallow(near: None, far: Tensor, edge: Tensor | None, *w: Tensor) -> Tensor:
            return start(far, edge, *w)

        return aggregate_messages(edges.orders, buffers, layout, shallow, None, v, attr, *of_edges)
    near = _by_towers(module, buffers, own, [nn[0].weight[:, :width].t() for nn in pre_nns])
    near = near + torch.cat([_bias(module, t) for t in range(module.towers)])
    inner = [nn[k] for nn in pre_nns for k in range(2, len(nn), 2)]
    depth, split = len(inner) // module.towers, len(of_edges)
    biases = [linear.bias for linear in inner]

    def deep(near: Tensor, far: Tensor, edge: Tensor | None, *w: Tensor) -> Tensor:
        rows = start(far, edge, *w[:split]) + near
        weights, shifts = w[split : split + len(inner)], w[split + len(inner) :]
        outs = []
        for t, part in enumerate(torch.split(rows, width, dim=1)):
            for k in range(depth):
                part = pre_nns[t][2 * k + 1](part)
                part = torch.addmm(shifts[t * depth + k], part, weights[t * depth + k].t())
            outs.append(part)
        return torch.cat(outs, 1)

    maps = [*of_edges, *[linear.weight for linear in inner], *biases]
    return aggregate_messages(edges.orders, buffers, layout, deep, near, v, attr, *maps)


def _edge_map(module: Any, t: int) -> Tensor:
    """[width, edge_dim]: features of edges to a tower's messages, the encoder folded in."""
    made: Tensor = module.pre_nns[t][0].weight[:, 2 * module.F_in :] @ module.edge_encoder.weight
    return made


def _bias(module: Any, t: int) -> Tensor:
    """What a tower adds to every message."""
    first = module.pre_nns[t][0]
    bias: Tensor = first.bias
    return (
        bias
        if module.edge_dim is None
        else bias + first.weight[:, 2 * module.F_in :] @ module.edge_encoder.bias
    )


def _shift(module: Any, t: int) -> tuple[Tensor, Tensor]:
    """(weight, bias) of the target's part, by which aggregates shift; 0 where it is inside the messages."""
    weight, bias = module.pre_nns[t][0].weight[:, : module.F_in], _bias(module, t)
    if _has_deep_messages(module):
        return torch.zeros_like(weight), torch.zeros_like(bias)
    return weight, bias


def _tower(
    module: Any, buffers: Any, t: int, x: Tensor, found: Tensor, scales: Tensor,
    names: tuple[str, ...], is_folded: bool,
) -> Tensor:  # fmt: skip
    """One tower's output: own part, and for every scaler the aggregates with the shift they miss."""
    width, count = module.F_in, len(module.aggr_module.scaler)
    shift_weight, shift_bias = _shift(module, t)
    weight, bias = _post(module, buffers, t, is_folded)
    # [outer, 1 + scalers * aggregators, width]: x, then the aggregators of each scaler
    blocks = weight.reshape(weight.shape[0], -1, width)
    by_scaler = blocks[:, 1:].reshape(weight.shape[0], count, len(names), width)
    w = by_scaler.permute(2, 3, 1, 0).reshape(len(names) * width, -1)
    groups, shifts = [blocks[:, 0].t()], [bias]
    for shift in _shift_sums(by_scaler, names):
        own = torch.cat([shift_weight, shift_bias[:, None]], 1).t()
        both = project(buffers, own, torch.cat([one.t() for one in shift.unbind(1)], 1))
        groups.append(both[:-1])
        shifts.append(both[-1])
    y = joined(
        buffers, x, torch.cat(groups, 1), torch.cat(shifts), found[:, : w.shape[0]], w, weight.shape[0]
    )
    return weighed(buffers, y, scales)


def _spread_tower(
    module: Any,
    buffers: Any,
    t: int,
    x: Tensor,
    found: Tensor,
    scales: Tensor,
    often: Tensor,
    is_folded: bool,
) -> Tensor:
    """One tower's output from scaled copies of the aggregates, in one product."""
    width = module.F_in
    shift_weight, shift_bias = _shift(module, t)
    weight, bias = _post(module, buffers, t, is_folded)
    u = project(buffers, x, shift_weight.t(), shift_bias)
    rows = spread_out(buffers, x, u, found[:, : often.shape[1] * width], scales, often)
    return project(buffers, rows, weight.t(), bias)


def _later_layers(module: Any, t: int, out: Tensor) -> Tensor:
    for layer in list(module.post_nns[t])[1:]:
        out = layer(out)
    return out


def _post(module: Any, buffers: Any, t: int, is_folded: bool) -> tuple[Tensor, Tensor]:
    """(weight, bias) of a tower's first layer after the aggregation, the layer's last map folded in."""
    post = module.post_nns[t][0]
    if not is_folded:
        return post.weight, post.bias
    # on plait's own product: its bits do not depend on the number of threads
    both = project(buffers, module.lin.weight, torch.cat([post.weight, post.bias[:, None]], 1))
    return both[:, :-1], both[:, -1] + module.lin.bias


def _shift_sums(by_scaler: Tensor, names: tuple[str, ...]) -> list[Tensor]:
    """[outer, scalers, width] each: the weights the shift meets once, and those it meets degree times."""
    once = [k for k, name in enumerate(names) if name in _SHIFTED]
    found = [by_scaler[:, :, once].sum(2)]
    if "sum" in names:
        found.append(by_scaler[:, :, names.index("sum")])
    return found


def _often(edges: Edges, names: tuple[str, ...], dtype: torch.dtype) -> Tensor:
    """[nodes, aggregators]: how often the shift enters an aggregate."""
    degree = torch.from_numpy(edges.graph.degrees).to(dtype)
    once, none = degree.clamp(max=1), torch.zeros_like(degree)
    return torch.stack([degree if n == "sum" else once if n in _SHIFTED else none for n in names], 1)


def _scales(module: Any, edges: Edges, dtype: torch.dtype, has_sums: bool) -> Tensor:
    """[nodes, groups]: what each scaler weighs a node with; once more times the degree for the shift of sums.

    A node without edges has no messages to shift: its weights are 0, as its aggregates are.
    """
    scaler = module.aggr_module
    degree = torch.from_numpy(edges.graph.degrees).to(dtype)
    least = degree.clamp(min=1)
    made = {"identity": torch.ones_like(degree)}
    if "linear" in scaler.scaler or "inverse_linear" in scaler.scaler:
        made |= {"linear": degree / scaler.avg_deg_lin, "inverse_linear": scaler.avg_deg_lin / least}
    if "amplification" in scaler.scaler or "attenuation" in scaler.scaler:
        made["amplification"] = torch.log(degree + 1) / scaler.avg_deg_log
        made["attenuation"] = scaler.avg_deg_log / torch.log(least + 1)
    columns = torch.stack([made[name] for name in scaler.scaler], 1) * (degree > 0).to(dtype)[:, None]
    return torch.cat([columns, columns * degree[:, None]], 1) if has_sums else columns


def _plan(
    module: Any, edges: Edges, x: Tensor, attr: Tensor | None, layout: Layout, is_folded: bool
) -> FusedPlan:
    training, wants_input = is_training(module, x, attr), x.requires_grad
    edge_width = 0 if attr is None else attr.shape[1]

    def make() -> FusedPlan:
        return choose(
            AggregatorsProblem(
                layer=active.name_of(module), matrix=cost_matrix(edges), inner=module.F_in, width=module.F_in,
                outer=module.F_out, towers=module.towers, aggregators=len(layout.names),
                sections=layout.sections, scalers=len(module.aggr_module.scaler), is_folded=is_folded,
                edge_width=edge_width, message_layers=(len(module.pre_nns[0]) + 1) // 2,
                machine=machine_in_use(), is_training=training, wants_input_grad=wants_input,
                float_bytes=x.element_size(), threads=launch.num_threads(),
                memory_limit=active.session().dial.room(active.name_of(module), training),
            )
        )  # fmt: skip

    return planned(module, edges, (x.shape, x.dtype, edge_width, training, wants_input), make)
