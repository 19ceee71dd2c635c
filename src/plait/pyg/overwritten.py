"""Inputs that a model writes to before the backward pass, as in `h += conv(h)`: the layer gets a copy.

A planned backward pass may read a layer's input where PyG's keeps a product of it and lets the input change.
Since it is unknown what a caller will do with it, a layer's input is copied until its first backward pass, or
the call after it, shows whether it was written to, and from then on only if it was.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from plait.pyg.active import Seat
from plait.runtime.identity import counts_writes

__all__ = ["copied", "may_be_overwritten", "ordinary"]

_MOST_COPIES = 32  # calls without a backward pass after which none is expected any more


def ordinary(value: Any) -> Any:
    """Copies of tensors made in inference_mode, which autograd does not accept; anything else unchanged."""
    if type(value) is tuple:
        return tuple(map(ordinary, value))
    is_copied = isinstance(value, Tensor) and value.is_floating_point() and not counts_writes(value)
    return value.clone() if is_copied else value


def may_be_overwritten(seat: Seat, x: Any, constant: Tensor | None) -> bool:
    """Whether the layer must be given a copy of x; `constant` is the input that is known to stay.

    Asked where gradients are recorded: without them nothing is read later.
    """
    if seat.given:
        _look(seat, seat.given, is_over=False)
        seat.given = []
    # torch counts no writes to what such hooks keep, as those of checkpoints do: a copy is the only safe way
    if seat.is_overwritten is False and torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        return False
    return any(type(value) is Tensor and value is not constant for value in _listed(x))


def copied(seat: Seat, x: Any, run: Callable[[Any], Any]) -> Any:
    """The layer's result on a copy of x; its backward pass will show whether later calls need one."""
    found = _listed(x)
    copies = {id(value): value.clone() for value in found if type(value) is Tensor}
    given = [copies.get(id(value), value) for value in found]
    out = run(given[0] if isinstance(x, Tensor) else tuple(given))
    made = out[0] if isinstance(out, tuple) else out
    if seat.is_overwritten is None and type(made) is Tensor and made.grad_fn is not None:
        seat.num_copied += 1
        if seat.num_copied >= _MOST_COPIES:
            seat.is_overwritten = False
        else:
            # an alias counts the same writes, and outlives what the caller drops after a call alone
            seat.given = [(v.detach(), _version(v)) for v in found if type(v) is Tensor]
            made.grad_fn.register_prehook(functools.partial(_before_backward, seat, seat.given))
    return out


def _listed(x: Any) -> list[Any]:
    return [x] if isinstance(x, Tensor) else [*x] if isinstance(x, tuple | list) else []


def _version(value: Any) -> int:
    return value._version if isinstance(value, Tensor) and counts_writes(value) else 0


def _before_backward(seat: Seat, given: list[tuple[Tensor, int]], _: Any) -> None:
    _look(seat, given, is_over=True)
    seat.given = []


def _look(seat: Seat, given: list[tuple[Tensor, int]], is_over: bool) -> None:
    """Note whether the layer's input was written to; if not and the call `is_over`, it will not be."""
    if any(_version(value) != version for value, version in given):
        seat.is_overwritten = True
    elif is_over and seat.is_overwritten is None:
        seat.is_overwritten = False
