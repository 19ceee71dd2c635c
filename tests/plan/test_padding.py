"""Padded sizes against every possible choice, with integers."""

from __future__ import annotations

import itertools
import random

import pytest

from plait.plan.padding import fitting, padded_sizes


def padding(sizes: list[tuple[int, ...]], choices: tuple[tuple[int, ...], ...]) -> int:
    """Numbers added when every size is padded to the cheapest choice it fits."""
    total = 0
    for size in sizes:
        found = fitting(size, choices)
        assert found is not None
        total += sum(found) - sum(size)
    return total


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("most", [1, 2, 3])
def test_no_choice_of_lengths_pads_less(seed: int, most: int) -> None:
    draw = random.Random(seed)
    sizes = [(draw.randrange(1, 60),) for _ in range(8)]
    chosen = padded_sizes(sizes, most)
    assert len(chosen) <= most
    every = itertools.combinations(sorted(set(sizes)), min(most, len(set(sizes))))
    able = [one for one in every if max(sizes) in one]
    assert padding(sizes, chosen) == min(padding(sizes, one) for one in able)


@pytest.mark.parametrize("seed", range(10))
def test_more_sizes_never_pad_more(seed: int) -> None:
    draw = random.Random(seed)
    sizes = [(draw.randrange(1, 900), draw.randrange(1, 9000)) for _ in range(40)]
    paddings = [padding(sizes, padded_sizes(sizes, most)) for most in range(1, 6)]
    assert paddings == sorted(paddings, reverse=True)
    assert padded_sizes(sizes, 1) == (tuple(map(max, zip(*sizes, strict=True))),)


def test_many_batches_and_none() -> None:
    sizes = [(k, 10 * k) for k in range(1, 2000)]
    chosen = padded_sizes(sizes, 4)
    assert len(chosen) == 4
    assert chosen[-1] == (1999, 19990)
    assert padded_sizes([], 4) == padded_sizes(sizes, 0) == ()
    assert fitting((2000, 1), chosen) is None
    assert fitting((1, 19990), chosen) == chosen[-1]


def test_weights_say_what_padding_costs() -> None:
    sizes = [(1, 100), (100, 1), (100, 100)]
    assert fitting((1, 1), ((1, 100), (100, 1)), (10.0, 1.0)) == (1, 100)
    assert fitting((1, 1), ((1, 100), (100, 1)), (1.0, 10.0)) == (100, 1)
    assert padded_sizes(sizes, 1, (10.0, 1.0)) == ((100, 100),)
