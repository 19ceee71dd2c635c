"""Layers as expressions, small values for their leaves, and matrices as the cost model sees them."""

from __future__ import annotations

from typing import Any

import numpy as np

from plait.ir import Add, Aggregate, Dense, Diagonal, Expr, Map, MatMul, Scalar, Scale, Sparse, leaves, total
from plait.ir.build import chebyshev, number, polynomial, propagation
from plait.ops.work import Matrix, Uniform

N, WIDTHS = 7, {"K1": 3, "K2": 4, "K3": 2}
SIZES = {"N": N, "Nr": 3, **WIDTHS}

X = Dense("X", "N", "K1")
W, V = Dense("W", "K1", "K2", "learnable"), Dense("V", "K1", "K2", "learnable")
U = Dense("U", "K2", "K3", "learnable")
B = Dense("b", 1, "K2", "learnable")
EPS = Scalar("eps", None, "learnable")
A = Sparse("A", "N", "N")
NORMALISED = propagation(left=True, loops=True, right=True)
# the same with loops that are all one, which may go inside a 0/1 matrix
PLAIN_LOOPS = MatMul(MatMul(Diagonal("p", "N"), Add((A, Diagonal("i", "N")))), Diagonal("q", "N"))
WEIGHTED = propagation(is_weighted=True, left=True, right=True)


def weights(count: int) -> list[Dense]:
    return [Dense(f"W{k}", "K1", "K2", "learnable") for k in range(count)]


def _appnp(hops: int) -> Expr:
    value: Expr = X
    for _ in range(hops):
        value = total(Scale(number(0.9), NORMALISED @ value), Scale(number(0.1), X))
    return value


def _sgc(hops: int) -> Expr:
    value: Expr = X
    for _ in range(hops):
        value = NORMALISED @ value
    return total(value @ W, B)


LAYERS: dict[str, tuple[Expr, ...]] = {
    "gcn": (total((NORMALISED @ X) @ W, B),),
    "gcn, loops of ones": (total((PLAIN_LOOPS @ X) @ W, B),),
    "gcn, edge weights": (total((WEIGHTED @ X) @ W, B),),
    "sage mean": (total((propagation(left=True) @ X) @ W, B, X @ V),),
    "sage max": (total(Aggregate("max", A, X) @ W, B, X @ V),),
    "gin": (total(total(A @ X, Scale(EPS, X)) @ W, B),),
    "gin, both maps": (Map("relu", total(total(A @ X, Scale(EPS, X)) @ W, B)) @ U,),
    "sgc": (_sgc(2),),
    "tag": tuple(total(form, B) for form in polynomial(NORMALISED, X, weights(3))),
    "appnp": (_appnp(2),),
    "cheb": tuple(total(form, B) for form in chebyshev(propagation(left=True, right=True), X, weights(3))),
}


def learnable(forms: tuple[Expr, ...]) -> tuple[str, ...]:
    return tuple(n for n, leaf in leaves(forms[0]).items() if getattr(leaf, "role", "") == "learnable")


def values(expr: Expr, rng: np.random.Generator) -> dict[str, Any]:
    """Numbers for every leaf; the graph has repeated edges, a loop and a node without any."""
    graph = rng.integers(0, 3, (N, N)).astype(float)
    graph[2] = 0
    found: dict[str, Any] = {}
    for name, leaf in leaves(expr).items():
        match leaf:
            case Dense(_, rows, cols):
                found[name] = rng.standard_normal([SIZES.get(str(s), s) for s in (rows, cols)])
            case Sparse("E"):
                found[name] = np.eye(N)[[0, 2, 5]]
            case Sparse(_, _, _, is_weighted):
                found[name] = graph * rng.standard_normal((N, N)) if is_weighted else graph
            case Diagonal(_, _):
                found[name] = np.ones(N) if name == "i" else rng.standard_normal(N)
            case Scalar(_, value) if value is None:
                found[name] = rng.standard_normal()
    return found


def matrix_of(nodes: int, edges: int) -> Any:
    """What Problem.matrices asks: the cost model's view of a constant, for a graph of even locality."""

    def view(expr: Expr) -> Matrix:
        names = set(leaves(expr))
        loops = nodes if names & {"i", "l"} and not isinstance(expr, Sparse) else 0
        is_weighted = bool(names - {"A", "i"}) or any(
            isinstance(leaf, Sparse) and leaf.is_weighted for leaf in leaves(expr).values()
        )
        return Matrix(nodes, nodes, edges + loops, is_weighted, Uniform(nodes), Uniform(nodes))

    return view
