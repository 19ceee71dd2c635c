"""Whether a model's layers run on the representatives of twins: searched, checked, timed, decided."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from plait.errors import InputError
from plait.measure import time_calls
from plait.runtime.edges import Edges
from plait.runtime.forms import FEWEST_CALLS, MARGIN, UNION_SECONDS_PER_EDGE, gathered
from plait.runtime.placed import PlacedGraph
from plait.runtime.quotient import Quotients
from plait.runtime.session import Session

__all__ = ["find_twins"]

_SECONDS, _SECONDS_PER_NODE, _SECONDS_PER_EDGE = 0.005, 4e-7, 1e-8
"""The cost of searching for twins (tu_collab, one thread: 0.15 s for 24.6 M edges)."""
_LARGEST_SEARCH = 0.02  # of the run's seconds
_CHECK_SECONDS = 2.0
_LIKELY = 0.5
"""Part of what free sums would gain that a search for shared ones is assumed to find."""
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}
"""Largest difference, as a share of the largest entry, that another order of summation may leave."""

Call = Callable[..., Any]
"""Runs the model once; with backward=True its gradients too."""


def find_twins(session: Session, run: Call) -> None:
    """Let layers run on representatives where a timed step of the whole model says that it is faster.

    A model whose own code needs whole matrices in a way plait cannot detect would give other values or
    gradients, or fail; this is checked, and such a model keeps whole matrices.
    """
    forms = session.forms
    if "twins" not in forms.names or (forms.calls < FEWEST_CALLS and not forms.is_forced):
        return
    for edges in list(session.edges.values()):
        if not edges.runs or isinstance(edges.graph, PlacedGraph):
            continue  # no layer on this graph can run on representatives
        text = _not_worth_looking(session, edges)
        quotients = Quotients(edges.graph) if text is None else None
        if quotients is None or quotients.classes is None:
            if text is not None:
                session.notes.append(text)
            continue
        session.notes.append(_decide(session, edges, quotients, run))


def _not_worth_looking(session: Session, edges: Edges) -> str | None:
    if session.forms.is_forced:
        return None
    step = sum(run.plan.seconds for run in edges.runs.values())
    graph = edges.graph
    looking = _SECONDS + _SECONDS_PER_NODE * graph.num_nodes + _SECONDS_PER_EDGE * graph.num_edges
    if looking <= _LARGEST_SEARCH * step * session.forms.calls:
        return None
    calls = session.forms.calls
    return f"twins (equal neighbours) not searched for: the search costs more than {calls} steps would save"


def _decide(session: Session, edges: Edges, quotients: Quotients, run: Call) -> str:
    """Decide whether to use the twins; returns the reason in words."""
    assert quotients.classes is not None
    twins = quotients.classes.twins
    counts = f"{twins.num_nodes:,} nodes are {twins.num_classes:,} classes of twins"
    by_sums = _most_by_sums(edges)
    problem = _problem(session, edges, quotients, run)
    if problem is None and session.forms.is_forced:
        return f"form twins is forced: {counts}"
    if problem is None:
        whole, own = _timed(session, edges, quotients, run)
        gain = whole / own
        timed = f"a step is {gain:.2f}x as fast as without them"
        left_to_gain = session.forms.calls * (own - whole / by_sums)
        is_worth_a_search = _LIKELY * left_to_gain > UNION_SECONDS_PER_EDGE * edges.graph.num_edges
        if gain >= MARGIN and is_worth_a_search and _shares_sums(session, edges, run):
            whole, own = _timed(session, edges, quotients, run)
            gain = whole / own
            timed += f", {gain:.2f}x as fast as with shared sums"
        if gain >= MARGIN:
            session.use_twins(edges, quotients)
            run()
            layers, needed = ", ".join(sorted(quotients.layers)), ", ".join(sorted(quotients.wholes))
            needed = f"; whole matrices for {needed}" if needed else ""
            return f"form twins pays: {counts}; {timed}; {layers} run on them{needed}"
        problem = timed
    session.use_twins(edges, None)
    run()
    return f"form twins not used: {counts}, but {problem}"


def _problem(session: Session, edges: Edges, quotients: Quotients, run: Call) -> str | None:
    """Why the model does not give the same on representatives, if so; they are in use afterwards."""
    expected = run(backward=True)
    session.use_twins(edges, quotients)
    try:
        found = run(backward=True)
    except (RuntimeError, ValueError, TypeError, InputError) as error:
        return f"the model's own code fails on representatives ({str(error).splitlines()[0]})"
    if not quotients.layers:
        return "no layer gives twins equal rows whatever its input"
    if not _is_close(found, expected):
        return "the model's own code does not give the same on representatives"
    return None


def _most_by_sums(edges: Edges) -> float:
    """How much faster a step would be if the sums over neighbours took no time: no other form gains more."""
    plans = [run.plan for run in edges.runs.values()]
    everything = sum(plan.seconds for plan in plans)
    sums = sum(
        gathered(s)[1] for plan in plans for s in plan.steps if s.step.op in ("spmm", "chain", "extremum")
    )
    return everything / max(everything - sums, 1e-9)


def _shares_sums(session: Session, edges: Edges, run: Call) -> bool:
    """Whether another form of the whole graph is used, which is looked for now."""
    session.use_twins(edges, None)
    run()
    return session.find_forms()


def _timed(session: Session, edges: Edges, quotients: Quotients, run: Call) -> tuple[float, float]:
    """Seconds of a step of the model on whole matrices and on representatives, taken in turns.

    Both sides keep their plans between turns.
    """
    session.has_twins = True
    kept: dict[bool, Any] = {
        True: (quotients, None, type(edges.runs)()),
        False: (None, None, type(edges.runs)()),
    }

    def side(is_folded: bool) -> Callable[[], object]:
        def step() -> object:
            edges.quotients, edges.smaller, edges.runs = kept[is_folded]
            out = run(backward=True)
            kept[is_folded] = (edges.quotients, edges.smaller, edges.runs)
            return out

        return step

    timing = time_calls(
        {"whole": side(False), "twins": side(True)},
        warmup=1, min_repeats=3, max_repeats=9, budget_seconds=_CHECK_SECONDS, target_spread=0.02,
    )  # fmt: skip
    whole, twins = timing["whole"], timing["twins"]
    if whole.p20 / twins.p20 < whole.median / twins.median:
        return whole.p20, twins.p20
    return whole.median, twins.median


def _is_close(ours: Any, expected: Any) -> bool:
    if isinstance(expected, tuple | list):
        is_alike = type(ours) is type(expected) and len(ours) == len(expected)
        return is_alike and all(_is_close(a, b) for a, b in zip(ours, expected, strict=True))
    if not isinstance(ours, Tensor) or not isinstance(expected, Tensor):
        return type(ours) is type(expected)
    if ours.shape != expected.shape:
        return False
    if not ours.dtype.is_floating_point or not ours.numel():
        return bool(torch.equal(ours, expected))
    largest = float(expected.detach().abs().max()) or 1.0
    error = float((ours.detach() - expected.detach()).abs().max())
    return error <= _TOLERANCE.get(ours.dtype, 1e-4) * largest
