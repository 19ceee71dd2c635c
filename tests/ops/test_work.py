"""ops/work.py: symbolic sizes as numbers."""

from __future__ import annotations

import pytest

from plait.ops.work import size_of


@pytest.mark.parametrize(
    ("size", "expected"), [(7, 7), ("N", 10), ("K1+K2", 8), ("K1+K1+4", 10), ("12", 12), (0, 0)]
)
def test_sizes_are_names_numbers_and_sums(size: str | int, expected: int) -> None:
    assert size_of(size, {"N": 10, "K1": 3, "K2": 5}) == expected


def test_an_unknown_name_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        size_of("M", {"N": 1})
