"""kernels/turned.py: a stored weight is turned to the last bit, and what is stored otherwise is refused."""

from __future__ import annotations

import ctypes
import threading

import pytest
import torch
from torch import nn

from plait.errors import InputError
from plait.kernels.turned import Turned, read_turned


def words() -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * 4)()


def read(block: ctypes.Array[ctypes.c_int64], at: int, rows: int, width: int, size: int) -> bytes:
    assert block[at + 1] == width * size
    return ctypes.string_at(block[at], rows * width * size)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().numpy().tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (7, 16), (16, 7), (33, 5), (1, 9), (9, 1)])
def test_it_is_the_transpose_and_follows_every_write(rows: int, width: int, dtype: torch.dtype) -> None:
    stored = nn.Parameter(torch.randn(width, rows, dtype=dtype))
    stored.data.view(-1)[0] = float("nan")
    turned, block = Turned(1, rows, width, dtype), words()
    for _ in range(3):
        assert turned.place(block, stored)
        assert read(block, 1, rows, width, dtype.itemsize) == bits(stored.t())
        stored.data.mul_(1.5)


def test_what_is_stored_otherwise_is_left_to_others() -> None:
    turned, block = Turned(0, 3, 2, torch.float32), words()
    weight = torch.randn(2, 3)
    for stored in (
        None,
        weight,
        nn.Parameter(weight.double()),
        nn.Parameter(weight.t()),
        nn.Parameter(torch.randn(3, 2).t()),
        nn.Parameter(weight.to("meta")),
        nn.Parameter(torch.randn(3, 2)),
    ):
        assert not turned.place(block, stored)
    freed = nn.Parameter(weight.clone())
    freed.untyped_storage().resize_(0)
    assert not turned.place(block, freed)
    assert [*block] == [0, 0, 0, 0]


def test_threads_do_not_share_the_memory() -> None:
    turned, places = Turned(0, 4, 4, torch.float32), []

    def place() -> None:
        block = words()
        turned.place(block, nn.Parameter(torch.randn(4, 4)))
        places.append(block[0])
        barrier.wait()  # both are alive, so neither takes the other's memory

    barrier = threading.Barrier(2)
    threads = [threading.Thread(target=place) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({*places}) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1, 1), (7, 16), (16, 7), (1, 9), (9, 1), (64, 40)])
def test_a_transpose_is_read_however_the_matrix_lies(shape: tuple[int, int], dtype: torch.dtype) -> None:
    rows, width = shape
    numbers = torch.complex64 if dtype.itemsize == 4 else torch.complex128
    for stored in (
        torch.randn(width, rows, dtype=dtype),
        torch.randn(rows, width, dtype=dtype).t(),
        torch.randn(width, 2 * rows, dtype=dtype)[:, ::2],
        torch.randn(1, rows, dtype=dtype).expand(width, rows),
        torch.randn(width, rows, dtype=numbers).conj().imag,
    ):
        block, made = words(), torch.empty(rows, width, dtype=dtype)
        held = read_turned(block, 1, "w", stored, dtype, rows, width)
        for i in range(rows):
            ctypes.memmove(made[i].data_ptr(), block[1] + i * block[2], width * dtype.itemsize)
        assert torch.equal(made, stored.t())
        del held


def test_a_transpose_that_does_not_fit_is_refused() -> None:
    stored = torch.randn(3, 4)
    for wrong in (stored.double(), stored.to("meta"), torch.randn(4, 3), stored[:2]):
        with pytest.raises(InputError, match="w: "):
            read_turned(words(), 0, "w", wrong, torch.float32, 4, 3)
