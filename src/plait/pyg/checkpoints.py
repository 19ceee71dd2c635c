"""Activation checkpointing: what ran planned must run planned again when the backward pass asks for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from plait.pyg.active import Seats, entered

__all__ = ["may_run_again"]

_FORWARD, _AGAIN = (
    "_checkpoint_hook.",
    "_recomputation_hook.",
)  # the classes in torch.utils.checkpoint whose hooks pack


def may_run_again(seats: Seats) -> bool:
    """True unless a checkpoint would run the layer again in a way that plait cannot follow.

    A checkpoint compares what its function saves the first time and in the backward pass. The second run does
    not come in through the compiled model by itself, so its function is wrapped to do so.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None:
        return True
    pack = hooks[0]
    name = getattr(pack, "__qualname__", "")
    if name.startswith(_AGAIN) or not name.startswith(_FORWARD):
        return True
    cells = dict(zip(pack.__code__.co_freevars, pack.__closure__ or (), strict=True))
    frame: Any = cells["frame"].cell_contents if "frame" in cells else None
    if not callable(getattr(frame, "recompute_fn", None)):
        return False
    if not isinstance(frame.recompute_fn, _Again):
        frame.recompute_fn = _Again(seats, frame.recompute_fn)
    return True


class _Again:
    """A checkpoint's function, called as if through the compiled model."""

    def __init__(self, seats: Seats, function: Callable[..., Any]):
        self.seats, self.function = seats, function

    def __call__(self, *args: Any) -> Any:
        with entered(self.seats):
            return self.function(*args)
