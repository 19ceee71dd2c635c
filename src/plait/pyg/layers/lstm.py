"""SAGE with aggr="lstm": neighbours in the order of the edges through an LSTM, shared prefixes run once."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.nn import SAGEConv
from torch_geometric.nn.aggr import LSTMAggregation

from plait.plan.lstm import Lists, Shape, ways
from plait.pyg import active
from plait.pyg.layers.base import has_hooks, is_parametrized, linear_values
from plait.pyg.layers.fused import Run, edges_of, fused, not_plain, refused_edges, refused_features
from plait.runtime import executor
from plait.runtime.lstm import Prefixes
from plait.runtime.placed import PlacedGraph
from plait.runtime.ways import Programs

__all__: list[str] = []


def _is_lstm(module: Any) -> bool:
    return isinstance(module.aggr_module, LSTMAggregation)


@fused(SAGEConv, only=_is_lstm)
def _prepare(module: Any, given: Mapping[str, Any]) -> Run | str:
    """The call made ready to run, or why it runs in PyG."""
    x, edge_index, size = given["x"], given["edge_index"], given.get("size")
    is_pair = not isinstance(x, Tensor)
    source, root = (x[0], x[1]) if is_pair else (x, x)
    if not isinstance(source, Tensor) or source.dim() != 2:
        return ": x is not a matrix or a pair of them"
    reason = _refused(module) or refused_edges(edge_index) or refused_features(module, source, root)
    if reason is not None:
        return reason
    if is_pair and module.flow != "source_to_target":
        return f"(flow={module.flow!r}): pairs of features are planned source_to_target only"
    if root is None and (size is None or size[1] is None):
        return ": the number of target nodes is not known; pass size= or x as a pair"
    num_targets = int(size[1]) if size is not None and size[1] is not None else root.shape[0]
    edges = edges_of(module, edge_index, num_targets, source.shape[0])
    if isinstance(edges.graph, PlacedGraph):
        return (
            "(aggr='lstm'): on a GPU PyG runs; every list is run to the longest one's length, which cuDNN "
            "does in one call and shared prefixes in several launches per element"
        )
    prefixes = edges.prefixes
    if edges.graph.num_edges == 0 or not prefixes.is_listed_by_target:
        return "(aggr='lstm'): there are no edges, or they are not sorted by target; PyG raises its own error"
    inputs = _inputs(module, source, root, is_pair)
    programs = Programs(
        active.name_of(module), ("lstm",),
        lambda wrt: ways(_shape(module, inputs, is_pair), _numbers(prefixes), wrt is not None),
        sizes=_numbers(prefixes).sizes,
    )  # fmt: skip
    run = programs.bound(active.session(), edges, inputs)
    if run.plan.choice == "padded":
        del active.session().plans[active.name_of(module)]
        return "(aggr='lstm'): padded lists are priced lower than shared prefixes"
    return partial(_run, module, run, inputs, prefixes)


def _refused(module: Any) -> str | None:
    cell = module.aggr_module.lstm
    if type(cell) is not nn.LSTM or type(module.aggr_module) is not LSTMAggregation:
        return "(aggr='lstm'): the aggregation is not PyG's own"
    if cell.num_layers != 1 or cell.bidirectional or cell.proj_size:
        return "(aggr='lstm'): only one layer, one direction and no projection are planned"
    if has_hooks(cell) or has_hooks(module.aggr_module):
        return "(aggr='lstm'): the aggregation has hooks"
    if is_parametrized(module):  # a plan is chosen once the weights are read, and it may be to run in PyG
        return ": a weight is parametrized, and PyG computes it as often as it reads it"
    names = [*["lin"] * (module.project and hasattr(module, "lin")), "lin_l", *["lin_r"] * module.root_weight]
    stop = not_plain(module, *names)
    return None if stop is None else stop.reason.removeprefix(type(module).__name__)


def _inputs(module: Any, x: Tensor, root: Tensor | None, is_pair: bool) -> dict[str, Tensor]:
    """What the layer's program reads, by name."""
    cell = module.aggr_module.lstm
    values: dict[str, Tensor | None] = {"X": x, "G": cell.weight_ih_l0.t(), "H": cell.weight_hh_l0.t()}
    if cell.bias:
        values["g"] = cell.bias_ih_l0 + cell.bias_hh_l0
    if module.project and hasattr(module, "lin"):
        values |= {"P": module.lin.weight.t(), "p": module.lin.bias}
    values |= linear_values(module.lin_l)
    if module.root_weight and root is not None:
        values |= {"V": module.lin_r.weight.t(), **({"R": root} if is_pair else {})}
    return {name: value for name, value in values.items() if value is not None}


def _shape(module: Any, inputs: Mapping[str, Tensor], is_pair: bool) -> Shape:
    (units, _), (_, width) = inputs["H"].shape, inputs["W"].shape
    return Shape(
        inputs["X"].shape[1], units, width,
        projected=inputs["P"].shape[1] if "P" in inputs else None,
        root=inputs["V"].shape[0] if "V" in inputs else None,
        has_gate_bias="g" in inputs, has_bias="b" in inputs, has_projection_bias="p" in inputs,
        is_pair=is_pair,
    )  # fmt: skip


def _numbers(prefixes: Prefixes) -> Lists:
    levels = prefixes.levels
    return Lists(levels.num_steps, levels.plain_steps, levels.length)


def _run(module: Any, run: executor.Run, inputs: Mapping[str, Tensor], prefixes: Prefixes) -> Tensor:
    out = executor.apply(run, inputs, {"lists": prefixes})
    return functional.normalize(out, p=2.0, dim=-1) if module.normalize else out
