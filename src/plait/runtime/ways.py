"""Runs the layers that are programs: the cheapest way to compute one, bound to its graph once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from plait.graph import Graph
from plait.kernels import launch
from plait.plan.plan import LayerPlan
from plait.plan.ways import Way, choose
from plait.runtime import executor
from plait.runtime.again import now
from plait.runtime.constants import Constants, Objects
from plait.runtime.edges import Edges
from plait.runtime.problems import of_program
from plait.runtime.session import MANY_GRAPHS, Session

__all__ = ["Programs"]

_log = logging.getLogger("plait")

Ways = Callable[[tuple[str, ...] | None], Sequence[Way]]
"""The ways to compute a layer, by the names of the inputs that need gradients (None: inference)."""

Own = Callable[[str], Mapping[str, torch.Tensor]]
"""The inputs of a way alone, by its name: weights as it reads them."""


@dataclass(slots=True)
class Programs:
    """A layer that is a program, as one call brings it: its ways, and what they read besides their inputs.

    `key` tells apart what the ways depend on besides the inputs' shapes, and which of a way's own inputs need
    gradients. `sizes`: numbers of rows that programs name besides those of nodes and edges. `objects`: the
    graph's matrices other than A; `diagonals`: its constants, a number for every target.
    """

    layer: str
    key: tuple[Any, ...]
    ways: Ways
    own: Own | None = None
    objects: Objects | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    diagonals: Callable[[], Mapping[str, torch.Tensor]] = dict

    def value(
        self,
        session: Session,
        edges: Edges,
        inputs: Mapping[str, torch.Tensor],
        given: Mapping[str, Any] | None = None,
    ) -> torch.Tensor:
        """The value of the layer by its chosen way; `given`: arguments that are not tensors."""
        run = self.bound(session, edges, inputs)
        if self.own is not None:
            inputs = {**inputs, **self.own(run.plan.choice)}
        return executor.apply(run, inputs, given)

    def bound(self, session: Session, edges: Edges, inputs: Mapping[str, torch.Tensor]) -> executor.Run:
        """The layer planned for these inputs and bound to the graph."""
        with_grad = torch.is_grad_enabled()
        wrt = tuple([name for name, t in inputs.items() if with_grad and t.requires_grad])
        shapes = tuple([(name, t.shape) for name, t in inputs.items()])
        return self.run(session, edges, inputs["X"], wrt, shapes)

    def run(
        self, session: Session, edges: Edges, x: torch.Tensor, wrt: tuple[str, ...], shapes: Any = None
    ) -> executor.Run:
        """The same where the inputs are not known yet; without `shapes` the key says all about them."""
        layer = self.layer
        # a way's own inputs are not in wrt: without this a plan made under no_grad would serve training
        of_own = self.own is not None and torch.is_grad_enabled()
        key = (self.key, shapes, of_own)
        place = (layer, "program", key, wrt, None, x.dtype, x.device, launch.num_threads())
        run = edges.runs.get(place)
        earlier = None if now.call is None else now.call.plan()
        if earlier is not None and (run is None or run.plan is not earlier):
            return self._bind(session, edges, earlier, x)
        if run is None:
            run = self._bind(session, edges, self._plan(session, place, edges.graph, x, shapes), x)
            edges.remember(place, run)
        if now.call is not None:
            now.call.note(run.plan)
        if session.plans.get(layer) is not run.plan:
            session.plans[layer] = run.plan
        run.trace = session.trace
        return run

    def _bind(self, session: Session, edges: Edges, plan: LayerPlan, x: torch.Tensor) -> executor.Run:
        constants = Constants(edges.graph, None, self.diagonals(), x.dtype, objects=self.objects)
        may_replay = session.options.memory_limit is None
        return executor.Run(
            plan, constants, session.buffers, place=x.device, orders=edges.orders, may_replay=may_replay
        )

    def _plan(
        self, session: Session, place: tuple[Any, ...], graph: Graph, x: torch.Tensor, shapes: Any
    ) -> LayerPlan:
        """The plan for this graph or, once graphs come and go, the latest one for graphs of its size."""
        counts = {graph.num_nodes: "N", graph.num_sources: "M", graph.num_edges: "E"}
        others = {**self.sizes, **({} if self.objects is None else self.objects.sizes)}
        sizes = (graph.num_nodes, graph.num_sources, graph.num_edges, *others.values())
        # a graph a little larger may not fit a memory limit
        first = MANY_GRAPHS if session.options.memory_limit is None else None
        return session.by_size.plan(
            self.layer, place if shapes is None else _counted(place, counts), sizes,
            lambda: self._best(session, graph, x, place[3], others), first=first,
        )  # fmt: skip

    def _best(
        self, session: Session, graph: Graph, x: torch.Tensor, wrt: tuple[str, ...], sizes: Mapping[str, int]
    ) -> LayerPlan:
        """The cheapest way on this graph."""
        wanted = dict.fromkeys(wrt)
        if self.own is not None and torch.is_grad_enabled():
            # made to be asked whether they need gradients: a checkpoint must not see what they save
            has_hooks = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
            with torch.autograd.graph.saved_tensors_hooks(_same, _same) if has_hooks else nullcontext():
                found = [self.own(way.name) for way in self.ways(("X",))]
            wanted |= {name: None for more in found for name, t in more.items() if t.requires_grad}
        asked = tuple(wanted) or None
        problem = of_program(self.layer, graph, x, asked, self.objects, sizes, session.dial)
        plan = choose(problem, self.ways(asked))
        _log.debug("layer %s planned: predicted %.3g ms", self.layer, 1e3 * plan.seconds)
        return plan


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _counted(part: Any, counts: Mapping[int, str]) -> Any:
    """A key with numbers of nodes and edges by what they count, so that graphs of one size share it."""
    if isinstance(part, torch.Size):
        return (counts.get(part[0], part[0]), *part[1:]) if part else ()
    return tuple(_counted(inner, counts) for inner in part) if type(part) is tuple else part
