"""plan/dial.py: amounts of memory, and the choice that fits a limit at least cost."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from plait.errors import InputError, PlanError
from plait.plan.dial import Option, Stage, bytes_text, least_peak, parse_bytes, peak_of, turn


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (1, 1),
        (2000, 2000),
        ("2000", 2000),
        ("8GB", 8_000_000_000),
        ("8 gb", 8_000_000_000),
        ("512 MB", 512_000_000),
        ("2GiB", 2 << 30),
        ("1.5 GiB", 3 << 29),
        (" .5MiB ", 1 << 19),
        ("10k", 10_000),
        ("3 kB", 3_000),
        ("7B", 7),
        ("1TB", 10**12),
    ],
)
def test_amounts_of_memory_are_read(given: Any, expected: int) -> None:
    assert parse_bytes(given) == expected


@pytest.mark.parametrize(
    "given",
    [0, -5, 1.5, True, None, "", "GB", "0", "0GB", "-1GB", "8 XB", "8GBs", "8,5GB", "1e9", "8 G B", b"8GB"],
)
def test_what_is_no_amount_of_memory_is_refused_with_an_example(given: Any) -> None:
    with pytest.raises(InputError, match=r'memory_limit: .* such as "8GB"'):
        parse_bytes(given)


def test_an_amount_is_written_for_people() -> None:
    assert [bytes_text(n) for n in (640, 1500, 12_340_000, 8 * 10**9)] == [
        "640 bytes", "1.50 kB", "12.3 MB", "8.00 GB"
    ]  # fmt: skip


def test_without_pressure_the_fastest_is_taken() -> None:
    fast, lean = Option(1.0, 100, 50), Option(2.0, 10, 20)
    found = turn([Stage("a", (lean, fast), 5), Stage("b", (fast, lean), 5)], 10**6)
    assert found.options == (fast, fast)
    assert (found.seconds, found.peak_bytes) == (2.0, 255)


def test_the_layer_whose_leanness_costs_least_gives_way() -> None:
    dear = Stage("dear", (Option(1.0, 100, 0), Option(9.0, 10, 0)))
    cheap = Stage("cheap", (Option(1.0, 100, 0), Option(1.5, 10, 0)))
    for stages in ([dear, cheap], [cheap, dear]):
        found = turn(stages, 150)
        assert found.seconds == 2.5
        assert found.peak_bytes == 110


def test_what_a_later_layer_keeps_does_not_press_an_earlier_one() -> None:
    first, last = Stage("first", (Option(1.0, 10, 80),)), Stage("last", (Option(1.0, 80, 0),))
    assert turn([first, last], 90).peak_bytes == 90
    assert peak_of([last, first], (last.options[0], first.options[0])) == 170


def test_a_limit_that_cannot_be_met_names_the_nearest_that_can() -> None:
    stages = [
        Stage("a", (Option(1.0, 100, 50), Option(2.0, 10, 500)), 7),
        Stage("b", (Option(1.0, 30, 0),), 9),
    ]
    least = least_peak(stages)
    assert least == 157
    with pytest.raises(PlanError, match=rf"memory_limit: 156 bytes .* needs {least} bytes"):
        turn(stages, least - 1)
    assert turn(stages, least).peak_bytes == least


def test_a_model_without_layers_needs_nothing() -> None:
    assert turn([], 1).peak_bytes == 0
    assert least_peak([]) == 0


def test_the_choice_is_the_best_of_all() -> None:
    rng = random.Random(3)
    for _ in range(300):
        stages = [
            Stage(
                str(k),
                tuple(
                    Option(rng.randint(1, 9), rng.randint(0, 9), rng.randint(0, 9))
                    for _ in range(rng.randint(1, 4))
                ),
                rng.randint(0, 9),
            )
            for k in range(rng.randint(1, 4))
        ]
        every = list(itertools.product(*(stage.options for stage in stages)))
        least = min(peak_of(stages, chosen) for chosen in every)
        assert least_peak(stages) == least
        limit = least + rng.randint(0, 12)
        fitting = [sum(o.seconds for o in chosen) for chosen in every if peak_of(stages, chosen) <= limit]
        found = turn(stages, limit)
        assert found.seconds == min(fitting)
        assert found.peak_bytes == peak_of(stages, found.options) <= limit
