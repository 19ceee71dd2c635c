"""plan/exchange.py: candidates over three ranks in numpy, step by step on all of them, against the whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from plait.cost.machine import default_profile
from plait.ir import Barrier, Expr, sort
from plait.ir.evaluate import evaluate
from plait.ops.exchange import TRADE_MEETING, wire_numbers
from plait.ops.operation import Setting, operation
from plait.ops.program import Program, Step
from plait.ops.work import Matrix
from plait.plan.candidates import Candidate, candidates
from plait.plan.early import early, early_backward
from plait.plan.exchange import Link, _order, by_features, by_nodes, choose_over_ranks, overlapped
from plait.plan.program import differentiate
from plait.plan.search import Problem
from plait.plan.words import step_text
from tests.plan.expressions import LAYERS, N, learnable, matrix_of, values
from tests.plan.interpreter import _ties, _value, run


def apart(program: Program) -> Program:
    """The program with rows sent early and waited for late."""
    return replace(program, steps=tuple(program.steps[k] for k in _order(program.steps)))


OWN = [np.arange(0, 3), np.arange(3, 4), np.arange(4, N)]
WAYS: dict[str, Callable[[Program], Program | None]] = {
    "by nodes": by_nodes, "overlapped": overlapped, "by features": by_features,
    "overlapped, apart": lambda program: apart(overlapped(program)),
    "border first": lambda program: apart(early(overlapped(program))),
}  # fmt: skip
ALL = [
    pytest.param(candidate, name, id=f"{name}: {candidate.name} [{candidate.form}]")
    for name, forms in LAYERS.items()
    for candidate in candidates(forms)
]


class Ranks:
    """Programs carried out by three ranks in lockstep; exchanges are plain indexing."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.given = given
        pattern = np.asarray(given["A"]) != 0
        self.halos = [np.setdiff1d(np.flatnonzero(pattern[own].any(axis=0)), own) for own in OWN]

    def constants(self, program: Program, rank: int) -> dict[str, Any]:
        leaves = {**self.given, "ones": np.ones(N)}
        own, halo = OWN[rank], self.halos[rank]
        both, every = np.concatenate((own, halo)), np.arange(N)
        found = {}
        for name, expr in program.constants.items():
            where = expr.name if isinstance(expr, Barrier) else ""
            inner = expr.body if isinstance(expr, Barrier) else expr
            rows, columns = {
                "halo": (both, both), "border": (halo, halo), "own": (own, own), "remote": (own, halo),
                "all": (every, every), "": (own, both if sort(inner) == "sparse" else own),
            }[where]  # fmt: skip
            found[name] = np.asarray(evaluate(inner, leaves))[np.ix_(rows, columns)]
        return found

    def run(self, program: Program, envs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        constants = [self.constants(program, rank) for rank in range(len(OWN))]
        for step in program.steps:
            if step.op in ("exchange", "pick", "send", "receive", "to_columns", "to_rows"):
                made = self.exchanged(step, envs)
            else:
                made = [_value(step, env, known) for env, known in zip(envs, constants, strict=True)]
            for rank, env in enumerate(envs):
                env[step.out] = made[rank]
                if step.op == "extremum":
                    env[step.more[0]] = _ties(step, {**env, **constants[rank]})
        return envs

    def exchanged(self, step: Step, envs: list[dict[str, Any]]) -> list[Any]:
        x = [env[step["x"]] for env in envs]
        ranks = range(len(OWN))
        if step.op == "to_columns":
            whole = np.concatenate(x)
            return [np.array_split(whole, len(OWN), axis=1)[rank] for rank in ranks]
        if step.op == "to_rows":
            whole = np.concatenate(x, axis=1)
            return [whole[own] for own in OWN]
        if not step.is_transposed and step.op == "receive":
            return x  # it arrived when it was sent
        lent = [np.concatenate([np.intersect1d(own, halo) for halo in self.halos]) for own in OWN]
        if step.op == "pick":
            return [rows[nodes - own[0]] for rows, nodes, own in zip(x, lent, OWN, strict=True)]
        if step.option("is_picked"):
            whole = np.full((N, x[0].shape[1]), np.nan)  # rows that nobody needs are not sent
            for rows, nodes in zip(x, lent, strict=True):
                whole[nodes] = rows
            return [whole[nodes] for nodes in self.halos]
        if not step.is_transposed:
            whole = np.concatenate(x)
            halo = [whole[nodes] for nodes in self.halos]
            return halo if step.op == "send" else [np.concatenate(pair) for pair in zip(x, halo, strict=True)]
        if step.op == "send":
            return x
        rows = [
            value[-len(halo) :] if len(halo) else value[:0] for value, halo in zip(x, self.halos, strict=True)
        ]
        back = np.zeros((N, x[0].shape[1]))
        for nodes, value in zip(self.halos, rows, strict=True):
            back[nodes] += value
        addend = [env[step["addend"]] if step.get("addend") else 0.0 for env in envs]
        own = addend if step.op == "receive" else [value[: len(o)] for value, o in zip(x, OWN, strict=True)]
        return [term + back[nodes] for term, nodes in zip(own, OWN, strict=True)]


def gradients(candidate: Candidate, program: Program, wrt: tuple[str, ...], way: str) -> Program:
    if way == "border first":
        whole = overlapped(candidate.forward)
        return apart(early_backward(differentiate(whole, wrt), whole, program))
    return apart(differentiate(program, wrt)) if "apart" in way else differentiate(program, wrt)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("candidate", "layer"), ALL)
def test_ranks_compute_what_one_computes(candidate: Candidate, layer: str, way: str) -> None:
    given = values(LAYERS[layer][0], np.random.default_rng(3))
    program = WAYS[way](candidate.forward)
    if program is None:
        pytest.skip("a width is a sum")
    for step in program.steps:
        operation(step.op).check(step)
    ranks = Ranks(given)
    envs = [{**given, "X": given["X"][own]} for own in OWN]
    whole = run(candidate.forward, given, given)
    out = candidate.forward.outputs[0]
    ranks.run(program, envs)
    np.testing.assert_allclose(np.concatenate([env[out] for env in envs]), whole[out], rtol=1e-9, atol=1e-9)
    wrt = ("X", *learnable(LAYERS[layer]))
    direction = np.random.default_rng(4).standard_normal(whole[out].shape)
    one = candidate.backward(wrt)
    expected = run(one, {**whole, "grad": direction}, given)
    backward = gradients(candidate, program, wrt, way)
    for env, own in zip(envs, OWN, strict=True):
        env["grad"] = direction[own]
    ranks.run(backward, envs)
    for name, theirs, mine in zip(wrt, one.outputs, backward.outputs, strict=True):
        parts = [env[mine] for env in envs]
        total = np.concatenate(parts) if name == "X" else sum(parts)
        np.testing.assert_allclose(total, expected[theirs], rtol=1e-9, atol=1e-9, err_msg=name)


SIZES = {"N": 1000, "H": 1400, "B": 400, "S": 300, "G": 4000, "K1": 64, "K2": 16, "K1/P": 16, "K2/P": 4}


def problem(**options: Any) -> Problem:
    def known(expr: Expr) -> Matrix:
        shares = {"own": 0.9, "remote": 0.1, "all": 4.0}
        share = shares.get(expr.name, 1.0) if isinstance(expr, Barrier) else 1.0
        return matrix_of(4000 if share > 1 else 1000, int(share * 20_000))(expr)  # type: ignore[no-any-return]

    made = Problem(LAYERS["gcn"], SIZES, known, default_profile(), wrt=("X", "W", "b"), threads=1)
    return replace(made, **options)


def alone(prices: Mapping[str, float]) -> Mapping[str, float]:
    return prices


def test_numbers_on_the_wire_are_counted_by_direction() -> None:
    program = by_nodes(candidates(LAYERS["gcn"])[0].forward)
    step = next(step for step in program.steps if step.op == "exchange")
    setting = Setting(program, SIZES, lambda name, turned: None, {})
    width = {"K1": 64, "K2": 16}[str(program.shapes[step.out][1])]
    assert wire_numbers(step, setting) == (300 * width, 400 * width)
    back = Step("exchange", step["x"], (("x", step.out),), True)
    assert wire_numbers(back, setting) == (400 * width, 300 * width)


def test_a_slow_network_sends_the_narrower_side() -> None:
    plan, choice = choose_over_ranks(problem(), Link(1e6, 1e-5, 3), alone)
    assert choice.travels == "fwd halo x 16, bwd haloᵀ x 16"
    assert choice.bytes_each == (300 * 16 * 4, 400 * 16 * 4)
    assert plan.because.endswith(choice.travels)
    assert any("64" in lost.why for lost in plan.rejected)
    assert all(lost.seconds >= choice.seconds[choice.travels] for lost in plan.rejected)  # type: ignore[operator]


def test_a_cut_that_needs_everything_is_split_by_features() -> None:
    everything = {**SIZES, "H": 4000, "B": 3000, "S": 3000}
    _, choice = choose_over_ranks(problem(sizes=everything), Link(1e6, 1e-5, 3), alone)
    assert choice.split == "by features"
    assert choice.travels.startswith("fwd columns x 16, fwd rows x 16")


def test_columns_are_priced_where_they_carry_less_than_halos() -> None:
    """To price them takes the whole graph, which ranks do not hold otherwise."""
    link = Link(1e6, 1e-5, 3)

    def refusing(expr: Expr) -> Matrix:
        assert not (isinstance(expr, Barrier) and expr.name == "all")
        return problem().matrices(expr)

    _, choice = choose_over_ranks(problem(matrices=refusing), link, alone)
    assert not any("columns" in travels for travels in choice.seconds)
    # rows go there and back, 3 / 4 of a quarter of 4000 each time
    for rows, is_priced in ((1500, False), (1501, True)):
        sizes = {**SIZES, "H": 1000 + rows, "B": rows}
        _, choice = choose_over_ranks(problem(sizes=sizes), link, alone)
        assert any("columns" in travels for travels in choice.seconds) == is_priced
    _, choice = choose_over_ranks(problem(), link, alone, "features")
    assert choice.split == "by features"


def test_halos_under_way_cost_what_is_not_computed_meanwhile() -> None:
    wide = problem(sizes={**SIZES, "K1": 512, "K2": 512, "K1/P": 128, "K2/P": 128})
    plan, choice = choose_over_ranks(wide, Link(1e8, 1e-6, 3), alone)
    assert choice.split == "by nodes, overlapped, border first"
    waits = [s.price.seconds for s in plan.steps if s.step.op == "receive"]
    assert all(seconds < Link(1e8, 1e-6, 3).seconds(400 * 512 * 4) for seconds in waits)


def test_what_needs_nothing_of_others_is_done_while_rows_travel() -> None:
    sage = problem(forms=LAYERS["sage mean"], wrt=("X", "W", "V", "b"), may_chain=False)
    sage = replace(sage, sizes={**SIZES, "K1": 512, "K2": 512, "K1/P": 128, "K2/P": 128})
    plan, choice = choose_over_ranks(sage, Link(1e8, 1e-6, 3), alone)
    assert choice.split == "by nodes, overlapped, border first"
    assert plan.backward is not None
    for program in (plan.forward, plan.backward):
        ops = [step.op for step in program.steps]
        assert ops.count("send") == ops.count("receive") == 1
        sent, came = ops.index("send"), ops.index("receive")
        leading = {"x"} | {name for step in program.steps[: sent + 1] for _, name in step.reads}
        assert all(step.out in leading for step in program.steps[:sent])  # nothing else goes before it
        later: set[str] = set()
        for step in program.steps[came:]:  # what follows needs what came
            assert step.op == "receive" or later & {name for _, name in step.reads}, step
            later.add(step.out)
    assert [s.step for s in plan.steps] == [*plan.forward.steps, *plan.backward.steps]


def test_exchanges_keep_their_order() -> None:
    for forms in LAYERS.values():
        for candidate in candidates(forms):
            program = overlapped(candidate.forward)
            for one in (program, differentiate(program, ("X",))):
                for ends in (("send", "exchange"), ("receive", "exchange")):
                    before = [step.out for step in one.steps if step.op in ends]
                    assert [step.out for step in apart(one).steps if step.op in ends] == before


def test_what_never_changes_travels_once() -> None:
    _, choice = choose_over_ranks(
        problem(constant=frozenset({"X"}), wrt=("W", "b")), Link(1e9, 1e-5, 3), alone
    )
    assert choice.bytes_each == ()
    assert choice.bytes_once == 300 * 64 * 4


def test_columns_stay_columns_between_two_products() -> None:
    whole = next(c for c in candidates(LAYERS["sgc"]) if c.form == "edges" and c.name.endswith("@ W + b"))
    program = by_features(whole.forward)
    assert program is not None
    assert [step.op for step in program.steps].count("to_columns") == 1
    assert [step.op for step in program.steps].count("to_rows") == 1


def test_one_rank_exchanges_with_nobody() -> None:
    _, choice = choose_over_ranks(problem(), Link(1e9, 1e-5, 0), alone)
    assert "columns" not in "".join(choice.seconds)


def test_the_slowest_rank_counts_and_sending_everything_never_wins() -> None:
    plan, choice = choose_over_ranks(
        problem(), Link(1e6, 1e-5, 3), lambda prices: {key: 2.0 - ("halo x 64" in key) for key in prices}
    )
    assert choice.travels == "fwd halo x 64, bwd haloᵀ x 64"
    assert "all rows" in " ".join(choice.seconds)
    assert any("all rows" in lost.candidate for lost in plan.rejected)


@pytest.mark.parametrize(("times", "width"), [(0.95, 16), (1.03, 16), (1.09, 16), (1.11, 64)])
def test_of_prices_within_a_tenth_the_fewest_bytes_are_sent(times: float, width: int) -> None:
    wide, narrow = (f"fwd halo x {columns}, bwd haloᵀ x {columns}" for columns in (64, 16))
    said: list[Mapping[str, float]] = []

    def agree(own: Mapping[str, float]) -> Mapping[str, float]:
        said.append(own)
        if len(said) == 2:  # bytes, after prices
            assert own[wide] == 4 * own[narrow] > 0
            return own
        return dict.fromkeys(own, 4.0) | {narrow: 2.0 * times, wide: 2.0}

    plan, choice = choose_over_ranks(problem(), Link(1e6, 1e-5, 3), agree)
    assert choice.travels == f"fwd halo x {width}, bwd haloᵀ x {width}"
    assert ("sends the fewest bytes" in plan.because) == (width == 16 and times > 1)


def test_exchanges_have_words() -> None:
    for op in ("exchange", "send", "receive"):
        for is_transposed in (False, True):
            words = step_text(Step(op, "v1", (("x", "v0"),), is_transposed)).split()
            assert "rows" in words or "gradients" in words
    assert step_text(Step("to_columns", "v1", (("x", "v0"),))) == "exchange rows for columns of all rows"


def test_an_exchange_costs_its_bytes_its_messages_and_a_meeting() -> None:
    assert Link(100.0, 0.5, 3, meeting=4.0).seconds(200.0) == 2.0 + 1.5 + 4.0
    assert Link(100.0, 0.5, 3, meeting=4.0).seconds(200.0, "to_rows") == 2.0 + 1.5 + 4.0 * TRADE_MEETING
    assert Link(100.0, 0.5, 0, meeting=4.0).seconds(200.0) == 2.0
