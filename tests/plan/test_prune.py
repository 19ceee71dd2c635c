"""plan/prune.py: what is dropped is never the cheapest, whatever the graph, the widths and the machine."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from plait.cost.price import Pricer
from plait.plan.candidates import candidates
from plait.plan.prune import Survivor, prune
from plait.plan.search import Problem, _plan
from tests.plan.expressions import LAYERS, A, W, X, learnable, matrix_of
from tests.plan.machines import random_machine

MODES = ["inference", "training", "middle"]


def wanted(name: str, mode: str) -> tuple[str, ...] | None:
    if mode == "inference":
        return None
    return learnable(LAYERS[name]) + (("X",) if mode == "middle" else ()) or ("X",)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", sorted(LAYERS))
def test_a_dropped_candidate_is_never_cheaper_than_the_best_survivor(name: str, mode: str) -> None:
    rng, forms, wrt = np.random.default_rng(8), LAYERS[name], wanted(name, mode)
    survivors, dropped = prune(forms, wrt, frozenset())
    assert len(survivors) + len(dropped) == len(candidates(forms))
    for _ in range(12):
        nodes, degree = int(10 ** rng.uniform(1, 6)), float(rng.uniform(0.5, 60))
        widths = {k: int(2 ** rng.uniform(0, 10)) for k in ("K1", "K2", "K3")}
        view = matrix_of(nodes, int(nodes * degree))
        problem = Problem(forms, {"N": nodes, **widths}, view, random_machine(rng), wrt)
        pricer = Pricer(problem.machine)

        def price(option: Survivor) -> float:
            return _plan(option, problem, pricer, False).seconds  # noqa: B023  used in this turn only

        best = min(price(survivor) for survivor in survivors)
        for loser in dropped:
            seconds = price(Survivor(loser.candidate, ""))
            assert seconds >= best * (1 - 1e-9), (loser.candidate.name, loser.candidate.form, widths)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", sorted(LAYERS))
def test_beyond_its_condition_a_survivor_is_never_the_only_best(name: str, mode: str) -> None:
    rng, forms, wrt = np.random.default_rng(9), LAYERS[name], wanted(name, mode)
    survivors, _ = prune(forms, wrt, frozenset())
    for order in itertools.permutations(("K1", "K2", "K3")):
        sizes = {"N": 5000, **dict(zip(order, sorted(2 ** rng.uniform(2, 8, 3)), strict=True))}
        sizes = {key: int(value) for key, value in sizes.items()}
        problem = Problem(forms, sizes, matrix_of(5000, 40000), random_machine(rng), wrt)
        pricer = Pricer(problem.machine)
        prices = [(_plan(s, problem, pricer, False).seconds, s) for s in survivors]
        allowed = [seconds for seconds, s in prices if _holds(s.condition, sizes)]
        assert min(allowed) <= min(seconds for seconds, _ in prices) * (1 + 1e-9)


def _holds(condition: str, sizes: dict[str, int]) -> bool:
    """Whether widths satisfy one of the orderings "K1 <= K2 or K2 <= K1"; no condition always holds."""
    chains = [[sizes[width] for width in part.split(" <= ")] for part in condition.split(" or ") if part]
    return not chains or any(chain == sorted(chain) for chain in chains)


def test_the_condition_of_an_order_is_kept_and_readable() -> None:
    survivors, dropped = prune(((A @ X) @ W,), None, frozenset())
    assert {s.candidate.name: s.condition for s in survivors} == {
        "(A @ X) @ W": "K1 <= K2",
        "A @ (X @ W)": "K2 <= K1",
    }
    assert dropped == ()


def test_a_constant_input_leaves_one_association() -> None:
    """With A X hoisted nothing is left to aggregate: update first loses for every width."""
    survivors, _ = prune(((A @ X) @ W,), ("W",), frozenset({"X"}))
    assert [s.candidate.name for s in survivors] == ["(A @ X) @ W"]
    assert survivors[0].condition == ""


def test_who_beats_a_dropped_candidate_is_named() -> None:
    _, dropped = prune(LAYERS["tag"], None, frozenset())
    assert dropped
    for loser in dropped:
        assert loser.beaten_by != loser.candidate
