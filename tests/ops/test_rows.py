"""ops/rows.py: columns are views, and their gradients are put side by side once."""

from __future__ import annotations

from plait.ops.operation import operation
from plait.plan.draft import Draft
from plait.plan.program import differentiate


def test_gradients_of_columns_are_joined_in_their_order_and_shared_columns_are_added() -> None:
    draft = Draft()
    z = draft.gemm(draft.input("X", "N", 3), draft.input("W", 3, 6))
    left, right = draft.columns(z, 0, 2), draft.columns(z, 4, 2)
    assert draft.columns(z, 0, 2) == left
    assert draft.columns(z, 0, 6) == z
    out = draft.add("combine", {"x0": right, "x1": left, "x2": left}, ("N", 2), factors=(1.0, 1.0, 1.0))
    backward = differentiate(draft.program(out), ["W"])
    joined = next(step for step in backward.steps if step.op == "join")
    assert joined.option("starts") == (0, 4)
    assert len(joined.reads) == 2
    assert backward.shapes[joined.out] == ("N", 6)
    places = {name: place for _, name in joined.reads if (place := backward.joined.get(name))}
    starts = dict(zip([name for _, name in joined.reads], joined.option("starts"), strict=True))
    assert places == {name: (joined.out, starts[name], 6) for name in places}


def test_taking_columns_apart_moves_no_data() -> None:
    row = operation("columns")
    assert row.is_view
    draft = Draft()
    z = draft.input("X", "N", 4)
    draft.columns(z, 1, 2)
    assert row.request(draft.steps[0], None) is None  # type: ignore[arg-type]
