"""Calls like a layer's last one: everything that may differ is compared in one function, then it runs.

Looking at a call in full (pyg/planned.py) goes through some twenty functions of Python, which on a small
graph take longer than the layer's products. What they would find again is compared here at once; where
anything differs, or needs a closer look, the call is looked at in full.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from plait.errors import TypesError
from plait.pyg import recorded
from plait.pyg.active import Seat, Seats
from plait.pyg.layers.fused import Ready
from plait.pyg.listening import is_watched
from plait.pyg.prepared import Prepared, is_narrow
from plait.pyg.recall import Layer
from plait.runtime import expressions
from plait.runtime.again import now
from plait.runtime.expressions import may_recall
from plait.runtime.identity import counts_writes, identity, is_identical

__all__ = ["Repeated", "are_like", "may_be_changed", "note", "note_ready", "repeated"]


@dataclass(frozen=True, slots=True)
class Repeated:
    """The last planned call of a layer in one mode, as far as the next one may differ from it."""

    layer: Layer
    run: weakref.ref[Prepared | Ready]  # the graph's answer: gone when the graph is forgotten
    shape: torch.Size
    dtype: torch.dtype
    edges: weakref.ref[Tensor]
    edges_identity: tuple[Any, ...]
    weight: weakref.ref[Tensor] | None
    weight_identity: tuple[Any, ...]
    size: tuple[bool, int, bool]  # calls that are timed against PyG together


def repeated(seats: Seats, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The result of a call like the last one; None: it has to be looked at in full.

    Asked where neither tracers, autocast, several ranks nor hooks on saved tensors are on.
    """
    seat = seats.of(module)
    last = seat.repeated.get(torch.is_grad_enabled())
    if last is None or len(args) < 2:
        return None
    x, edges = args[0], args[1]
    if type(x) is not Tensor or edges is not last.edges() or x.layout is not torch.strided:
        return None
    if not x.is_cpu or recorded.is_on_gpu(x):  # calls on a GPU are replayed instead
        return None
    run = last.run()
    if run is None or x.shape != last.shape or x.dtype is not last.dtype or _is_looked_at(seats, last):
        return None
    if not _has_its_weight(last, args, kwargs) or (last.size[0] and may_be_changed(seats, seat, x)):
        return None
    layer = last.layer
    if not layer.is_as_it_was(module) or not is_identical(edges, last.edges_identity):
        return None
    session = seats.session
    if not may_recall(session, run.edges) or not are_like(layer.parameters, x.dtype):
        return None
    if isinstance(run, Ready):
        _note_planned(seats, seat, run)
        seat.found = layer
        return run(module, x, edges)  # type: ignore[no-any-return]
    given = layer.given(run.lowered, module, x)
    if given is None or given is ...:
        return None
    _note_planned(seats, seat, run)
    recipe, values = given
    try:
        return expressions.recalled(
            session, run.name, run.edges, run.constants, recipe, values, x, run.latest
        )
    except TypesError:  # the call is looked at in full, and left to PyG
        return None


def _note_planned(seats: Seats, seat: Seat, run: Prepared | Ready) -> None:
    """The layer runs as planned on this graph, which is the one used last."""
    session = seats.session
    session.note_use(run.edges)
    session.aside.note_planned()
    if session.not_planned:
        session.not_planned.pop(seat.name, None)


def note(
    seats: Seats, seat: Seat, layer: Layer, run: Prepared | Ready, x: Any, edges: Any, weight: Tensor | None
) -> None:
    """Note a call that was recognised, for the next one; not while it may be timed against PyG."""
    if type(x) is not Tensor or type(edges) is not Tensor or not x.is_cpu or is_narrow(x):
        return
    aside = seats.session.aside
    if aside.may_be_pygs(edges) or (isinstance(run, Prepared) and run.lowered.keeps_graph):
        return
    seat.repeated[torch.is_grad_enabled()] = Repeated(
        layer, weakref.ref(run), x.shape, x.dtype, weakref.ref(edges), identity(edges),
        None if weight is None else weakref.ref(weight), () if weight is None else identity(weight),
        aside.size_of(edges),
    )  # fmt: skip


def note_ready(seats: Seats, seat: Seat, run: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """The same of a layer with passes of its own; its graph keeps how it is run."""
    ready, layer = getattr(run, "func", None), seat.found
    if not isinstance(ready, Ready) or layer is None or kwargs or len(args) != 2 or now.call is not None:
        return
    x, edges = args
    if not seats.session.meets_many_graphs and type(x) is Tensor:
        key = (layer.token, torch.is_grad_enabled(), x.shape, x.dtype)
        seats.session.keep(key, ready.edges, ready)
        note(seats, seat, layer, ready, x, edges, None)


def _is_looked_at(seats: Seats, last: Repeated) -> bool:
    """Whether somebody observes the call or computes it in another way, or it may be left to PyG."""
    session, aside = seats.session, seats.session.aside
    return (
        is_watched()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or session.has_twins
        or aside.is_trying
        or last.size in aside.notes
    )


def _has_its_weight(last: Repeated, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether the call comes with the edge weights it had, and nothing else."""
    if len(args) + len(kwargs) == 2:
        return last.weight is None
    if len(args) + len(kwargs) != 3 or last.weight is None:
        return False
    weight = args[2] if len(args) == 3 else kwargs.get("edge_weight")
    if not isinstance(weight, Tensor) or weight.requires_grad or weight is not last.weight():
        return False
    return is_identical(weight, last.weight_identity)


def may_be_changed(seats: Seats, seat: Seat, x: Tensor) -> bool:
    """Whether x may be written to before the backward pass, or without being counted."""
    if seat.given or not counts_writes(x):
        return True
    return seat.is_overwritten is not False and x is not seats.session.constant_input()


def are_like(parameters: list[torch.nn.Parameter], dtype: torch.dtype) -> bool:
    """Whether parameters lie on the CPU and are of this type: `.to()` may change that in place."""
    for parameter in parameters:  # noqa: SIM110  a generator takes longer, at every call of a layer
        if parameter.dtype is not dtype or not parameter.is_cpu:
            return False
    return True
