"""Activation checkpointing: what ran planned must run planned again when the backward pass recomputes it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from plait.pyg.active import Seats, active, entered
from plait.runtime.again import Called, now

__all__ = ["called", "in_checkpoint", "note_in_pyg", "runs_again"]

_FORWARD = "_checkpoint_hook."  # the class in torch.utils.checkpoint whose hooks pack the first time
_IN_PYG = Called(is_pygs=True, place=0)


def in_checkpoint() -> bool:
    """Whether a checkpoint runs its function for the first time: each layer has to note how it ran."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and _is_first_run(hooks[0])


def called(seats: Seats, module: Any) -> Called | None:
    """The notes on a call of a layer: new ones in a checkpoint's first run, the same in its second.

    None where the hooks on saved tensors are not a checkpoint's. A checkpoint compares what its function
    saves the first time and in the backward pass. The second run does not go through the compiled model by
    itself, so its function is wrapped to do so; where that is impossible, both runs are left to PyG.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None:
        return None
    if _rerun.hook is hooks[0]:
        return _rerun.next_call(module)
    if not _is_first_run(hooks[0]):
        return None
    again = _wrapped(seats, hooks[0])
    if again is None:
        return _IN_PYG
    made = Called()
    again.calls.setdefault(id(module), []).append(made)
    return made


def note_in_pyg() -> None:
    """Note that the layer runs in PyG, so that it does in a checkpoint's second run too."""
    if now.call is not None and not now.call.is_second:
        now.call.is_pygs = True


def runs_again() -> bool:
    """Whether the layer runs a second time for a checkpoint: nothing is decided again."""
    return now.call is not None and now.call.is_second


def _is_first_run(pack: Any) -> bool:
    return getattr(pack, "__qualname__", "").startswith(_FORWARD)


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


class _Rerun(threading.local):
    """The checkpoint whose function runs again in this thread."""

    hook: Any = None  # which packs what its layers save
    calls: Mapping[int, list[Called]] = MappingProxyType({})  # by id of a layer: those still to come

    def next_call(self, module: Any) -> Called:
        """The notes on a layer's next call; a layer that did not run before is PyG's."""
        left = self.calls.get(id(module))
        return left.pop(0).again() if left else _IN_PYG


_rerun = _Rerun()


class _Again:
    """A checkpoint's function, called as if through the compiled model."""

    def __init__(self, seats: Seats, function: Callable[..., Any]):
        self.seats, self.function = seats, function
        self.calls: dict[int, list[Called]] = {}  # by id of a layer, in order

    def __call__(self, *args: Any) -> Any:
        hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
        before = _rerun.hook, _rerun.calls
        _rerun.hook = None if hooks is None else hooks[0]
        _rerun.calls = {layer: [*calls] for layer, calls in self.calls.items()}
        is_outermost = active.seats is None
        try:
            with entered(self.seats):
                return self.function(*args)
        finally:
            _rerun.hook, _rerun.calls = before
            if is_outermost:
                self.seats.session.shared.clear()
