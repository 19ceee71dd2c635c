"""kernels/launch.py: one pool of threads, and none in a forked child."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from plait.kernels import launch
from plait.kernels import spmm as sparse


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def operands() -> tuple[sparse.Pattern, torch.Tensor, torch.Tensor]:
    """A product large enough for two threads, and what it must be."""
    rng = np.random.default_rng(1)
    indptr = np.arange(0, 40_001, 10, dtype=np.int32)
    indices = rng.integers(0, 4000, 40_000).astype(np.int32)
    x = torch.from_numpy(rng.integers(0, 9, (4000, 64)).astype(np.float32))
    pattern = sparse.Pattern(indptr, indices, 4000)
    expected = x[torch.from_numpy(indices.astype(np.int64))].reshape(4000, 10, 64).sum(1)
    return pattern, x, expected


def product() -> tuple[torch.Tensor, torch.Tensor]:
    pattern, x, expected = operands()
    return sparse.spmm(pattern, x, torch.full((4000, 64), float("nan"))), expected


def test_threads_follow_torch(two_threads: object) -> None:
    assert launch.num_threads() == 2
    torch.set_num_threads(1)
    assert launch.num_threads() == 1


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_piece_is_done_once_on_any_number_of_threads(threads: int) -> None:
    calls: list[int] = []
    kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    function = kind(lambda where: calls.append(where))
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    block = (ctypes.c_int64 * 4)()
    launch._python_team(address, ctypes.addressof(block), threads)
    assert calls == [ctypes.addressof(block)] * threads


def test_a_product_on_two_threads_is_whole(two_threads: object) -> None:
    for _ in range(5):
        made, expected = product()
        assert torch.equal(made, expected)


def test_the_fallback_team_gives_the_same_bits(two_threads: object, monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = product()
    monkeypatch.setattr(launch, "_team", lambda: launch._python_team)
    again, _ = product()
    assert torch.equal(made, again)


def test_python_threads_may_launch_at_the_same_time(two_threads: object) -> None:
    faults: list[str] = []

    def work() -> None:
        for _ in range(10):
            made, expected = product()
            if not torch.equal(made, expected):
                faults.append("differs")

    workers = [threading.Thread(target=work) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not faults


@pytest.mark.processes
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_works_alone(two_threads: object) -> None:
    """Only plait's kernel runs in the child: torch's own operations hang there with more than one thread."""
    pattern, x, expected = operands()
    wanted, out = expected.numpy(), torch.full((4000, 64), float("nan"))
    sparse.spmm(pattern, x, torch.empty_like(out))  # the parent's pool exists now
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # a hang ends as a failure
        is_right = launch.num_threads() == 1 and np.array_equal(sparse.spmm(pattern, x, out).numpy(), wanted)
        os._exit(0 if is_right else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_the_pool_has_a_name() -> None:
    assert "OpenMP" in launch.describe_pool()
