"""The counter-based numbers: pure, distinct by position, uniform."""

from __future__ import annotations

import numpy as np
from numba import njit

from plait.loader.draw import below, draw, node_key, stream_key, unit


@njit
def table(key: np.uint64, count: int, bound: int) -> tuple[np.ndarray, np.ndarray]:
    whole, real = np.empty(count, np.int64), np.empty(count, np.float64)
    for i in range(count):
        bits = draw(node_key(key, i), i % 7)
        whole[i], real[i] = below(bits, bound), unit(bits)
    return whole, real


def test_keys_depend_on_every_word_and_on_their_order() -> None:
    words = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1), (1, 1, 0), (0, 0), (0, 0, 0, 0)]
    assert len({int(stream_key(*w)) for w in words}) == len(words)
    assert stream_key(7, 8, 9) == stream_key(7, 8, 9)


def test_bounded_draws_are_uniform_and_in_range() -> None:
    whole, real = table(stream_key(1), 60_000, 30)
    counts = np.bincount(whole, minlength=30)
    assert counts.size == 30
    assert ((counts - 2000) ** 2 / 2000).sum() < 80  # chi-square, 29 degrees of freedom: p about 1e-6
    assert abs(real.mean() - 0.5) < 0.01
    assert real.min() > 0
    assert real.max() < 1


def test_bounds_near_two_to_the_32_stay_in_range() -> None:
    whole, _ = table(stream_key(2), 10_000, 2**32 - 1)
    assert whole.min() >= 0
    assert whole.max() < 2**32 - 1
    assert abs(whole.mean() / 2**31 - 1) < 0.03
