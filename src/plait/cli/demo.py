"""plait demo: three models trained with PyG and with plait on a built-in graph."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING, Any

from plait.measure.progress import Meter
from plait.report.table import Table, bytes_text, ratio_text, seconds_text

if TYPE_CHECKING:
    from plait.bench.models import Trainer
    from plait.bench.task import Stack, Task

__all__ = ["add_arguments", "run"]

PEERS = {"pyg-default": "PyG", "pyg-csr": "PyG on torch CSR", "plait": "plait"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Size of the demonstration."""
    parser.add_argument("--epochs", type=int, default=50, help="training steps per model (default 50)")
    parser.add_argument("--num-nodes", type=int, default=6000, help="nodes of the graph (default 6000)")
    parser.add_argument("--num-threads", type=int, metavar="N", help="threads of torch and plait")


def run(args: argparse.Namespace) -> int:
    """Train, compare, explain."""
    from plait.bench.cases import MODELS
    from plait.bench.task import build_model, load_task
    from plait.cli.threads import use_threads
    from plait.errors import InputError
    from plait.graph import generate

    if args.epochs < 1:
        raise InputError(f"--epochs: {args.epochs}; train at least one")
    use_threads(args.num_threads)
    loaded = generate.sbm(args.num_nodes, classes=6, degree_in=10, degree_out=8, features=64)
    task = load_task(loaded, "sbm")
    print(
        f"built-in graph: {task.x.shape[0]:,} nodes, {task.edge_index.shape[1]:,} edges, "
        f"{task.x.shape[1]} features, {task.num_classes} classes; two layers, hidden width 64"
    )
    results = {}
    for kind in MODELS:
        model = build_model(kind, task.x.shape[1], task.num_classes)
        for peer in PEERS:
            results[kind, peer] = _train(kind, peer, model, task, args.epochs)
    print(f"\n{results['gcn', 'plait'].plan}\n")
    print(_table(results, args.epochs))
    return 0


class _Result:
    """What one training gave."""

    def __init__(self, seconds: float, loss: float, accuracy: float, peak_bytes: int, plan: Any) -> None:
        self.seconds, self.loss, self.accuracy = seconds, loss, accuracy
        self.peak_bytes, self.plan = peak_bytes, plan


def _train(kind: str, peer: str, model: Stack, task: Task, epochs: int) -> _Result:
    from plait.bench.models import prepare_trainer
    from plait.measure.memory import step_peak

    # off the clock: the first use of a kernel compiles it and keeps it on disk, later processes only load it
    prepare_trainer(peer, model, kind, task).step(task)()
    meter = Meter(f"{kind} with {PEERS[peer]}", epochs, sys.stderr)
    started = time.perf_counter()
    trainer = prepare_trainer(peer, model, kind, task)
    step = trainer.step(task)
    for _ in range(epochs):
        loss = step()
        meter.advance()
    seconds = time.perf_counter() - started
    meter.close()
    peak = step_peak(lambda: prepare_trainer(peer, model, kind, task).step(task)).tensor_bytes
    plan = getattr(trainer.module, "plan", None)
    return _Result(seconds, float(loss), _accuracy(trainer, task), peak, plan)


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
        title=f"{epochs} epochs, preparation included; ratios are to PyG as it comes",
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
