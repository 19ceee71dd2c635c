"""Calls on new graphs like a layer's last one: what may differ is compared in one function, then they run.

Where graphs are seen only once (pyg/once.py), each is another tensor of another size; the layer, the sort of
features and who observes the call stay. What pyg/repeated.py is to graphs that stay, this is to new ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from plait.errors import TypesError
from plait.pyg import recorded
from plait.pyg.active import Seat, Seats
from plait.pyg.listening import is_watched
from plait.pyg.once import Once, matrix_of
from plait.pyg.recall import Layer
from plait.pyg.repeated import are_like, may_be_changed
from plait.runtime.again import now
from plait.runtime.identity import identity
from plait.runtime.listed import program_of

__all__ = ["Relisted", "note_listed", "relisted"]


@dataclass(frozen=True, slots=True)
class Relisted:
    """A layer's last call on a graph seen only once, as far as the next one may differ from it."""

    layer: Layer
    how: Any  # what the layer does on an edge list, see pyg/once.py


def note_listed(
    seat: Seat, layer: Layer, listed: Once, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Note a call that ran on the edges as listed, for the next one."""
    if len(args) == 2 and not kwargs and now.call is None:
        seat.listed[torch.is_grad_enabled()] = Relisted(layer, listed.how)


def relisted(seats: Seats, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The result on a graph seen only once, as the layer's last; None: the call is looked at in full.

    Asked where neither tracers, autocast, several ranks nor hooks on saved tensors are on.
    """
    seat, with_grad = seats.of(module), torch.is_grad_enabled()
    last = seat.listed.get(with_grad)
    if last is None or len(args) != 2 or kwargs:
        return None
    x, edges = args
    session, layer, how = seats.session, last.layer, last.how
    aside = session.aside
    if type(x) is not Tensor or type(edges) is not Tensor or x.layout is not torch.strided:
        return None
    if not x.is_cpu or recorded.is_on_gpu(x):
        return None
    if is_watched() or torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return None
    if aside.is_trying or aside.notes or (with_grad and may_be_changed(seats, seat, x)):
        return None
    if not layer.is_as_it_was(module) or not are_like(layer.parameters, x.dtype):
        return None
    if not aside.is_off and not aside.is_over(seat.name, edges):
        return None  # it may be PyG's turn
    given = layer.given(how.lowered, module, x)
    if given is None or given is ...:
        return None
    recipe, values = given
    program = program_of(recipe.forms)
    if program is None or program.parts != how.diagonals:
        return None
    matrix = matrix_of(session, layer, how, x, edges, None, identity(edges), None)
    if matrix is None:
        return None
    aside.planned_in = aside.calls
    if session.not_planned:
        session.not_planned.pop(seat.name, None)
    try:
        return program.recalled(recipe, values, matrix)
    except TypesError:  # the call is looked at in full, and left to PyG
        return None
