"""bench/ops/case: sizes agree with each other, what does not apply is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from plait.bench.ops.case import group_key
from plait.bench.ops.catalogue import make_case
from plait.errors import InputError


def test_nodes_follow_from_edges_and_degree() -> None:
    assert make_case("spmm", edges=1000, degree=4.0).nodes == 250
    given = make_case("spmm", edges=1000, nodes=100)
    assert (given.nodes, given.degree) == (100, 10.0)


def test_sparsity_makes_a_square_matrix() -> None:
    case = make_case("spmm", nodes=100, sparsity=0.9)
    assert case.edges == 1000
    assert case.law is None


def test_a_real_graph_brings_its_own_sizes() -> None:
    case = make_case("spmm", graph="grid:rows=3,cols=3")
    assert (case.edges, case.nodes, case.law) == (None, None, None)


def test_a_record_holds_only_what_applies() -> None:
    sizes = make_case("mm").to_dict()
    assert set(sizes) == {"op", "direction", "device", "nodes", "inner", "width", "dtype"}


def test_the_group_is_the_same_for_the_same_cases_whatever_the_suite() -> None:
    case = make_case("mm")
    assert group_key((case,)) == group_key((replace(case, suite="quick"),))
    assert group_key((case,)) != group_key((replace(case, width=8),))


@pytest.mark.parametrize(
    ("op", "sizes", "message"),
    [
        ("spmm", {"law": "zipf"}, "--law: unknown name 'zipf'; known are regular, uniform, powerlaw"),
        ("spmm", {"heads": 2}, "--heads: spmm has no such size"),
        ("spmm", {"sparsity": 1.0}, "--sparsity: 1.0 is not a share"),
        ("spmm", {"exponent": 2.0}, "--exponent: 2.0"),
        ("spmm", {"edges": 0}, "--edges: 0"),
        ("index_select", {"axis": 2}, "--axis: 2"),
        ("spmm", {"degree": 0.0}, "--degree: 0.0"),
        ("sort", {"direction": "backward"}, "--direction: sort has no gradient"),
        ("spnn", {}, "--op: unknown operation 'spnn'; known are index_select"),
    ],
)
def test_bad_sizes_are_refused_by_name(op: str, sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match="^" + message.replace("(", r"\(")):
        make_case(op, **sizes)
