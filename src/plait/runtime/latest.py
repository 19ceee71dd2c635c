"""How a call was run the last time: while all that decides it stays, the next one is run the same way.

Finding the run of an expression anew takes a description of all its inputs. Here the few of them that may
differ between two calls that are recognised as the same are compared one by one.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from plait.runtime.executor import Run
from plait.runtime.recipe import Recipe
from plait.runtime.session import Session
from plait.runtime.watched import Watched

__all__ = ["Latest"]


class _Last(NamedTuple):
    recipe: Recipe
    with_grad: bool
    token: int | None  # of an input that stays the same
    shapes: list[torch.Size]  # of the inputs
    wants: list[bool]  # whether a gradient of each is wanted
    run: weakref.ref[Run]  # the graph's: it may be dropped to save memory


class Latest:
    """The latest run of one kind of call of a layer on one graph."""

    __slots__ = ("_last", "_x")

    def __init__(self) -> None:
        self._last: _Last | None = None
        self._x: weakref.ref[Tensor] | None = None

    def watch(self, session: Session, x: Tensor) -> Watched | None:
        """The record of an input that appears to be constant; one that came after another had gone is not.

        So do the outputs of an earlier layer: each would be looked at for nothing.
        """
        if session.watched.has_met(x):
            return session.watch(x)
        before, self._x = self._x, weakref.ref(x)
        is_after_another = before is not None and before() is None
        return None if is_after_another and session.constant_input() is not x else session.watch(x)

    def run(
        self, recipe: Recipe, values: Sequence[Tensor], seen: Watched | None, with_grad: bool
    ) -> Run | None:
        """What ran the same call on inputs that look the same; None where that must be found anew."""
        last = self._last
        if last is None or last.recipe is not recipe or last.with_grad is not with_grad:
            return None
        if last.token != (None if seen is None else seen.token):
            return None
        if [value.shape for value in values] != last.shapes:
            return None
        if with_grad and [value.requires_grad for value in values] != last.wants:
            return None
        return last.run()

    def note(
        self, recipe: Recipe, values: Sequence[Tensor], seen: Watched | None, with_grad: bool, run: Run
    ) -> None:
        """Note how a call was run; numbers, which may change from call to call, decide it too."""
        if not recipe.numbers:
            shapes, wants = [value.shape for value in values], [value.requires_grad for value in values]
            token = None if seen is None else seen.token
            self._last = _Last(recipe, with_grad, token, shapes, wants, weakref.ref(run))
