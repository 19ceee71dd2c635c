"""runtime/buffers.py: memory is used again, never while someone holds it."""

from __future__ import annotations

import random
import threading

import pytest
import torch

from plait.runtime.buffers import Buffers

ROWS = 40_000  # of one float32: well above what is left to the allocator


def test_a_live_buffer_is_never_handed_out_again() -> None:
    pool, rng = Buffers(), random.Random(1)
    alive: list[tuple[torch.Tensor, float]] = []
    for turn in range(300):
        rows, cols = rng.choice([ROWS, ROWS + 1, 2 * ROWS, 3 * ROWS]), rng.choice([1, 2])
        tensor = pool.take(rows, cols, rng.choice([torch.float32, torch.float64])).fill_(turn)
        assert tensor.shape == (rows, cols)
        assert tensor.is_contiguous()
        alive.append((tensor, turn))
        while len(alive) > 5 or (alive and rng.random() < 0.4):
            alive.pop(rng.randrange(len(alive)))
        # whoever gets a buffer fills all of it: some of its rows show that as well as all do
        assert all(bool((held[::61] == value).all()) for held, value in alive)


def test_a_dropped_buffer_is_used_again() -> None:
    pool = Buffers()
    first = pool.take(ROWS, 1, torch.float32)
    where = first.data_ptr()
    del first
    assert pool.take(ROWS, 1, torch.float32).data_ptr() == where


def test_with_headroom_sizes_that_vary_a_little_share_one_buffer() -> None:
    tight, roomy = Buffers(), Buffers(headroom=0.125)
    for rows in range(ROWS, ROWS + ROWS // 10, ROWS // 50):
        for pool in (tight, roomy):
            assert pool.take(rows, 1, torch.float32).shape == (rows, 1)
    assert len(roomy._held) == 1
    assert len(tight._held) == 5


@pytest.mark.parametrize("hold", ["view", "slice", "numpy", "graph"])
def test_whoever_holds_a_part_holds_the_buffer(hold: str) -> None:
    pool = Buffers()
    tensor = pool.take(ROWS, 2, torch.float32).fill_(1)
    where = tensor.data_ptr()
    if hold == "graph":
        weight = torch.ones(2, requires_grad=True)
        kept: object = (tensor * weight).sum()
    else:
        kept = {"view": tensor.t(), "slice": tensor[5:7, 1], "numpy": tensor.numpy()}[hold]
    del tensor
    assert pool.take(ROWS, 2, torch.float32).data_ptr() != where
    del kept


def test_what_autograd_saved_is_free_after_the_backward_pass() -> None:
    pool, weight = Buffers(), torch.ones(2, requires_grad=True)
    where = pool.take(ROWS, 2, torch.float32).fill_(1).data_ptr()
    loss = (pool.take(ROWS, 2, torch.float32).fill_(1) * weight).sum()
    loss.backward()
    assert pool.take(ROWS, 2, torch.float32).data_ptr() == where


def test_the_pool_holds_little_more_than_was_alive_at_once() -> None:
    pool, sizes = Buffers(), [8 << 20, 20 << 20, 33 << 20, 47 << 20]
    most = 0
    for turn in range(60):
        pair = [pool.take(sizes[(turn + k) % 4] // 4, 1, torch.float32) for k in range(2)]
        most = max(most, sum(t.nbytes for t in pair))
        del pair
    # a free buffer also serves smaller requests, so it may be larger than what is alive
    assert pool.bytes_held <= 2 * most + (32 << 20)
    pool.clear()
    assert pool.bytes_held == 0


def test_a_step_that_needs_a_little_more_does_not_map_it_every_time() -> None:
    buffers, million = Buffers(), 1 << 18

    def step() -> None:
        early = [buffers.take(size, million, torch.float32) for size in (20, 25)]
        del early
        buffers.take(130, million, torch.float32)

    for _ in range(4):
        step()
    before = list(buffers._held)
    step()
    assert [id(buffer) for buffer in buffers._held] == [id(buffer) for buffer in before]
    assert buffers.bytes_held <= 1.5 * 130 * million * 4


def test_small_results_are_left_to_the_allocator() -> None:
    pool = Buffers()
    assert pool.take(3, 5, torch.float64).shape == (3, 5)
    assert pool.take(0, 4, torch.float32).shape == (0, 4)
    assert pool.bytes_held == 0


def test_a_result_may_be_changed_in_place() -> None:
    pool, weight = Buffers(), torch.ones(2, requires_grad=True)
    tensor = pool.take(ROWS, 2, torch.float32).fill_(1)
    tensor.mul_(2)
    tensor.mul_(weight)
    tensor.sum().backward()
    assert weight.grad is not None
    assert float(weight.grad[0]) == 2 * ROWS


def test_threads_do_not_share_a_buffer() -> None:
    pool, faults = Buffers(), []

    def work(mark: int) -> None:
        for _ in range(200):
            tensor = pool.take(ROWS, 1, torch.float32).fill_(mark)
            if not bool((tensor == mark).all()):
                faults.append(mark)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults


def test_a_buffer_another_process_reads_is_not_lent_again() -> None:
    buffers = Buffers()
    first = buffers.take(300, 300, torch.float32)
    first.share_memory_()  # what a loader worker does to what it returns
    where = first.data_ptr()
    del first
    assert buffers.take(300, 300, torch.float32).data_ptr() != where


def test_under_a_limit_free_buffers_make_room_and_only_tight_ones_are_used() -> None:
    pool = Buffers()
    pool.limit_to(3 << 20)
    big = pool.take(1, 1 << 19, torch.float32)
    del big
    small = pool.take(1, 1 << 18, torch.float32)
    assert small.untyped_storage().nbytes() == 1 << 20
    assert pool.bytes_held == 3 << 20
    more = pool.take(1, 1 << 18, torch.float32)
    assert pool.bytes_held == small.untyped_storage().nbytes() + more.untyped_storage().nbytes()
