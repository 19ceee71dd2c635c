"""Sums over edges as they are listed, against the dense matrix of the reference."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.errors import InputError
from plait.kernels.arguments import Arguments
from plait.kernels.listed import LOOPS, SCALES, cpu, entries, listed_sum
from plait.kernels.listed.reference import dense_matrix

GRAPHS: dict[str, tuple[int, list[tuple[int, int]]]] = {
    "no edges": (3, []),
    "no nodes": (0, []),
    "isolated nodes": (5, [(0, 1), (1, 0)]),
    "self loops": (3, [(0, 0), (1, 1), (1, 1), (0, 2)]),
    "repeated edges": (3, [(0, 1), (0, 1), (2, 1), (0, 1)]),
    "hub": (6, [(k, 0) for k in range(6)] + [(0, k) for k in range(6)]),
}


def edge_list(edges: list[tuple[int, int]]) -> Tensor:
    return torch.tensor(edges, dtype=torch.long).reshape(-1, 2).t()


@pytest.mark.parametrize("is_grouped", [False, True])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("loops", LOOPS)
@pytest.mark.parametrize("name", GRAPHS)
def test_the_matrix_and_its_transpose_are_the_references(
    name: str, loops: str, scale: str, is_grouped: bool
) -> None:
    nodes, edges = GRAPHS[name]
    edge_index, shape = edge_list(edges), (nodes, nodes)
    weights = (None, torch.rand(len(edges)) + 0.1)
    for weight, width, dtype, fill in itertools.product(
        weights, (1, 8, 33), (torch.float32, torch.float64), (1.0, 2.0)
    ):
        given = None if weight is None else weight.to(dtype)
        x = torch.randn(nodes, width, dtype=dtype)
        found = entries(edge_index, given, shape, x, loops, fill, scale, is_grouped)
        assert found is not None
        assert (found.indptr is not None) == is_grouped
        dense = dense_matrix(edge_index, weight, shape, loops, fill, scale).to(dtype)
        torch.testing.assert_close(listed_sum(found, x), dense @ x)
        torch.testing.assert_close(listed_sum(found.turned, x), dense.t() @ x)
        bias = torch.randn(width, dtype=dtype)
        for identity in (0.5, 1.0):
            wanted = dense @ x + identity * x + bias
            torch.testing.assert_close(listed_sum(found, x, identity, bias), wanted)


def test_grouped_entries_come_row_by_row_in_the_order_of_the_list() -> None:
    edge_index = torch.tensor([[5, 1, 2, 5, 3, 0], [2, 0, 2, 0, 3, 2]])
    weight = torch.arange(6.0)
    found = entries(edge_index, weight, (6, 6), torch.zeros(6, 1), "remaining", is_grouped=True)
    assert found is not None
    assert found.target.tolist() == [0, 0, 2, 2]
    assert found.source.tolist() == [1, 5, 5, 0]
    assert found.value is not None
    assert found.value.tolist() == [1.0, 3.0, 0.0, 5.0]
    assert found.indptr is not None
    assert found.indptr.tolist() == [0, 2, 2, 4, 4, 4, 4]


@pytest.mark.parametrize("is_grouped", [False, True])
def test_targets_and_sources_may_be_different_nodes(is_grouped: bool) -> None:
    edge_index = torch.tensor([[0, 3, 3], [1, 0, 1]])
    x = torch.randn(4, 5)
    found = entries(edge_index, None, (2, 4), x, scale="mean", is_grouped=is_grouped)
    assert found is not None
    dense = dense_matrix(edge_index, None, (2, 4), scale="mean").float()
    torch.testing.assert_close(listed_sum(found, x), dense @ x)


@pytest.mark.parametrize("is_grouped", [False, True])
@pytest.mark.parametrize("width", [1, 8, 31, 64, 200])
def test_threads_do_not_change_a_bit(width: int, is_grouped: bool) -> None:
    edge_index, x = torch.randint(0, 400, (2, 9000)), torch.randn(400, width)
    found = entries(edge_index, None, (400, 400), x, "remaining", 1.0, "symmetric", is_grouped)
    assert found is not None
    before, sums = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            sums.append(listed_sum(found, x, 0.5))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(sums[0], sums[1])
    assert torch.equal(sums[0], sums[2])
    dense = dense_matrix(edge_index, None, (400, 400), "remaining", 1.0, "symmetric").float()
    torch.testing.assert_close(sums[0], dense @ x + 0.5 * x, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("width", [1, 16, 24, 32, 33, 40, 48, 100, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_two_threads_write_to_one_line_of_the_cache(
    monkeypatch: pytest.MonkeyPatch, width: int, dtype: torch.dtype
) -> None:
    edge_index, x = torch.randint(0, 400, (2, 90_000)), torch.randn(400, width, dtype=dtype)
    found, run, seen = entries(edge_index, None, (400, 400), x), Arguments.run, []
    assert found is not None

    def watched(self: Arguments, address: int, words: Any, threads: int) -> None:
        seen.append((words[self.columns] * dtype.itemsize, words[self.out_row], words[self.pieces], threads))
        run(self, address, words, threads)

    monkeypatch.setattr(Arguments, "run", watched)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        listed_sum(found, x)
    finally:
        torch.set_num_threads(before)
    ((piece, row, pieces, threads),) = seen
    assert pieces * piece >= row
    assert pieces == 1 or (piece % 64 == 0 and row % 64 == 0)
    assert threads == (2 if width * dtype.itemsize % 64 == 0 and width * dtype.itemsize > 64 else 1)


@pytest.mark.parametrize("is_grouped", [False, True])
@pytest.mark.parametrize("edge", [(0, 3), (3, 0), (-1, 0), (0, -1), (-(1 << 63), 0), (0, (1 << 63) - 1)])
def test_an_end_out_of_range_is_seen_before_anything_is_written(
    edge: tuple[int, int], is_grouped: bool
) -> None:
    edge_index = torch.tensor([[0, edge[0]], [1, edge[1]]])
    assert entries(edge_index, None, (3, 3), torch.zeros(3, 1), is_grouped=is_grouped) is None


@pytest.mark.parametrize("stride", ["columns", "every other", "expanded", "part of a list"])
def test_any_stride(stride: str) -> None:
    edge_index = torch.tensor([[0, 1, 2, 0], [1, 2, 0, 2]])
    x = torch.randn(3, 4)
    if stride == "columns":
        x, edge_index = x.t().contiguous().t(), edge_index.t().contiguous().t()
    elif stride == "every other":
        x = torch.randn(3, 8)[:, ::2]
    elif stride == "expanded":
        x = torch.randn(3, 1).expand(-1, 4)
    else:
        edge_index = edge_index[:, :3]
    found = entries(edge_index, None, (3, 3), x, "remaining", 1.0, "symmetric")
    assert found is not None
    dense = dense_matrix(edge_index, None, (3, 3), "remaining", 1.0, "symmetric").float()
    torch.testing.assert_close(listed_sum(found, x), dense @ x)


@pytest.mark.parametrize("scale", range(len(SCALES)))
@pytest.mark.parametrize(("is_weighted", "has_own", "is_grouped"), itertools.product([False, True], repeat=3))
def test_the_kernel_calls_nothing_outside_itself(
    is_weighted: bool, has_own: bool, is_grouped: bool, scale: int
) -> None:
    """Code that is kept on disk must not point into the interpreter that compiled it."""
    text = cpu.entries_kernel(32, is_weighted, has_own, scale, is_grouped).inspect_llvm()
    called = set(re.findall(r"call[^@\n]*@([\w.$]+)", text))
    assert all(name.startswith(("llvm.", "_ZN5plait")) for name in called), called


def test_operands_that_do_not_fit_are_refused() -> None:
    edge_index, x = torch.tensor([[0, 1], [1, 0]]), torch.zeros(2, 3)
    found = entries(edge_index, None, (2, 2), x, scale="mean")
    assert found is not None
    with pytest.raises(InputError, match="x: "):
        listed_sum(found, torch.zeros(3, 3))
    with pytest.raises(InputError, match="convert one of them"):
        listed_sum(found, x.double())
    with pytest.raises(InputError, match="float32 and float64"):
        listed_sum(found, x.half())
    with pytest.raises(InputError, match="bias: "):
        listed_sum(found, x, bias=torch.zeros(2))
    with pytest.raises(InputError, match="edge_weight"):
        entries(edge_index, torch.ones(3), (2, 2), x)
