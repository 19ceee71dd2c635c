"""The learned part of the cost model: steps of real training loops compared with their modelled times.

Kernels timed alone find their operands in cache; in a training loop they do not, and what lies between is a
matter of sizes. So a few layers are trained on made-up graphs with a clock on every step, and for each kind
of step the logarithm of seen over modelled time is fitted as a line in two sizes. A correction is used
only if it lowers the error on graphs that took no part in its fit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch_geometric.data import Data
from torch_geometric.nn import GATConv, GATv2Conv, GCNConv, GINConv, SAGEConv, TAGConv, TransformerConv

from plait.bench.pace import at_pace
from plait.bench.problem import edge_index_of, hidden_features, training_step
from plait.cost.machine import NUM_FEATURES
from plait.graph import Graph, generate
from plait.plan.plan import LayerPlan
from plait.plan.search import Problem, search, survey
from plait.pyg.compile import compile
from plait.pyg.probe import Probe, machine_in_use

__all__ = ["VIEW", "Sample", "correction", "samples", "samples_of_features", "samples_on"]

MakeEdges = Callable[[], "tuple[torch.Tensor, int]"]
Layers = Callable[[int, int], Iterator[nn.Module]]
Choose = Callable[[Problem], LayerPlan]

VIEW = "view"  # steps that move no data: they take what they take

_WIDTHS = ((48, 48), (192, 32), (32, 192))
_ATTENDED, _HEADS = ((64, 64),), 4  # few: each width is a kernel to compile for each pass
# (rows, columns, share of non-zeros) of made-up features, from bags of words to tables
_FEATURES = ((3_000, 1_500, 0.012), (8_000, 800, 0.3), (2_000, 8_000, 0.002), (12_000, 400, 0.1),
             (6_000, 2_500, 0.01))  # fmt: skip
_FEATURE_WIDTHS = (16, 64, 128)
_WARM, _REPEATS = 2, 4
_LEAST_SAMPLES = 12
_RIDGE = 0.3  # in samples: what a coefficient must be worth


@dataclass(frozen=True)
class Sample:
    """One step of one training loop: its kind, the model's seconds, those seen, the graph it ran on."""

    kind: str
    features: tuple[float, ...]
    modelled: float
    seen: float
    graph: int

    @property
    def gap(self) -> float:
        return float(np.log(self.seen / self.modelled))


def _layers(inner: int, outer: int) -> Iterator[nn.Module]:
    yield GCNConv(inner, outer)
    yield SAGEConv(inner, outer)
    yield SAGEConv(inner, outer, aggr="max")
    yield GINConv(nn.Sequential(nn.Linear(inner, outer), nn.ReLU(), nn.Linear(outer, outer)))
    yield TAGConv(inner, outer, K=2)


def _attending(inner: int, outer: int) -> Iterator[nn.Module]:
    for kind in (GATConv, GATv2Conv, TransformerConv):
        yield kind(inner, outer // _HEADS, heads=_HEADS)


def samples(graphs: Sequence[Graph], tell: Callable[[float], None]) -> list[Sample]:
    """Steps of middle layers trained on these graphs: the planner's choice, and the best without chains."""
    listed = [(functools.partial(edge_index_of, graph), graph.num_nodes) for graph in graphs]
    return _samples(listed, ((_layers, _WIDTHS, (search, _unchained)),), at_pace, tell)


def samples_of_features(tell: Callable[[float], None]) -> list[Sample]:
    """Products with sparse features and their gradients, in layers trained on made-up features."""
    found: list[Sample] = []
    for number, (rows, columns, share) in enumerate(_FEATURES):
        draw = torch.Generator().manual_seed(number)
        x = (torch.rand(rows, columns, generator=draw) < share).float()
        x *= torch.rand(columns, generator=draw) + 0.5  # or all values are one, and need not be read
        edge_index = edge_index_of(generate.erdos(rows, 4 * rows, number))
        data = Data(x=x, edge_index=edge_index)
        for width in _FEATURE_WIDTHS:
            compiled = compile(GCNConv(columns, width), data, mode="training", forms=["csr"])
            take = functools.partial(_steps, compiled, _sparsely, x, edge_index, number)
            found += [sample for sample in at_pace(take) if sample.kind.startswith("spmm_features")]
        tell((number + 1) / len(_FEATURES))
    return found


def samples_on(graphs: Sequence[MakeEdges], tell: Callable[[float], None]) -> list[Sample]:
    """The same on a device, where functions make its edges: the planner's choice and its second one.

    Layers of attention too: what their passes cost beside a sparse product is not that of a CPU.
    """
    listed = [(make, -1) for make in graphs]
    families = ((_layers, _WIDTHS, (search, _second)), (_attending, _ATTENDED, (search,)))
    return _samples(listed, families, lambda measure: measure(), tell, _fresh_step)


def _fresh_step(model: nn.Module, x: torch.Tensor, edges: torch.Tensor) -> Callable[[], None]:
    """A training step whose gradient was just written, as by the layer behind it: a GPU's cache holds it."""
    parameters = list(model.parameters())

    def step() -> None:
        for leaf in (x, *parameters):
            leaf.grad = None
        out = model(x, edges)
        torch.autograd.backward(out, torch.ones_like(out))

    return step


def _samples(
    graphs: Sequence[tuple[Callable[[], Any], int]],
    families: Sequence[tuple[Layers, Sequence[tuple[int, int]], Sequence[Choose]]],
    taken: Callable[[Callable[[], list[Sample]]], list[Sample]],
    tell: Callable[[float], None],
    step_of: Callable[..., Callable[[], None]] = training_step,
) -> list[Sample]:
    found: list[Sample] = []
    cases = [(layers, widths, choices) for layers, grid, choices in families for widths in grid]
    for number, (make, num_nodes) in enumerate(graphs):
        edge_index = make()
        if isinstance(edge_index, tuple):
            edge_index, num_nodes = edge_index
        for k, (layers, (inner, outer), choices) in enumerate(cases):
            x = hidden_features(num_nodes, inner, device=edge_index.device).requires_grad_()
            for layer in layers(inner, outer):
                for choose in choices:
                    compiled = compile(layer.to(edge_index.device), None, forms=["csr"])
                    measured = functools.partial(_steps, compiled, choose, x, edge_index, number, step_of)
                    found += taken(measured)
            tell((number + (k + 1) / len(cases)) / len(graphs))
    return found


def _second(problem: Problem) -> LayerPlan:
    ranked = sorted(survey(problem), key=lambda plan: plan.seconds)
    return ranked[min(1, len(ranked) - 1)]


def _unchained(problem: Problem) -> LayerPlan:
    plain = [plan for plan in survey(problem) if not plan.form.endswith("chained")]
    return min(plain, key=lambda plan: plan.seconds)


def _sparsely(problem: Problem) -> LayerPlan:
    """The cheapest plan whose first operation is a product with the sparse features themselves."""
    plans = [plan for plan in survey(problem) if plan.sparse_values and not plan.hoisted_steps]
    return min(plans, key=lambda plan: plan.seconds)


def _steps(
    compiled: Any,
    choose: Choose,
    x: torch.Tensor,
    edges: torch.Tensor,
    graph: int,
    step_of: Callable[..., Callable[[], None]] = training_step,
) -> list[Sample]:
    probe = Probe(compiled)
    probe.choose_by(choose)
    seen = probe.clock(step_of(compiled, x, edges), _WARM, _REPEATS)
    result, call = [], machine_in_use(x.device).call_seconds
    for name, plan in probe.plans.items():
        assert isinstance(plan, LayerPlan)
        for step in plan.steps:
            times, price = seen.get((name, step.step.out)), step.price
            if times and price.backend == VIEW:
                result.append(Sample(VIEW, (), price.seconds, float(np.median(times)), graph))
            elif times and price.kind:
                modelled, middle = (_beyond(t, call) for t in (price.uncorrected, float(np.median(times))))
                result.append(Sample(price.kind, price.features, modelled, middle, graph))
    return result


def _beyond(seconds: float, call: float) -> float:
    """What a step takes beyond a call; a fifth of it at least, where the call is most of it."""
    return max(seconds - call, 0.2 * seconds, 1e-7)


def correction(found: Sequence[Sample], least: int = _LEAST_SAMPLES) -> dict[str, tuple[float, ...]]:
    """Coefficients for each kind of step where they help on graphs left out of the fit.

    A line in fewer features is kept where it does better there: few graphs teach few coefficients. Kinds with
    fewer than `least` samples have none.
    """
    result = {}
    for kind in sorted({sample.kind for sample in found} - {VIEW}):
        own = [sample for sample in found if sample.kind == kind]
        if len(own) < least:
            continue
        errors = {used: _held_out_error(own, used) for used in range(1, NUM_FEATURES + 1)}
        used = min(errors, key=errors.__getitem__)
        if errors[used] < _error(own, None):
            result[kind] = tuple(float(c) for c in _line(own, used))
    return result


def _line(found: Sequence[Sample], used: int) -> np.ndarray[Any, Any]:
    """Coefficients of the first `used` features, zeros for the others."""
    a = np.array([sample.features[:used] for sample in found])
    gaps = np.array([sample.gap for sample in found])
    line = np.zeros(NUM_FEATURES)
    line[:used] = np.linalg.solve(a.T @ a + _RIDGE * np.eye(used), a.T @ gaps)
    return line


def _error(found: Sequence[Sample], line: np.ndarray[Any, Any] | None) -> float:
    gaps = np.array([sample.gap for sample in found])
    if line is not None:
        gaps = gaps - np.array([sample.features for sample in found]) @ line
    return float(np.mean(np.abs(gaps)))


def _held_out_error(found: Sequence[Sample], used: int) -> float:
    """The error on every graph of the line fitted to the others."""
    numbers = {sample.graph for sample in found}
    if len(numbers) < 2:
        return float("inf")
    errors = []
    for number in numbers:
        own = [sample for sample in found if sample.graph == number]
        line = _line([sample for sample in found if sample.graph != number], used)
        errors += [_error(own, line)] * len(own)
    return float(np.mean(errors))
