"""Graphs seen only once, kept as lists of edges while a call of the model lasts and a little longer.

A graph that is seen again and again is worth sorting and planning for, which happens after a few calls.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import Tensor

from plait.runtime.identity import Hold
from plait.runtime.listed import Listed

__all__ = ["Listing", "Listings"]

_MOST_LISTINGS = 4
_MOST_CALLS = 2  # of the model on one graph: training on it and evaluating it are two


class Listing:
    """One graph as it was handed over, and the matrices of the operators on it."""

    __slots__ = ("calls", "hold", "kept", "latest", "matrices")

    def __init__(self, edges: Tensor, gone: list[Any], key: Any, call: int):
        self.hold = Hold(edges, gone, key)
        self.calls, self.latest = 1, call
        self.matrices: dict[Any, Listed | None] = {}
        self.kept: list[Any] = []  # what keys name by identity

    def matrix(self, key: Any, make: Callable[[], Listed | None], of: Any = None) -> Listed | None:
        """The matrix of an operator, made when first asked for; None where the edges are not in range.

        `of`: what the key names by identity, which is then kept as long as the matrix.
        """
        try:
            return self.matrices[key]
        except KeyError:
            found = self.matrices[key] = make()
            if of is not None:
                self.kept.append(of)
            return found


class Listings:
    """The graphs met last."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Any, Listing] = OrderedDict()
        self._gone: list[Any] = []

    def __len__(self) -> int:
        return len(self._kept)

    def of(self, key: Any, edges: Tensor, call: int) -> Listing | None:
        """The listing of a graph in the model's call with this number; None if it was seen too often."""
        while self._gone:
            self._kept.pop(self._gone.pop(), None)
        found = self._kept.get(key)
        if found is None:
            while len(self._kept) >= _MOST_LISTINGS:
                self._kept.popitem(last=False)
            found = self._kept[key] = Listing(edges, self._gone, key, call)
        elif found.latest != call:
            found.latest = call
            found.calls += 1
        return found if found.calls <= _MOST_CALLS else None
