"""plait bench models: whole two-layer models trained on real features, preparation included."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch_geometric.data import Data

import plait
from plait.bench import suite
from plait.bench.cases import EVERY_MODEL, find_graph, known
from plait.bench.peers import PEERS, UNTRIED, Unavailable, prepare
from plait.bench.peers.runner import share_times, tried
from plait.bench.problem import Forms, Problem
from plait.bench.suite import Suite, case_reader
from plait.bench.task import HIDDEN, Stack, Task, adam_step, build_model, load_task
from plait.bench.trial import fate
from plait.errors import InputError
from plait.measure import BusyElsewhere, Record, Timing, step_peak, time_calls

__all__ = [
    "DEFAULT", "KIND", "ModelCase", "Options", "Trainer", "cases", "left", "measure", "prepare_trainer",
    "run",
]  # fmt: skip

KIND = "bench-models"
DEFAULT = ("pyg-default", "pyg", "pyg-csr", "dgl", "dgl-ops", "plait")
REFERENCES = ("pyg-default", "pyg-csr")
# Losses of the first epochs must agree this closely before the clock starts; later ones are only reported,
# because rounding differences grow in training.
CHECKED_EPOCHS = 3
TOLERANCE = 1e-3


@dataclass(frozen=True, order=True)
class ModelCase:
    """One cell: a model trained on a graph for a number of epochs."""

    graph: str
    model: str
    epochs: int


@dataclass(frozen=True)
class Options(suite.Options):
    """How the models are trained and measured."""

    peers: Sequence[str] = DEFAULT
    repeats: int = 1
    memory: bool = False


@dataclass(frozen=True)
class Trainer:
    """A prepared model: its forward pass on the task's features and what Adam updates."""

    forward: Callable[[Tensor], Tensor]
    parameters: tuple[nn.Parameter, ...]
    module: nn.Module | None = None

    def step(self, task: Task) -> Callable[[], Tensor]:
        """One training step, ready to be called again and again; it returns the loss."""
        rows = task.train_rows
        wanted = task.y[rows]
        return adam_step(self.parameters, lambda: cross_entropy(self.forward(task.x)[rows], wanted))


def prepare_trainer(peer: str, model: Stack, kind: str, task: Task) -> Trainer:
    """What a user of this peer does between reading the file and the first step."""
    # a fresh tensor, so that nothing kept from an earlier run is found again
    edge_index = task.edge_index.clone()
    if peer == "plait":
        return _own_trainer(model, task, edge_index)
    layer = {"sage": "sage-mean"}.get(kind, kind)
    forms = Forms(edge_index, task.x.shape[0], task.is_symmetric)
    widths = ((task.x.shape[1], HIDDEN), (HIDDEN, task.num_classes))
    first, second = (
        prepare(peer, Problem(layer, forms, *pair, conv), "training")
        for conv, pair in zip(model.convs, widths, strict=True)
    )
    return Trainer(lambda x: second.forward(first.forward(x).relu()), first.parameters + second.parameters)


def _own_trainer(model: Stack, task: Task, edge_index: Tensor) -> Trainer:
    """plait.compile with the rows the loss needs."""
    data = Data(x=task.x, edge_index=edge_index, y=task.y)
    fast: Any = plait.compile(copy.deepcopy(model), data, rows=task.train_mask, mode="training")
    return Trainer(lambda x: fast(x, edge_index), tuple(fast.parameters()), fast)


def train(peer: str, model: Stack, kind: str, task: Task, epochs: int) -> list[float]:
    """Prepare and train from the model's weights, which stay as they are; the loss of every epoch."""
    step = prepare_trainer(peer, model, kind, task).step(task)
    return [float(step()) for _ in range(epochs)]


def cases(graphs: Sequence[str], models: Sequence[str], epochs: int) -> list[ModelCase]:
    """The grid, graph by graph."""
    chosen = [known("--models", model, EVERY_MODEL) for model in models]
    if epochs < 1:
        raise InputError(f"--epochs: {epochs}; train at least one")
    return [ModelCase(graph, model, epochs) for graph, model in itertools.product(graphs, chosen)]


def _take(cases: list[ModelCase], options: Options) -> Iterator[Record]:
    for name, group in itertools.groupby(cases, key=lambda case: case.graph):
        task = load_task(find_graph(name, options.data_dir), name)
        facts = {
            "num_nodes": task.x.shape[0],
            "num_edges": task.edge_index.shape[1],
            "num_features": task.x.shape[1],
            "num_train": int(task.train_mask.sum()),
        }
        for case in group:
            yield Record(KIND, asdict(case) | facts, measure(case, task, options), options.environment)
            gc.collect()


_SUITE = Suite(KIND, case_reader(ModelCase), _take)
run, left = _SUITE.run, _SUITE.left


def measure(case: ModelCase, task: Task, options: Options) -> dict[str, object]:
    """What every peer did with one case: seconds of the whole training, loss curve, difference to PyG's."""
    model = build_model(case.model, task.x.shape[1], task.num_classes)
    lines: dict[str, dict[str, object]] = {}
    reference, first_losses = _expected(model, case.model, task)
    for name in options.peers:
        lines[name] = _check(name, model, case.model, task, first_losses)
    curves: dict[str, list[float]] = {}

    def call(name: str) -> Callable[[], object]:
        def training() -> None:
            curves[name] = train(name, model, case.model, task, case.epochs)

        return training

    calls = {name: call(name) for name, line in lines.items() if line["status"] == "timed"}
    with BusyElsewhere() as busy:
        timings = (
            time_calls(calls, warmup=0, repeats=options.repeats, min_sample_seconds=0.0) if calls else {}
        )
    _fill(lines, timings, curves)
    if options.memory:
        for name in timings:
            lines[name] |= _memory(name, model, case.model, task)
    return {"peers": lines, "reference": reference, "busy_elsewhere": busy.share}


def _expected(model: Stack, kind: str, task: Task) -> tuple[str, list[float]]:
    """The first losses of the first reference that fits the memory, and its name."""
    for name in REFERENCES[:-1]:
        trial = _trial(name, model, kind, task)
        if trial is not None and fate(trial) is not None:
            continue
        with contextlib.suppress(Unavailable):
            return name, train(name, model, kind, task, CHECKED_EPOCHS)
    return REFERENCES[-1], train(REFERENCES[-1], model, kind, task, CHECKED_EPOCHS)


def _trial(name: str, model: Stack, kind: str, task: Task) -> Callable[[], object] | None:
    """An epoch of this peer, to be tried in a process of its own; None where it is not."""
    return None if name in UNTRIED else lambda: train(name, model, kind, task, 1)


def _check(name: str, model: Stack, kind: str, task: Task, expected: list[float]) -> dict[str, object]:
    """A few epochs off the clock: the losses must agree, and whatever compiles at first use has done so."""
    known("--peers", name, tuple(PEERS))
    losses, line = tried(
        lambda: train(name, model, kind, task, CHECKED_EPOCHS), _trial(name, model, kind, task),
        "first_use_seconds",
    )  # fmt: skip
    if losses is None:
        return line
    error_share = max(abs(a - b) / max(abs(b), 1e-6) for a, b in zip(losses, expected, strict=True))
    line["error"] = error_share
    if not error_share <= TOLERANCE:
        reason = f"losses of the first {CHECKED_EPOCHS} epochs differ by {error_share:.1e}"
        line |= {"status": "wrong", "reason": reason}
    return line


def _fill(
    lines: dict[str, dict[str, object]], timings: Mapping[str, Timing], curves: Mapping[str, list[float]]
) -> None:
    reference = next((curves[name] for name in REFERENCES if name in curves), None)
    for name, timing in timings.items():
        lines[name] |= timing.to_dict()
        lines[name]["losses"] = curves[name]
        if reference is not None:
            differences = (abs(a - b) for a, b in zip(curves[name], reference, strict=True))
            lines[name]["max_loss_difference"] = max(differences)
    share_times(lines)


def _memory(name: str, model: Stack, kind: str, task: Task) -> dict[str, object]:
    peak = step_peak(lambda: prepare_trainer(name, model, kind, task).step(task))
    return {"peak_tensor_bytes": peak.tensor_bytes, "peak_process_bytes": peak.process_bytes}
