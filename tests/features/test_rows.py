"""Rows by number, from every kind of source, and what is said when a source is not one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plait.errors import InputError
from plait.features.rows import ArrayRows, RetryingRows, as_rows, gather, place

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, np.int8, np.bool_, np.complex128])
@pytest.mark.parametrize("shape", [(9,), (9, 1), (9, 3), (9, 33), (9, 2, 5), (9, 0)])
def test_rows_are_those_numpy_takes(dtype: Any, shape: tuple[int, ...]) -> None:
    array = (RNG.random(shape) * 9).astype(dtype)
    for ids in (np.array([3, 3, 0, 8]), np.array([], np.int64), np.array([5], np.int32)):
        assert np.array_equal(as_rows(array).take(ids), array[ids])


@pytest.mark.parametrize("view", [lambda a: a[::2], lambda a: a[:, ::2], lambda a: a.T, np.asfortranarray])
def test_rows_of_views_are_rows(view: Any) -> None:
    array = view(RNG.random((8, 8)))
    assert np.array_equal(as_rows(array).take(np.array([2, 0])), array[[2, 0]])


def test_a_path_is_mapped_not_read(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", RNG.random((5, 4)))
    rows = as_rows(tmp_path / "x.npy")
    assert isinstance(rows.array, np.memmap)  # type: ignore[attr-defined]
    assert rows.num_rows == 5
    assert np.array_equal(rows.take(np.array([4, 1])), np.load(tmp_path / "x.npy")[[4, 1]])


def test_a_file_that_shrank_is_an_error(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((500, 40)))
    rows = as_rows(str(tmp_path / "x.npy"))
    with (tmp_path / "x.npy").open("r+b") as file:
        file.truncate(4096)
    with pytest.raises(InputError, match="shrank"):
        rows.take(np.array([499]))


def test_a_file_of_objects_is_not_opened(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.array([{}], object), allow_pickle=True)
    with pytest.raises(InputError, match=r"numpy\.save"):
        as_rows(tmp_path / "x.npy")


@pytest.mark.parametrize("ids", [[5], [-1], [0, 2**40]])
def test_ids_out_of_range_are_refused(ids: list[int]) -> None:
    with pytest.raises(InputError, match="0 and 4"):
        as_rows(np.zeros((5, 2))).take(np.array(ids))


def test_gather_writes_into_what_it_is_given() -> None:
    out = np.full((2, 3), np.nan, np.float32)
    gather(np.arange(12, dtype=np.float32).reshape(4, 3), np.array([3, 0]), out)
    assert np.array_equal(out, [[9, 10, 11], [0, 1, 2]])


@pytest.mark.parametrize("returned", [np.zeros((3, 2)), 7.0])
def test_a_function_must_return_one_row_per_id(returned: Any) -> None:
    with pytest.raises(InputError, match="one row per id"):
        as_rows(lambda ids: returned).take(np.array([1, 2]))


@pytest.mark.parametrize("source", [7, None, object(), np.float64(3) * np.ones(()), np.array([{}], object)])
def test_what_holds_no_rows_is_refused(source: Any) -> None:
    with pytest.raises(InputError, match="source"):
        as_rows(source)


def failing(times: int) -> Any:
    left = [times]

    def source(ids: Any) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            raise ConnectionError("no route")
        return np.ones((ids.size, 2))

    return as_rows(source)


def test_a_source_that_recovers_is_forgiven_and_counted() -> None:
    rows = RetryingRows(failing(2), retries=2, pause_seconds=0)
    assert rows.take(np.array([1])).shape == (1, 2)
    assert rows.failures == 2


def test_a_source_that_does_not_is_reported_with_its_cause() -> None:
    with pytest.raises(InputError, match=r"3 times in a row for 4 rows.*no route") as caught:
        RetryingRows(failing(9), retries=2, pause_seconds=0).take(np.arange(4))
    assert isinstance(caught.value.__cause__, ConnectionError)


def test_negative_retries_are_refused() -> None:
    with pytest.raises(InputError, match="retries"):
        RetryingRows(failing(0), retries=-1)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int8, np.float16])
@pytest.mark.parametrize("shape", [(), (1,), (5,), (8,), (2, 3), (0,)])
def test_rows_are_placed_and_the_others_left_alone(dtype: Any, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    array = (100 * rng.random((30, *shape))).astype(dtype)
    out = np.zeros((20, *shape), dtype)
    ids, at = rng.integers(0, 30, 9), rng.permutation(20)[:9]
    expected = out.copy()
    expected[at] = array[ids]
    ArrayRows(array).place(ids, at, out)
    assert np.array_equal(out, expected)
    ArrayRows(array[::2]).place(ids // 2, at, out)
    assert np.array_equal(out[at], array[ids // 2 * 2])


def test_places_outside_are_refused() -> None:
    with pytest.raises(InputError, match="ids"):
        place(np.zeros((3, 2)), np.array([3]), np.array([0]), np.zeros((2, 2)))
    with pytest.raises(InputError, match="at"):
        place(np.zeros((3, 2)), np.array([0]), np.array([2]), np.zeros((2, 2)))
