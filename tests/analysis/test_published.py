"""analysis/published.py: every row evaluated, beside the exact count of what plait executes."""

from __future__ import annotations

import math
from typing import Any

import pytest

from plait.analysis.published import GLOBAL, LOCAL, SCHEMES, Row, find
from plait.errors import InputError
from plait.ops.symbolic import parse

VALUES: dict[str, Any] = {
    "n": 1000, "m": 20000, "d": 64, "d_out": 64, "k": 16, "L": 3, "K": 2, "c": 8, "s": 4, "T": 8,
    "W_pre": 500, "D_pre": 5,
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


# Executed counts: closed forms of what executed.py finds in programs, which its own tests run ---------------

EXECUTED = {
    ("local", "GCN"): "2Lmk + 2Lnk^2",
    ("local", "GraphSAGE mean"): "Lmk + 2Lnk + 4Lnk^2",
    ("local", "GIN"): "Lmk + Lnk + LKnk + 2LKnk^2",
    ("local", "CommNet"): "Lmk + Lnk + 4Lnk^2",
    ("local", "Vanilla attention"): "4Lmk + 2Lnk^2",
    ("local", "AGNN"): "4Lmk + 4Lm + 5Lnk + 3Ln + 2Lnk^2",
    ("local", "MoNet"): "Lmk + 4Lnk + 2Ln + 4Lnk^2",
    ("local", "GAT"): "2Lmk + 7Lm + 5Lnk + Ln + 2Lnk^2",
    ("local", "G-GCN"): "7Lmk + 6Lnk^2",
    ("local", "GraphSAGE pool"): "Lmk + 3Lnk + 6Lnk^2",
    ("local", "EdgeConv-1"): "Lmk + 2Lnk^2",
    ("local", "EdgeConv-5"): "3Lmk + 4Lnk^2 + Lk^2",
    ("global", "GraphSAGE mean"): "2Lmk + 2Lnk^2",
    ("global", "SGC"): "2smk + 2nk^2",
    ("global", "DeepWalk"): "2Tmk + Tnk + 2nk^2",
    ("global", "ChebNet"): "2Tmk + 2Tnk + nk + 2nk^2",
    ("global", "DCNN, GDC"): "2Tmk + 2Tnk - nk + 2nk^2",
    ("global", "Node2Vec"): "4mk + 5nk + 2nk^2",
    ("global", "LINE, SDNE"): "4mk + 2nk + 2nk^2",
    **{
        ("global", name): "2Tmk + 3Tnk + 2nk^2"
        for name in ("Auto-Regress", "PPNP", "ARMA", "ParWalks")
    },
    **{("training", row.model): "4Lmk + 6Lnk^2 - 2mk - 2nk^2" for row in SCHEMES},
}  # fmt: skip
SAME_AS_LOCAL = {"GCN": "GCN", "GIN": "GIN", "CommNet": "CommNet", "EdgeConv-1": "EdgeConv-1",
                 "Dot product": "Vanilla attention"}  # fmt: skip


@pytest.mark.parametrize("row", EVERY, ids=lambda row: f"{row.table} {row.model}")
def test_every_row_has_the_exact_count_of_what_plait_executes(row: Row) -> None:
    key = (row.table, row.model)
    text = EXECUTED[key] if key in EXECUTED else EXECUTED["local", SAME_AS_LOCAL[row.model]]
    assert row.executed_work.terms == parse(text).terms
    assert row.executed_by.startswith("plait's programs")


@pytest.mark.parametrize(
    ("model", "table", "depth"),
    [
        ("GCN", "local", L * (1 + ld + 1 + lk)),
        ("GIN", "global", L * (ld + 1 + K * (1 + lk) + K - 1)),
        ("GAT", "local", L * (2 * (1 + lk) + 2 + 2 * ld + 4)),
        ("SGC", "global", s * (1 + ld) + 1 + lk),
        ("PPNP", "global", T * (1 + ld + 2) + 1 + lk),
        # forward; back through all layers but the first, and there the gradient of its weight: a sum over n
        ("Full batch", "training", L * (2 + ld + lk) + (L - 1) * (2 + ld + lk) + 1 + 10),
    ],
)  # fmt: skip
def test_depths_of_what_is_executed(model: str, table: str, depth: int) -> None:
    assert find(model, table).executed_depth(**VALUES) == depth


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
