"""One compiled model's memory: the graphs it has met, the plans it made for them, its buffers.

Graphs are recognised by the tensor that holds them (runtime/identity.py: nothing is hashed per call), plans
by expression, sizes and which inputs want gradients. What belongs to a tensor is dropped with it, and what
belongs to tensors that stay is bounded in bytes (runtime/budget.py): the least recently used goes first.
"""

from __future__ import annotations

import functools
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch

from plait.cost.machine import MachineProfile, gpu_profile, gpu_profile_path, load_profile
from plait.cost.price import uniform_matrix
from plait.errors import InputError
from plait.graph import Graph
from plait.ir import Dense, Diagonal, Expr, Scalar, Sparse, children, formula, leaves, rebuild
from plait.kernels import launch
from plait.kernels.compiled import cache_folder
from plait.ops.work import Matrix
from plait.plan.candidates import restrict
from plait.plan.plan import LayerPlan
from plait.plan.search import Problem, search
from plait.plan.ways import Way, choose
from plait.runtime import executor
from plait.runtime.aside import Aside
from plait.runtime.budget import bytes_in, cache_limit
from plait.runtime.buffers import Buffers
from plait.runtime.constants import Constants, Objects, SparseValue, from_dense
from plait.runtime.cuda_orders import PlacedOrders
from plait.runtime.deferred import Deferred, can_defer, held_rows
from plait.runtime.dial import Dial
from plait.runtime.forms import USUAL, Forms, adopt, with_form_text
from plait.runtime.identity import Hold
from plait.runtime.listings import Listings
from plait.runtime.lstm import Prefixes
from plait.runtime.orders import EdgeOrders
from plait.runtime.placed import PlacedGraph
from plait.runtime.plans import Plans
from plait.runtime.probe import machine_for
from plait.runtime.quotient import Quotient, Quotients
from plait.runtime.wanted import Wanted, WantedRows, check_unchanged, state_of
from plait.runtime.watched import Inputs, Numbers, Watched

__all__ = ["Edges", "Options", "Session", "Ways"]

_log = logging.getLogger("plait")

Ways = Callable[[tuple[str, ...] | None], Sequence[Way]]
"""The ways to compute a layer, by the names of the inputs that want gradients (None: inference)."""

Own = Callable[[str], Mapping[str, torch.Tensor]]
"""The inputs of a way alone, by its name: weights as it reads them."""

_MOST_GRAPHS = 16
_MOST_RUNS = 64
_MOST_WAYS = 512  # programs: a layer in pieces has up to six, in training and in inference
_MOST_CONSTANTS = 32
_MOST_CALLS = 512
_MOST_PLANS = 64  # for sizes of mini-batches
_LEFT = 0.75  # of the bytes allowed, after things were dropped
# bytes a graph and an operator's constants come to hold, guessed when they are made: with indices of four
# bytes the edges, the transpose, their orders and the same without loops; weights both ways round
_GRAPH_BYTES = {"edge": 48, "node": 48}
_CONSTANT_BYTES = {"edge": 24, "node": 24}
_MANY_GRAPHS = 4  # graphs from which on each is taken to come once, until it comes back
_MANY_WEIGHTS = 8  # weights on one graph, counted for each operator, from which on each is taken to come once
_IDENTITY = 7  # parts of a tensor's identity, with which the key of a graph begins
_TOKEN = 4  # where the key of a run says for which state of the input it was made
_MANY_WHOLES = 3  # results asked for all rows before `rows` may be taken to gain nothing
_DENSEST = 0.4  # non-zeros above this share are never worth a sparse view, whatever the machine


@dataclass(frozen=True)
class Options:
    """What the user asked of a compiled model."""

    rows: torch.Tensor | None = None  # row numbers the loss needs, for the last layer in training
    memory_limit: int | None = None
    calls: int = 200
    forms: tuple[str, ...] = USUAL
    cache_limit: int | None = None  # bytes of everything kept from call to call; None: see runtime/budget.py


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
    gone: list[Any] = field(default_factory=list)  # keys of constants whose weights are no more

    @functools.cached_property
    def orders(self) -> EdgeOrders:
        """The edges by target and by source."""
        if isinstance(self.graph, PlacedGraph):
            return cast(EdgeOrders, PlacedOrders(self.graph))  # its surface, on the device
        return EdgeOrders(self.graph)

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
        for other in alike[: -(_MOST_WAYS if is_program else _MOST_RUNS)]:
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


class Session:
    """Plans and runs the expressions of one compiled model."""

    def __init__(self, options: Options | None = None):
        self.options = options or Options()
        self.buffers = Buffers()
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
        self._gone: list[Any] = []  # keys of graphs whose tensors are no more
        self._bytes = 0  # kept since it was last counted, and what was counted then
        self._plans_by_size: OrderedDict[Any, tuple[tuple[Expr, ...], LayerPlan]] = OrderedDict()
        self._ways_by_size: OrderedDict[Any, tuple[int, LayerPlan]] = OrderedDict()
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
        """A copied model starts with empty caches: it may meet other graphs."""
        return type(self)(self.options)

    def __reduce__(self) -> Any:
        return type(self), (self.options,)

    # Graphs -----------------------------------------------------------------------------------

    def edges_for(
        self, key: Any, owners: tuple[Any, ...], build: Callable[[], tuple[Graph, torch.Tensor | None]]
    ) -> Edges:
        """The graph known by `key`, built when first met; the least recently used one is forgotten."""
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
        if isinstance(graph, PlacedGraph) and self._met < _MANY_GRAPHS:
            graph.is_read = not torch.cuda.is_current_stream_capturing()
        self._met += 1
        holds = tuple(Hold(owner, self._gone, key) for owner in owners)
        found = self.edges[key] = Edges(graph, holds, weight, key=key, remembered=self._calls)
        self._grow(_GRAPH_BYTES["edge"] * graph.num_edges + _GRAPH_BYTES["node"] * graph.num_nodes)
        return found

    def _forget_graph(self, key: Any) -> None:
        edges = self.edges.pop(key, None)
        for call in () if edges is None else list(edges.calls):
            self._calls.pop(call, None)

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

    def _grow(self, more: int) -> None:
        """Something of about so many bytes was kept; when that may be too much, it is counted and bounded."""
        self._bytes += more
        if self._bytes > self.cache_limit:
            self._shrink()

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

    # Graphs that come once --------------------------------------------------------------------

    def lists_edges(self) -> bool:
        """Whether a new graph is taken to come once, so that layers read its edges as they are listed."""
        return self._met >= _MANY_GRAPHS and self.lists_values()

    def lists_values(self) -> bool:
        """Whether a layer may run without a plan where what it is called with comes once."""
        return (
            self.trace is None
            and self.choose is search
            and not self.may_defer
            # a checkpoint runs a layer again and expects the same tensors to be saved
            and torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        )

    def has_sparse_view(self, x: torch.Tensor) -> bool:
        """Whether plans use the zeros of an input."""
        return self.watched.has_view(x)

    def say_listed(self) -> None:
        """Note in the plan that small graphs which come once are not planned for."""
        if not self._has_said_listed:
            self._has_said_listed = True
            self.notes.append(
                "new graphs: small ones that come once are summed in the order their edges are listed, "
                "without a plan; the plans above are for graphs that come back"
            )

    def find_forms(self) -> bool:
        """Look for other forms of the graphs planned so far; where one is found, plans are made anew."""
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
        """Run the layers on this graph by its twins, or not; plans made the other way are dropped."""
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
        for key in [key for key in self._plans_by_size if key[0] == layer]:
            del self._plans_by_size[key]
        for sized in [sized for sized in self._ways_by_size if sized[0][0] == layer]:
            del self._ways_by_size[sized]

    # Inputs that stay the same ----------------------------------------------------------------

    def watch(self, x: torch.Tensor) -> Watched | None:
        """The record of an input that is constant as far as anyone can tell, or None."""
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
        """Forget what was hoisted for inputs that are no more, or no more the same."""
        stale = set(self.watched.stale)
        self.watched.stale.clear()
        for edges in list(self.edges.values()):
            for known in (edges, edges.smaller):
                runs = {} if known is None else known.runs
                for key in [key for key in list(runs) if key[_TOKEN] in stale]:
                    runs.pop(key, None)

    def _sparse_view(self, seen: Watched, x: torch.Tensor) -> SparseValue | None:
        if not seen.is_examined:
            seen.is_examined = True
            if x.is_cpu and x.numel() and _density(x) <= _DENSEST:
                seen.sparse = from_dense(x)
                self._grow(2 * bytes_in(seen.sparse))
        return seen.sparse

    # Running ----------------------------------------------------------------------------------

    def apply(
        self,
        layer: str,
        edges: Edges,
        constants: Constants,
        forms: tuple[Expr, ...],
        inputs: Mapping[str, torch.Tensor | None],
    ) -> torch.Tensor:
        """The value of one planned expression of a layer."""
        rows = None if self.restricted_layer is None else self._wanted_rows(layer, constants)
        if rows is None and edges.quotients is not None and can_defer():
            expressions = with_identity_loops(forms, constants)
            found = edges.quotients.of(layer, constants, expressions, inputs["X"])
            if found is not None:
                return self._folded(layer, edges, constants, found, inputs)
        for value in inputs.values():
            if type(value) is Deferred:
                value.complete(layer)
        if rows is None:
            return self._apply(layer, edges, constants, forms, inputs)
        return self._wanted(layer, edges, constants, forms, inputs, rows)

    def _folded(
        self,
        layer: str,
        edges: Edges,
        constants: Constants,
        found: Quotient,
        inputs: Mapping[str, torch.Tensor | None],
    ) -> torch.Tensor:
        """One row for each class of twins: those of the whole input, or of one that is folded itself."""
        x = held_rows(inputs["X"], found.classes)
        if x is None:
            rows = found.classes.representatives
            return found.fold(self._apply(layer, edges, constants, found.forms, inputs, rows))
        if edges.smaller is None:
            edges.smaller = Edges(found.small.graph, ())
        kept = {**inputs, "X": x}
        return found.fold(self._apply(layer, edges.smaller, found.small, found.small_forms, kept))

    def _wanted_rows(self, layer: str, constants: Constants) -> WantedRows | None:
        """The rows the loss needs, where this layer computes only those; None for all."""
        if layer != self.restricted_layer or not torch.is_grad_enabled():
            return None
        if self._rows is None or len(self._rows.place) != constants.graph.num_nodes or not can_defer():
            return None
        return self._rows

    def _wanted(
        self,
        layer: str,
        edges: Edges,
        constants: Constants,
        forms: tuple[Expr, ...],
        inputs: Mapping[str, torch.Tensor | None],
        rows: WantedRows,
    ) -> torch.Tensor:
        """The rows the loss needs, as a matrix that computes the others when they are asked for."""
        if not any(isinstance(leaf, Sparse) for leaf in _leaves(forms[0]).values()):
            return self._apply(
                layer, edges, constants, forms, inputs
            )  # X @ W, of K = 0: no row costs another
        self._asked[0] += 1
        held = self._apply(layer, edges, constants, forms, inputs, rows.numbers)
        given = {name: value for name, value in inputs.items() if value is not None}
        weight = state_of(constants.weight)  # may be the user's own memory

        def compute(again: Mapping[str, torch.Tensor | None]) -> torch.Tensor:
            check_unchanged(constants.weight, weight)
            return self._apply(layer, edges, constants, forms, again)

        return Deferred.of(Wanted.of_layer(held, rows, compute, given, self._hear_of_whole))

    def _hear_of_whole(self, name: str) -> None:
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

    def _apply(
        self,
        layer: str,
        edges: Edges,
        constants: Constants,
        forms: tuple[Expr, ...],
        inputs: Mapping[str, torch.Tensor | None],
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The value of the expression, or its rows with these numbers."""
        given = {name: value for name, value in inputs.items() if value is not None}
        x = given["X"]
        with_grad = torch.is_grad_enabled()
        signature = tuple([(name, t.shape, with_grad and t.requires_grad) for name, t in given.items()])
        seen = self.watch(x)
        place = (layer, id(forms), id(constants), signature)
        wanted = None if rows is None else id(rows)
        numbers = None if seen is None else self._steady_numbers(layer, given)
        token = None if seen is None else seen.token
        key = (*place, token, wanted, numbers)
        run = edges.runs.get(key)
        if run is None:
            once = (*place, None, wanted, None)
            of_x = (*place, token, wanted, None)
            comes_once = self._met >= _MANY_GRAPHS and once not in edges.runs and of_x not in edges.runs
            run = self._planned(
                layer, edges, constants, forms, given, signature, seen, rows, numbers, comes_once
            )
            if comes_once:
                key = of_x if run.hoisted else once  # what reads a sparse view of this x serves no other
            edges.remember(key, run)
            self._grow(bytes_in(run.hoisted) + _constant_bytes(constants))
        if self.plans.get(layer) is not run.plan:
            self.plans[layer] = run.plan
        run.trace = self.trace
        return executor.apply(run, given)

    def _planned(
        self,
        layer: str,
        edges: Edges,
        constants: Constants,
        forms: tuple[Expr, ...],
        given: Mapping[str, torch.Tensor],
        signature: tuple[tuple[str, torch.Size, bool], ...],
        seen: Watched | None,
        rows: torch.Tensor | None,
        numbers: tuple[float, ...] | None,
        comes_once: bool,
    ) -> executor.Run:
        """The expression bound to the graph.

        While graphs come and go nothing is computed beforehand for one that may not come back, and its plan
        is that of the graphs of its size: of an input that stays the same only the sparse view is used.
        """
        sparse = None if seen is None else self._sparse_view(seen, given["X"])
        if comes_once and sparse is None:
            seen = None
        fixed = _fixed(seen, None if comes_once else numbers, given)
        whole = constants
        if rows is not None:
            constants = self._restricted(edges, constants, rows)
        if comes_once:
            plan = self._plan_by_size(layer, constants, forms, given, signature, sparse, fixed)
        else:
            plan = self._plan_by_graph(
                layer, edges, whole, constants, forms, given, signature, sparse, rows, fixed
            )
        may_replay = self.options.memory_limit is None
        run = executor.Run(plan, constants, self.buffers, place=given["X"].device, may_replay=may_replay)
        if seen is not None:
            self._hoist(run, given, sparse)
        return run

    def _plan_by_graph(
        self,
        layer: str,
        edges: Edges,
        whole: Constants,
        constants: Constants,
        forms: tuple[Expr, ...],
        given: Mapping[str, torch.Tensor],
        signature: tuple[tuple[str, torch.Size, bool], ...],
        sparse: SparseValue | None,
        rows: torch.Tensor | None,
        fixed: frozenset[str],
    ) -> LayerPlan:
        """The plan for this very graph; weights and the numbers in x may change from call to call."""
        place = (
            layer, id(forms), signature, fixed, id(constants.graph), whole.weight is None, whole.dtype,
            None if sparse is None else sparse.graph.num_edges.bit_length(),
            None if rows is None else id(rows), launch.num_threads(),
        )  # fmt: skip
        found = edges.plans.get(place)
        if found is None:
            plan = self._plan(layer, constants, forms, given, signature, sparse, fixed)
            while len(edges.plans) >= _MOST_PLANS:
                edges.plans.pop(next(iter(edges.plans)))
            found = edges.plans[place] = (forms, plan)
        return with_form_text(found[1], constants)

    def _plan_by_size(
        self,
        layer: str,
        constants: Constants,
        forms: tuple[Expr, ...],
        given: Mapping[str, torch.Tensor],
        signature: tuple[tuple[str, torch.Size, bool], ...],
        sparse: SparseValue | None,
        fixed: frozenset[str],
    ) -> LayerPlan:
        """The plan for graphs of this size, made for the first of them."""
        graph = constants.graph
        counts = {graph.num_nodes: "N", graph.num_sources: "M"}
        rows = constants.rows
        place = (
            layer, id(forms), fixed, constants.weight is None and constants.has_unit_loops,
            constants.weight is None, constants.dtype, launch.num_threads(),
            tuple([(name, counts.get(shape[0], shape[0]), shape[1:], wants) if shape else (name, wants)
                   for name, shape, wants in signature]),
            graph.num_nodes.bit_length(), graph.num_sources.bit_length(), graph.num_edges.bit_length(),
            None if sparse is None else sparse.graph.num_edges.bit_length(),
            None if rows is None else len(rows).bit_length(),
        )  # fmt: skip
        found = self._plans_by_size.get(place)
        if found is None:
            plan = self._plan(layer, constants, forms, given, signature, sparse, fixed, calls=1)
            while len(self._plans_by_size) >= _MOST_PLANS:
                self._plans_by_size.popitem(last=False)
            found = self._plans_by_size[place] = (forms, plan)
        return found[1]

    def _plan(
        self,
        layer: str,
        constants: Constants,
        forms: tuple[Expr, ...],
        given: Mapping[str, torch.Tensor],
        signature: tuple[tuple[str, torch.Size, bool], ...],
        sparse: SparseValue | None,
        fixed: frozenset[str],
        calls: int | None = None,
    ) -> LayerPlan:
        """The cheapest plan when what is hoisted serves so many calls; None: as many as the user said."""
        expressions = with_identity_loops(forms, constants)
        if constants.rows is not None:
            expressions = _restrict(expressions)
        wrt = tuple(name for name, _, wants in signature if wants) or None
        problem = Problem(
            forms=expressions,
            sizes=_sizes(expressions[0], given, constants, layer),
            matrices=constants.cost_matrix,
            machine=_machine(given["X"].device),
            wrt=wrt,
            constant=fixed,
            features={} if sparse is None else _feature_matrices(sparse, constants, calls != 1),
            float_bytes=given["X"].element_size(),
            threads=launch.num_threads() if given["X"].is_cpu else None,
            allowance=self.dial.share(layer, wrt is not None),
            calls=self.options.calls if calls is None else calls,
            layer=layer,
            may_chain=not isinstance(constants.graph, PlacedGraph),
        )
        plan = self.choose(problem)
        _log.debug("layer %s planned: predicted %.3g ms", layer, 1e3 * plan.seconds)
        return plan

    # Layers that are programs ------------------------------------------------------------------

    def lowered(
        self,
        layer: str,
        edges: Edges,
        key: tuple[Any, ...],
        inputs: Mapping[str, torch.Tensor],
        ways: Ways,
        given: Mapping[str, Any] | None = None,
        own: Own | None = None,
        objects: Objects | None = None,
        sizes: Mapping[str, int] | None = None,
        diagonals: Callable[[], Mapping[str, torch.Tensor]] = dict,
    ) -> torch.Tensor:
        """The value of a layer that is a program, whichever way it goes; `given`: what is no tensor."""
        run = self.bound(layer, edges, key, inputs, ways, own, objects, sizes, diagonals)
        if own is not None:
            inputs = {**inputs, **own(run.plan.choice)}
        return executor.apply(run, inputs, given)

    def bound(
        self,
        layer: str,
        edges: Edges,
        key: tuple[Any, ...],
        inputs: Mapping[str, torch.Tensor],
        ways: Ways,
        own: Own | None = None,
        objects: Objects | None = None,
        sizes: Mapping[str, int] | None = None,
        diagonals: Callable[[], Mapping[str, torch.Tensor]] = dict,
    ) -> executor.Run:
        """A layer that is a program, planned for these inputs and bound to the graph.

        `key` tells apart what its ways depend on beside the inputs' shapes, and which of a way's own inputs
        want gradients. `sizes`: numbers of rows that programs name beside those of nodes and edges.
        `objects`: the graph's matrices beside A; `diagonals`: its constants, a number for every target.
        """
        with_grad = torch.is_grad_enabled()
        wrt = tuple([name for name, t in inputs.items() if with_grad and t.requires_grad])
        shapes = tuple([(name, t.shape) for name, t in inputs.items()])
        return self.way(
            layer, edges, (key, shapes), inputs["X"], wrt, ways, own, objects, sizes, diagonals
        )  # fmt: skip

    def way(
        self,
        layer: str,
        edges: Edges,
        key: tuple[Any, ...],
        x: torch.Tensor,
        wrt: tuple[str, ...],
        ways: Ways,
        own: Own | None = None,
        objects: Objects | None = None,
        sizes: Mapping[str, int] | None = None,
        diagonals: Callable[[], Mapping[str, torch.Tensor]] = dict,
    ) -> executor.Run:
        """The same where the inputs are not known yet; `key`: all that the ways depend on."""
        place = (layer, "program", key, wrt, None, x.dtype, x.device, launch.num_threads())
        run = edges.runs.get(place)
        if run is None:
            plan = self._way(place, edges.graph, x, ways, own, objects, sizes or {})
            constants = Constants(edges.graph, None, diagonals(), x.dtype, objects=objects)
            may_replay = self.options.memory_limit is None
            run = executor.Run(
                plan, constants, self.buffers, place=x.device, orders=edges.orders, may_replay=may_replay
            )
            edges.remember(place, run)
        if self.plans.get(layer) is not run.plan:
            self.plans[layer] = run.plan
        run.trace = self.trace
        return run

    def _way(
        self,
        place: tuple[Any, ...],
        graph: Graph,
        x: torch.Tensor,
        ways: Ways,
        own: Own | None,
        objects: Objects | None,
        sizes: Mapping[str, int],
    ) -> LayerPlan:
        """The plan for this graph or, once graphs come and go, the latest one for graphs of its size."""
        counts = {graph.num_nodes: "N", graph.num_sources: "M", graph.num_edges: "E"}
        others = {**sizes, **({} if objects is None else objects.sizes)}
        all_sizes = (graph.num_nodes, graph.num_sources, graph.num_edges, *others.values())
        sized = (_by_size(place, counts), tuple([size.bit_length() for size in all_sizes]))
        count, plan = self._ways_by_size.get(sized, (0, None))
        # a graph a little larger may not fit a memory limit
        if plan is None or count < _MANY_GRAPHS or self.options.memory_limit is not None:
            plan = self._best_way(place[0], graph, x, place[3], ways, own, objects, others)
            while len(self._ways_by_size) >= _MOST_WAYS:
                self._ways_by_size.popitem(last=False)
            self._ways_by_size[sized] = (count + 1, plan)
        return plan

    def _best_way(
        self,
        layer: str,
        graph: Graph,
        x: torch.Tensor,
        wrt: tuple[str, ...],
        ways: Ways,
        own: Own | None,
        objects: Objects | None,
        sizes: Mapping[str, int],
    ) -> LayerPlan:
        wanted = dict.fromkeys(wrt)
        if own is not None and torch.is_grad_enabled():
            # made to be asked whether they want gradients: a checkpoint must not see what they save
            with torch.autograd.graph.saved_tensors_hooks(_same, _same):
                found = [own(way.name) for way in ways(("X",))]
            wanted |= {name: None for more in found for name, t in more.items() if t.requires_grad}
        asked = tuple(wanted) or None
        backward = graph.stats if graph.is_symmetric else graph.transpose.stats
        matrix = Matrix(
            graph.num_nodes, graph.num_sources, graph.num_edges, True, graph.stats, backward,
            graph.indices.dtype.itemsize,
        )  # fmt: skip
        problem = Problem(
            forms=(),
            sizes={"N": graph.num_nodes, "M": graph.num_sources, "E": graph.num_edges, **sizes},
            matrices=lambda expr: matrix if objects is None else _known(expr, matrix, objects),
            machine=_machine(x.device),
            wrt=asked,
            float_bytes=x.element_size(),
            threads=launch.num_threads() if x.is_cpu else None,
            allowance=self.dial.share(layer, bool(wrt)),
            layer=layer,
            may_chain=not isinstance(graph, PlacedGraph),
        )
        plan = choose(problem, ways(asked))
        _log.debug("layer %s planned: predicted %.3g ms", layer, 1e3 * plan.seconds)
        return plan

    def _steady_numbers(self, layer: str, given: Mapping[str, torch.Tensor]) -> tuple[float, ...] | None:
        """The numbers a layer is called with, where they do not keep changing."""
        scalars = [t for t in given.values() if t.dim() == 0]
        if any(not t.is_cpu for t in scalars):
            return None  # reading one would wait for the device
        numbers = tuple(t.item() for t in scalars)
        return numbers if not numbers or self._numbers.steady(layer, numbers) else None

    def _restricted(self, edges: Edges, constants: Constants, rows: torch.Tensor) -> Constants:
        key = (id(constants), id(rows))
        whole, restricted = edges.restricted.get(key, (None, None))
        if restricted is None or whole is not constants or restricted.rows is not rows:
            restricted = Constants(
                constants.graph, constants.weight, constants.diagonals, constants.dtype, rows
            )
            edges.restricted[key] = (constants, restricted)
        return restricted

    def _hoist(
        self, run: executor.Run, given: Mapping[str, torch.Tensor], sparse: SparseValue | None
    ) -> None:
        """Compute what stays the same now, sparse where the plan says so."""
        values: dict[str, Any] = {}
        plan = run.plan
        if "X" in plan.sparse_values:
            values["X"] = sparse
        with torch.no_grad():
            if plan.hoisted.steps:
                values.update(run.hoist(given))
        for name in plan.sparse_values:
            if name != "X":
                values[name] = from_dense(values[name])
        run.hoisted = values


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _by_size(part: Any, counts: Mapping[int, str]) -> Any:
    """A key with numbers of nodes and edges by what they count, so that graphs of one size share it."""
    if isinstance(part, torch.Size):
        return (counts.get(part[0], part[0]), *part[1:]) if part else ()
    return tuple(_by_size(inner, counts) for inner in part) if type(part) is tuple else part


def _known(expr: Expr, whole: Matrix, objects: Objects) -> Matrix:
    """What the cost model knows of a program's matrix."""
    name = formula(expr)
    return whole if name == "A" else objects.cost(name, whole)


def _is_earlier(key: Any, later: Any) -> bool:
    """Whether a graph is the same tensor's as it was before it was changed in place."""
    return bool(key[0] == later[0] and key[_IDENTITY:] == later[_IDENTITY:])


def _fixed(
    seen: Watched | None, numbers: tuple[float, ...] | None, given: Mapping[str, torch.Tensor]
) -> frozenset[str]:
    """Names of the inputs that are the same at every call; numbers come as tensors without dimensions."""
    if seen is None:
        return frozenset()
    scalars = () if numbers is None else (name for name, value in given.items() if value.dim() == 0)
    return frozenset({"X", *scalars})


def _constant_bytes(constants: Constants) -> int:
    """About what an operator's constants come to hold."""
    graph = constants.graph
    return _CONSTANT_BYTES["edge"] * graph.num_edges + _CONSTANT_BYTES["node"] * graph.num_nodes


_borrowed: list[MachineProfile] = []


def _machine(place: torch.device | None = None) -> MachineProfile:
    if _borrowed:
        return _borrowed[-1]
    return _own_machine() if place is None or place.type == "cpu" else _gpu(place.index or 0)


@functools.cache
def _gpu(index: int) -> MachineProfile:
    properties = torch.cuda.get_device_properties(index)
    path = gpu_profile_path(cache_folder(), properties.name)
    if path.exists():
        return load_profile(path)
    return gpu_profile(properties.name, (properties.major, properties.minor))


@functools.cache
def _own_machine() -> MachineProfile:
    return machine_for(cache_folder())


@contextmanager
def using_machine(machine: MachineProfile) -> Iterator[None]:
    """Plans made inside are priced with this profile."""
    _borrowed.append(machine)
    try:
        yield
    finally:
        _borrowed.pop()


def machine_in_use(place: torch.device | None = None) -> MachineProfile:
    """The profile plans are priced with, on a device or on the CPU."""
    return _machine(place)


def forget_machine() -> None:
    """Read the machine profile anew at the next plan (after a calibration)."""
    _own_machine.cache_clear()
    _gpu.cache_clear()


def _density(x: torch.Tensor) -> float:
    """The share of non-zeros, from whole rows spread over the matrix when it is large."""
    if x.numel() > 1 << 20:
        x = x[:: max(1, x.shape[0] // 256)]
    return float(torch.count_nonzero(x)) / max(1, x.numel())


def _feature_matrices(sparse: SparseValue, constants: Constants, may_spread: bool) -> dict[str, Matrix]:
    """The cost model's view of sparse features and, if wanted, of the features one propagation further."""
    graph = sparse.graph
    views = {"X": uniform_matrix(graph.num_nodes, graph.num_sources, graph.num_edges, True)}
    if not may_spread:
        return views
    spread = _spread_estimate(graph, constants.graph)
    if spread <= _DENSEST * graph.num_nodes * graph.num_sources:
        views["S^1 X"] = uniform_matrix(graph.num_nodes, graph.num_sources, spread, True)
    return views


def _spread_estimate(features: Graph, graph: Graph) -> int:
    """Non-zeros of the adjacency times the features, from the union of columns over a few sampled rows."""
    if graph.num_sources != features.num_nodes or graph.num_nodes == 0:
        return features.num_nodes * features.num_sources
    rows = np.unique(np.linspace(0, graph.num_nodes - 1, 64).astype(np.int64))
    count = 0
    for v in rows:
        nodes = np.append(graph.indices[graph.indptr[v] : graph.indptr[v + 1]][:256], v % features.num_nodes)
        count += len(
            np.unique(
                np.concatenate([features.indices[features.indptr[u] : features.indptr[u + 1]] for u in nodes])
            )
        )
    return int(count / len(rows) * graph.num_nodes)


@functools.lru_cache(maxsize=512)
def _identity_loops(forms: tuple[Expr, ...]) -> tuple[Expr, ...]:
    return tuple(_renamed(form) for form in forms)


def _renamed(expr: Expr) -> Expr:
    """Leaf l as i: loops that are all one, which keep a 0/1 matrix 0/1."""
    if isinstance(expr, Diagonal) and expr.name == "l":
        return Diagonal("i", expr.size, expr.role)
    parts = children(expr)
    return rebuild(expr, tuple(map(_renamed, parts))) if parts else expr


def with_identity_loops(forms: tuple[Expr, ...], constants: Constants) -> tuple[Expr, ...]:
    """The forms with loops that are all one named so: they keep a 0/1 matrix 0/1."""
    return _identity_loops(forms) if constants.weight is None and constants.has_unit_loops else forms


@functools.lru_cache(maxsize=128)
def _restrict(forms: tuple[Expr, ...]) -> tuple[Expr, ...]:
    rows = next(leaf.rows for leaf in leaves(forms[0]).values() if isinstance(leaf, Sparse))
    selection = Sparse("E", "Nr", rows)
    return tuple(restrict(form, selection) for form in forms)


_found_leaves: dict[int, tuple[Expr, dict[str, Any]]] = {}


def _leaves(expr: Expr) -> dict[str, Any]:
    """The leaves by name; found once for an expression, which is known by its identity: hashing walks it."""
    found = _found_leaves.get(id(expr))
    if found is None:
        if len(_found_leaves) >= _MOST_CALLS:
            _found_leaves.clear()
        found = _found_leaves[id(expr)] = (expr, dict(leaves(expr)))
    return found[1]


def _sizes(expr: Expr, given: Mapping[str, torch.Tensor], constants: Constants, layer: str) -> dict[str, int]:
    """Numbers for the symbolic sizes, read off the tensors; InputError where two of them disagree."""
    sizes: dict[str, int] = {}

    def bind(symbol: str | int, value: int, what: str) -> None:
        known = symbol if isinstance(symbol, int) else sizes.setdefault(symbol, value)
        if known != value:
            raise InputError(
                f"{layer}: {what} is {value}, but {symbol} is {known} elsewhere; "
                "check the widths of x and the layer"
            )

    for name, value in given.items():
        if value.dtype != given["X"].dtype:
            raise InputError(
                f"{layer}: x is {given['X'].dtype} but {name} is {value.dtype}; "
                "convert the model with .to(x.dtype), or x"
            )
    for name, leaf in _leaves(expr).items():
        if isinstance(leaf, Sparse) and name == "A":
            bind(leaf.rows, constants.graph.num_nodes, "the number of targets")
            bind(leaf.cols, constants.graph.num_sources, "the number of sources")
        elif isinstance(leaf, Sparse):
            assert constants.rows is not None
            bind(leaf.rows, len(constants.rows), "the number of selected rows")
        elif isinstance(leaf, Dense) and leaf.rows == 1:
            bind(leaf.cols, given[name].numel(), f"the width of {name}")
        elif isinstance(leaf, Dense):
            bind(leaf.rows, given[name].shape[0], f"the number of rows of {name}")
            bind(leaf.cols, given[name].shape[1], f"the width of {name}")
        elif isinstance(leaf, Scalar) and leaf.value is None and name not in given:
            raise InputError(f"{layer}: the scalar {name} is missing")
    return sizes
