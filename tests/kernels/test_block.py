"""Teams of threads: every piece is claimed once, by its own thread first."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from numba import cfunc, types

from plait.kernels.block import Block
from plait.kernels.vector import fetch_add, next_piece, next_rows, thread_rank


def claims(threads: int, pieces: int) -> np.ndarray:
    """How often each piece was claimed, by rank: [threads, pieces]."""
    # a counter for every (rank, piece)
    counts = np.zeros((threads, pieces + 1), np.int64)

    @cfunc(types.void(types.CPointer(types.int64)))
    def run(a):
        team, where, pieces = a[0], a[1], a[2]
        rank = thread_rank(team)
        while True:
            piece = next_piece(team, pieces)
            if piece >= pieces:
                break
            fetch_add(where + 8 * (rank * (pieces + 1) + piece))

    block = Block(["team", "where", "pieces"])
    words = block.words()
    words[1], words[2] = counts.ctypes.data, pieces
    block.run(ctypes.cast(run.ctypes, ctypes.c_void_p).value or 0, words, threads)
    assert not counts[:, pieces].any()
    return counts[:, :pieces]


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("pieces", [0, 1, 2, 7, 64])
def test_every_piece_is_claimed_exactly_once(threads: int, pieces: int) -> None:
    assert (claims(threads, pieces).sum(axis=0) == 1).all()


def test_a_team_that_runs_twice_starts_anew() -> None:
    for _ in range(2):
        assert claims(2, 9).sum() == 9


def test_one_thread_takes_the_pieces_of_all_parts() -> None:
    assert claims(1, 6).tolist() == [[1] * 6]


@pytest.mark.parametrize(("rows", "height"), [(0, 4), (1, 4), (10, 4), (12, 4)])
def test_rows_are_claimed_in_steps_of_a_height_until_none_are_left(rows: int, height: int) -> None:
    first = np.full(8, -1, np.int64)

    @cfunc(types.void(types.CPointer(types.int64)))
    def run(a):
        while True:
            at = next_rows(a[0], a[2], a[3])
            if at >= a[2]:
                break
            fetch_add(a[1] + 8 * (at // a[3]))

    block = Block(["team", "where", "rows", "height"])
    words = block.words()
    words[1], words[2], words[3] = first.ctypes.data, rows, height
    block.run(ctypes.cast(run.ctypes, ctypes.c_void_p).value or 0, words, 2)
    assert (first == 0).sum() == -(-rows // height)
