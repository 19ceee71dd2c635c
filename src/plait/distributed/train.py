"""Mini-batch training over the parts of a graph: steps, evaluation, and where the time of an epoch goes."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch_geometric.nn import models

from plait.distributed.checkpoint import Checkpoints, Position
from plait.distributed.neighbor import NeighborLoader
from plait.distributed.session import Session
from plait.errors import InputError
from plait.pyg.compile import compile as compile_model
from plait.pyg.layered import Layered, can_be_layered

__all__ = ["MODELS", "EpochReport", "Trainer", "make_model", "of_all", "together"]

MODELS = {"sage": models.GraphSAGE, "gcn": models.GCN, "gin": models.GIN, "gat": models.GAT}


@dataclass(frozen=True)
class EpochReport:
    """One epoch of one rank, times in seconds.

    `seconds` is what passed. `stall`, `compute` and `all_reduce` are the main thread's and nearly add up to
    it; `sampling`, `look_up` and `exchange` (waiting for rows of other ranks) are those of the threads
    that prepare batches beside it. Bytes count what the exchanges of features and neighbours
    carried. `hit_rate` is that of the cache, over remote rows.
    """

    loss: float
    seconds: float
    sampling: float
    look_up: float
    exchange: float
    stall: float
    compute: float
    all_reduce: float
    bytes_in: float
    bytes_out: float
    hit_rate: float
    steps: float

    def values(self) -> list[float]:
        """All of them, as they travel."""
        return [float(getattr(self, field.name)) for field in fields(self)]


def make_model(name: str, width: int, hidden: int, layers: int, classes: int, dropout: float) -> nn.Module:
    """A model of PyG by its short name."""
    if name not in MODELS:
        raise InputError(f"model={name!r} is unknown; choose one of {', '.join(MODELS)}")
    model: nn.Module = MODELS[name](width, hidden, layers, classes, dropout=dropout)
    return model


class Trainer:
    """Trains `model` on the batches of `loader`; gradients are averaged over ranks after every step.

    All ranks start from rank 0's parameters. With `compiled` layers run planned by plait. Where the model
    allows it, every layer computes the rows that later ones read and no others.
    """

    def __init__(
        self,
        session: Session,
        model: nn.Module,
        loader: NeighborLoader,
        *,
        learning_rate: float = 0.01,
        compiled: bool = True,
    ) -> None:
        self.session, self.loader, self.model = session, loader, model
        self._is_layered = can_be_layered(model)
        shape: nn.Module = Layered(model) if self._is_layered else model
        self._run = compile_model(shape) if compiled else shape
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        if session.size > 1:
            for tensor in model.state_dict().values():
                dist.broadcast(tensor, 0)
        self._optimizer = torch.optim.Adam(self._parameters, lr=learning_rate)
        self.position = Position()
        self._checkpoints: Checkpoints | None = None

    def checkpoint(self, folder: str | os.PathLike[str], **options: Any) -> Position:
        """Resumes from the newest checkpoint in `folder`, keeps new ones there, and returns the position.

        `options` are those of `Checkpoints`. The next epoch begins with the batch after the last one done.
        """
        self._checkpoints = Checkpoints(folder, self.model, self._optimizer, **options)
        self.position = self._checkpoints.resume() or Position()
        self.loader.start_at(self.position.epoch, self.position.batch)
        return self.position

    def _done(self, loss: float) -> None:
        """Counts a finished step and saves a checkpoint when one is due."""
        at = self.position
        self.position = Position(at.epoch, at.batch + 1, at.step + 1, at.loss + loss)
        if self._checkpoints is not None:
            self._checkpoints.after_step(self.position)

    def epoch(self) -> EpochReport:
        """Trains one epoch, or what is left of it; returns this rank's report."""
        begin, before = time.perf_counter(), self._counted()
        compute, reduced, steps = 0.0, 0.0, 0
        trace, ended = self.session.exchange.trace, begin
        self._run.train()
        for batch in self.loader:
            started = time.perf_counter()
            if trace is not None:
                trace.add("stall", ended, started)
            loss = self._loss(batch)
            self._optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch's own lack
            reducing = time.perf_counter()
            self._average()
            averaged = time.perf_counter()
            self._optimizer.step()
            self._done(float(loss.detach()))
            ended = time.perf_counter()
            if trace is not None:
                trace.add("compute", started, reducing)
                trace.add("all-reduce", reducing, averaged)
                trace.add("optimizer", averaged, ended)
            reduced += averaged - reducing
            compute += ended - started - (averaged - reducing)
            steps += 1
        passed = time.perf_counter() - begin
        whole, self.position = self.position, Position(self.position.epoch + 1, 0, self.position.step)
        sampling, filling, waited, sent_in, sent_out, hits, requests = (
            now - then for now, then in zip(self._counted(), before, strict=True)
        )
        return EpochReport(
            whole.loss / max(1, whole.batch),
            passed,
            sampling,
            max(0.0, filling - waited),
            waited,
            self.loader.stalled_seconds,
            compute,
            reduced,
            sent_in,
            sent_out,
            hits / requests if requests else 0.0,
            steps,
        )

    @torch.no_grad()
    def accuracy(self, batches: NeighborLoader) -> float:
        """The share of correct predictions for the seeds of a loader without padding, over all ranks."""
        self._run.eval()
        right = seen = 0
        for batch in batches:
            out = self._seed_rows(batch)
            labels = batch.y[: batch.batch_size]
            right += int((out.argmax(dim=-1) == labels).sum())
            seen += int((labels >= 0).sum())
        right_of_all, seen_by_all = self.session.sums([right, seen])
        return right_of_all / seen_by_all if seen_by_all else 0.0

    def _seed_rows(self, batch: Any) -> Tensor:
        """The model's rows of the seeds of a batch."""
        if self._is_layered:
            by_hop = (batch.num_sampled_nodes, batch.num_sampled_edges)
            found: Tensor = self._run(batch.x, batch.edge_index, *by_hop)
            return found
        return self._run(batch.x, batch.edge_index)[: batch.batch_size]  # type: ignore[no-any-return]

    def _loss(self, batch: Any) -> Tensor:
        out = self._seed_rows(batch)
        labels = batch.y[: batch.batch_size]
        return nn.functional.cross_entropy(out, labels, ignore_index=-1)

    def _average(self) -> None:
        """Replaces the gradients by their mean over ranks, in one all-reduce."""
        if self.session.size == 1:
            return
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self._parameters]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        self.session.add(flat)
        flat /= self.session.size
        means = torch.split(flat, [gradient.numel() for gradient in gradients])
        for parameter, mean in zip(self._parameters, means, strict=True):
            parameter.grad = mean.view_as(parameter)

    def _counted(self) -> list[float]:
        """The counters an epoch is the difference of."""
        exchange, cache = self.session.exchange.counters, self.loader.cache
        assert cache is not None
        return [
            self.loader.seconds.sampling,
            self.loader.seconds.filling,
            exchange.waited_seconds,
            *self.session.traffic(),
            cache.counters.hits,
            cache.counters.requests,
        ]


def of_all(session: Session, report: EpochReport) -> list[EpochReport]:
    """The reports of every rank, on every rank."""
    return [EpochReport(*values) for values in session.gathered(report.values())]


def together(reports: Sequence[EpochReport]) -> EpochReport:
    """One report for all ranks: mean loss and hit rate, the longest of each time, the sum of bytes."""
    columns = dict(
        zip(
            (f.name for f in fields(EpochReport)),
            zip(*(r.values() for r in reports), strict=True),
            strict=True,
        )
    )
    mean = {name: sum(columns[name]) / len(reports) for name in ("loss", "hit_rate")}
    total = {name: sum(columns[name]) for name in ("bytes_in", "bytes_out")}
    longest = {
        name: max(values) for name, values in columns.items() if name not in mean and name not in total
    }
    return EpochReport(**mean, **total, **longest)
