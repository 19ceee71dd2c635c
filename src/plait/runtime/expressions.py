"""Runs the expressions of a layer: each planned for its graph and inputs, and bound to them, once.

Rows that a loss does not read and nodes that have twins are left out here, where a layer allows it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from plait.ir import Expr, Sparse
from plait.kernels import launch
from plait.plan.plan import LayerPlan
from plait.runtime import executor
from plait.runtime.again import now
from plait.runtime.budget import bytes_in
from plait.runtime.constants import Constants, SparseValue, from_dense
from plait.runtime.deferred import Deferred, can_defer, held_rows
from plait.runtime.edges import Edges
from plait.runtime.forms import with_form_text
from plait.runtime.latest import Latest
from plait.runtime.problems import Asked, known_leaves, with_identity_loops
from plait.runtime.quotient import Quotient
from plait.runtime.recipe import Recipe
from plait.runtime.session import Session
from plait.runtime.wanted import Wanted, WantedRows, check_unchanged, state_of
from plait.runtime.watched import Watched

__all__ = ["apply", "may_recall", "recalled"]

_log = logging.getLogger("plait")

_MOST_PLANS = 64  # of one graph
# bytes an operator's constants come to hold, guessed when they are made: weights both ways round
_CONSTANT_BYTES = {"edge": 24, "node": 24}

Inputs = Mapping[str, torch.Tensor | None]
Given = Mapping[str, torch.Tensor]


def apply(
    session: Session, layer: str, edges: Edges, constants: Constants, forms: tuple[Expr, ...], inputs: Inputs
) -> torch.Tensor:
    """The value of one planned expression of a layer."""
    rows = None
    # nothing is left for later inside a checkpoint: whether that pays may be decided before it runs again
    if session.restricted_layer is not None and now.call is None:
        rows = session.wanted_rows(layer, constants)
    if rows is None and edges.quotients is not None and now.call is None and can_defer():
        expressions = with_identity_loops(forms, constants)
        found = edges.quotients.of(layer, constants, expressions, inputs["X"])
        if found is not None:
            return _folded(session, layer, edges, constants, found, inputs)
    for value in inputs.values():
        if type(value) is Deferred:
            value.complete(layer)
    if rows is None:
        return _value(session, layer, edges, constants, forms, inputs)
    return _wanted(session, layer, edges, constants, forms, inputs, rows)


def _folded(
    session: Session, layer: str, edges: Edges, constants: Constants, found: Quotient, inputs: Inputs
) -> torch.Tensor:
    """One row for each class of twins: those of the whole input, or of one that is folded itself."""
    x = held_rows(inputs["X"], found.classes)
    if x is None:
        rows = found.classes.representatives
        return found.fold(_value(session, layer, edges, constants, found.forms, inputs, rows))
    if edges.smaller is None:
        edges.smaller = Edges(found.small.graph, ())
    kept = {**inputs, "X": x}
    return found.fold(_value(session, layer, edges.smaller, found.small, found.small_forms, kept))


def _wanted(
    session: Session,
    layer: str,
    edges: Edges,
    constants: Constants,
    forms: tuple[Expr, ...],
    inputs: Inputs,
    rows: WantedRows,
) -> torch.Tensor:
    """The rows the loss needs, as a matrix that computes the others when they are asked for."""
    if not any(isinstance(leaf, Sparse) for leaf in known_leaves(forms[0]).values()):
        return _value(session, layer, edges, constants, forms, inputs)  # X @ W of K = 0: no row costs another
    session.count_wanted()
    held = _value(session, layer, edges, constants, forms, inputs, rows.numbers)
    given = {name: value for name, value in inputs.items() if value is not None}
    weight = state_of(constants.weight)  # may be the user's own memory

    def compute(again: Inputs) -> torch.Tensor:
        check_unchanged(constants.weight, weight)
        return _value(session, layer, edges, constants, forms, again)

    return Deferred.of(Wanted.of_layer(held, rows, compute, given, session.hear_of_whole))


def _value(
    session: Session,
    layer: str,
    edges: Edges,
    constants: Constants,
    forms: tuple[Expr, ...],
    inputs: Inputs,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """The value of the expression, or its rows with these numbers."""
    given = {name: value for name, value in inputs.items() if value is not None}
    with_grad = torch.is_grad_enabled()
    signature = tuple([(name, t.shape, with_grad and t.requires_grad) for name, t in given.items()])
    seen = session.watch(given["X"])
    run = _run_of(session, layer, edges, constants, forms, signature, seen, lambda: given, rows)
    return executor.apply(run, given)


def may_recall(session: Session, edges: Edges) -> bool:
    """Whether an expression is evaluated on all rows, with nothing to follow or to leave for later."""
    return session.restricted_layer is None and edges.quotients is None and now.call is None


def recalled(
    session: Session,
    layer: str,
    edges: Edges,
    constants: Constants,
    recipe: Recipe,
    values: Sequence[torch.Tensor],
    x: torch.Tensor,
    latest: Latest,
) -> torch.Tensor:
    """The value of an expression whose inputs are known to be x, a layer's parameters and numbers."""
    with_grad, seen = torch.is_grad_enabled(), latest.watch(session, x)
    run = latest.run(recipe, values, seen, with_grad)
    if run is None:
        signature = tuple([
            (name, value.shape[::-1] if is_turned else value.shape, with_grad and value.requires_grad)
            for name, value, is_turned in zip(recipe.names, values, recipe.are_turned, strict=True)
        ])  # fmt: skip
        run = _run_of(
            session,
            layer,
            edges,
            constants,
            recipe.forms,
            signature,
            seen,
            lambda: recipe.given(values),
            None,
            bool(recipe.numbers),
        )
        if seen is None or run.serves == seen.token:
            latest.note(recipe, values, seen, with_grad, run)
    else:
        _say(session, layer, run)
    return executor.apply_to(run, recipe.stored, values)


def _run_of(
    session: Session,
    layer: str,
    edges: Edges,
    constants: Constants,
    forms: tuple[Expr, ...],
    signature: Any,
    seen: Watched | None,
    inputs: Callable[[], Given],
    rows: torch.Tensor | None,
    has_numbers: bool = True,
) -> executor.Run:
    """The expression planned for such inputs and bound to the graph.

    seen: the record of features that stay the same; has_numbers: some inputs may be scalars.
    """
    place = (layer, id(forms), id(constants), signature)
    wanted = None if rows is None else id(rows)
    numbers: tuple[float, ...] | None = None
    if seen is not None:
        numbers = session.steady_numbers(layer, inputs()) if has_numbers else ()
    token = None if seen is None else seen.token
    key = (*place, token, wanted, numbers)
    run = edges.runs.get(key)
    earlier = None if now.call is None else now.call.plan()
    if earlier is not None and (run is None or run.plan is not earlier):
        return _bound_again(session, earlier, constants, inputs())
    if run is None:
        once = (*place, None, wanted, None)
        of_x = (*place, token, wanted, None)
        comes_once = session.meets_many_graphs and once not in edges.runs and of_x not in edges.runs
        asked = Asked(layer, constants, forms, inputs(), signature)
        run = _planned(session, edges, asked, seen, rows, numbers, comes_once)
        if comes_once:
            key = of_x if run.hoisted else once  # what reads a sparse view of this x serves only this x
        edges.remember(key, run)
        session.grow((bytes_in(run.hoisted) if run.hoisted else 0) + _constant_bytes(constants))
    if now.call is not None:
        now.call.note(run.plan)
    _say(session, layer, run)
    return run


def _say(session: Session, layer: str, run: executor.Run) -> None:
    """The layer runs by this plan now, timed where someone asked for it."""
    if session.plans.get(layer) is not run.plan:
        session.plans[layer] = run.plan
    run.trace = session.trace


def _bound_again(
    session: Session, plan: LayerPlan, constants: Constants, given: Mapping[str, torch.Tensor]
) -> executor.Run:
    """A plan that a checkpoint's first run took, where there is another one by now."""
    run = executor.Run(plan, constants, session.buffers, place=given["X"].device, may_replay=False)
    if plan.hoisted.steps or plan.sparse_values:
        _hoist(run, given, from_dense(given["X"]) if "X" in plan.sparse_values else None)
    return run


def _planned(
    session: Session,
    edges: Edges,
    asked: Asked,
    seen: Watched | None,
    rows: torch.Tensor | None,
    numbers: tuple[float, ...] | None,
    comes_once: bool,
) -> executor.Run:
    """The expression bound to the graph.

    While graphs come and go nothing is computed beforehand for one that may not come back, and its plan
    is that of the graphs of its size: of an input that stays the same only the sparse view is used.
    """
    given, constants = asked.given, asked.constants
    sparse = None if seen is None else session.sparse_view(seen, given["X"])
    if comes_once and sparse is None:
        seen = None
    if rows is not None:
        constants = _restricted(edges, constants, rows)
    fixed = _fixed(seen, None if comes_once else numbers, given)
    asked = replace(asked, constants=constants, sparse=sparse, fixed=fixed)
    plan = _plan_by_size(session, asked) if comes_once else _plan_by_graph(session, edges, asked)
    may_replay = session.options.memory_limit is None
    run = executor.Run(plan, constants, session.buffers, place=given["X"].device, may_replay=may_replay)
    if seen is not None:
        run.serves = None if comes_once else seen.token
        _hoist(run, given, sparse)
    return run


def _plan_by_graph(session: Session, edges: Edges, asked: Asked) -> LayerPlan:
    """The plan for this very graph; weights and the numbers in x may change from call to call."""
    constants, sparse = asked.constants, asked.sparse
    place = (
        asked.layer, id(asked.forms), asked.signature, asked.fixed, id(constants.graph),
        constants.weight is None, constants.dtype,
        None if sparse is None else sparse.graph.num_edges.bit_length(),
        None if constants.rows is None else id(constants.rows), launch.num_threads(),
    )  # fmt: skip
    found = edges.plans.get(place)
    if found is None:
        plan = _plan(session, asked, session.options.calls)
        while len(edges.plans) >= _MOST_PLANS:
            edges.plans.pop(next(iter(edges.plans)))
        found = edges.plans[place] = (asked.forms, plan)
    return with_form_text(found[1], constants)


def _plan_by_size(session: Session, asked: Asked) -> LayerPlan:
    """The plan for graphs of this size, made for the first of them."""
    constants, sparse, rows = asked.constants, asked.sparse, asked.constants.rows
    graph = constants.graph
    counts = {graph.num_nodes: "N", graph.num_sources: "M"}
    place = (
        id(asked.forms), asked.fixed, constants.weight is None and constants.has_unit_loops,
        constants.weight is None, constants.dtype, launch.num_threads(), sparse is None, rows is None,
        tuple([(name, counts.get(shape[0], shape[0]), shape[1:], wants) if shape else (name, wants)
               for name, shape, wants in asked.signature]),
    )  # fmt: skip
    sizes = (
        graph.num_nodes, graph.num_sources, graph.num_edges,
        0 if sparse is None else sparse.graph.num_edges, 0 if rows is None else len(rows),
    )  # fmt: skip
    return session.by_size.plan(asked.layer, place, sizes, lambda: _plan(session, asked, 1), asked.forms)


def _plan(session: Session, asked: Asked, calls: int) -> LayerPlan:
    """The cheapest plan when what is hoisted serves this many calls."""
    plan = session.choose(asked.problem(session.dial, calls))
    _log.debug("layer %s planned: predicted %.3g ms", asked.layer, 1e3 * plan.seconds)
    return plan


def _fixed(
    seen: Watched | None, numbers: tuple[float, ...] | None, given: Mapping[str, torch.Tensor]
) -> frozenset[str]:
    """Names of the inputs that are the same at every call; numbers come as tensors without dimensions."""
    if seen is None:
        return frozenset()
    scalars = () if numbers is None else (name for name, value in given.items() if value.dim() == 0)
    return frozenset({"X", *scalars})


def _restricted(edges: Edges, constants: Constants, rows: torch.Tensor) -> Constants:
    key = (id(constants), id(rows))
    whole, restricted = edges.restricted.get(key, (None, None))
    if restricted is None or whole is not constants or restricted.rows is not rows:
        restricted = Constants(constants.graph, constants.weight, constants.diagonals, constants.dtype, rows)
        edges.restricted[key] = (constants, restricted)
    return restricted


def _hoist(run: executor.Run, given: Mapping[str, torch.Tensor], sparse: SparseValue | None) -> None:
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


def _constant_bytes(constants: Constants) -> int:
    """About what an operator's constants come to hold."""
    graph = constants.graph
    return _CONSTANT_BYTES["edge"] * graph.num_edges + _CONSTANT_BYTES["node"] * graph.num_nodes
