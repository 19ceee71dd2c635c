"""report/page/draw: scales, ticks and markup."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from plait.report.page.draw import Scale, decades, padded, short, svg, tag


def test_a_scale_maps_its_ends_to_its_ends() -> None:
    for is_log in (True, False):
        scale = Scale(2.0, 200.0, 10.0, 50.0, is_log)
        assert scale(2.0) == pytest.approx(10.0)
        assert scale(200.0) == pytest.approx(50.0)
    assert Scale(1.0, 100.0, 0.0, 2.0)(10.0) == pytest.approx(1.0)
    assert Scale(5.0, 5.0, 0.0, 2.0)(5.0) == 1.0


@pytest.mark.parametrize(("low", "high"), [(1e-6, 1e3), (0.9, 1.1), (3.0, 4.0), (1e-9, 1e12), (10.0, 500.0)])
@pytest.mark.parametrize("most", [2, 5, 9])
def test_ticks_lie_inside_and_are_few(low: float, high: float, most: int) -> None:
    ticks = decades(low, high, most)
    assert 2 <= len(ticks) <= max(2, most)
    assert all(low * 0.99 <= tick <= high * 1.01 for tick in ticks)


def test_markup_is_escaped() -> None:
    drawn = svg(10, 10, tag("text", class_="a", data_op='"><script>'), title="a & <b>")
    root = ElementTree.fromstring(drawn)
    assert root.attrib["aria-label"] == "a & <b>"
    assert root[1].attrib["data-op"] == '"><script>'


def test_numbers_are_short() -> None:
    assert [short(v) for v in (0.0, 0.5, 20.0, 1e3, 2.5e6, 999_999.0)] == [
        "0",
        "0.5",
        "20",
        "1k",
        "2.5M",
        "1M",
    ]
    assert [short(v, "s") for v in (2.0, 5e-2, 1e-5, 1e-10)] == ["2 s", "50 ms", "10 µs", "0.1 ns"]


def test_padding_ignores_what_a_logarithm_cannot_take() -> None:
    assert padded([0.0, -1.0, float("nan"), 4.0], 2.0) == (2.0, 8.0)
    assert padded([], 2.0) == (0.5, 2.0)
