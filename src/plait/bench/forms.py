"""plait hag --all: does the planner's choice of a graph form ever lose against CSR, search included?

Every graph meets a layer in the middle of a model (its input needs a gradient), compiled with CSR alone and
with every usual form; a step is forward and backward. Unions of labelled graphs also train whole models,
two layers and a mean over each graph, compared with the peers.
"""

from __future__ import annotations

import copy
import functools
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch_geometric.data import Data

import plait
from plait.bench.cases import find_graph
from plait.bench.pace import clock
from plait.bench.peers import PEERS, SameAs, Unavailable, prepare
from plait.bench.problem import Forms, Problem, build_layer, edge_index_of, hidden_features
from plait.bench.task import adam_step
from plait.errors import InputError
from plait.graph import Graph, LoadedGraph
from plait.measure import BusyElsewhere, Record, append, environment, time_calls
from plait.pyg.probe import Probe

__all__ = ["EPOCHS", "KIND", "LAYERS", "LEAST", "FormCase", "Options", "graphs_in", "run", "train"]

KIND, KIND_TRAINING = "bench-forms", "bench-forms-training"
LAYERS = ("gcn", "gin", "sage-max")
WIDTH, EPOCHS = 64, 200
LEAST = 0.97
"""No choice may be slower than this share of CSR."""
_STEP_SECONDS = 2.0
_CURVE = 10


@dataclass(frozen=True)
class FormCase:
    """One cell: a layer or a model on a graph."""

    graph: str
    model: str
    width: int = WIDTH
    epochs: int = EPOCHS


@dataclass(frozen=True)
class Options:
    """What is measured and where it goes."""

    layers: Sequence[str] = LAYERS
    output: Path | None = None
    peers: Sequence[str] = ("pyg-csr", "dgl")
    environment: dict[str, object] = field(default_factory=environment)


def graphs_in(folder: str) -> list[Path]:
    """The graph files of a folder, smallest first: what fails, fails soon."""
    found = sorted(Path(folder).glob("*.npz"), key=lambda path: path.stat().st_size)
    if not found:
        raise InputError(f"--all: no npz files in {folder}; name the folder that holds the graphs")
    return found


def run(paths: Sequence[Path], options: Options) -> Iterator[Record]:
    """A record of every graph and layer, as each is taken."""
    _warm_up(options.layers)
    for path in paths:
        graph = find_graph(str(path)).graph
        for layer in options.layers:
            yield _kept(Record(KIND, asdict(FormCase(path.stem, layer)) | _facts(graph),
                               _compared(layer, graph), options.environment), options)  # fmt: skip
            gc.collect()


def train(path: Path, models: Sequence[str], options: Options) -> Iterator[Record]:
    """A record of every model trained on a union of labelled graphs, compared with the peers."""
    loaded = find_graph(str(path))
    _warm_up(models)
    for model in models:
        result = _trained(model, loaded, options)
        case = asdict(FormCase(path.stem, model)) | _facts(loaded.graph)
        yield _kept(Record(KIND_TRAINING, case, result, options.environment), options)
        gc.collect()


def _kept(record: Record, options: Options) -> Record:
    if options.output is not None:
        append(options.output, record)
    return record


def _facts(graph: Graph) -> dict[str, object]:
    return {"num_nodes": graph.num_nodes, "num_edges": graph.num_edges}


def _warm_up(layers: Sequence[str]) -> None:
    """Compile what compiles at first use, off the clock."""
    u, v = np.nonzero(1 - np.eye(8, dtype=int))
    graph = Graph.from_edge_index(np.concatenate([u, u + 8]), np.concatenate([v, v + 8]), 16)
    plait.hag.forecast(graph)
    for layer in layers:
        for forms in (["csr"], ["hag"]):
            _Side(layer, graph, forms).step()


class _Side:
    """A layer compiled for a graph with some forms allowed: its preparation timed, its step ready."""

    def __init__(self, layer: str, graph: Graph, forms: list[str] | None):
        self.edges = edge_index_of(graph)
        self.x = hidden_features(graph.num_nodes, WIDTH).requires_grad_()
        self.cotangent = torch.ones(graph.num_nodes, WIDTH)
        data = Data(x=self.x, edge_index=self.edges)
        started = _now()
        self.module: Any = plait.compile(
            build_layer(layer, WIDTH, WIDTH), data, epochs=EPOCHS, forms=forms, mode="training"
        )
        self.prepare_seconds = _now() - started

    def step(self) -> Tensor:
        """Forward and backward; the output."""
        self.x.grad = None
        self.module.zero_grad()
        out: Tensor = self.module(self.x, self.edges)
        out.backward(self.cotangent)  # type: ignore[no-untyped-call]
        return out.detach()

    def values(self) -> tuple[Tensor, Tensor]:
        """The output and the gradient of the input."""
        out = self.step()
        assert self.x.grad is not None
        return out, self.x.grad

    @property
    def has_twins(self) -> bool:
        """Whether it runs on the representatives of twins."""
        return Probe(self.module).has_twins

    def steps(self) -> list[tuple[str, str]]:
        """What the plan does, in order, and with what."""
        steps = [(s.step.op, s.price.backend) for layer in self.module.plan.layers for s in layer.steps]
        return [*steps, ("layer", "twins")] if self.has_twins else steps


def _compared(layer: str, graph: Graph) -> dict[str, object]:
    """Seconds of a step and of a run with CSR alone and as planned; equal plans are timed once."""
    csr, planned = _Side(layer, graph, ["csr"]), _Side(layer, graph, None)
    errors = [_difference(a, b) for a, b in zip(csr.values(), planned.values(), strict=True)]
    is_same = csr.steps() == planned.steps()
    sides = {"csr": csr} if is_same else {"csr": csr, "forms": planned}
    with BusyElsewhere() as busy:
        timings = time_calls(
            {name: side.step for name, side in sides.items()},
            warmup=1, budget_seconds=_STEP_SECONDS, clock=clock(),
        )  # fmt: skip
    lines: dict[str, dict[str, object]] = {}
    runs = []
    for name, side in (("csr", csr), ("forms", planned)):
        timing = timings.get(name, timings["csr"])
        runs.append(side.prepare_seconds + EPOCHS * timing.median)
        lines[name] = timing.to_dict() | {"prepare_seconds": side.prepare_seconds, "run_seconds": runs[-1]}
        lines[name]["backends"] = sorted({backend for _, backend in side.steps()})
    return {
        "sides": lines,
        "is_same_plan": is_same,
        "gain": 1.0 if is_same else timings["csr"].median / timings["forms"].median,
        "run_gain": runs[0] / runs[1],
        "error": errors[0],
        "gradient_error": errors[1],
        "notes": list(planned.module.plan.notes),
        "busy_elsewhere": busy.share,
    }


def _difference(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference, as a share of the largest entry."""
    return float((ours - theirs).abs().max()) / (float(theirs.abs().max()) or 1.0)


def _now() -> float:
    """Seconds by the clock that steps are timed with."""
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


# Whole models ------------------------------------------------------------------------------------------


class _Pooled(nn.Module):
    """Two layers, 64 wide, the mean over every graph of a union, a linear map to the classes."""

    def __init__(self, model: str, graph_ptr: Tensor, classes: int):
        super().__init__()
        self.first, self.second = (build_layer(model, WIDTH, WIDTH) for _ in range(2))
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.last = nn.Linear(WIDTH, classes)
        self.graph_ptr = graph_ptr

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.pooled(self.second(self.first(x, edge_index).relu(), edge_index))

    def pooled(self, h: Tensor) -> Tensor:
        """The classes' scores of the graphs."""
        mean = torch.segment_reduce(h.relu(), "mean", offsets=self.graph_ptr, axis=0)
        scores: Tensor = self.last(mean)
        return scores


def _trained(model: str, loaded: LoadedGraph, options: Options) -> dict[str, object]:
    labels = loaded.arrays.get("graph_y")
    if loaded.graph_ptr is None or labels is None:
        raise InputError(
            "--train: the file has no graph_ptr and graph_y; train on a union of labelled graphs"
        )
    y = torch.from_numpy(np.asarray(labels, np.int64))
    net = _Pooled(model, torch.from_numpy(np.asarray(loaded.graph_ptr, np.int64)), int(y.max()) + 1)
    x = hidden_features(loaded.graph.num_nodes, WIDTH)
    lines: dict[str, dict[str, object]] = {}
    steps: dict[str, Callable[[], Tensor]] = {}
    for name in ("csr", "forms", *options.peers):
        started = _now()
        try:
            forward, parameters, notes = _forward(name, net, model, loaded.graph, x)
        except (Unavailable, SameAs) as error:
            lines[name] = {"status": "missing", "reason": str(error)}
            continue
        steps[name] = adam_step(parameters, functools.partial(_loss, forward, y))
        lines[name] = {"prepare_seconds": _now() - started, "notes": notes}
    for name, step in steps.items():
        lines[name]["losses"] = [float(step()) for _ in range(_CURVE)]
    with BusyElsewhere() as busy:
        timings = time_calls(steps, warmup=0, min_repeats=3, budget_seconds=4 * _STEP_SECONDS, clock=clock())
    for name, timing in timings.items():
        lines[name] |= timing.to_dict()
        lines[name]["run_seconds"] = lines[name]["prepare_seconds"] + EPOCHS * timing.median  # type: ignore[operator]
    return {"sides": lines, "busy_elsewhere": busy.share}


def _loss(forward: Callable[[], Tensor], y: Tensor) -> Tensor:
    return cross_entropy(forward(), y)


def _forward(
    name: str, net: _Pooled, model: str, graph: Graph, x: Tensor
) -> tuple[Callable[[], Tensor], list[nn.Parameter], list[str]]:
    """A peer's forward pass on the task, the parameters Adam updates, and what its plan says."""
    own = copy.deepcopy(net)
    edges = edge_index_of(graph)
    if name not in PEERS:
        forms = ["csr"] if name == "csr" else None
        data = Data(x=x, edge_index=edges)
        fast: Any = plait.compile(own, data, epochs=EPOCHS, forms=forms, mode="training")
        return lambda: fast(x, edges), list(fast.parameters()), list(fast.plan.notes)
    shared = Forms(edges, graph.num_nodes, graph.is_symmetric)
    layers = (own.first, own.second)
    runners = [prepare(name, Problem(model, shared, WIDTH, WIDTH, conv), "training") for conv in layers]
    parameters = [p for runner in runners for p in runner.parameters] + list(own.last.parameters())
    return lambda: own.pooled(runners[1].forward(runners[0].forward(x).relu())), parameters, []
