"""Inputs that are constant from call to call, and those that only seem to be.

An input is treated as constant when it is seen again unchanged. One that keeps changing in place (features
masked at every step) would have everything derived from it computed again each time, so from its second
change on it has to be seen unchanged four times as often as after the previous change.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from plait.runtime.constants import SparseValue
from plait.runtime.identity import SAMPLES, Hold, counts_writes, identity, is_identical

__all__ = ["Inputs", "Numbers", "Watched"]

_TRUSTED_CHANGES = 2  # this many may come before patience is asked for
_MOST_PATIENCE = 4096
_MANY_ONCE = (
    4  # inputs seen a single time, one after the other, from which on the next is taken for such a one
)


@dataclass(slots=True)
class Watched:
    """An input tensor seen before, as it was then."""

    hold: Callable[[], Tensor | None]
    known: tuple[Any, ...]
    token: int  # another one for every tensor and every state of it; 0 where nothing is kept for it
    changes: int = 0
    sightings: int = 1  # in this state
    sparse: SparseValue | None = None
    is_examined: bool = False
    version: int = 0  # of one that is only glimpsed, with nothing known: torch's counter of writes

    def is_constant(self, is_given: bool) -> bool:
        """Whether it was seen often enough; an input given to compile need not be, at first."""
        if self.changes < _TRUSTED_CHANGES:
            return is_given or self.sightings > 1
        return self.sightings > min(_MOST_PATIENCE, 1 << 2 * self.changes - 1)


class Numbers:
    """The numbers each layer was called with: constant until they have changed a few times."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[tuple[float, ...], int]] = {}

    def steady(self, layer: str, numbers: tuple[float, ...]) -> bool:
        """Whether a layer's numbers may be treated as constant."""
        known, changes = self._seen.get(layer, (numbers, 0))
        if known != numbers:
            changes += 1
        self._seen[layer] = (numbers, changes)
        return changes < _TRUSTED_CHANGES


class Inputs:
    """The inputs met so far; those that are gone are forgotten."""

    def __init__(self) -> None:
        self._seen: dict[int, Watched] = {}
        self._tokens = 0
        self._dead: list[int] = []
        self.stale: list[int] = []
        """Tokens that will not come back, for whoever keeps something under them."""
        self._num_once = 0  # inputs that went after a single look, since one came back

    def __len__(self) -> int:
        return len(self._seen)

    def look(self, x: Tensor, is_given: bool) -> Watched | None:
        """The record of an input that appears to be constant, or None."""
        if not counts_writes(x):  # changes in place are not counted: looking at all of it costs what it saves
            return None
        if self._dead:
            self._bury()
        seen = self._seen.get(id(x))
        if seen is None:
            if self._num_once >= _MANY_ONCE and not is_given:
                self._seen[id(x)] = self._glimpsed(x, 0)
                return None
            seen = self._seen[id(x)] = self._watched(x, identity(x, SAMPLES), 0)
        elif not seen.token:
            if seen.version != x._version:  # it keeps changing: there is nothing to compare it with
                seen.version, seen.changes = x._version, seen.changes + 1
                return None
            seen = self._seen[id(x)] = self._watched(x, identity(x, SAMPLES), seen.changes)
        elif is_identical(x, seen.known, SAMPLES):
            seen.sightings += 1
            self._num_once = 0
        else:
            known = identity(x, SAMPLES)
            self.stale.append(seen.token)
            if seen.changes >= _TRUSTED_CHANGES:
                self._seen[id(x)] = self._glimpsed(x, seen.changes + 1)
                return None
            seen = self._seen[id(x)] = self._watched(x, known, seen.changes + 1)  # in other memory perhaps
        return seen if seen.is_constant(is_given) else None

    def _watched(self, x: Tensor, known: tuple[Any, ...], changes: int) -> Watched:
        return Watched(Hold(x, self._dead, id(x)), known, self._token(), changes)

    def _glimpsed(self, x: Tensor, changes: int) -> Watched:
        """Of an input that will hardly come back as it is: looking at its elements waits until it does."""
        dead, key = self._dead, id(x)
        return Watched(weakref.ref(x, lambda _: dead.append(key)), (), 0, changes, version=x._version)

    def _token(self) -> int:
        self._tokens += 1
        return self._tokens

    def _bury(self) -> None:
        while self._dead:
            key = self._dead.pop()
            seen = self._seen.get(key)
            if seen is not None and seen.hold() is None:
                self._num_once += seen.sightings == 1 and not seen.changes
                if seen.token:
                    self.stale.append(seen.token)
                del self._seen[key]

    def has_met(self, x: Tensor) -> bool:
        """Whether an input was looked at before; perhaps another that is gone had its place."""
        return id(x) in self._seen

    def has_view(self, x: Tensor) -> bool:
        """Whether a sparse view of an input is kept."""
        seen = self._seen.get(id(x))
        return seen is not None and seen.sparse is not None and seen.hold() is x

    def drop_views(self) -> None:
        """Forget the sparse views; they are made again where they are asked for."""
        for seen in list(self._seen.values()):
            seen.sparse, seen.is_examined = None, False

    def views(self) -> list[SparseValue]:
        """The sparse views kept."""
        return [seen.sparse for seen in list(self._seen.values()) if seen.sparse is not None]
