"""Plans held to one way, for tests of each of them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from plait.plan.plan import LayerPlan
from plait.plan.search import Problem
from plait.plan.ways import Way, choose

__all__ = ["only"]


def only(choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers planned from here on go this way."""

    def chosen(problem: Problem, ways: Sequence[Way]) -> LayerPlan:
        return choose(problem, [way for way in ways if way.name == choice])

    monkeypatch.setattr("plait.runtime.ways.choose", chosen)
