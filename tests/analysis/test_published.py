"""analysis/published.py: every row evaluated, and the exact counts held to programs and to plain counting."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from plait.analysis.published import GLOBAL, LOCAL, SCHEMES, Row, find, generic_depth, generic_work
from plait.analysis.work import Phase, of_layer
from plait.cost.machine import default_profile
from plait.errors import InputError
from plait.graph import Graph
from plait.ir import Add, Aggregate, Dense, Expr, Map, MatMul, Scale, Sparse, leaves, total
from plait.ir.build import number, propagation
from plait.ops.work import Matrix
from plait.plan.search import Problem, matrices_of, survey

VALUES: dict[str, Any] = {
    "n": 1000, "m": 20000, "d": 64, "k": 16, "L": 3, "K": 2, "c": 8, "s": 4, "T": 8, "W_pre": 500, "D_pre": 5,
}  # fmt: skip
n, m, d, k, L, K, c, s, T = (VALUES[name] for name in "nmdkLKcsT")
lk, ld = 4, 6  # log2 of k and d
LINEAR = L * m * k + L * n * k**2
BY_EDGE = L * m * k**2 + L * n * k**2
DEPTH = L * ld + L * lk
POWERS = m * n * 3 + n * k**2

AS_PUBLISHED = {
    ("local", "GCN"): (LINEAR, DEPTH),
    ("local", "GraphSAGE mean"): (LINEAR, DEPTH),
    ("local", "GIN"): (L * m * k + L * K * n * k**2, L * ld + L * K * lk),
    ("local", "CommNet"): (LINEAR, DEPTH),
    ("local", "Vanilla attention"): (LINEAR, DEPTH),
    ("local", "AGNN"): (LINEAR, DEPTH),
    ("local", "MoNet"): (BY_EDGE, DEPTH),
    ("local", "GAT"): (L * m * d * k**2 + L * n * k**2, DEPTH),
    ("local", "G-GCN"): (BY_EDGE, DEPTH),
    ("local", "GraphSAGE pool"): (BY_EDGE, DEPTH),
    ("local", "EdgeConv-1"): (BY_EDGE, DEPTH),
    ("local", "EdgeConv-5"): (BY_EDGE, DEPTH),
    ("global", "GCN"): (LINEAR, DEPTH),
    ("global", "GraphSAGE mean"): (LINEAR, DEPTH),
    ("global", "GIN"): (L * m * k + K * L * n * k**2, L * K * (lk + ld)),
    ("global", "CommNet"): (LINEAR, DEPTH),
    ("global", "Dot product"): (LINEAR, DEPTH),
    ("global", "EdgeConv-1"): (LINEAR, DEPTH),
    ("global", "SGC"): (m * n * 2 + n * k**2, lk + 2 * ld),
    ("global", "DeepWalk"): (POWERS, lk + 3 * ld),
    ("global", "ChebNet"): (POWERS, lk + 3 * ld),
    ("global", "DCNN, GDC"): (POWERS, lk + 3 * ld),
    ("global", "Node2Vec"): (m * n + n * k**2, lk + ld),
    ("global", "LINE, SDNE"): (m * n + n * k**2, lk + ld),
    **{
        ("global", name): (n**3 + n * k**2, math.log2(n) ** 2 + lk)
        for name in ("Auto-Regress", "PPNP", "ARMA", "ParWalks")
    },
    ("training", "Full batch"): (LINEAR, DEPTH),
    ("training", "GraphSAGE"): (LINEAR + c**L * n * k**2, L * lk + L * 3),
    ("training", "FastGCN"): (LINEAR + c * L * n * k**2, L * lk + L * 3),
    ("training", "Cluster-GCN"): (500 + LINEAR, 5 + DEPTH),
    ("training", "GraphSAINT"): (500 + LINEAR, 5 + DEPTH),
}
EVERY = (*LOCAL, *GLOBAL, *SCHEMES)


@pytest.mark.parametrize("row", EVERY, ids=lambda row: f"{row.table} {row.model}")
def test_every_row_evaluates_to_the_published_bound(row: Row) -> None:
    work, depth = AS_PUBLISHED[row.table, row.model]
    assert row.work(**VALUES) == work
    assert row.depth(**VALUES) == pytest.approx(depth)
    assert row.executed_work(**VALUES) > 0
    assert row.executed_depth(**VALUES) > 0


def test_all_rows_of_the_tables_are_here() -> None:
    assert {(row.table, row.model) for row in EVERY} == set(AS_PUBLISHED)


@pytest.mark.parametrize("row", LOCAL, ids=lambda row: row.model)
def test_kernels_of_a_local_model_add_up_to_its_bound(row: Row) -> None:
    kernels = row.kernels()
    work = L * sum(bound.work(**VALUES) for bound in kernels.values())
    depth = L * sum(bound.depth(**VALUES) for bound in kernels.values())
    assert work <= 2 * row.work(**VALUES) + L
    assert depth <= 3 * row.depth(**VALUES) + L
    assert kernels["scatter"].communication(**VALUES) == m * k


def test_the_generic_equations() -> None:
    assert generic_work(2, m=10, n=5, psi=3, plus=4, phi=7, pre=1, post=2) == 3 + 2 * (30 + 55)
    assert generic_work(1, m=10, n=5, psi=3, plus=4, phi=7, attention=2) == 50 + 55
    assert generic_depth(2, psi=1, plus=3, phi=2, pre=4, post=5, attention=1) == 9 + 14
    # Table 6's GCN from the generic equation: psi k, plus k d_i (sum over i: m k), phi k²
    assert generic_work(L, m=m, n=n, psi=0, plus=m * k / n, phi=k**2) == find("gcn").work(**VALUES)


# Executed counts against programs ---------------------------------------------------------------------------

X = Dense("X", "N", "Q")
W, V = Dense("W", "Q", "Q", "learnable"), Dense("V", "Q", "Q", "learnable")
A, MEAN = Sparse("A", "N", "N"), propagation(left=True)
WEIGHTED = Sparse("A", "N", "N", True)


def _powers(count: int) -> list[Expr]:
    powers: list[Expr] = [X]
    for _ in range(count):
        powers.append(MatMul(WEIGHTED, powers[-1]))
    return powers


def _horner(count: int, first: int = 0) -> Expr:
    """Sum over first..count of 0.5 A^p X, one product a power."""
    value: Expr = Scale(number(0.5), X)
    for power in range(count - 1, -1, -1):
        product = MatMul(WEIGHTED, value)
        value = total(product, Scale(number(0.5), X)) if power >= first else product
    return value


def _appnp() -> Expr:
    value: Expr = X
    for _ in range(T):
        value = total(Scale(number(0.9), MatMul(WEIGHTED, value)), Scale(number(0.1), X))
    return value @ W


def _pooled() -> Expr:
    message = Map("relu", total(X @ Dense("P", "Q", "Q", "learnable"), Dense("c", 1, "Q", "learnable")))
    return total(Aggregate("max", A, message) @ W, X @ V)


LOWERED: dict[tuple[str, str], Expr] = {
    ("local", "GCN"): MatMul(MatMul(WEIGHTED, X), W),
    ("local", "GraphSAGE mean"): total(MatMul(MatMul(MEAN, X), W), X @ V),
    ("local", "GIN"): Map("relu", total(A @ X, Scale(number(1.5), X)) @ W) @ V,
    ("local", "CommNet"): total(MatMul(A, X) @ W, X @ V),
    ("local", "EdgeConv-1"): A @ (X @ W),
    ("global", "SGC"): MatMul(_powers(s)[-1], W),
    ("global", "DeepWalk"): MatMul(Add(tuple(_powers(T))), W),
    ("global", "ChebNet"): MatMul(_horner(T), W),
    ("global", "DCNN, GDC"): MatMul(_horner(T, 1), W),
    ("global", "Node2Vec"): MatMul(_horner(2), W),
    ("global", "LINE, SDNE"): MatMul(total(_powers(2)[1], Scale(number(0.5), _powers(2)[2])), W),
    ("local", "GraphSAGE pool"): _pooled(),
    ("global", "GCN"): MatMul(MatMul(WEIGHTED, X), W),
    ("global", "GraphSAGE mean"): MatMul(MatMul(WEIGHTED, X), W),
    ("global", "GIN"): Map("relu", total(A @ X, Scale(number(1.5), X)) @ W) @ V,
    ("global", "CommNet"): total(MatMul(A, X) @ W, X @ V),
    ("global", "EdgeConv-1"): A @ (X @ W),
    # inverses as an iteration: a product, scaled, and the scaled features added, whatever the factors
    **{("global", name): _appnp() for name in ("Auto-Regress", "PPNP", "ARMA", "ParWalks")},
}
# held to plain loops below, and to kernels carried out by loops in test_executed.py
BY_LOOPS = {("local", "GAT")}
# counted on a graph, by shares of planned layers: test_schemes.py
ON_GRAPHS = {("training", name) for name in ("Full batch", "GraphSAGE", "Cluster-GCN")}


def _phases(expr: Expr, wrt: tuple[str, ...] | None = None) -> list[dict[str, Phase]]:
    """Of every plan of the expression on a small regular graph."""
    nodes, degree = 12, 4
    sources = np.concatenate([(np.arange(nodes) + shift) % nodes for shift in range(1, degree + 1)])
    graph = Graph.from_edge_index(sources, np.tile(np.arange(nodes), degree), num_nodes=nodes)

    def matrix(part: Expr) -> Matrix:
        is_weighted = not isinstance(part, Sparse) or part.is_weighted
        is_weighted &= set(leaves(part)) != {"A"} or isinstance(part, Sparse)
        return Matrix(nodes, nodes, graph.num_edges, is_weighted, graph.stats, graph.stats)

    sizes = {"N": nodes, "Q": 8}
    asked = Problem((expr,), sizes, matrix, default_profile(), wrt=wrt)
    return [of_layer(replace(plan, matrices=matrices_of(plan, asked))) for plan in survey(asked)]


SMALL = {"n": 12, "m": 48, "d": 4, "k": 8, "L": 1, "K": 2, "s": s, "T": T}


@pytest.mark.parametrize("key", list(LOWERED), ids=lambda key: f"{key[0]} {key[1]}")
def test_what_is_executed_is_what_a_program_counts(key: tuple[str, str]) -> None:
    row = find(key[1], key[0])
    flops = {phases["forward"].flops for phases in _phases(LOWERED[key])}
    assert row.executed_work(**SMALL) in flops
    assert row.executed_depth(**SMALL) in {phases["forward"].depth for phases in _phases(LOWERED[key])}


def test_every_row_is_counted_or_says_why_plait_does_not_run_it() -> None:
    counted = {*LOWERED, *BY_LOOPS, *ON_GRAPHS}
    for row in EVERY:
        assert row.is_run == ((row.table, row.model) in counted), row.model
        assert row.executed_by.startswith("plait's programs" if row.is_run else "not run: ")


def test_a_full_batch_is_a_forward_and_a_backward_pass_of_a_gcn() -> None:
    expr = LOWERED["local", "GCN"]
    inner = {p["forward"].flops + p["backward"].flops for p in _phases(expr, ("X", "W"))}
    first = {p["forward"].flops + p["backward"].flops for p in _phases(expr, ("W",))}
    asked = find("full batch", "training").executed_work
    assert any(a + b == asked(**{**SMALL, "L": 2}) for a, b in itertools.product(first, inner))


def _naive_gat(edges: list[tuple[int, int]], nodes: int, width: int) -> int:
    """A layer with one head, counted operation by operation."""
    flops = nodes * width * width * 2  # W h
    flops += nodes * 2 * width * 2  # both halves of the score
    for _ in edges:
        flops += 1 + 2  # their sum; LeakyReLU compares and multiplies
        flops += 1  # largest score of the row
        flops += 2  # minus it, exponential
        flops += 1  # sum of the row
        flops += 2 * width  # weighted sum
    return flops + nodes + nodes * width  # one over the sum, times that


def test_gat_is_counted_as_it_runs() -> None:
    edges = [(i, (i + j) % 12) for i in range(12) for j in range(4)]
    assert find("gat").executed_work(**SMALL) == _naive_gat(edges, 12, 8)


def test_the_bound_of_gat_is_loose_by_degree_and_width() -> None:
    row = find("GAT")
    assert row.work(**VALUES) / row.executed_work(**VALUES) > d / 4
    assert "every edge" in row.because


@pytest.mark.parametrize(
    "row", [r for r in EVERY if r.table != "training"], ids=lambda r: f"{r.table} {r.model}"
)
def test_no_executed_count_exceeds_its_bound_by_more_than_a_constant(row: Row) -> None:
    base = dict(VALUES, n=10**5, m=10**6, d=1000, k=64)
    for values in (base, dict(base, n=10**7, m=10**8), dict(base, k=256), dict(base, L=12)):
        assert row.executed_work(**values) <= 8 * row.work(**values)


def test_an_unknown_row_lists_the_known_ones() -> None:
    with pytest.raises(InputError, match="GraphSAGE pool"):
        find("graphormer")
    with pytest.raises(InputError, match="local, global, training"):
        find("gcn", "eight")
    with pytest.raises(InputError, match="only the local models"):
        find("sgc", "global").kernels()
