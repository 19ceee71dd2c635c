"""PNAConv: several aggregators of linear messages in one pass, degree scalers after the weights.

A message W_a x_i + W_b x_j + b is the neighbour's part shifted by the target's: mean, max and min shift with
it, a sum degree times, variance and deviation not at all. The shift then meets the aggregators' weights as
one small matrix, so the targets' part is never computed. Ties between messages are those of the neighbours'
parts; torch counts its zero-filled output as one more where the extremum is exactly 0, which is not followed.
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
from plait.pyg.layers.base import has_hooks, is_plain_linear
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
from plait.runtime.pna import Layout, aggregate_all, joined, spread_out, weighed
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
    reason = refused_edges(edge_index) or refused_features(module, x) or _refused(module, given)
    if reason is not None:
        return reason
    edges = edges_of(module, edge_index, x.shape[0], x.shape[0])
    return functools.partial(_run, module, edges, x)


def _refused(module: Any, given: Mapping[str, Any]) -> str | None:
    if module.edge_dim is not None or given.get("edge_attr") is not None:
        return ": edge features in the messages are not lowered"
    if any(len(nn) != 1 for nn in module.pre_nns):
        layers = (len(module.pre_nns[0]) + 1) // 2
        return f"(pre_layers={layers}): messages of more than one layer are not lowered"
    scaler = module.aggr_module
    if type(scaler) is not DegreeScalerAggregation or type(scaler.aggr) is not MultiAggregation:
        return ": the aggregation was replaced"
    names = _aggregators(module)
    if scaler.aggr.mode != "cat" or None in names or len(set(names)) < len(names):
        return ": one of the aggregators is not lowered, or named twice"
    if any(_is_half(aggr) for aggr in scaler.aggr.aggrs) or any(s not in _SCALERS for s in scaler.scaler):
        return ": half gradients and other scalers are not lowered"
    first = [nn[0] for nns in (module.pre_nns, module.post_nns) for nn in nns]
    watched = [*module.pre_nns, *module.post_nns, scaler, scaler.aggr, *scaler.aggr.aggrs]
    if not all(map(is_plain_linear, [*first, module.lin])) or any(map(has_hooks, watched)):
        return ": a part of the layer is watched by hooks or was replaced"
    return None


def _aggregators(module: Any) -> tuple[str, ...]:
    return tuple(_NAMES.get(type(aggr)) for aggr in module.aggr_module.aggr.aggrs)  # type: ignore[misc]


def _is_half(aggr: Any) -> bool:
    return bool(getattr(getattr(aggr, "var_aggr", aggr), "semi_grad", False))


def _run(module: Any, edges: Edges, x: Tensor) -> Tensor:
    buffers = module._plait_session.buffers
    names, towers, width = _aggregators(module), module.towers, module.F_in
    layout = Layout(names, width, towers)
    is_folded = towers == 1 and len(module.post_nns[0]) == 1
    plan = _plan(module, edges, x, layout, is_folded)
    own = list(torch.split(x, width, dim=1)) if module.divide_input else [x] * towers
    near = [nn[0].weight[:, width:].t() for nn in module.pre_nns]
    if module.divide_input and towers > 1:
        v = torch.cat([project(buffers, part, w) for part, w in zip(own, near, strict=True)], 1)
    else:
        v = project(buffers, x, torch.cat(near, 1))
    found = aggregate_all(edges.orders, buffers, layout, v)
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


def _tower(
    module: Any, buffers: Any, t: int, x: Tensor, found: Tensor, scales: Tensor,
    names: tuple[str, ...], is_folded: bool,
) -> Tensor:  # fmt: skip
    """One tower's output: own part, and for every scaler the aggregates with the shift they miss."""
    width, count = module.F_in, len(module.aggr_module.scaler)
    pre = module.pre_nns[t][0]
    weight, bias = _post(module, buffers, t, is_folded)
    # [outer, 1 + scalers * aggregators, width]: x, then the aggregators of each scaler
    blocks = weight.reshape(weight.shape[0], -1, width)
    by_scaler = blocks[:, 1:].reshape(weight.shape[0], count, len(names), width)
    w = by_scaler.permute(2, 3, 1, 0).reshape(len(names) * width, -1)
    groups, shifts = [blocks[:, 0].t()], [bias]
    for shift in _shift_sums(by_scaler, names):
        own = torch.cat([pre.weight[:, :width], pre.bias[:, None]], 1).t()
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
    pre = module.pre_nns[t][0]
    weight, bias = _post(module, buffers, t, is_folded)
    u = project(buffers, x, pre.weight[:, :width].t(), pre.bias)
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


def _plan(module: Any, edges: Edges, x: Tensor, layout: Layout, is_folded: bool) -> FusedPlan:
    training, wants_input = is_training(module, x), x.requires_grad

    def make() -> FusedPlan:
        return choose(
            AggregatorsProblem(
                layer=module._plait_name, matrix=cost_matrix(edges), inner=module.F_in, width=module.F_in,
                outer=module.F_out, towers=module.towers, aggregators=len(layout.names),
                sections=layout.sections, scalers=len(module.aggr_module.scaler), is_folded=is_folded,
                machine=machine_in_use(), is_training=training, wants_input_grad=wants_input,
                float_bytes=x.element_size(), threads=launch.num_threads(),
                memory_limit=module._plait_session.options.memory_limit,
            )
        )  # fmt: skip

    return planned(module, edges, (x.shape, x.dtype, training, wants_input), make)
