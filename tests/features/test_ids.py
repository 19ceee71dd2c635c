"""Ids are checked, listed once each in the order they come, and masks have one value per row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from plait.errors import InputError
from plait.features.ids import Distinct, checked, first_places, mask_of


@pytest.mark.parametrize(
    ("ids", "message"), [([0, 5], "holds 5"), ([-1], "holds -1"), ([[1]], "shape"), ([0.5], "float64")]
)
def test_what_is_no_row_number_is_refused(ids: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        checked(ids, 5)


def test_row_numbers_are_whole() -> None:
    assert checked(np.array([4, 0], np.int32), 5).dtype == np.int64
    assert checked([], 0).size == 0


def test_every_id_is_listed_once_in_the_order_it_comes() -> None:
    ids = np.array([3, 1, 3, 2, 1])
    assert first_places(ids).tolist() == [3, 1, 2]
    distinct = Distinct(5)
    for _ in range(2):
        unique, inverse = distinct(ids)
        assert unique.tolist() == [3, 1, 2]
        assert inverse is not None
        assert np.array_equal(unique[inverse], ids)
    assert distinct(ids[:2]) == (pytest.approx(ids[:2]), None)


def test_a_mask_has_one_truth_value_for_each_row() -> None:
    assert mask_of("halo", None, 3) is None
    assert mask_of("halo", [True, False], 2).tolist() == [True, False]  # type: ignore[union-attr]
    for given in ([True], [1, 0]):
        with pytest.raises(InputError, match="halo has shape"):
            mask_of("halo", given, 2)
