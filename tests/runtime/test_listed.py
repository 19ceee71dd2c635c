"""Expressions on listed edges: what is evaluated so, and where sums over neighbours come in a product."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from plait.ir import Aggregate, Dense, Expr, Map, MatMul, Scalar, Scale, Sparse, total
from plait.ir.build import propagation
from plait.kernels.listed import entries
from plait.kernels.listed.reference import dense_matrix
from plait.runtime import listed as lists
from plait.runtime.listed import Listed, program_of

X, W, B = Dense("X", "N", "K1"), Dense("W", "K1", "K2", "learnable"), Dense("b", 1, "K2", "learnable")
EDGES = torch.tensor([[0, 1, 2, 2, 3], [1, 2, 0, 3, 3]])
S = propagation(left=True, loops=True, right=True)
FORMS: dict[str, Expr] = {
    "sums of products": total((S @ X) @ W, B),
    "powers": total((S @ (S @ X)) @ W, B),
    "multiples": total(MatMul(S, X), Scale(Scalar("e", None, "data"), X)) @ W,
    "relu": Map("relu", total((S @ X) @ W, X @ W)),
    "no product": S @ X,
    "loops of one": total(MatMul(S, X), X) @ W,
}


def listed() -> Listed:
    found = entries(EDGES, None, (4, 4), torch.zeros(1), "remaining", 1.0, "symmetric")
    assert found is not None
    return Listed(found)


@pytest.mark.parametrize("width", [2, 9])
@pytest.mark.parametrize("wants", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_values_and_gradients(name: str, wants: bool, width: int) -> None:
    program = program_of((FORMS[name],))
    assert program is not None
    assert program.parts == frozenset("plq")
    inputs = {
        "X": torch.randn(4, 5, requires_grad=wants),
        "W": torch.randn(5, width, requires_grad=True),
        "b": torch.randn(width, requires_grad=True),
        "e": torch.tensor(1.5),
    }
    s = dense_matrix(EDGES, None, (4, 4), "remaining", 1.0, "symmetric").float()
    x, w, b = inputs["X"], inputs["W"], inputs["b"]
    expected = {
        "sums of products": lambda: s @ x @ w + b,
        "powers": lambda: s @ s @ x @ w + b,
        "multiples": lambda: (s @ x + 1.5 * x) @ w,
        "relu": lambda: torch.relu(s @ x @ w + x @ w),
        "no product": lambda: s @ x,
        "loops of one": lambda: (s @ x + x) @ w,
    }[name]()
    found = program(inputs, listed())
    torch.testing.assert_close(found, expected)
    by = [value for value in inputs.values() if value.requires_grad]
    if found.requires_grad:
        ours = torch.autograd.grad(found.square().sum(), by, allow_unused=True)
        theirs = torch.autograd.grad(expected.square().sum(), by, allow_unused=True)
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    "expr",
    [
        X @ W,
        Aggregate("max", Sparse("A", "N", "N"), X),
        MatMul(total(S, S), X),
    ],
)
def test_other_expressions_are_left_to_the_planner(expr: Expr) -> None:
    assert program_of((expr,)) is None


@pytest.mark.parametrize("has_bias", [False, True])
def test_products_of_many_rows_are_those_of_torch(has_bias: bool) -> None:
    x = torch.randn(5000, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(16, 8, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(16, dtype=torch.float64, requires_grad=True) if has_bias else None
    by = [x, weight] if bias is None else [x, weight, bias]
    found, expected = lists._linear(x, weight, bias), functional.linear(x, weight, bias)
    torch.testing.assert_close(found, expected)
    for out in (found, expected):
        assert ("_Node" in type(out.grad_fn).__name__) == (out is found)
    ours = torch.autograd.grad(found.square().sum(), by, create_graph=True)
    theirs = torch.autograd.grad(expected.square().sum(), by, create_graph=True)
    torch.testing.assert_close(ours, theirs)
    seconds = [torch.autograd.grad(sum(g.sum() for g in first), by) for first in (ours, theirs)]  # type: ignore[arg-type]
    torch.testing.assert_close(*seconds)
