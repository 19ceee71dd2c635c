"""The state of one compiled model: the graphs it has seen, constant inputs, plans and buffers.

Graphs are recognised by the tensor that holds them (runtime/identity.py: nothing is hashed per call). What
belongs to a tensor is dropped with it, and what belongs to tensors that stay is bounded in bytes
(runtime/budget.py): the least recently used goes first. Layers run in runtime/expressions.py and
runtime/ways.py.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from plait.graph import Graph
from plait.plan.plan import LayerPlan
from plait.plan.search import Problem, search
from plait.runtime.aside import Aside
from plait.runtime.budget import bytes_in, cache_limit
from plait.runtime.buffers import Buffers
from plait.runtime.constants import Constants, SparseValue, from_dense
from plait.runtime.deferred import can_defer
from plait.runtime.dial import Dial
from plait.runtime.edges import Edges
from plait.runtime.forms import USUAL, Forms, adopt, with_form_text
from plait.runtime.identity import Hold
from plait.runtime.listings import Listings
from plait.runtime.placed import PlacedGraph
from plait.runtime.plans import BySize, Plans
from plait.runtime.problems import DENSEST
from plait.runtime.project import Projector
from plait.runtime.quotient import Quotients
from plait.runtime.wanted import WantedRows
from plait.runtime.watched import Inputs, Numbers, Watched

__all__ = ["MANY_GRAPHS", "Options", "Session"]

MANY_GRAPHS = 4  # graphs from which on each is assumed to be seen only once, until it comes back
_MOST_GRAPHS = 16
_MOST_CALLS = 512
_LEFT = 0.75  # of the bytes allowed, after things were dropped
# bytes a graph comes to hold, guessed when it is made: with indices of four bytes the edges, the transpose,
# their orders and the same without loops
_GRAPH_BYTES = {"edge": 48, "node": 48}
_IDENTITY = 7  # parts of a tensor's identity, with which the key of a graph begins
_TOKEN = 4  # where the key of a run says for which state of the input it was made
_MANY_WHOLES = 3  # results asked for all rows before `rows` may be assumed to gain nothing


@dataclass(frozen=True)
class Options:
    """What the user asked of a compiled model."""

    rows: torch.Tensor | None = None  # row numbers the loss needs, for the last layer in training
    memory_limit: int | None = None
    calls: int = 200
    forms: tuple[str, ...] = USUAL
    cache_limit: int | None = None  # bytes of everything kept from call to call; None: see runtime/budget.py


class Session:
    """What one compiled model keeps from call to call."""

    def __init__(self, options: Options | None = None):
        self.options = options or Options()
        self.buffers = Buffers()
        self.project = Projector(self.buffers)
        self.edges: OrderedDict[Any, Edges] = OrderedDict()
        self.watched = Inputs()
        self._numbers = Numbers()
        self.aside = Aside()
        self.listings = Listings()
        self.num_calls = 0  # of the model
        self._has_said_listed = False
        self.shared: dict[Any, Any] = {}  # what the layers of one call of the model share
        self._calls: dict[Any, Edges] = {}  # calls seen before, and their graphs, which know the answers
        self._met = 0  # graphs built so far
        self._gone: list[Any] = []  # keys of graphs whose tensors are gone
        self._bytes = 0  # kept since it was last counted, and what was counted then
        self.by_size = BySize()
        self.plans = Plans()
        self.dial = Dial(self.options.memory_limit)
        if self.options.memory_limit is not None:
            self.buffers.limit_to(self.options.memory_limit)
        self.not_planned: dict[str, str] = {}
        self.constant_input: Callable[[], torch.Tensor | None] = lambda: None
        self.restricted_layer: str | None = None  # the layer whose rows `options.rows` are computed first
        self._rows: WantedRows | None = None
        self._asked = [0, 0]  # results of that layer, and how many of them were asked for all rows
        self.asked_by: str | None = None  # the function that asked last
        self.trace: list[tuple[str, Any]] | None = None
        self.choose: Callable[[Problem], LayerPlan] = search
        self.notes: list[str] = []
        self.forms = Forms(self.options.forms, self.options.calls)
        self.has_twins = False  # some layer's output may be folded
        self.over_ranks: Callable[..., Any] | None = None  # runs layers of which each rank has some rows

    def __deepcopy__(self, memo: dict[int, Any]) -> Session:
        """A copied model starts with empty caches: it may be used on other graphs."""
        return type(self)(self.options)

    def __reduce__(self) -> Any:
        return type(self), (self.options,)

    # Graphs -----------------------------------------------------------------------------------

    def edges_for(
        self, key: Any, owners: tuple[Any, ...], build: Callable[[], tuple[Graph, torch.Tensor | None]]
    ) -> Edges:
        """The graph with this key, built when first needed; the least recently used one is dropped."""
        while self._gone:
            self._forget_graph(self._gone.pop())
        found = self.edges.get(key)
        if found is not None:
            self.edges.move_to_end(key)
            return found
        while len(self.edges) >= _MOST_GRAPHS:
            self._forget_graph(next(iter(self.edges)))
        for other in [other for other in list(self.edges) if _is_earlier(other, key)]:
            self._forget_graph(other)
        graph, weight = build()
        if isinstance(graph, PlacedGraph) and self._met < MANY_GRAPHS:
            graph.is_read = not torch.cuda.is_current_stream_capturing()
        self._met += 1
        holds = tuple(Hold(owner, self._gone, key) for owner in owners)
        found = self.edges[key] = Edges(graph, holds, weight, key=key, remembered=self._calls)
        self.grow(_GRAPH_BYTES["edge"] * graph.num_edges + _GRAPH_BYTES["node"] * graph.num_nodes)
        return found

    def _forget_graph(self, key: Any) -> None:
        edges = self.edges.pop(key, None)
        if edges is None:
            return
        for call in list(edges.calls):
            self._calls.pop(call, None)
        edges.calls.clear()  # the answers hold their graph: in a cycle it would wait for the collector

    def keep(self, call: Any, edges: Edges, answer: Any) -> None:
        """Remember how a call on this graph is answered, until the graph is forgotten; None: do not."""
        if call is None:
            return
        while len(self._calls) >= _MOST_CALLS:
            oldest = next(iter(self._calls))
            self._calls.pop(oldest).calls.pop(oldest, None)
        self._calls[call] = edges
        edges.calls[call] = answer

    def recall(self, call: Any) -> Any:
        """The answer to such a call, or None."""
        edges = self._calls.get(call)
        if edges is None:
            return None
        try:
            self.edges.move_to_end(edges.key)
        except KeyError:  # another thread's graph took its place just now
            return None
        return edges.calls.get(call)

    def note_use(self, edges: Edges) -> None:
        """This graph is the most recently used one."""
        if len(self.edges) > 1 and edges.key in self.edges:
            self.edges.move_to_end(edges.key)

    # Memory -----------------------------------------------------------------------------------

    @functools.cached_property
    def cache_limit(self) -> int:
        """Bytes that may be kept from call to call."""
        return cache_limit(self.options.cache_limit)

    @property
    def cache_bytes(self) -> int:
        """Bytes that are kept from call to call now: graphs, constants, hoisted values, views, buffers."""
        kept = bytes_in(list(self.edges.values()), self.watched.views(), self.listings)
        return kept + self.buffers.bytes_held

    def grow(self, more: int) -> None:
        """About this many more bytes are kept; if that may be too much, everything is counted and bounded."""
        self._bytes += more
        if self._bytes > self.cache_limit:
            self._shrink()
            self._bytes = min(self._bytes + more, self.cache_limit)  # it may not have its place yet

    def _shrink(self) -> None:
        """Drop what was used least recently: whole graphs, then what belongs to the latest one."""
        most = int(_LEFT * self.cache_limit)
        if self.cache_bytes > most:
            self.buffers.trim()
        while self.cache_bytes > most and self._drop_oldest():
            pass
        if self.cache_bytes > most:
            self.watched.drop_views()
        # what is in use stays, however large; it is not counted again until more was kept
        self._bytes = min(most, self.cache_bytes)

    def _drop_oldest(self) -> bool:
        if len(self.edges) > 1:
            self._forget_graph(next(iter(self.edges)))
            return True
        return any(edges.drop_oldest() for edges in list(self.edges.values()))

    # Graphs seen only once --------------------------------------------------------------------

    @property
    def meets_many_graphs(self) -> bool:
        """Whether a new graph is assumed to be seen only once."""
        return self._met >= MANY_GRAPHS

    def lists_edges(self) -> bool:
        """Whether layers read the edges of a new graph unsorted."""
        return self._met >= MANY_GRAPHS and self.lists_values()

    def lists_values(self) -> bool:
        """Whether a layer may run without a plan on inputs seen only once."""
        return (
            self.trace is None
            and self.choose is search
            and not (self.has_twins or self.restricted_layer is not None)  # `may_defer`, inline
            # a checkpoint runs a layer again and expects the same tensors to be saved
            and torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        )

    def has_sparse_view(self, x: torch.Tensor) -> bool:
        """Whether plans use the zeros of an input."""
        return self.watched.has_view(x)

    def say_listed(self) -> None:
        """Note in the plan that small graphs seen only once are not planned for."""
        if not self._has_said_listed:
            self._has_said_listed = True
            self.notes.append(
                "new graphs: small ones seen only once are summed in the order of their edge list, "
                "without a plan; the plans above are for graphs seen again"
            )

    def find_forms(self) -> bool:
        """Look for other forms of the graphs planned so far; where one is found, plans are made again."""
        known = [*self.edges.values(), *(e.smaller for e in self.edges.values() if e.smaller is not None)]
        changed = [edges for edges in known if adopt(self.forms, edges.runs.values())]
        for edges in changed:
            edges.runs.clear()
            edges.plans.clear()
        for run in (run for edges in known for run in edges.runs.values()):
            before, run.plan = run.plan, with_form_text(run.plan, run.constants)
            if self.plans.get(before.layer) is before:
                self.plans[before.layer] = run.plan
        return bool(changed)

    def use_twins(self, edges: Edges, quotients: Quotients | None) -> None:
        """Run the layers on this graph with its twins, or without; plans made otherwise are dropped."""
        edges.quotients, edges.smaller = quotients, None
        edges.runs.clear()
        edges.plans.clear()
        self.has_twins = any(known.quotients is not None for known in self.edges.values())

    def forget(self, layer: str) -> None:
        """Drop the plans of a layer that will run another way."""
        known = [*self.edges.values(), *(e.smaller for e in self.edges.values() if e.smaller is not None)]
        for edges in known:
            for kept in (edges.runs, edges.plans):
                for key in [key for key in kept if key[0] == layer]:
                    del kept[key]
        self.by_size.forget(layer)

    # Inputs that stay the same ----------------------------------------------------------------

    def watch(self, x: torch.Tensor) -> Watched | None:
        """The record of an input that appears to be constant, or None."""
        if x.requires_grad or x.grad_fn is not None:
            return None
        is_given = self.constant_input() is x
        has_hooks = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        if has_hooks and not is_given:
            return None  # checkpointing runs a layer twice and counts on the same tensors being saved
        seen = self.watched.look(x, is_given)
        if self.watched.stale:
            self._drop_stale()
        return seen

    def _drop_stale(self) -> None:
        """Forget what was hoisted for inputs that are gone or have changed."""
        stale = set(self.watched.stale)
        self.watched.stale.clear()
        for edges in list(self.edges.values()):
            for known in (edges, edges.smaller):
                runs = {} if known is None else known.runs
                for key in [key for key in list(runs) if key[_TOKEN] in stale]:
                    runs.pop(key, None)

    def sparse_view(self, seen: Watched, x: torch.Tensor) -> SparseValue | None:
        """The non-zeros of such an input, where there are few."""
        if not seen.is_examined:
            seen.is_examined = True
            if x.is_cpu and x.numel() and _density(x) <= DENSEST:
                seen.sparse = from_dense(x)
                self.grow(2 * bytes_in(seen.sparse))
        return seen.sparse

    def steady_numbers(self, layer: str, given: Mapping[str, torch.Tensor]) -> tuple[float, ...] | None:
        """The numbers a layer is called with, where they do not keep changing."""
        scalars = [t for t in given.values() if t.dim() == 0]
        if any(not t.is_cpu for t in scalars):
            return None  # reading one would wait for the device
        numbers = tuple(t.item() for t in scalars)
        return numbers if not numbers or self._numbers.steady(layer, numbers) else None

    # Rows that are needed first ------------------------------------------------------------------

    def wanted_rows(self, layer: str, constants: Constants) -> WantedRows | None:
        """The rows the loss needs, where this layer computes only those; None for all."""
        if layer != self.restricted_layer or not torch.is_grad_enabled():
            return None
        if self._rows is None or len(self._rows.place) != constants.graph.num_nodes or not can_defer():
            return None
        return self._rows

    def count_wanted(self) -> None:
        """Note that some rows of a result were computed first."""
        self._asked[0] += 1

    def hear_of_whole(self, name: str) -> None:
        """Stop computing some rows first where all of them are asked for most of the time."""
        self._asked[1] += 1
        self.asked_by = name
        calls, wholes = self._asked
        if wholes >= _MANY_WHOLES and 2 * wholes > calls:
            self.stop_restricting(f"{name} asks for all rows")

    def restrict(self, layer: str, num_nodes: int) -> None:
        """Let this layer compute the rows the loss needs first, on graphs of this many nodes."""
        assert self.options.rows is not None
        self.restricted_layer, self._rows = layer, WantedRows(self.options.rows, num_nodes)
        self._asked, self.asked_by = [0, 0], None

    @property
    def may_defer(self) -> bool:
        """Whether a layer's result may be one that computes some of its rows later."""
        return self.has_twins or self.restricted_layer is not None

    def stop_restricting(self, reason: str) -> None:
        """Compute all rows at once again, with the reason in the plan."""
        if self.restricted_layer is not None:
            self.restricted_layer = None
            self.notes.append(f"rows= is not used: {reason}")


def _is_earlier(key: Any, later: Any) -> bool:
    """Whether a graph is the same tensor's as it was before it was changed in place."""
    return bool(key[0] == later[0] and key[_IDENTITY:] == later[_IDENTITY:])


def _density(x: torch.Tensor) -> float:
    """The share of non-zeros, from whole rows spread over the matrix when it is large."""
    if x.numel() > 1 << 20:
        x = x[:: max(1, x.shape[0] // 256)]
    return float(torch.count_nonzero(x)) / max(1, x.numel())
