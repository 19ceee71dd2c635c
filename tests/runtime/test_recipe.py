"""runtime/recipe.py: x and parameters are recognised among a layer's inputs, and nothing else is."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from plait.ir import Dense, Expr
from plait.runtime.recipe import recipe_of

FORMS: tuple[Expr, ...] = (Dense("X", "N", "K1") @ Dense("W", "K1", "K2"),)


def made(**inputs: Tensor | None) -> tuple[Tensor, nn.Parameter, nn.Parameter, dict[str, Tensor | None]]:
    x, w, b = torch.rand(5, 3), nn.Parameter(torch.rand(4, 3)), nn.Parameter(torch.rand(4))
    return x, w, b, {"X": x, "W": w.t(), "b": b, **inputs}


def test_a_recipe_gives_the_inputs_of_the_next_call() -> None:
    x, w, b, inputs = made(R=None)
    recipe = recipe_of(FORMS, inputs, x, [w, b])
    assert recipe is not None
    assert recipe.names == ("X", "W", "b")
    assert recipe.stored == ("X", "Wᵀ", "b")
    later = torch.rand(7, 3)
    values = recipe.values(later)
    assert [*map(id, values)] == [id(later), id(w), id(b)]
    given = recipe.given(values)
    assert given["X"] is later
    assert given["W"].shape == (3, 4)
    assert given["W"].data_ptr() == w.data_ptr()


def test_a_recipe_is_found_without_gradients_too() -> None:
    x, w, b, _ = made()
    with torch.no_grad():
        recipe = recipe_of(FORMS, {"X": x, "W": w.t(), "b": b}, x, [w, b])
    assert recipe is not None
    assert recipe.are_turned == (False, True, False)


def test_what_is_made_anew_at_every_call_is_in_no_recipe() -> None:
    x, w, b, inputs = made()
    others: dict[str, Tensor] = {
        "W": w.t() * 2.0,
        "X": x.relu(),
        "b": -b,
        "alpha": torch.tensor(0.5),
    }
    for name, value in others.items():
        assert recipe_of(FORMS, {**inputs, name: value}, x, [w, b]) is None
    assert recipe_of(FORMS, inputs, x, [b]) is None  # somebody else's weight
    assert recipe_of(FORMS, {**inputs, "W": w[:, :2].t()}, x, [w, b]) is None


def test_numbers_that_are_named_are_read_anew() -> None:
    x, w, b, inputs = made(alpha=torch.tensor(0.5))
    recipe = recipe_of(FORMS, inputs, x, [w, b], ["alpha"])
    assert recipe is not None
    assert recipe.names == recipe_of(FORMS, inputs, x, [w, b], {"alpha": 0}).names  # type: ignore[union-attr]
    number = torch.tensor(0.25)
    values = recipe.values(x, {"alpha": number})
    assert [*map(id, values)] == [id(x), id(w), id(b), id(number)]
    assert recipe_of(FORMS, {**inputs, "alpha": torch.rand(2)}, x, [w, b], ["alpha"]) is None
    assert recipe_of(FORMS, inputs, x, [w, b], ["b"]) is None


def test_a_parameter_that_is_a_number_is_in_no_recipe() -> None:
    x, w, b, inputs = made()
    eps = nn.Parameter(torch.tensor(0.5))
    assert recipe_of(FORMS, {**inputs, "eps": eps}, x, [w, b, eps]) is None
