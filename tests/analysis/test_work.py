"""analysis/work.py: flops and depth against programs run on numbers that count."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from plait.analysis.work import Phase, fullest_row, of_layer
from plait.cost.machine import default_profile
from plait.cost.price import uniform_matrix
from plait.graph import Graph
from plait.ir import Diagonal, Expr, Sparse, leaves
from plait.ops.work import Matrix
from plait.plan.plan import LayerPlan
from plait.plan.search import Problem, matrices_of, survey
from tests.analysis.counting import Counter, run
from tests.plan.expressions import LAYERS, WIDTHS, learnable

LINEAR = [name for name in LAYERS if name != "sage max"]
GRAPHS = ("random", "empty", "one hub", "loops", "repeated", "isolated", "one node")


def graph(kind: str, rng: np.random.Generator) -> Any:
    """Dense 0/1 matrices with multiplicity: row i lists the sources of i."""
    n = 1 if kind == "one node" else 6
    a = (rng.random((n, n)) < 0.4).astype(float)
    np.fill_diagonal(a, 0)
    match kind:
        case "empty" | "one node":
            a[:] = 0
        case "one hub":
            a[:] = 0
            a[2] = 1
        case "loops":
            np.fill_diagonal(a, 1)
        case "repeated":
            a *= rng.integers(1, 4, (n, n))
        case "isolated":
            a[3] = a[:, 3] = 0
    return a


def problem(layer: str, a: Any, wrt: tuple[str, ...] | None, **more: Any) -> Problem:
    n = len(a)
    targets, sources = np.nonzero(a)
    counts = a[targets, sources].astype(int)
    built = Graph.from_edge_index(np.repeat(sources, counts), np.repeat(targets, counts), num_nodes=n)

    def matrix(expr: Expr) -> Matrix:
        names = set(leaves(expr))
        loops = n if names & {"i", "l"} and not isinstance(expr, Sparse) else 0
        is_weighted = bool(names - {"A", "i"}) or any(
            isinstance(leaf, Sparse) and leaf.is_weighted for leaf in leaves(expr).values()
        )
        return Matrix(
            n, n, built.num_edges + loops, is_weighted, built.stats, built.transpose.stats, 4, loops
        )

    return Problem(LAYERS[layer], {"N": n, **WIDTHS}, matrix, default_profile(), wrt=wrt, **more)


def values(layer: str, a: Any, rng: np.random.Generator) -> dict[str, Any]:
    """Numbers for every leaf; no weight is 0, which would be no edge."""
    sizes = {"N": len(a), **WIDTHS}
    found: dict[str, Any] = {}
    for form in LAYERS[layer]:
        for name, leaf in leaves(form).items():
            if isinstance(leaf, Sparse):
                found[name] = a
            elif isinstance(leaf, Diagonal):
                found[name] = np.ones(len(a)) if name == "i" else rng.uniform(1, 2, len(a))
            elif hasattr(leaf, "rows"):
                found[name] = rng.standard_normal([sizes.get(str(s), s) for s in (leaf.rows, leaf.cols)])
            else:
                found[name] = rng.standard_normal()
    return found


def plans(asked: Problem) -> list[LayerPlan]:
    return [replace(plan, matrices=matrices_of(plan, asked)) for plan in survey(asked)]


def counted(plan: LayerPlan, given: dict[str, Any], by_tree: bool) -> dict[str, tuple[int, int]]:
    """(flops, depth of the deepest output) of each pass, counted."""
    found, env = {}, {k: v for k, v in given.items() if k in ("X", *plan.wrt) or np.ndim(v) != 1}
    env.pop("A", None)
    for name, program in (("once", plan.hoisted), ("forward", plan.forward), ("backward", plan.backward)):
        if program is None:
            continue
        counter = Counter(by_tree)
        if name == "backward":
            env["grad"] = np.ones((len(given["A"]), _width(plan)))
        for rows in (rows for rows in env.values() if isinstance(rows, list)):
            for row in rows:
                for value in row:
                    value.depth, value.counter = 0, counter
        env = run(program, env, given, plan.matrices, counter)
        depths = [v.depth for out in program.outputs if out for row in env[out] for v in row]
        found[name] = (counter.flops, max(depths, default=0))
    return found


def _width(plan: LayerPlan) -> int:
    size = plan.forward.shapes[plan.forward.outputs[0]][1]
    return size if isinstance(size, int) else plan.sizes[size]


@pytest.mark.parametrize("layer", LINEAR)
@pytest.mark.parametrize("kind", GRAPHS)
def test_flops_are_those_of_an_instrumented_run(layer: str, kind: str) -> None:
    rng = np.random.default_rng(GRAPHS.index(kind))
    a = graph(kind, rng)
    given = values(layer, a, rng)
    for wrt in (None, ("X", *learnable(LAYERS[layer]))):
        for plan in plans(problem(layer, a, wrt)):
            phases, seen = of_layer(plan), counted(plan, given, by_tree=False)
            assert {n: p.flops for n, p in phases.items()} == {
                n: f for n, (f, _) in seen.items() if n in phases
            }, plan.describe()


@pytest.mark.parametrize("layer", LINEAR)
@pytest.mark.parametrize("kind", GRAPHS)
def test_depth_is_that_of_the_dependences_where_all_rows_are_alike_and_never_less(
    layer: str, kind: str
) -> None:
    rng = np.random.default_rng(GRAPHS.index(kind))
    regular = np.roll(np.eye(6), 1, axis=1) + np.roll(np.eye(6), 2, axis=1) + np.roll(np.eye(6), 4, axis=1)
    for a in (regular, graph(kind, rng)):
        given = values(layer, a, rng)
        for plan in plans(problem(layer, a, ("X", *learnable(LAYERS[layer])))):
            phases, seen = of_layer(plan), counted(plan, given, by_tree=True)
            for name, phase in phases.items():
                if a is regular:
                    assert phase.depth == seen[name][1], (name, plan.describe())
                assert phase.depth >= seen[name][1], (name, plan.describe())


def test_work_done_once_is_counted_apart() -> None:
    rng = np.random.default_rng(3)
    a = graph("random", rng)
    given = values("gcn", a, rng)
    asked = problem("gcn", a, learnable(LAYERS["gcn"]), constant=frozenset({"X"}))
    hoisting = [plan for plan in plans(asked) if plan.hoisted.steps]
    assert hoisting
    for plan in hoisting:
        seen = counted(plan, given, by_tree=False)
        assert {name: phase.flops for name, phase in of_layer(plan).items()} == {
            name: flops for name, (flops, _) in seen.items()
        }


def test_sparse_features_are_counted_by_their_non_zeros() -> None:
    rng = np.random.default_rng(4)
    a = graph("random", rng)
    given = values("sage mean", a, rng)
    given["X"][rng.random(given["X"].shape) < 0.5] = 0
    features = uniform_matrix(len(a), WIDTHS["K1"], int(np.count_nonzero(given["X"])), True)
    asked = problem(
        "sage mean", a, learnable(LAYERS["sage mean"]), constant=frozenset({"X"}), features={"X": features}
    )
    sparse = [plan for plan in plans(asked) if plan.sparse_values == ("X",)]
    assert sparse
    for plan in sparse:
        seen = counted(plan, given, by_tree=False)
        assert of_layer(plan)["forward"].flops == seen["forward"][0]
        assert of_layer(plan)["backward"].flops == seen["backward"][0]


@pytest.mark.parametrize("layer", list(LAYERS))
def test_formulas_evaluate_to_the_counts(layer: str) -> None:
    a = graph("repeated", np.random.default_rng(5))
    for plan in plans(problem(layer, a, ("X", *learnable(LAYERS[layer])))):
        for phase in of_layer(plan).values():
            assert phase.formulas["flops"](**phase.values) == phase.flops
            assert phase.formulas["depth"](**phase.values) == phase.depth


def test_a_gcn_layer_reads_like_the_textbook() -> None:
    a = graph("random", np.random.default_rng(6))
    asked = problem("gcn, loops of ones", a, None)
    folded = next(p for p in plans(asked) if p.form == "edges")
    forward = of_layer(folded)["forward"]
    text = str(forward.formulas["flops"])
    # the sum is taken before the product with W or after it, on K1 or on K2 columns, and once
    assert ("2 m K1 + 2 n K1" in text) != ("2 m K2 + 2 n K2" in text)
    assert "2 n K1 K2" in text


def test_extrema_count_their_comparisons() -> None:
    a = graph("random", np.random.default_rng(7))
    edges, width = int(a.sum()), WIDTHS["K1"]
    for wrt, each in ((None, 1), (("X", *learnable(LAYERS["sage max"])), 3)):
        plan = plans(problem("sage max", a, wrt))[0]
        assert of_layer(plan)["forward"].kernels["aggregate"] == each * edges * width


def test_average_parallelism_and_brents_bound() -> None:
    phase = Phase(1000, 24, 8, 512.0, 600.0, 0.0, {})
    assert phase.work == 1024
    assert phase.parallelism == 128
    assert phase.brent(4) == 264
    assert phase.intensity == 1000 / 512
    assert Phase(0, 0, 0, 0.0, 0.0, 0.0, {}).parallelism == 0


def test_the_fullest_row_counts_the_loop_that_is_added() -> None:
    a = graph("one hub", np.random.default_rng(8))
    asked = problem("gcn", a, None)
    plan = next(p for p in plans(asked) if "fold" in next(iter(p.matrices)))
    (matrix,) = plan.matrices.values()
    assert fullest_row(matrix) == 7
