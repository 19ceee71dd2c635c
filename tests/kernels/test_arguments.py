"""Arguments by name, and teams of threads: every piece is claimed once, by its own thread first."""

from __future__ import annotations

import ast
import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba import cfunc, types

import plait.kernels
from plait.kernels.arguments import PATTERN, Arguments
from plait.kernels.vector import fetch_add, next_piece, next_rows, thread_rank


def claims(threads: int, pieces: int) -> np.ndarray:
    """How often each piece was claimed, by rank: [threads, pieces]."""
    # a counter for every (rank, piece)
    counts = np.zeros((threads, pieces + 1), np.int64)

    at = Arguments("where pieces")
    read = at.reader()

    @cfunc(types.void(types.CPointer(types.int64)))
    def run(arguments):
        a = read(arguments)
        rank = thread_rank(a.team)
        while True:
            piece = next_piece(a.team, a.pieces)
            if piece >= a.pieces:
                break
            fetch_add(a.where + 8 * (rank * (a.pieces + 1) + piece))

    words = at.words()
    words[at.where], words[at.pieces] = counts.ctypes.data, pieces
    at.run(ctypes.cast(run.ctypes, ctypes.c_void_p).value or 0, words, threads)
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


@pytest.mark.parametrize("threads", [1, 3])
def test_a_row_kernel_sees_every_row_once_with_its_edges(threads: int) -> None:
    at = Arguments(f"{PATTERN} out")
    indptr, bounds = np.array([0, 2, 2, 7, 8], np.int32), np.array([0, 1, 3, 4], np.int64)
    indices, out = np.zeros(8, np.int32), np.zeros(4, np.int64)

    def each(a: Any, i: Any, start: Any, end: Any) -> None:
        for _ in range(start, end):
            fetch_add(a.out + 8 * i)

    run = at.row_kernel(32, each)
    words = at.over([len(bounds) - 1, bounds.ctypes.data, indptr.ctypes.data, indices.ctypes.data])
    words[at.out] = out.ctypes.data
    at.run(ctypes.cast(run.ctypes, ctypes.c_void_p).value or 0, words, threads)
    assert out.tolist() == [2, 0, 5, 1]


@pytest.mark.parametrize(("rows", "height"), [(0, 4), (1, 4), (10, 4), (12, 4)])
def test_rows_are_claimed_in_steps_of_a_height_until_none_are_left(rows: int, height: int) -> None:
    first = np.full(8, -1, np.int64)

    at = Arguments("where rows height")
    read = at.reader()

    @cfunc(types.void(types.CPointer(types.int64)))
    def run(arguments):
        a = read(arguments)
        while True:
            row = next_rows(a.team, a.rows, a.height)
            if row >= a.rows:
                break
            fetch_add(a.where + 8 * (row // a.height))

    words = at.words()
    words[at.where], words[at.rows], words[at.height] = first.ctypes.data, rows, height
    at.run(ctypes.cast(run.ctypes, ctypes.c_void_p).value or 0, words, 2)
    assert (first == 0).sum() == -(-rows // height)


def test_a_matrix_takes_two_places_and_a_group_repeats_its_own() -> None:
    at = Arguments("x[] width", product=(2, "rows[] inner"))
    assert at.names == (
        *("team", "x", "x_row", "width"),
        *("rows0", "rows_row0", "inner0", "rows1", "rows_row1", "inner1"),
    )
    assert (at.x, at.x_row, at.width, at.inner1) == (1, 2, 3, 9)


def test_a_name_is_declared_once_and_only_declared_names_are_known() -> None:
    with pytest.raises(ValueError, match="twice"):
        Arguments("x[] x_row")
    with pytest.raises(AttributeError, match="widht"):
        _ = Arguments("width").widht


def test_the_arguments_of_a_pattern_are_filled_together() -> None:
    at = Arguments(f"x[] {PATTERN} width")
    words = at.over((5, 6, 7, 8))
    assert [words[k] for k in (at.pieces, at.bounds, at.indptr, at.indices)] == [5, 6, 7, 8]


def test_a_kernel_reads_what_was_written_by_name() -> None:
    at = Arguments("out x[] width", product=(3, "rows[] inner"))
    read, read_product = at.reader(), at.group_reader("product")

    @cfunc(types.void(types.CPointer(types.int64)))
    def run(arguments):
        a, p = read(arguments), read_product(arguments, 2)
        for _ in range(a.x + 10 * a.x_row + 100 * a.width + 1000 * p.rows + 10000 * p.inner):
            fetch_add(a.out)

    made = np.zeros(1, np.int64)
    words = at.words()
    words[at.out], words[at.x], words[at.x_row], words[at.width] = made.ctypes.data, 1, 2, 3
    words[at.rows2], words[at.inner2] = 4, 5
    at.run(ctypes.cast(run.ctypes, ctypes.c_void_p).value or 0, words, 1)
    assert made[0] == 54321


def _numbered(tree: ast.AST) -> list[int]:
    """Lines on which arguments are named by a number."""
    lines = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
            is_number = isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, int)
            if node.value.id in ("words", "a", "arguments") and is_number:
                lines.append(node.lineno)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            takes_a_place = node.func.id in (
                "read_rows",
                "read_flat",
                "read_numbers",
                "write_rows",
                "write_flat",
            )
            if takes_a_place and isinstance(node.args[1], ast.Constant):
                lines.append(node.lineno)
    return lines


def test_nobody_numbers_the_arguments_of_a_kernel() -> None:
    folder = Path(plait.kernels.__file__).parent
    found = {
        f"{path.relative_to(folder)}:{line}"
        for path in folder.rglob("*.py")
        if path.name != "relaunch.py"  # Triton takes its arguments as a sequence
        for line in _numbered(ast.parse(path.read_text()))
    }
    assert not found
