"""runtime/plans.py: the latest plan of each layer by mode, and plans shared by graphs of one size."""

from __future__ import annotations

from typing import Any

from plait.runtime import plans
from plait.runtime.plans import BySize


def make(made: list[str], name: str) -> Any:
    return lambda: made.append(name) or name


def test_sizes_of_one_order_of_magnitude_share_a_plan() -> None:
    kept, made = BySize(), list[str]()
    found = [kept.plan("layer", "x", (size, 3), make(made, str(size))) for size in (16, 31, 32, 17)]
    assert found == ["16", "16", "32", "16"]
    assert made == ["16", "32"]
    assert kept.plan("layer", "y", (16, 3), make(made, "other")) == "other"


def test_the_first_graphs_are_planned_for_each() -> None:
    kept, made = BySize(), list[str]()
    found = [kept.plan("layer", "x", (9,), make(made, str(k)), first=3) for k in range(5)]
    assert found == ["0", "1", "2", "2", "2"]
    assert [kept.plan("layer", "x", (9,), make(made, "new"), first=None) for _ in range(2)] == ["new", "new"]


def test_a_layer_is_forgotten_and_the_oldest_go() -> None:
    kept, made = BySize(), list[str]()
    for k in range(plans._MOST_SIZES + 5):
        kept.plan(f"layer{k % 2}", k, (9,), make(made, str(k)))
    assert len(kept) == plans._MOST_SIZES
    kept.forget("layer0")
    assert len(kept) == plans._MOST_SIZES // 2
    assert kept.plan("layer1", plans._MOST_SIZES + 3, (9,), make(made, "again")) != "again"
    assert kept.plan("layer0", plans._MOST_SIZES + 4, (9,), make(made, "again")) == "again"
