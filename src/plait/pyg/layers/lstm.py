"""SAGE with aggr="lstm": neighbours in the order of the edges through an LSTM, shared prefixes run once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.nn import SAGEConv
from torch_geometric.nn.aggr import LSTMAggregation

from plait.cost.price import Price, Pricer
from plait.kernels import launch
from plait.ops.work import Request, Work
from plait.plan.fused import FusedCandidate, FusedPlan, FusedStep, choose_among
from plait.pyg import active
from plait.pyg.layers.base import has_hooks
from plait.pyg.layers.fused import (
    Run,
    edges_of,
    fused,
    is_training,
    planned,
    refused_edges,
    refused_features,
)
from plait.runtime.lstm import Gates, Prefixes, lstm
from plait.runtime.session import machine_in_use

__all__: list[str] = []

# Seconds one length costs beside its arithmetic, forward and backward: some dozen torch calls, where torch's
# own LSTM makes few. Measured on lists of 30 to 60 elements of 40 to 100 nodes, one thread.
_SECONDS, _SECONDS_OF_TORCH = {"fwd": 60e-6, "bwd": 110e-6}, {"fwd": 17e-6, "bwd": 40e-6}
# passes over the gates of one step: activations, cell and state; their gradients
_PASSES, _PASSES_BACKWARD = 3, 6


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
        return f"(flow={module.flow!r}): pairs of features are lowered source_to_target only"
    if root is None and (size is None or size[1] is None):
        return ": the number of target nodes is not known; pass size= or x as a pair"
    num_targets = int(size[1]) if size is not None and size[1] is not None else root.shape[0]
    edges = edges_of(module, edge_index, num_targets, source.shape[0])
    prefixes = edges.prefixes
    if edges.graph.num_edges == 0 or not prefixes.is_listed_by_target:
        return "(aggr='lstm'): there are no edges, or they are not sorted by target; PyG says what it wants"
    training = is_training(module, source, root)
    plan = planned(
        module, edges, (source.shape[1], training), lambda: _plan(module, prefixes, source, training)
    )
    if plan.choice == "padded":
        del active.session().plans[active.name_of(module)]
        return "(aggr='lstm'): padded lists are priced lower than shared prefixes"
    return partial(_run, module, prefixes, source, root)


def _refused(module: Any) -> str | None:
    cell = module.aggr_module.lstm
    if type(cell) is not nn.LSTM or type(module.aggr_module) is not LSTMAggregation:
        return "(aggr='lstm'): the aggregation is not PyG's own"
    if cell.num_layers != 1 or cell.bidirectional or cell.proj_size:
        return "(aggr='lstm'): only one layer, one direction and no projection are lowered"
    if has_hooks(cell) or has_hooks(module.aggr_module):
        return "(aggr='lstm'): the aggregation is watched by hooks"
    return None


def _run(module: Any, prefixes: Prefixes, x: Tensor, root: Tensor | None) -> Tensor:
    if module.project and hasattr(module, "lin"):
        x = module.lin(x).relu()
    cell = module.aggr_module.lstm
    bias = (cell.bias_ih_l0, cell.bias_hh_l0) if cell.bias else (None, None)
    out: Tensor = module.lin_l(lstm(x, Gates(cell.weight_ih_l0, cell.weight_hh_l0, *bias), prefixes))
    if module.root_weight and root is not None:
        out = out + module.lin_r(root)
    return functional.normalize(out, p=2.0, dim=-1) if module.normalize else out


@dataclass(frozen=True)
class _Work:
    """Rows whose input, and whose state, meets its weights; steps; seconds beside them; widths."""

    inputs: int
    states: int
    steps: int
    seconds: Mapping[str, float]
    length: int
    width_in: int
    width: int

    def bytes_kept(self, size: int) -> int:
        """Of training: gates and cells of every step, and the gates' gradients."""
        return self.steps * 9 * self.width * size


def _plan(module: Any, prefixes: Prefixes, x: Tensor, training: bool) -> FusedPlan:
    """Shared prefixes against lists padded one by one."""
    machine, levels = machine_in_use(), prefixes.levels
    width, size = module.aggr_module.lstm.hidden_size, x.element_size()
    pricer = Pricer(machine, size, launch.num_threads())
    num_sources, width_in = x.shape
    steps, plain, length = levels.num_steps, levels.plain_steps, levels.length
    longest = prefixes.start[-1] - prefixes.start[-2]  # prefixes that are extended no further
    own = _Work(num_sources, steps - longest, steps, _SECONDS, length, width_in, width)
    padded = _Work(plain, plain, plain, _SECONDS_OF_TORCH, length, width_in, width)
    held = 4 * width * size * (num_sources + longest)
    fewer = f"neighbour lists share their beginnings, {plain / steps:.2f}x fewer steps"
    candidates = [
        FusedCandidate(
            "prefixes", f"lstm over {steps:,} distinct prefixes ({plain:,} padded elements)",
            _steps(pricer, own, training), held + own.bytes_kept(size) * training, fewer,
        ),
        FusedCandidate(
            "padded", f"lstm over {plain:,} padded elements (PyG)", _steps(pricer, padded, training),
            plain * (width_in + width) * size + padded.bytes_kept(size) * training, "lists share too little",
        ),
    ]  # fmt: skip
    sizes = {"N": levels.num_nodes, "M": num_sources, "K": width_in, "H": width, "D": length}
    return choose_among(
        candidates, layer=active.name_of(module), kind="lstm", sizes=sizes, machine=machine,
        is_training=training, memory_limit=active.session().dial.room(active.name_of(module), training),
    )  # fmt: skip


def _steps(pricer: Pricer, work: _Work, training: bool) -> tuple[FusedStep, ...]:
    """The inputs' gates, the states' gates and the recurrence itself, then the way back."""
    gates = 4 * work.width
    passes = {"fwd": _PASSES} | ({"bwd": _PASSES_BACKWARD} if training else {})
    made = []
    for phase, streams in passes.items():
        products = 1 if phase == "fwd" else 2  # the gradient of the rows and of the weights
        for title, rows, inner in (
            ("inputs", work.inputs, work.width_in),
            ("states", work.states, work.width),
        ):
            price = pricer.price(Request("gemm", rows, gates, inner))
            made.append(FusedStep(f"{title}' part of the gates", phase, _times(price, products)))
        price = pricer.price(Request("gates", work.steps, gates, parts=streams))
        seconds = price.seconds + work.length * work.seconds[phase]
        made.append(FusedStep(f"gates of {work.steps:,} steps", phase, replace(price, seconds=seconds)))
    return tuple(made)


def _times(price: Price, count: int) -> Price:
    work = Work(
        *(part * count for part in (price.work.flops, price.work.bytes_least, price.work.bytes_gathered))
    )
    return replace(price, seconds=price.seconds * count, work=work)
