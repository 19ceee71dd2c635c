"""Rows in 16 bits are those torch rounds to, and come back as torch widens them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from plait.errors import InputError
from plait.features.narrow import NarrowRows, check_precision, narrowed, narrowed_features, widened
from plait.features.rows import ArrayRows

PRECISIONS = ["float16", "bfloat16"]


def every_number(precision: str) -> torch.Tensor:
    """All 65,536 numbers of the type."""
    bits = torch.arange(-(2**15), 2**15).to(torch.int16)
    return bits.view(getattr(torch, precision))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_number_is_widened_as_torch_does(precision: str) -> None:
    numbers = every_number(precision)
    bits = numbers.view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(widened(bits, precision), numbers.float().numpy(), equal_nan=True)
    strided = widened(bits.reshape(-1, 4)[:, ::2], precision)
    assert np.array_equal(strided, numbers.float().numpy().reshape(-1, 4)[:, ::2], equal_nan=True)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_numbers_are_rounded_as_torch_does(precision: str) -> None:
    rng = np.random.default_rng(0)
    rows = (rng.standard_normal((300, 7)) * 10.0 ** rng.integers(-9, 4, (300, 7))).astype(np.float32)
    exact = every_number(precision).float().numpy()
    exact = exact[np.isfinite(exact)]
    ties = ((exact[:-1].astype(np.float64) + exact[1:]) / 2).astype(np.float32)
    odd = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0], np.float32)
    for values in (rows, exact, ties[np.isfinite(ties)], odd):
        kind = getattr(torch, precision)
        expected = torch.from_numpy(values).to(kind).float().numpy()
        assert np.array_equal(widened(narrowed(values, precision), precision), expected, equal_nan=True)


def test_what_float16_cannot_hold_is_refused_with_the_next_step() -> None:
    rows = np.ones((4, 2), np.float32)
    rows[2, 1] = 65_520  # the least that is rounded to infinity
    with pytest.raises(InputError, match=r"65520, float16 only 65504; choose bfloat16"):
        narrowed(rows, "float16")
    narrowed(rows, "bfloat16")
    rows[2, 1] = 65_519
    assert widened(narrowed(rows, "float16"), "float16")[2, 1] == 65_504
    with pytest.raises(InputError, match="no feature is larger than 1e-05"):
        narrowed_features(np.full((3, 2), 1e-5, np.float32), "float16")
    assert not narrowed_features(np.zeros((3, 2), np.float32), "float16").any()
    assert narrowed_features(np.zeros((0, 2), np.float32), "float16").shape == (0, 2)


@pytest.mark.parametrize("dtype", [np.int64, np.uint16, np.float64])
def test_only_float32_is_rounded(dtype: type) -> None:
    with pytest.raises(InputError, match="not rounded to bfloat16"):
        narrowed(np.ones((2, 2), dtype), "bfloat16")


def test_features_are_rounded_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.features.narrow._BLOCK_ROWS", 3)
    rows = np.random.default_rng(1).standard_normal((10, 5)).astype(np.float32)
    assert np.array_equal(narrowed_features(rows, "float16"), narrowed(rows, "float16"))


def test_rows_of_a_source_are_rounded() -> None:
    rows = np.random.default_rng(2).standard_normal((10, 5)).astype(np.float32)
    source = NarrowRows(ArrayRows(rows), "bfloat16")
    bits = narrowed(rows, "bfloat16")
    ids = np.array([3, 9, 3])
    assert source.num_rows == 10
    assert source.row == ((5,), np.dtype(np.uint16))
    assert np.array_equal(source.take(ids), bits[ids])
    out = np.zeros((4, 5), np.uint16)
    source.place(ids[:2], np.array([2, 0]), out)
    assert np.array_equal(out[[2, 0]], bits[[3, 9]])
    assert NarrowRows(_Untold(), "float16").row is None


class _Untold:
    num_rows = 3

    def take(self, ids: np.ndarray) -> np.ndarray:
        return np.ones((ids.size, 2), np.float32)


def test_an_unknown_precision_is_named() -> None:
    check_precision("precision", None)
    with pytest.raises(InputError, match="wire='int8' is unknown; choose float16 or bfloat16"):
        check_precision("wire", "int8")
