"""Which compiled model is being called in this thread: its layers are planned while that call lasts.

The layers stay the user's own objects. The same layer runs in PyG when it is reached through the original
model, and planned when it is reached through the compiled one.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from plait.pyg.recall import Layer
from plait.runtime.aside import is_list_of_edges
from plait.runtime.edges import Edges
from plait.runtime.identity import identity
from plait.runtime.session import Session

__all__ = [
    "Kept",
    "Seat",
    "Seats",
    "active",
    "entered",
    "is_explained",
    "name_of",
    "parameters_of",
    "record_of",
    "session",
    "tensors_of",
    "traced",
]


_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Kept:
    """What a layer with cached=True holds: PyG's own cache, and the edges it was made from."""

    cache: Any
    edges: Edges
    weight: Any
    weight_key: tuple[Any, ...]
    is_sparse: bool
    is_swapped: bool = False  # the flow it was made for
    made_from: tuple[Any, ...] = ()  # the weight's identity when the cache was made
    operator: Any = None  # what it was made for
    shared: tuple[Any, ...] = ()  # (tensor of the cache, its identity) where it has the caller's memory

    def is_as_made(self) -> bool:
        """Whether the edges that PyG's cache shares with the caller are unchanged."""
        return not self.shared or identity(self.shared[0]) == self.shared[1]

    def has_its_weight(self) -> bool:
        """Whether edge_weight is unchanged since the cache was made."""
        return self.weight is None or identity(self.weight) == self.made_from


@dataclass(slots=True)
class Seat:
    """One layer as a compiled model knows it."""

    module: weakref.ref[nn.Module]
    name: str
    seen: dict[bool, Layer] = field(default_factory=dict)  # as it was lowered, in training and in evaluation
    kept: Kept | None = None
    is_overwritten: bool | None = None  # whether its input is written to before the backward pass, once known
    num_copied: int = 0  # inputs copied to find that out
    given: list[tuple[Tensor, int]] = field(default_factory=list)  # the last of them, and their versions
    seen_on_gpu: Any = None  # see pyg/recorded.py
    written: dict[bool, Layer] = field(default_factory=dict)  # of fused layers, found to be unmodified
    found: Layer | None = None  # the one of them that the current call found unchanged
    repeated: dict[bool, Any] = field(default_factory=dict)  # see pyg/repeated.py; with and without gradients
    listed: dict[bool, Any] = field(default_factory=dict)  # see pyg/relisted.py; the same

    def as_it_was(self, module: nn.Module) -> Layer | None:
        """The record of a layer, if the layer has not changed since it was lowered; else None."""
        layer = self.seen.get(module.training)
        return layer if layer is not None and layer.is_as_it_was(module) else None

    def look(self, module: nn.Module) -> Layer:
        """The record of the layer as it is now, made again if the layer has changed."""
        layer = self.as_it_was(module)
        if layer is None:
            layer = self.seen[module.training] = Layer(module)
        return layer

    def is_as_written(self, module: nn.Module) -> bool:
        """Whether a fused layer is unchanged since it was found to be unmodified."""
        layer = self.written.get(module.training)
        self.found = layer if layer is not None and layer.is_as_it_was(module) else None
        return self.found is not None

    def note_as_written(self, module: nn.Module) -> None:
        """Note that the layer was found to be unmodified."""
        self.found = self.written[module.training] = Layer(module)


class Seats:
    """A compiled model's session and its layers, whether held as children, in lists or in closures."""

    def __init__(self, session: Session, model: nn.Module):
        self.number = next(_numbers)
        self.session = session
        self._model = weakref.ref(model)
        self._seats: dict[int, Seat] = {}
        self.explained: weakref.ref[nn.Module] | None = None  # the latest layer that ran under an explainer
        # (where the edges were among the arguments, the edges, with gradients?) of the last call left to PyG
        self.rested: tuple[int, weakref.ref[Tensor] | None, bool] = (0, None, False)

    def are_explained(self) -> bool:
        """Whether an explainer is still attached, which masks the messages of all layers."""
        module = None if self.explained is None else self.explained()
        if module is None or not is_explained(module):
            self.explained = None
        return self.explained is not None

    def note_rest(self, args: tuple[Any, ...]) -> None:
        """Note what recognises such a call, where it is left to PyG whenever its graph comes back."""
        place = next((k for k, value in enumerate(args) if is_list_of_edges(value)), None)
        if place is not None and self.session.aside.leaves_again(args[place]):
            self.rested = place, weakref.ref(args[place]), torch.is_grad_enabled()

    def of(self, module: nn.Module) -> Seat:
        """The record of a layer, made when it first runs."""
        seat = self._seats.get(id(module))
        if seat is None or seat.module() is not module:
            self._drop_dead()
            seat = self._seats[id(module)] = Seat(weakref.ref(module), self._name(module))
        return seat

    def _drop_dead(self) -> None:
        for key in [key for key, seat in self._seats.items() if seat.module() is None]:
            del self._seats[key]

    def _name(self, module: nn.Module) -> str:
        """Where the layer is in the model; layers outside the tree of modules are numbered as they run."""
        kind, model = module.__class__.__name__, self._model()
        for path, child in () if model is None else model.named_modules():
            if vars(child) is vars(module):  # the compiled root and the original are two objects of one state
                return f"{path or 'model'} {kind}"
        return f"unlisted.{len(self._seats)} {kind}"


def is_explained(module: nn.Module) -> bool:
    """Whether an explainer masks the messages of a layer."""
    return bool(vars(module).get("_explain"))


class _Active(threading.local):
    seats: Seats | None = None
    is_resting: bool = False  # a whole call of a compiled model is left to PyG


class _Traced:
    """Replaces `active` while torch.compile traces, which follows attributes of plain objects only."""

    seats: Seats | None = None


active = _Active()
traced = _Traced()


@contextmanager
def entered(seats: Seats) -> Iterator[None]:
    """Marks the calls inside as coming through the compiled model of these layers."""
    before, active.seats = active.seats, seats
    try:
        yield
    finally:
        active.seats = before


def session() -> Session:
    """The session of the compiled model that is being called."""
    assert active.seats is not None
    return active.seats.session


def record_of(module: nn.Module) -> Layer | None:
    """The record of a fused layer that the current call found unchanged."""
    return None if active.seats is None else active.seats.of(module).found


def parameters_of(module: nn.Module) -> Iterable[nn.Parameter]:
    """The parameters of a layer, from its record where there is one: walking through modules takes longer."""
    record = record_of(module)
    return module.parameters() if record is None else record.parameters


def tensors_of(module: nn.Module) -> Iterable[Tensor]:
    """The parameters of a layer and what may stand in their place."""
    record = record_of(module) or Layer(module)
    return itertools.chain(record.parameters, record.others())


def name_of(module: nn.Module) -> str:
    """The layer's name in the compiled model that is being called."""
    assert active.seats is not None
    return active.seats.of(module).name
