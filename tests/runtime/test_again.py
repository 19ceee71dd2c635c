"""runtime/again.py: the second run of a checkpoint takes the plans of its first, in their order."""

from __future__ import annotations

from typing import Any

from plait.runtime.again import Called


def test_the_second_run_takes_the_plans_of_the_first_in_order() -> None:
    first, (one, two, three) = Called(), _plans()
    for plan in (one, two):
        assert first.plan() is None  # free to choose
        first.note(plan)
    for _ in range(2):  # a graph that is kept may be gone through again
        second = first.again()
        assert [second.plan(), second.plan(), second.plan()] == [one, two, None]
        second.note(three)
        assert first.plans == [one, two]
    assert (first.is_second, second.is_second) == (False, True)


def _plans() -> list[Any]:
    return [object(), object(), object()]
