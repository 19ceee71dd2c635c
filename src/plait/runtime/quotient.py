"""Layers on the representatives of twins: what a graph's constants become there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plait.graph import Graph
from plait.graph.twins import Twins, closed_twins
from plait.ir import Expr
from plait.plan.twins import closed, is_equal_on_twins, on_representatives
from plait.runtime.constants import Constants
from plait.runtime.deferred import Deferred
from plait.runtime.folded import Classes, Folded

__all__ = ["MOST_LEFT", "Quotient", "Quotients"]

MOST_LEFT = 0.85
"""Twins are considered where at most this share of the nodes remains: spreading the result costs a pass."""


@dataclass(frozen=True)
class Quotient:
    """One expression of a layer, on a graph and on the representatives of its twins."""

    classes: Classes
    forms: tuple[Expr, ...]
    small: Constants
    small_forms: tuple[Expr, ...]
    heard: Callable[[str], None]

    def fold(self, rows: Tensor) -> Tensor:
        """The matrix whose rows, one per class, these are."""
        return Deferred.of(Folded(rows, self.classes, self.heard))


class Quotients:
    """The twins of one graph as a model met it, and its layers' expressions on their representatives."""

    def __init__(self, graph: Graph):
        self.wholes: Counter[str] = Counter()
        """How often a function needed a whole matrix, by its name."""
        self.layers: set[str] = set()
        """The layers that ran on representatives."""
        self._classes: dict[int, tuple[Graph, Classes | None]] = {}
        # what a key names by identity is kept with the answer, so that its id stays unique
        self._found: dict[Any, tuple[Constants, tuple[Expr, ...], Quotient | None]] = {}
        self._small: dict[int, Constants] = {}
        self.classes = self._classes_of(graph)

    def of(self, layer: str, constants: Constants, forms: tuple[Expr, ...], x: Any) -> Quotient | None:
        """The expression on representatives, where it gives twins equal rows from this input."""
        is_folded = isinstance(x, Deferred) and isinstance(x.source, Folded) and x.is_held()
        key = (id(constants), id(forms), is_folded)
        if key not in self._found:
            self._found[key] = (constants, forms, self._make(constants, forms, is_folded))
        found = self._found[key][2]
        if found is None or (is_folded and x.source.rows is not found.classes):
            return None
        self.layers.add(layer)
        return found

    def _hear(self, name: str) -> None:
        self.wholes[name] += 1

    def _classes_of(self, graph: Graph) -> Classes | None:
        """The twins of a graph; None where there are too few. Layers may see it without its loops."""
        if id(graph) not in self._classes:
            twins = closed_twins(graph)
            is_few = twins is None or twins.num_classes > MOST_LEFT * twins.num_nodes
            self._classes[id(graph)] = (graph, None if is_few else Classes(twins))  # type: ignore[arg-type]
        return self._classes[id(graph)][1]

    def _make(self, constants: Constants, forms: tuple[Expr, ...], is_folded: bool) -> Quotient | None:
        forms = closed(forms)
        if constants.weight is not None or constants.rows is not None or not constants.graph.is_square:
            return None
        if not is_equal_on_twins(forms, is_folded):
            return None
        classes = self._classes_of(constants.graph)
        if classes is None or not _are_equal(constants, classes.twins):
            return None
        small = self._small.get(id(constants))
        if small is None:
            small = self._small[id(constants)] = _between(constants, classes)
        return Quotient(classes, forms, small, on_representatives(forms), self._hear)


def _are_equal(constants: Constants, twins: Twins) -> bool:
    """Whether every scaling of the operator is the same on twins."""
    back = torch.from_numpy(np.asarray(twins.representatives[twins.members], np.int64))
    return all(bool((value == value[back]).all()) for value in constants.diagonals.values())


def _between(constants: Constants, classes: Classes) -> Constants:
    """The operator's constants on the representatives; q carries how many each stands for."""
    twins, chosen = classes.twins, classes.representatives
    sizes = torch.from_numpy(twins.sizes).to(constants.dtype)
    diagonals = {name: value[chosen] for name, value in constants.diagonals.items()}
    diagonals["q"] = diagonals["q"] * sizes if "q" in diagonals else sizes
    return Constants(twins.between(constants.graph), None, diagonals, constants.dtype)
