"""Activation checkpointing: what ran planned must run planned again when the backward pass asks for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from plait.pyg.active import Seats, active, entered

__all__ = ["in_checkpoint", "may_run_again", "note_in_pyg", "ran_in_pyg"]

_FORWARD = "_checkpoint_hook."  # the class in torch.utils.checkpoint whose hooks pack the first time


def in_checkpoint() -> bool:
    """Whether a checkpoint runs its function for the first time: each layer has to note how it ran."""
    return _first_run() is not None


def may_run_again(seats: Seats) -> bool:
    """True unless a checkpoint would run the layer again in a way that plait cannot follow.

    A checkpoint compares what its function saves the first time and in the backward pass. The second run does
    not come in through the compiled model by itself, so its function is wrapped to do so.
    """
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:  # asked at every call
        return True
    pack = _first_run()
    return pack is None or _wrapped(seats, pack) is not None


def note_in_pyg(seats: Seats, module: Any) -> None:
    """A layer runs in PyG (a cache is made, a clock decides): in a checkpoint's second run it will too."""
    pack = _first_run()
    again = None if pack is None else _wrapped(seats, pack)
    if again is not None:
        again.in_pyg[id(module)] += 1


def ran_in_pyg(module: Any, before: Counter[int]) -> bool:
    """Whether this call of a layer, made again for a checkpoint, ran in PyG the first time."""
    if not before[id(module)]:
        return False
    before[id(module)] -= 1
    return True


def _first_run() -> Any:
    """The hook of the checkpoint whose function runs for the first time, or None."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None:
        return None
    name = getattr(hooks[0], "__qualname__", "")
    return hooks[0] if name.startswith(_FORWARD) else None


def _wrapped(seats: Seats, pack: Any) -> _Again | None:
    """The checkpoint's function as it will be called again, None where it cannot be found."""
    cells = dict(zip(pack.__code__.co_freevars, pack.__closure__ or (), strict=True))
    frame: Any = cells["frame"].cell_contents if "frame" in cells else None
    if not callable(getattr(frame, "recompute_fn", None)):
        return None
    if not isinstance(frame.recompute_fn, _Again):
        frame.recompute_fn = _Again(seats, frame.recompute_fn)
        seats.session.dial.wait_for(frame.recompute_fn)
    found: _Again = frame.recompute_fn
    return found


class _Again:
    """A checkpoint's function, called as if through the compiled model."""

    def __init__(self, seats: Seats, function: Callable[..., Any]):
        self.seats, self.function = seats, function
        self.in_pyg: Counter[int] = Counter()  # by id of a layer: its first calls, which ran in PyG

    def __call__(self, *args: Any) -> Any:
        before, active.in_pyg_before = active.in_pyg_before, Counter(self.in_pyg)
        try:
            with entered(self.seats):
                return self.function(*args)
        finally:
            active.in_pyg_before = before
