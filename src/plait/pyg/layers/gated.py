"""ResGatedGraphConv: gates over edges from one projection of the nodes; with edge features in blocks."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn import ResGatedGraphConv
from torch_geometric.nn.aggr import SumAggregation

from plait.plan.gated import ways
from plait.plan.messages import End, Messages
from plait.plan.ways import Way
from plait.pyg import active
from plait.pyg.layers.base import has_hooks, is_parametrized
from plait.pyg.layers.fused import Run, edges_of, fused, not_plain, refused_edges, refused_features
from plait.pyg.layers.messages import lowered
from plait.pyg.layers.pieces import PiecesCall, read_call
from plait.runtime.edges import Edges
from plait.runtime.ways import Programs

__all__ = ["prepare"]


@fused(ResGatedGraphConv)
def prepare(module: Any, given: Mapping[str, Any]) -> Run | str:
    """The call made ready to run, or why it runs in PyG."""
    x, edge_index = given["x"], given["edge_index"]
    parts = (
        [x, x] if isinstance(x, Tensor) else list(x) if isinstance(x, tuple | list) and len(x) == 2 else []
    )
    if not parts or not all(isinstance(part, Tensor) for part in parts):
        return ": x is not a tensor or a pair of tensors"
    attr = given.get("edge_attr")
    # edge features are lowered in blocks, by functions of torch
    reason = refused_edges(edge_index) or refused_features(module, *parts, attr, takes_halves=attr is None)
    reason = reason or _refused(module, parts, attr)
    if reason is not None:
        return reason
    if attr is not None:
        call = read_call(module, given, attr=attr)
        return call if isinstance(call, str) else functools.partial(_with_edges, call)
    is_pair = not isinstance(x, Tensor)
    edges = edges_of(module, edge_index, parts[1].shape[0], parts[0].shape[0])
    return functools.partial(_run, module, edges, parts[0], parts[1] if is_pair else None)


def _refused(module: Any, parts: list[Tensor], attr: Tensor | None) -> str | None:
    if any(part.dim() != 2 for part in parts):
        return ": x is not [nodes, width]"
    if (attr is None) != (module.edge_dim is None) or (attr is not None and attr.dim() != 2):
        return f"(edge_dim={module.edge_dim}): edge_attr is not [edges, edge_dim]"
    if module.act is not torch.sigmoid and (type(module.act) is not nn.Sigmoid or has_hooks(module.act)):
        return f"(act={module.act}): only sigmoid gates are planned"
    if type(module.aggr_module) is not SumAggregation:
        return f"(aggr={module.aggr!r}): gates are planned with sums only"
    if parts[0] is not parts[1] and module.flow != "source_to_target":
        return f"(flow={module.flow!r}): pairs of features are planned source_to_target only"
    names = ["lin_key", "lin_query", "lin_value", *(["lin_skip"] if module.root_weight else [])]
    if attr is not None and is_parametrized(module):
        return ": a weight is parametrized, and PyG computes it at every read"
    stop = not_plain(module, *names, width=module.out_channels)
    return None if stop is None else stop.reason.removeprefix(type(module).__name__)


def _run(module: Any, edges: Edges, source: Tensor, target: Tensor | None) -> Tensor:
    far = [module.lin_query, module.lin_value]
    near = [module.lin_key, *([module.lin_skip] if module.root_weight else [])]
    w, b = _side_by_side(far + near if target is None else far)
    inputs = {"X": source, "W": w, "b": b}
    if target is not None:
        w1, b1 = _side_by_side(near)
        inputs |= {"X1": target, "W1": w1, "b1": b1}
    if module.bias is not None:
        inputs["c"] = module.bias
    outer = None if target is None else target.shape[1]

    def make(wrt: tuple[str, ...] | None) -> list[Way]:
        return ways(
            source.shape[1], outer, module.out_channels, has_skip=bool(module.root_weight),
            has_bias=module.bias is not None, is_training=wrt is not None,
        )  # fmt: skip

    return Programs(active.name_of(module), ("gated",), make).value(active.session(), edges, inputs)


def _with_edges(call: PiecesCall) -> Tensor:
    """K [x_i, e], Q [x_j, e] and V [x_j, e] split: nodes are projected once, edges in their block."""
    module, own, width = call.module, call.own, call.module.out_channels
    assert own is not None
    assert call.attr is not None
    inner, outer = call.source.shape[1], own.shape[1]
    key, query, value = module.lin_key, module.lin_query, module.lin_value
    bias, of_edges = module.bias, ((call.attr.shape[1], 2 * width),)

    def message(near: Tensor, far: Tensor, edge: Tensor, w: Tensor) -> Tensor:
        rows = torch.addmm(far, edge, w)
        return (rows[:, :width] + near).sigmoid() * rows[:, width:]

    inputs = {
        "X": call.source, "W": torch.cat([query.weight[:, :inner], value.weight[:, :inner]]).t(),
        "b": torch.cat([query.bias, value.bias]), "Y": own if call.is_pair else None,
        "U": key.weight[:, :outer].t(), "c": key.bias, "E": call.attr,
        "P0": torch.cat([key.weight[:, outer:] + query.weight[:, inner:], value.weight[:, inner:]]).t(),
    }  # fmt: skip
    skip = None
    if module.root_weight:
        biases = [b for b in (module.lin_skip.bias, bias) if b is not None]
        skip = End(width, outer, bool(biases))
        inputs |= {"S": module.lin_skip.weight.t(), "s": sum(biases[1:], biases[0]) if biases else None}
    layer = Messages(
        "messages", width, End(2 * width, inner, True), End(width, outer, True), End(call.attr.shape[1]),
        skip, of_edges, of_edges, is_pair=call.is_pair, form=("gated", 0.0),
    )  # fmt: skip
    out = lowered(
        call, layer, inputs, "Σ σ(Kᵢ + Qⱼ + E Wₖ) ∘ (Vⱼ + E Wᵥ), in blocks",
        "projections are done once per node; gates are made in blocks of edges and again for gradients",
        message=message,
    )  # fmt: skip
    return out if bias is None or skip is not None else out + bias


def _side_by_side(linears: list[Any]) -> tuple[Tensor, Tensor]:
    """Weights [in, sum of outs] and biases of linear maps of one input; the skip has no bias."""
    biases = [m.weight.new_zeros(m.weight.shape[0]) if m.bias is None else m.bias for m in linears]
    return torch.cat([m.weight for m in linears]).t(), torch.cat(biases)
