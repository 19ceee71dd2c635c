"""kernels/operands.py: what a kernel may read and write, what is copied, and what is refused."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from plait.errors import InputError
from plait.kernels import attention, edgewise, gate, gemm, multi, spmm
from plait.kernels.operands import float_bits, read_flat, read_numbers, read_rows, write_flat, write_rows

N, WIDTH = 6, 4
F32 = torch.float32


def words() -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * 2)()


def rows_at(block: ctypes.Array[ctypes.c_int64], rows: int, width: int) -> np.ndarray:
    """The matrix a kernel would see at the address and stride in the block."""
    size = 4
    found = np.empty((rows, width), np.float32)
    for i in range(rows):
        line = (ctypes.c_float * width).from_address(block[0] + i * block[1])
        found[i] = np.frombuffer(line, np.float32, width)
    assert size == found.itemsize
    return found


LYING: dict[str, Callable[[Tensor], Tensor]] = {
    "as it comes": lambda x: x,
    "transposed": lambda x: x.t().contiguous().t(),
    "every other column": lambda x: torch.stack([x, x + 1], -1).flatten(1)[:, ::2],
    "every other row": lambda x: torch.stack([x, x + 1], 1).flatten(0, 1)[::2],
    "window": lambda x: torch.nn.functional.pad(x, (1, 2))[:, 1:-2],
    "one column": lambda x: x[:, :1].expand(-1, WIDTH),
    "one row": lambda x: x[:1].expand(N, -1),
    "overlapping": lambda x: x.flatten().as_strided((N, WIDTH), (1, 1)),
    "negative view": lambda x: torch.complex(x, x).conj().imag,
}


@pytest.mark.parametrize("name", LYING)
def test_a_matrix_is_read_as_it_is_whatever_its_strides(name: str) -> None:
    x = LYING[name](torch.randn(N, WIDTH))
    block = words()
    held = read_rows(block, 0, "x", x, F32, N, WIDTH)
    np.testing.assert_array_equal(rows_at(block, N, WIDTH), x.numpy(force=True) if x.is_neg() else x.numpy())
    assert held is not None
    column = x[:, :1]
    held = read_rows(block, 0, "x", column, F32, N, 1)
    np.testing.assert_array_equal(rows_at(block, N, 1), column.resolve_neg().numpy())


def test_a_single_number_is_read_with_its_sign() -> None:
    one, block = torch.complex(torch.ones(1, 1), torch.ones(1, 1)).conj().imag, words()
    assert one.is_contiguous()
    rows = read_rows(block, 0, "x", one, F32, 1, 1)
    assert ctypes.c_float.from_address(block[0]).value == -1.0
    flat = read_flat(block, 0, "bias", one[0], F32, 1)
    assert ctypes.c_float.from_address(block[0]).value == -1.0
    del rows, flat


@pytest.mark.parametrize("name", ["as it comes", "every other row", "window", "one row", "overlapping"])
def test_rows_that_are_whole_are_not_copied(name: str) -> None:
    x = LYING[name](torch.randn(N, WIDTH))
    assert read_rows(words(), 0, "x", x, F32, N, WIDTH) is x


def test_vectors_are_read_in_one_piece() -> None:
    vector = torch.randn(N, 3)[:, 1]
    block = words()
    held = read_flat(block, 0, "bias", vector, F32, N)
    assert held is not vector
    block[1] = 0
    np.testing.assert_array_equal(rows_at(block, 1, N)[0], vector.numpy())


def test_none_is_the_address_zero() -> None:
    block = words()
    block[0] = block[1] = 7
    assert read_rows(block, 0, "addend", None, F32, N, WIDTH) is None
    assert list(block) == [0, 0]
    block[0] = 7
    assert read_flat(block, 0, "bias", None, F32, N) is None
    assert block[0] == 0


@pytest.mark.parametrize("name", ["transposed", "every other column", "one column", "one row", "overlapping"])
def test_what_is_written_is_never_a_copy(name: str) -> None:
    out = LYING[name](torch.randn(N, WIDTH))
    with pytest.raises(InputError, match="out: is written row by row"):
        write_rows(words(), 0, "out", out, F32, N, WIDTH)
    with pytest.raises(InputError, match="out: its elements are written in one piece"):
        write_flat(words(), 0, "out", out, F32, N * WIDTH)


def test_columns_of_a_wider_result_are_written_in_place() -> None:
    whole = torch.zeros(N, 3 * WIDTH)
    block = words()
    write_rows(block, 0, "out", whole[:, WIDTH : 2 * WIDTH], F32, N, WIDTH)
    assert block[1] == 3 * WIDTH * 4
    assert block[0] == whole.data_ptr() + WIDTH * 4


def fake() -> Tensor:
    with FakeTensorMode():
        return torch.randn(N, WIDTH)


NOWHERE: dict[str, tuple[Callable[[], Tensor], str]] = {
    "meta": (lambda: torch.empty(N, WIDTH, device="meta"), "is on meta"),
    "fake": (fake, "without memory"),
    "sparse": (lambda: torch.randn(N, WIDTH).to_sparse(), "without memory"),
    "sparse rows": (lambda: torch.randn(N, WIDTH).to_sparse_csr(), "without memory"),
    "half": (lambda: torch.randn(N, WIDTH).half(), "is torch.float16"),
    "double": (lambda: torch.randn(N, WIDTH).double(), "is torch.float64"),
    "whole numbers": (lambda: torch.ones(N, WIDTH, dtype=torch.int32), "is torch.int32"),
    "too few rows": (lambda: torch.randn(N - 1, WIDTH), "has shape"),
    "too wide": (lambda: torch.randn(N, WIDTH + 1), "has shape"),
    "a vector": (lambda: torch.randn(N * WIDTH + 1), "has shape"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NOWHERE)
def test_what_has_no_memory_or_another_kind_is_refused_by_name(name: str) -> None:
    make, text = NOWHERE[name]
    given = make()
    with pytest.raises(InputError, match=f"x: .*{text}"):
        read_rows(words(), 0, "x", given, F32, N, WIDTH)
    with pytest.raises(InputError, match=f"out: .*{text}"):
        write_rows(words(), 0, "out", given, F32, N, WIDTH)
    with pytest.raises(InputError, match=f"bias: .*{text}"):
        read_flat(words(), 0, "bias", given, F32, N * WIDTH)


def test_tensors_inside_vmap_are_refused() -> None:
    def inside(x: Tensor) -> Tensor:
        read_rows(words(), 0, "x", x, F32, N, WIDTH)
        return x

    with pytest.raises(InputError, match=r"x: .*without memory"):
        torch.func.vmap(inside)(torch.randn(3, N, WIDTH))


def test_gathered_rows_may_be_more_than_are_gathered() -> None:
    x = torch.randn(N + 3, WIDTH)
    assert read_rows(words(), 0, "x", x, F32, N, WIDTH, True) is x
    with pytest.raises(InputError, match=r"wanted \[9 or more, 4\]"):
        read_rows(words(), 0, "x", x[:5], F32, 9, WIDTH, True)


def test_empty_operands_have_no_address_and_pass() -> None:
    read_rows(words(), 0, "x", torch.empty(0, WIDTH), F32, 0, WIDTH)
    write_rows(words(), 0, "out", torch.empty(N, 0), F32, N, 0)
    read_flat(words(), 0, "edge", torch.empty(0), F32, 0)


def test_numbers_of_edges_have_the_width_and_length_of_the_graph() -> None:
    read_numbers(words(), 0, "order", np.arange(5, dtype=np.int32), 32, 5)
    for wrong in (np.arange(5), np.arange(4, dtype=np.int32), np.arange(10, dtype=np.int32)[::2]):
        with pytest.raises(InputError, match="order: "):
            read_numbers(words(), 0, "order", wrong, 32, 5)


def test_kernels_compute_in_two_precisions() -> None:
    assert (float_bits("x", torch.empty(1)), float_bits("x", torch.empty(1, dtype=torch.float64))) == (32, 64)
    with pytest.raises(InputError, match="x: kernels compute in float32 and float64"):
        float_bits("x", torch.empty(1, dtype=torch.bfloat16))


PATTERN = spmm.Pattern(np.array([0, 2, 2, 3], np.int32), np.array([0, 2, 1], np.int32), 3)


def blank(*shape: int) -> Tensor:
    return torch.zeros(shape)


META = {"device": "meta"}
CALLS: dict[str, Callable[[Tensor], object]] = {
    "spmm x": lambda bad: spmm.spmm(PATTERN, bad, blank(3, 4)),
    "spmm out": lambda bad: spmm.spmm(PATTERN, blank(3, 4), bad),
    "spmm addend": lambda bad: spmm.spmm(PATTERN, blank(3, 4), blank(3, 4), addend=bad),
    "extremum": lambda bad: spmm.extremum(PATTERN, bad, blank(3, 4), blank(3, 4), "max"),
    "extremum_gather": lambda bad: spmm.extremum_gather(PATTERN, blank(3, 4), blank(3, 4), bad, blank(3, 4)),
    "weight_gradient": lambda bad: spmm.weight_gradient(PATTERN, blank(3, 4), bad, blank(3)),
    "gemm x": lambda bad: gemm.gemm(bad, blank(4, 4), blank(3, 4)),
    "gemm out": lambda bad: gemm.gemm(blank(3, 4), blank(4, 4), bad),
    "gemm_transposed": lambda bad: gemm.gemm_transposed(blank(3, 4), bad),
    "gate": lambda bad: gate.gate(PATTERN, "relu", bad, blank(3, 4), None, out=blank(3, 4)),
    "multi": lambda bad: multi.aggregate(PATTERN, bad, multi.Layout(("mean",), 4), blank(3, 4)),
    "pair": lambda bad: edgewise.pair(PATTERN, 0, 3, blank(3, 4), bad, blank(3, 4)),
    "output_dots": lambda bad: attention.output_dots(bad, blank(3, 4), blank(3, 4, 1), 1),
}


@pytest.mark.parametrize("name", CALLS)
def test_no_kernel_takes_an_operand_without_memory(name: str) -> None:
    with pytest.raises(InputError, match="is on meta"):
        CALLS[name](torch.empty(3, 4, **META))


def test_one_scale_for_each_row_and_one_weight_for_each_edge() -> None:
    x, out = blank(3, 4), blank(3, 4)
    for name, count in (("edge", 2), ("source", 2), ("target", 4), ("addend_scale", 2), ("bias", 3)):
        with pytest.raises(InputError, match=f"{name}: has shape"):
            spmm.spmm(PATTERN, x, out, **{name: blank(count)})
