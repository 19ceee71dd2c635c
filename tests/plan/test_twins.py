"""plan/twins: which expressions give twins equal rows, shown on numbers."""

from __future__ import annotations

import numpy as np
import pytest

from plait.ir import Add, Aggregate, Dense, Diagonal, Expr, Map, MatMul, Scale, Sparse, total
from plait.ir.build import number
from plait.ir.evaluate import evaluate
from plait.plan.twins import closed, is_equal_on_twins, on_representatives

A, I = Sparse("A", "N", "N"), Diagonal("i", "N")
P, Q = Diagonal("p", "N"), Diagonal("q", "N")
X, W = Dense("X", "N", "K1"), Dense("W", "K1", "K2", "learnable")
B = Dense("b", 1, "K2", "learnable")
GCN = MatMul(MatMul(P, Add((A, I))), Q)

EQUAL: dict[str, Expr] = {
    "gcn": total(MatMul(MatMul(GCN, X), W), B),
    "gin": Map("relu", total(MatMul(total(MatMul(A, X), X), W), B)),
    "sg": MatMul(MatMul(GCN, MatMul(GCN, X)), W),
    "scaled": Scale(number(0.5), MatMul(GCN, X)),
}
OWN: dict[str, Expr] = {
    "own row beside": total(MatMul(GCN, X), X),
    "neighbours only": MatMul(A, X),
    "eps": total(MatMul(A, X), Scale(number(1.5), X)),
    "max": Aggregate("max", A, X),
    "appnp": total(Scale(number(0.9), MatMul(GCN, X)), Scale(number(0.1), X)),
    "twice its own": total(MatMul(A, X), X, X),
}


@pytest.mark.parametrize("name", EQUAL)
def test_rows_of_twins_are_equal_whatever_the_input(name: str) -> None:
    assert is_equal_on_twins(closed((EQUAL[name],)), False)


@pytest.mark.parametrize("name", OWN)
def test_a_nodes_own_row_is_noticed(name: str) -> None:
    assert not is_equal_on_twins(closed((OWN[name],)), False)


def test_an_own_row_does_no_harm_where_the_input_is_equal_already() -> None:
    assert is_equal_on_twins(closed((OWN["own row beside"], OWN["appnp"])), True)
    assert not is_equal_on_twins(closed((OWN["neighbours only"],)), True)


@pytest.mark.parametrize("name", [*EQUAL, "own row beside", "appnp"])
def test_the_layer_on_representatives_is_the_layer(name: str) -> None:
    rng = np.random.default_rng(0)
    sizes = np.array([3, 1, 2, 4])
    classes = np.repeat(np.arange(4), sizes)
    between = np.array([[0, 1, 0, 1], [1, 0, 1, 0], [0, 1, 0, 0], [1, 0, 0, 0]])
    whole = (between + np.eye(4, dtype=int))[classes][:, classes] - np.eye(10, dtype=int)
    p, q = rng.random(4), rng.random(4)
    small = {
        "X": rng.standard_normal((4, 3)),
        "W": rng.standard_normal((3, 2)),
        "b": rng.standard_normal((1, 2)),
    }
    form = closed(({**EQUAL, **OWN}[name],))[0]
    expected = evaluate(
        form,
        {**small, "X": small["X"][classes], "A": whole, "p": p[classes], "q": q[classes], "i": np.ones(10)},
    )
    has_q = "q" in str(form)
    found = evaluate(
        on_representatives((form,))[0],
        {**small, "A": between, "p": p, "q": q * sizes if has_q else sizes.astype(float), "i": np.ones(4)},
    )
    np.testing.assert_allclose(found[classes], expected, atol=1e-12)
