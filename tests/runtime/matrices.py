"""Deferred matrices of both kinds beside the plain matrix that each stands for."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from plait.graph import generate
from plait.graph.twins import closed_twins
from plait.runtime.deferred import Deferred
from plait.runtime.folded import Classes, Folded
from plait.runtime.wanted import Wanted, WantedRows

__all__ = ["KINDS", "Pair", "pair"]

NUM_ROWS, WIDTH = 12, 5
KINDS = ("twins", "rows")


def classes() -> Classes:
    """Three classes of four nodes."""
    twins = closed_twins(generate.cliques(3, 4))
    assert twins is not None
    return Classes(twins)


CLASSES = classes()
ROWS = WantedRows(torch.tensor([0, 3, 4, 9]), NUM_ROWS)


class Pair:
    """One matrix twice, each over leaves of its own: `plain`, and `deferred` with what it was asked for."""

    def __init__(self, kind: str, with_grad: bool):
        self.heard: list[str] = []
        self.is_refused = False  # gradients with respect to it may be refused
        self.plain_leaves, self.leaves = self._leaves(kind, with_grad), self._leaves(kind, with_grad)
        whole, deferred = {"twins": self._twins, "rows": self._rows}[kind]()
        self.plain, self.deferred = whole, deferred

    def _leaves(self, kind: str, with_grad: bool) -> list[Tensor]:
        rng = torch.Generator().manual_seed(1)
        shapes = [(3, WIDTH)] if kind == "twins" else [(NUM_ROWS, 4), (4, WIDTH)]
        made = [torch.rand(*shape, generator=rng, dtype=torch.float64) + 0.1 for shape in shapes]
        return [leaf.requires_grad_(with_grad) for leaf in made]

    def _twins(self) -> tuple[Tensor, Tensor]:
        held = self.leaves[0] * 1
        whole = (self.plain_leaves[0] * 1).index_select(0, CLASSES.place)
        return whole, Deferred.of(Folded(held, CLASSES, self.heard.append))

    def _rows(self) -> tuple[Tensor, Tensor]:
        x, w = self.leaves
        source = Wanted.of_layer(
            x[ROWS.numbers] @ w, ROWS, lambda again: again["X"] @ again["W"], {"X": x, "W": w},  # type: ignore[operator]
            self.heard.append,
        )  # fmt: skip
        return self.plain_leaves[0] @ self.plain_leaves[1], Deferred.of(source)


def pair(kind: str, with_grad: bool = True) -> Pair:
    """A matrix of this kind beside the plain one."""
    return Pair(kind, with_grad)


def gradients(out: Tensor, leaves: list[Tensor]) -> list[Tensor | None]:
    """Of a weighted sum of the result."""
    weights = torch.linspace(0.3, 1.7, out.numel(), dtype=torch.float64).reshape(out.shape)
    for leaf in leaves:
        leaf.grad = None
    (out * weights).sum().backward(retain_graph=True)
    return [leaf.grad for leaf in leaves]


Function = Callable[[Tensor], Tensor]
