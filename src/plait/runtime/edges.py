"""One graph as a compiled model met it: its CSR, the constants of operators on it, the runs bound to it.

What belongs to the user's tensors is dropped with them; of the rest the oldest is dropped first.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from plait.graph import Graph
from plait.ir import Expr
from plait.plan.plan import LayerPlan
from plait.runtime import executor
from plait.runtime.constants import Constants
from plait.runtime.cuda_orders import PlacedOrders
from plait.runtime.identity import Hold
from plait.runtime.learned import Products
from plait.runtime.lstm import Prefixes
from plait.runtime.orders import EdgeOrders
from plait.runtime.placed import PlacedGraph
from plait.runtime.quotient import Quotients

__all__ = ["Edges"]

_MOST_RUNS = 64
_MOST_PROGRAMS = 512  # a layer in pieces has up to six, in training and in inference
_MOST_CONSTANTS = 32
_MANY_WEIGHTS = 8  # distinct weights on one graph and operator after which each is assumed to be used once


@dataclass
class Edges:
    """One graph as the model met it: what recognises it, the CSR, the constants of each operator on it."""

    graph: Graph
    owners: tuple[Hold, ...]  # of the user's tensors: what recognises them stays theirs
    weight: torch.Tensor | None = None  # values of a sparse matrix handed over as the graph
    constants: OrderedDict[Any, Constants] = field(default_factory=OrderedDict)
    runs: OrderedDict[Any, executor.Run] = field(default_factory=OrderedDict)
    plans: dict[Any, tuple[tuple[Expr, ...], LayerPlan]] = field(default_factory=dict)  # whatever the values
    quotients: Quotients | None = None  # its twins, where layers run on representatives
    smaller: Edges | None = None  # the graph between representatives
    restricted: dict[Any, tuple[Constants, Constants]] = field(default_factory=dict)  # (all rows, some)
    key: Any = None  # what the session knows it by
    calls: dict[Any, Any] = field(default_factory=dict)  # calls on it that are remembered, and their answers
    remembered: dict[Any, Edges] = field(default_factory=dict)  # the session's, of all graphs
    weights: dict[Any, Hold] = field(default_factory=dict)  # of the constants
    num_weights: int = 0  # weights that constants were made for so far
    gone: list[Any] = field(default_factory=list)  # keys of constants whose weights are gone
    products: dict[Graph, Products] = field(default_factory=dict)  # with weights that are inputs

    @functools.cached_property
    def orders(self) -> EdgeOrders:
        """The edges by target and by source."""
        if isinstance(self.graph, PlacedGraph):
            return cast(EdgeOrders, PlacedOrders(self.graph))  # its surface, on the device
        return EdgeOrders(self.graph)

    @functools.cached_property
    def listed(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(the listed edge at each place by target, the place of each listed edge); None where they agree."""
        order = self.graph.order
        if order is None:
            return None
        numbers = order if isinstance(order, torch.Tensor) else torch.from_numpy(order)
        places = torch.empty_like(numbers)
        places[numbers.long()] = torch.arange(len(numbers), dtype=numbers.dtype, device=numbers.device)
        return numbers, places

    @functools.cached_property
    def prefixes(self) -> Prefixes:
        """The neighbour lists as recurrent aggregators read them."""
        return Prefixes(self.graph)

    @property
    def meets_many_weights(self) -> bool:
        """Whether the weights on this graph keep changing."""
        return self.num_weights >= _MANY_WEIGHTS

    def keep_constants(self, key: Any, constants: Constants, weight: torch.Tensor | None) -> None:
        """Keep an operator's constants until the weights are gone; the oldest go when there are many."""
        if weight is not None:
            operator, _, dtype = key
            for other, hold in list(self.weights.items()):
                if hold() is weight and other[::2] == (operator, dtype):
                    self.drop_constants(other)  # as they were before they were changed in place
            self.weights[key] = Hold(weight, self.gone, key)
            self.num_weights += 1
        self.constants[key] = constants
        while self.gone:
            self.drop_constants(self.gone.pop())
        while len(self.constants) > _MOST_CONSTANTS:
            self.drop_constants(next(iter(self.constants)))

    def drop_constants(self, key: Any) -> None:
        """Forget an operator's constants and all that was made with them."""
        constants = self.constants.pop(key, None)
        self.weights.pop(key, None)
        if constants is None:
            return
        made = [(place, pair) for place, pair in list(self.restricted.items()) if pair[0] is constants]
        for place, _ in made:
            self.restricted.pop(place, None)
        mine = [constants, *(pair[1] for _, pair in made)]
        for place, run in list(self.runs.items()):
            if any(run.constants is c for c in mine):
                self.runs.pop(place, None)
        for call, answer in list(self.calls.items()):
            if getattr(answer, "constants", None) is constants:
                self.calls.pop(call, None)
                self.remembered.pop(call, None)

    def remember(self, key: Any, run: executor.Run) -> None:
        """Keep a run; the oldest goes when inputs keep changing, and what was hoisted for it with it."""
        self.runs[key] = run
        is_program = run.plan.expr is None
        alike = [other for other, kept in self.runs.items() if (kept.plan.expr is None) == is_program]
        for other in alike[: -(_MOST_PROGRAMS if is_program else _MOST_RUNS)]:
            del self.runs[other]

    def drop_oldest(self) -> bool:
        """Forget constants or a run, but for the latest; False where nothing else is left."""
        if len(self.constants) > 1:
            self.drop_constants(next(iter(self.constants)))
        elif len(self.runs) > 1:
            self.runs.popitem(last=False)
        else:
            return False
        return True
