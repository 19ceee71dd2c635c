"""A step on a mini-batch as plait.distributed runs it: its price, or its seconds on this machine."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from plait.analysis.between import PASSES_SECONDS
from plait.analysis.growth import Batch, draw
from plait.cost.price import Pricer
from plait.graph import Graph
from plait.kernels import launch
from plait.pyg.beside import beside
from plait.pyg.call import Call, call_of
from plait.pyg.compile import compile as compile_model
from plait.pyg.edges import Demand, attach
from plait.pyg.layered import Layered, can_be_layered
from plait.pyg.layers.fused import layer_of
from plait.runtime.aside import SETTLED_AFTER
from plait.runtime.machine import machine_in_use
from plait.runtime.session import Session

__all__ = ["Batches"]

_EACH, _SMALLER = 3, 16  # batches of either size; a small one has so many times fewer seeds
# Turns before layers have settled on how to run, and turns that count: until a layer that is tried in PyG too
# is decided about (runtime/aside.py), every other block of steps is not what training will run.
_FIRST, _TIMED = math.ceil(SETTLED_AFTER / _EACH), 5
_LONGEST_SECONDS = 1.5  # of the turns before: with steps this long, plait's own are timed


@dataclass(frozen=True)
class Batches:
    """Batches of `size` random seeds for a model that takes features and edges and nothing else."""

    model: nn.Module
    data: Any
    graph: Graph
    size: int
    fanouts: Sequence[int | None]
    mode: str

    @property
    def can_run(self) -> bool:
        """Whether the model takes what a batch has."""
        if not self.data.x.is_cpu:
            return False
        return self._is_layered or call_of(self.model, self.data) == Call((self.data.x, self.data.edge_index))

    @property
    def _is_layered(self) -> bool:
        return can_be_layered(self.model) and len(self.fanouts) == len(self.model.convs)  # type: ignore[arg-type]

    def price(self) -> float:
        """The price of the model's layers and of what is outside them, on one batch."""
        pricer = Pricer(machine_in_use(), threads=launch.num_threads())
        run: nn.Module = Layered(self.model) if self._is_layered else self.model
        noted = beside(run, self._call(self._drawn(np.random.default_rng(0), self.size)), self.mode)
        parts = [op.seconds(pricer, launch.num_threads()) for ops in noted.after.values() for op in ops]
        python = PASSES_SECONDS * sum(layer_of(module) is not None for module in run.modules())
        return noted.plan_seconds + python + sum(ahead + behind for ahead, behind in parts)

    def seconds(self) -> tuple[float, float] | None:
        """Of a step with a copy of the model: those of every batch, and more for all nodes of a whole one.

        Medians, the loss, gradients and optimiser included. What a layer on a new graph costs beside its
        kernels is Python, and how it runs is found out by timing it: a price has neither. Whole and small
        batches take turns, as in an epoch, whose last batch is short. With one thread it is processor time,
        which other programs do not change. None where the model returns something else than a row for every
        node.
        """
        rng, demand = np.random.default_rng(0), Demand()
        sizes = [self.size] * _EACH + [max(1, self.size // _SMALLER)] * _EACH
        drawn = [self._drawn(rng, size) for size in sizes]
        with torch.random.fork_rng(devices=()):
            step = _Step(copy.deepcopy(self.model), self._is_layered, self.mode, self.size)
            ends = time.perf_counter() + _LONGEST_SECONDS
            for turn in range(_FIRST):
                if turn and time.perf_counter() > ends:
                    break
                if step.seconds(self, drawn[0], demand) is None:
                    return None
                for batch in drawn[1:]:
                    step.seconds(self, batch, demand)
            step.end_trials()
            took = [[step.seconds(self, batch, demand) for batch in drawn] for _ in range(_TIMED)]
        times: Any = np.array(took)
        small, whole = float(np.median(times[:, _EACH:])), float(np.median(times[:, :_EACH]))
        share = len(drawn[-1].nodes) / len(drawn[0].nodes)
        more = max(0.0, whole - small) / (1 - share) if share < 1 else 0.0
        return max(0.0, whole - more), min(more, whole)

    def _drawn(self, rng: np.random.Generator, size: int) -> Batch:
        count = self.graph.num_nodes
        return draw(self.graph, rng.choice(count, min(size, count), False), self.fanouts, rng)

    def _call(self, batch: Batch) -> Call:
        x = self.data.x[torch.from_numpy(batch.nodes)]
        edges = torch.from_numpy(np.stack((batch.source, batch.target)))
        hops = (batch.nodes_by_hop, batch.edges_by_hop) if self._is_layered else ()
        return Call((x, edges, *hops))

    def with_graph(self, batch: Batch, demand: Demand) -> tuple[Call, float]:
        """The call with an edge_index that carries its graph, as a loader's does; seconds of that."""
        call = self._call(batch)
        edges = call.args[1]
        pointer = np.searchsorted(batch.target, np.arange(sum(batch.nodes_by_hop[:-1]) + 1))
        begin = _now()
        attach(edges, edges[0].numpy(), pointer, len(batch.nodes), demand)
        return call, _now() - begin


class _Step:
    """One step of training, or one call without gradients."""

    def __init__(self, model: nn.Module, is_layered: bool, mode: str, size: int) -> None:
        self.is_training, self.size = mode == "training", size
        model.train(self.is_training)
        self.run = compile_model(Layered(model) if is_layered else model)
        learnt = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.Adam(learnt) if learnt and self.is_training else None

    def end_trials(self) -> None:
        """From now on no layer is tried in PyG: what was not decided yet is plait's."""
        session: Session = self.run._plait_plan_session  # type: ignore[assignment]
        session.aside.is_off = True

    def seconds(self, batches: Batches, batch: Batch, demand: Demand) -> float | None:
        call, attached = batches.with_graph(batch, demand)
        begin = _now()
        with torch.set_grad_enabled(self.is_training):
            out = call(self.run)
        if not isinstance(out, Tensor) or out.dim() != 2:
            return None
        if self.optimizer is not None:
            rows = out[: self.size]
            loss = functional.cross_entropy(rows, rows.new_zeros(rows.shape[0], dtype=torch.int64))
            self.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch's own lack
            self.optimizer.step()
        return attached + _now() - begin


def _now() -> float:
    """Processor seconds of this thread where it does all the work, else those that pass."""
    return time.thread_time() if launch.num_threads() == 1 else time.perf_counter()
