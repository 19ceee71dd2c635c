"""Expressions as one node of torch's graph: values, gradients, and what is saved, against torch's own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from plait.errors import PlanError
from plait.ir import Dense, Expr, Map, MatMul, Scalar, Scale, formula, total
from plait.ir.build import propagation
from plait.kernels.listed import entries
from plait.runtime import listed as lists
from plait.runtime import tape as tapes
from plait.runtime.listed import Listed, Program
from plait.runtime.tape import Given, Tape

X, W, V = Dense("X", "N", "K1"), Dense("W", "K1", "K2", "learnable"), Dense("V", "K1", "K2", "learnable")
U, B = Dense("U", "K2", "H0", "learnable"), Dense("b", 1, "K2", "learnable")
S, E = propagation(left=True, loops=True, right=True), Scalar("e", None, "learnable")
FORMS: dict[str, Expr] = {
    "GCN": total((S @ X) @ W, B),
    "SAGE": total((S @ X) @ W, X @ V, B),
    "GIN": total(total(MatMul(S, X), X) @ W, B),
    "GIN, eps": total(total(MatMul(S, X), Scale(E, X)) @ W, B),
    "powers": total((S @ (S @ X)) @ W, B),
    "two matrices": total(total(MatMul(S, X), MatMul(S, MatMul(S, X))) @ W, B),
    "network": Map("relu", total(total(MatMul(S, X), X) @ W, B)) @ U,
    "no product": S @ X,
    "bias alone": total(S @ X, Dense("c", 1, "K1", "learnable")),
    "APPNP": total(Scale(E, MatMul(S, X)), Scale(Scalar("half", 0.5), X)),
}
NODES = 7
EDGES = torch.randint(0, NODES, (2, 20), generator=torch.Generator().manual_seed(0))


def listed() -> Listed:
    found = entries(EDGES, None, (NODES, NODES), torch.zeros(1).double(), "remaining", 1.0, "symmetric")
    assert found is not None
    return Listed(found)


def inputs_of(expr: Expr, width: int, wants_x: bool) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)

    def rows(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=draw)

    made = {
        "X": rows(NODES, 5).requires_grad_(wants_x),
        "W": nn.Parameter(rows(width, 5)).t(),
        "V": nn.Parameter(rows(width, 5)).t(),
        "U": nn.Parameter(rows(3, width)).t(),
        "b": nn.Parameter(rows(width)),
        "c": nn.Parameter(rows(5)),
        "e": nn.Parameter(rows(1)),
    }
    text = formula(expr).replace("relu", "")
    return {name: value for name, value in made.items() if name in text}


def leaf(value: Tensor) -> Tensor:
    return value if value.is_leaf else value._base if value._base is not None else value


@pytest.fixture(params=[False, True], ids=["torch's products", "plait's products"])
def tall(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tapes, "_FEWEST", 1 if request.param else 1 << 60)
    monkeypatch.setattr(lists, "_linear", functional.linear)  # what a program is compared with


@pytest.mark.usefixtures("tall")
@pytest.mark.parametrize("wants_x", [False, True])
@pytest.mark.parametrize("width", [1, 4, 9])
@pytest.mark.parametrize("name", FORMS)
def test_values_and_gradients_are_those_of_torch(name: str, width: int, wants_x: bool) -> None:
    expr, matrix = FORMS[name], listed()
    program, inputs = Program(expr), inputs_of(FORMS[name], width, wants_x)
    found, expected = program.on_list(inputs, matrix), program(inputs, matrix)
    torch.testing.assert_close(found, expected)
    by = [leaf(value) for value in inputs.values() if value.requires_grad]
    if not by:
        assert not found.requires_grad
        return
    assert "_Node" in type(found.grad_fn).__name__  # one for all
    seeds = torch.randn_like(found)
    ours = torch.autograd.grad(found, by, seeds)
    theirs = torch.autograd.grad(expected, by, seeds)
    for one, other in zip(ours, theirs, strict=True):
        assert one.shape == other.shape
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", FORMS)
def test_derivatives_of_derivatives_and_batches_of_directions(name: str) -> None:
    expr, matrix = FORMS[name], listed()
    program, inputs = Program(expr), inputs_of(FORMS[name], 4, True)
    by = [leaf(value) for value in inputs.values() if value.requires_grad]

    def second(value: Tensor) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(value.square().sum(), by, create_graph=True)
        return torch.autograd.grad(sum(one.square().sum() for one in first), by, allow_unused=True)  # type: ignore[arg-type]

    for one, other in zip(
        second(program.on_list(inputs, matrix)), second(program(inputs, matrix)), strict=True
    ):
        torch.testing.assert_close(one, other)
    found, expected = program.on_list(inputs, matrix), program(inputs, matrix)
    seeds = torch.randn(3, *found.shape, dtype=found.dtype)
    ours = torch.autograd.grad(found, by, seeds, is_grads_batched=True)
    theirs = torch.autograd.grad(expected, by, seeds, is_grads_batched=True)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


def test_what_a_gradient_does_not_read_may_change_until_it_is_computed() -> None:
    program, inputs = Program(FORMS["GCN"]), inputs_of(FORMS["GCN"], 9, False)
    out = program.on_list(inputs, listed())
    with torch.no_grad():
        inputs["b"].add_(1.0)
        inputs["X"].add_(1.0)  # S @ X is what is kept of it
    out.sum().backward()
    out = program.on_list(inputs, listed())
    first = torch.autograd.grad(out.square().sum(), inputs["b"], create_graph=True)[0]
    assert first.requires_grad
    out = program.on_list(inputs, listed())
    with torch.no_grad():
        inputs["b"].add_(1.0)
    with pytest.raises(RuntimeError, match="b was modified by an inplace operation"):
        torch.autograd.grad(out.square().sum(), inputs["b"], create_graph=True)


def test_a_pass_runs_again_where_it_is_kept() -> None:
    program, inputs = Program(FORMS["SAGE"]), inputs_of(FORMS["SAGE"], 4, True)
    out = program.on_list(inputs, listed())
    once = torch.autograd.grad(out.sum(), inputs["X"], retain_graph=True)[0]
    assert torch.equal(once, torch.autograd.grad(out.sum(), inputs["X"])[0])


def test_expressions_that_are_no_tape_are_refused() -> None:
    given = [Given("X", 5, False), Given("b", 5, True), Given("c", 5, True)]
    two = total(S @ X, *(Dense(name, 1, "K1", "learnable") for name in "bc"))
    with pytest.raises(PlanError, match="more than one"):
        Tape(two, given, lambda values, matrix: values[0])
    with pytest.raises(PlanError, match="nothing is computed"):
        Tape(X, given[:1], lambda values, matrix: values[0])
    with pytest.raises(PlanError, match="W: is no input"):
        Tape((S @ X) @ W, given, lambda values, matrix: values[0])
