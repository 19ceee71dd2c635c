"""ops/symbolic.py: formulas against the arithmetic they stand for."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.errors import InputError
from plait.ops.symbolic import Formula, ceil_log2, log2, parse, symbol

n, m, k = symbol("n"), symbol("m"), symbol("k")
whole = st.integers(-50, 50)


@given(whole, whole, whole)
def test_algebra_of_formulas_is_that_of_numbers(a: int, b: int, c: int) -> None:
    formula = (n + 2 * m - 3) * (k - n) ** 2 - m * k
    assert formula(n=a, m=b, k=c) == (a + 2 * b - 3) * (c - a) ** 2 - b * c


def test_equal_formulas_are_equal_in_any_order() -> None:
    assert n * m + k == k + m * n
    assert hash(n * m + k) == hash(k + m * n)
    assert n - n == Formula({})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("Lmk + Lnk^2", 2 * 30 * 4 + 2 * 10 * 16),
        ("c^L n k^2", 3**2 * 10 * 16),
        ("L log k + L log d", 2 * 2 + 2 * 3),
        ("log k + log s log d", 2 + 1 * 3),
        ("log^2 n", math.log2(10) ** 2),
        ("mn log T + nk^2", 30 * 10 * 2 + 160),
        ("L(m + n) - 2", 78),
        ("W_pre + D_pre", 12),
    ],
)
def test_the_tables_notation_is_read_and_evaluated(text: str, value: float) -> None:
    values = {"L": 2, "m": 30, "n": 10, "k": 4, "c": 3, "d": 8, "s": 2, "T": 4, "W_pre": 7, "D_pre": 5}
    assert parse(text)(**values) == pytest.approx(value)


def test_whole_numbers_stay_exact_beyond_floats() -> None:
    assert parse("n^3")(n=10**9 + 1) == (10**9 + 1) ** 3


@pytest.mark.parametrize(("leaves", "height"), [(0, 0), (1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (1025, 11)])
def test_the_height_of_a_tree_of_sums(leaves: int, height: int) -> None:
    assert ceil_log2(leaves) == height
    assert ceil_log2(symbol("d"))(d=leaves) == height


def test_printing_reads_like_the_tables() -> None:
    assert str(parse("Lmk + Lnk^2")) == "L m k + L n k²"
    assert str(2 * n * k - ceil_log2(symbol("d"))) == "2 n k - ⌈log d⌉"
    assert str(log2(n + m)) == "log(n + m)"


def test_what_is_missing_or_cannot_be_read_is_named() -> None:
    with pytest.raises(InputError, match="m: no value given; known are n"):
        (n + m)(n=1)
    with pytest.raises(InputError, match="cannot read"):
        parse("n ? m")
