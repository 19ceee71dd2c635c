"""runtime/problems.py: sizes are read off the tensors, and what disagrees is named."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from plait.errors import InputError
from plait.graph import Graph
from plait.ir import Dense, MatMul, Sparse, leaves
from plait.plan.search import Problem
from plait.runtime.constants import Constants, from_dense
from plait.runtime.dial import Dial
from plait.runtime.problems import Asked, known_leaves, of_program

A, X, W = Sparse("A", "N", "N"), Dense("X", "N", "K"), Dense("W", "K", "L")
EXPR = MatMul(MatMul(A, X), W)


def graph() -> Graph:
    ends = torch.randint(0, 9, (2, 30), generator=torch.Generator().manual_seed(1)).numpy()
    return Graph.from_edge_index(ends[0], ends[1], 9)


def problem(given: Mapping[str, Tensor], rows: Tensor | None = None, **more: object) -> Problem:
    constants = Constants(graph(), None, {}, torch.float32, rows)
    signature = tuple((name, value.shape, value.requires_grad) for name, value in given.items())
    return Asked("layer", constants, (EXPR,), given, signature, **more).problem(Dial(None), 7)  # type: ignore[arg-type]


def test_sizes_and_wanted_gradients_are_those_of_the_tensors() -> None:
    found = problem({"X": torch.randn(9, 5), "W": torch.randn(5, 4, requires_grad=True)})
    assert found.sizes == {"N": 9, "K": 5, "L": 4}
    assert (found.wrt, found.calls, found.float_bytes) == (("W",), 7, 4)
    assert problem({"X": torch.randn(9, 5), "W": torch.randn(5, 4)}).wrt is None


def test_rows_restrict_the_expression() -> None:
    found = problem({"X": torch.randn(9, 5), "W": torch.randn(5, 4)}, rows=torch.tensor([1, 4]))
    assert found.sizes["Nr"] == 2
    assert "E" in leaves(found.forms[0])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"X": torch.randn(8, 5), "W": torch.randn(5, 4)}, "number of rows of X"),
        ({"X": torch.randn(9, 5), "W": torch.randn(6, 4)}, "check the widths"),
        ({"X": torch.randn(9, 5), "W": torch.randn(5, 4).double()}, "x is torch.float32 but W"),
    ],
    ids=["rows", "widths", "types"],
)
def test_what_disagrees_is_named(given: Mapping[str, Tensor], words: str) -> None:
    with pytest.raises(InputError, match=words):
        problem(given)


def test_few_non_zeros_are_priced_as_a_sparse_matrix() -> None:
    x = torch.zeros(9, 5)
    x[2, 3] = 1.0
    found = problem({"X": x, "W": torch.randn(5, 4)}, sparse=from_dense(x), fixed=frozenset({"X"}))
    assert found.features["X"].edges == 1
    assert found.constant == {"X"}


def test_leaves_are_found_once() -> None:
    assert known_leaves(EXPR) == leaves(EXPR)
    assert known_leaves(EXPR) is known_leaves(EXPR)


def test_a_program_may_name_sizes_of_its_own() -> None:
    found = of_program("layer", graph(), torch.randn(9, 5), None, None, {"S": 3}, Dial(None))
    assert found.sizes == {"N": 9, "M": 9, "E": graph().num_edges, "S": 3}
