"""What steps of real training loops take: the constants of sparse products, and what is learned beside them.

Kernels timed alone find their operands where the call before left them; in a training loop they do not. So a
few layers are trained on made-up graphs with a clock on every step. The constants of sparse products are
fitted to those steps; then, for each kind of step, the logarithm of seen over modelled time is fitted as a
line in two sizes. A correction is used only if it lowers the error on graphs that took no part in its fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch_geometric.nn import GCNConv, GINConv, SAGEConv, SGConv, TAGConv

from plait.bench.problem import edge_index_of, hidden_features
from plait.cost.machine import NUM_FEATURES, MachineProfile
from plait.cost.price import ChainRequest, Pricer, Request
from plait.graph import Graph
from plait.plan.plan import LayerPlan
from plait.plan.search import Problem, search, survey
from plait.pyg.compile import compile

__all__ = ["Sample", "Seen", "correction", "fit_sparse", "priced", "seen_steps"]

_WIDTHS = ((48, 48), (128, 24), (16, 160))
_WARM, _REPEATS = 2, 4
_LEAST_SAMPLES = 12
_RIDGE = 0.3  # in samples: what a coefficient must be worth
_PULL = 1.0  # in samples: what the logarithm of a constant away from its start must be worth

# Where the fit of two threads begins, and stays for what no graph exercised; in seconds of one thread.
_START = {
    "gather_l2_bytes_per_s": 4e-12, "gather_l3_bytes_per_s": 4e-12, "gather_memory_bytes_per_s": 4e-11,
    "write_bytes_per_s": 1.5e-11, "edge_seconds": 3e-10, "row_seconds": 3e-9, "tile_seconds": 4e-9,
    "l3_row_seconds": 4e-9, "memory_row_seconds": 8e-9, "l2_line_seconds": 5e-10, "uneven_row_seconds": 2e-8,
    "part_line_seconds": 3e-10, "write_line_seconds": 4e-9,
}  # fmt: skip


@dataclass(frozen=True)
class Seen:
    """One step of one training loop: what was asked for, how it ran, its median seconds, on which graph."""

    request: Request | ChainRequest | None  # None: a step that moves no data
    backend: str
    slab: int
    seconds: float
    graph: int


@dataclass(frozen=True)
class Sample:
    """A seen step beside the model: its kind, the model's seconds, those seen, the graph it ran on."""

    kind: str
    features: tuple[float, ...]
    modelled: float
    seen: float
    graph: int

    @property
    def gap(self) -> float:
        return float(np.log(self.seen / self.modelled))


def _loops(inner: int, outer: int) -> Iterator[tuple[nn.Module, Callable[[Problem], LayerPlan]]]:
    """Layers and how their plans are chosen: by the planner, and the best without chains."""
    two = nn.Sequential(nn.Linear(inner, outer), nn.ReLU(), nn.Linear(outer, outer))
    for layer in (GCNConv(inner, outer), GINConv(two), SGConv(inner, outer, K=2)):
        yield layer, search
        yield layer, _unchained
    yield SAGEConv(inner, outer, aggr="max"), search
    yield TAGConv(inner, outer, K=2), _unchained


def seen_steps(graphs: Sequence[Graph], tell: Callable[[float], None]) -> list[Seen]:
    """Steps of middle layers trained on these graphs."""
    found: list[Seen] = []
    total = len(graphs) * len(_WIDTHS)
    for number, graph in enumerate(graphs):
        edge_index = edge_index_of(graph)
        for k, (inner, outer) in enumerate(_WIDTHS):
            x = hidden_features(graph.num_nodes, inner).requires_grad_()
            for layer, choose in _loops(inner, outer):
                found += _steps(layer, choose, x, edge_index, number)
            tell((number * len(_WIDTHS) + k + 1) / total)
    return found


def _unchained(problem: Problem) -> LayerPlan:
    plain = [plan for plan in survey(problem) if not plan.form.endswith("chained")]
    return min(plain, key=lambda plan: plan.seconds)


def _steps(
    layer: nn.Module, choose: Callable[[Problem], LayerPlan], x: torch.Tensor, edges: torch.Tensor, graph: int
) -> Iterator[Seen]:
    compiled: Any = compile(layer, None, forms=["csr"])
    session = compiled._plait_plan_session
    session.choose = choose
    seen: dict[str, list[float]] = {}
    cotangent = None
    for repeat in range(_WARM + _REPEATS):
        x.grad = None
        trace: list[Any] = []
        session.trace = trace if repeat >= _WARM else None
        out = compiled(x, edges)
        cotangent = torch.ones_like(out) if cotangent is None else cotangent
        out.backward(cotangent)
        for name, measured in trace:
            seen.setdefault(name.partition("\0")[2], []).append(measured.seconds)
    session.trace = None
    for plan in session.plans.values():
        for step in plan.steps:
            times, price = seen.get(step.step.out), step.price
            if times and (price.request is not None or price.backend == "view"):
                yield Seen(price.request, price.backend, price.slab, float(np.median(times)), graph)


# The constants of sparse products -------------------------------------------------------------------


def fit_sparse(found: Sequence[Seen], machine: MachineProfile) -> MachineProfile:
    """The profile with the constants of sparse products that explain these steps best.

    The size of the third-level cache is fitted too: page tables share it and so do other guests of the
    machine, so gathers see less than the system tells.
    """
    own = [step for step in found if isinstance(step.request, Request) and step.request.op == "spmm"]
    own = [step for step in own if step.backend == "plait"]
    best: tuple[float, MachineProfile] | None = None
    for share in (8, 4, 2, 1):
        seen = replace(machine, l3_bytes=machine.l3_bytes // share)
        fitted, error = _fitted(own, seen)
        if best is None or error < best[0]:
            best = error, fitted
    assert best is not None
    return best[1]


def _fitted(own: Sequence[Seen], machine: MachineProfile) -> tuple[MachineProfile, float]:
    pricer = Pricer(machine)
    amounts, rest = [], []
    for step in own:
        request = step.request
        assert isinstance(request, Request)
        assert request.matrix is not None
        counts = pricer.sparse_amounts(request, request.matrix, step.slab)
        of_constants = sum(amount * machine.sparse_seconds(name) for name, amount in counts.items())
        amounts.append([counts[name] for name in _START])
        # the call, streamed weights and addends: what is not to be fitted
        rest.append(pricer.sparse_seconds(request, request.matrix, step.slab or request.cols) - of_constants)
    times = np.array([step.seconds for step in own])
    start = np.array(list(_START.values())) / machine.threads
    constants = _fit(np.array(amounts), np.maximum(np.array(rest), 0.0), times, start)
    error = float(np.mean(np.abs(np.log((np.array(amounts) @ constants + rest) / times))))
    fields = {
        name: float(1.0 / value if name.endswith("_per_s") else value)
        for name, value in zip(_START, constants, strict=True)
    }
    # noise may find a far cache faster than a near one
    near = fields["gather_l2_bytes_per_s"]
    fields["gather_l3_bytes_per_s"] = min(near, fields["gather_l3_bytes_per_s"])
    fields["gather_memory_bytes_per_s"] = min(
        fields["gather_l3_bytes_per_s"], fields["gather_memory_bytes_per_s"]
    )
    return replace(machine, **fields), error  # type: ignore[arg-type]


def _fit(
    amounts: np.ndarray[Any, Any],
    rest: np.ndarray[Any, Any],
    times: np.ndarray[Any, Any],
    start: np.ndarray[Any, Any],
) -> np.ndarray[Any, Any]:
    """Positive constants with the least squared logarithmic error, by damped Gauss-Newton steps.

    A relative error would be bounded below and not above, and so favour constants that are too small.
    """
    origin = np.log(start)
    logs, damping, pull = origin.copy(), 1e-2, np.sqrt(_PULL)

    def gaps(at: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return np.concatenate([np.log((amounts @ np.exp(at) + rest) / times), pull * (at - origin)])

    now = gaps(logs)
    for _ in range(200):
        parts = amounts * np.exp(logs)
        slopes = np.concatenate(
            [parts / (parts.sum(axis=1) + rest)[:, None], pull * np.eye(start.size)], dtype=np.float64
        )
        step = np.linalg.solve(slopes.T @ slopes + damping * np.eye(start.size), -slopes.T @ now)
        then = gaps(logs + np.clip(step, -2.0, 2.0))
        if then @ then < now @ now:
            logs, now, damping = logs + np.clip(step, -2.0, 2.0), then, max(damping / 3, 1e-9)
        else:
            damping *= 4
    return np.asarray(np.exp(logs))


# What is learned beside the model -------------------------------------------------------------------


def priced(found: Sequence[Seen], machine: MachineProfile) -> list[Sample]:
    """Seen steps beside what the model says with these constants."""
    pricer, call = Pricer(replace(machine, correction={})), machine.call_seconds
    result = []
    for step in found:
        if step.request is None:
            continue
        request = step.request
        price = pricer.chain(request) if isinstance(request, ChainRequest) else pricer.price(request)
        modelled, seen = (_beyond(seconds, call) for seconds in (price.uncorrected, step.seconds))
        result.append(Sample(price.kind, price.features, modelled, seen, step.graph))
    return result


def _beyond(seconds: float, call: float) -> float:
    """What a step takes beyond a call; a fifth of it at least, where the call is most of it."""
    return max(seconds - call, 0.2 * seconds, 1e-7)


def correction(found: Sequence[Sample]) -> dict[str, tuple[float, ...]]:
    """Coefficients for each kind of step where they help on graphs left out of the fit.

    A line in fewer features is kept where it does better there: few graphs teach few coefficients.
    """
    result = {}
    for kind in sorted({sample.kind for sample in found}):
        own = [sample for sample in found if sample.kind == kind]
        if len(own) < _LEAST_SAMPLES:
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
