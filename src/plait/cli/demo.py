"""plait demo: four models trained with PyG and with plait on a built-in graph."""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from plait.cli.options import add_threads, use_threads
from plait.errors import InputError
from plait.measure.environment import BusyElsewhere
from plait.measure.progress import progress
from plait.report.table import Table, bytes_text, ratio_text, seconds_text

if TYPE_CHECKING:
    from plait.bench.models import Trainer
    from plait.bench.task import Stack, Task

__all__ = ["add_arguments", "run"]

_NEXT = """Where to look next:
  plait explain --model gat --data sbm       the plan of another model; --data FILE.npz for your own graph
  plait explain ... --analyze                the measured time of every step next to its prediction
  plait calibrate                            prices for this machine instead of the built-in ones
  examples/                                  six models beside their PyG originals
  docs/coverage.md, docs/planning.md         what is planned, and how"""

_LEAST_NODES = 60  # ten of each class
PEERS = {"pyg-default": "PyG", "pyg-csr": "PyG on torch CSR", "plait": "plait"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Size of the demonstration."""
    parser.add_argument("--epochs", type=int, default=50, help="training steps per model (default 50)")
    parser.add_argument("--num-nodes", type=int, default=6000, help="nodes of the graph (default 6000)")
    add_threads(parser)


def run(args: argparse.Namespace) -> int:
    """Train, compare, explain."""
    from plait.bench.cases import EVERY_MODEL
    from plait.bench.task import build_model, load_task
    from plait.graph import generate

    if args.epochs < 1:
        raise InputError(f"--epochs: {args.epochs}; train at least one")
    if args.num_nodes < _LEAST_NODES:
        raise InputError(f"--num-nodes: {args.num_nodes}; the demonstration needs {_LEAST_NODES} or more")
    use_threads(args.num_threads)
    loaded = generate.sbm(args.num_nodes, classes=6, degree_in=10, degree_out=8, features=64)
    task = load_task(loaded, "sbm")
    print(
        f"built-in graph: {task.x.shape[0]:,} nodes, {task.edge_index.shape[1]:,} edges, "
        f"{task.x.shape[1]} features, {task.num_classes} classes; two layers, hidden width 64 (GAT: 8 heads)"
    )
    results: dict[tuple[str, str], _Result] = {}
    with BusyElsewhere() as busy:
        for kind in EVERY_MODEL:
            model = build_model(kind, task.x.shape[1], task.num_classes)
            results |= _train(kind, model, task, args.epochs)
    print(f"\n{results['gcn', 'plait'].plan}\n")
    for kind in EVERY_MODEL[1:]:
        print(f"  {kind:<6}{results[kind, 'plait'].plan!r}")
    print(f"\n{_table(results, args.epochs)}")
    print(f"\n{_NEXT}")
    if busy.share is not None and busy.share > 0.1:
        print(f"\nother processes used {100 * busy.share:.0f}% of the processor: times are too high")
    return 0


class _Result:
    """What one training gave."""

    def __init__(self, seconds: float, loss: float, accuracy: float, peak_bytes: int, plan: Any) -> None:
        self.seconds, self.loss, self.accuracy = seconds, loss, accuracy
        self.peak_bytes, self.plan = peak_bytes, plan


def _train(kind: str, model: Stack, task: Task, epochs: int) -> dict[tuple[str, str], _Result]:
    """Train one model with every peer, epoch by epoch in turn: a slow spell of the machine hits all.

    PyG has no attention on torch CSR: there the peer is left out.
    """
    from plait.bench.models import prepare_trainer
    from plait.measure.memory import step_peak

    names = tuple(peer for peer in PEERS if not (kind == "gat" and peer == "pyg-csr"))
    peaks, seconds, trainers, steps, losses = {}, dict.fromkeys(names, 0.0), {}, {}, {}
    for peer in names:
        # off the clock: the first use ever of a kernel compiles it; later processes load it from disk
        ready = functools.partial(_ready, prepare_trainer, peer, model, kind, task)
        peaks[peer] = step_peak(ready).tensor_bytes
        started = time.perf_counter()
        trainers[peer] = prepare_trainer(peer, model, kind, task)
        steps[peer] = trainers[peer].step(task)
        seconds[peer] += time.perf_counter() - started
    for _ in progress(epochs, f"{kind}: {', '.join(PEERS[n] for n in names)}", file=sys.stderr):
        for peer in names:
            started = time.perf_counter()
            losses[peer] = steps[peer]()
            seconds[peer] += time.perf_counter() - started
    return {
        (kind, peer): _Result(
            seconds[peer],
            float(losses[peer]),
            _accuracy(trainers[peer], task),
            peaks[peer],
            _training_plan(trainers[peer]),
        )
        for peer in names
    }


def _training_plan(trainer: Trainer) -> Any:
    """The plan a compiled model trained by; None for the peers."""
    plan = getattr(trainer.module, "plan", None)
    return None if plan is None else plan.training or plan


def _ready(
    prepare: Callable[..., Trainer], peer: str, model: Stack, kind: str, task: Task
) -> Callable[[], object]:
    return prepare(peer, model, kind, task).step(task)


def _accuracy(trainer: Trainer, task: Task) -> float:
    import torch

    if trainer.module is not None:
        trainer.module.eval()
    with torch.no_grad():
        guess = trainer.forward(task.x).argmax(dim=1)
    return float((guess == task.y)[task.test_mask].float().mean())


def _table(results: dict[tuple[str, str], _Result], epochs: int) -> Table:
    table = Table(
        ["model", "with", "test accuracy", "last loss", "time", "speed-up", "step memory", "memory ratio"],
        title=f"{epochs} epochs, preparation included; ratios are to PyG with its defaults",
    )
    for (kind, peer), result in results.items():
        base = results[kind, "pyg-default"]
        table.add(
            kind,
            PEERS[peer],
            f"{100 * result.accuracy:.1f}%",
            f"{result.loss:.4f}",
            seconds_text(result.seconds),
            ratio_text(base.seconds / result.seconds),
            bytes_text(result.peak_bytes),
            ratio_text(base.peak_bytes / result.peak_bytes) if result.peak_bytes else "-",
        )
    return table
