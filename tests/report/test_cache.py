"""report/cache: every point is in the table and every policy in the figure."""

from __future__ import annotations

import re

import numpy as np

from plait.features import advise
from plait.report.cache import advice_figure, advice_text

ADVICE = advise(
    [np.arange(9), np.arange(5, 14)] * 4, 64, "1mbit", shares=[0.2, 0.9], policies=["lru", "sieve"]
)


def test_the_table_marks_what_is_recommended() -> None:
    text = advice_text(ADVICE)
    assert text.count("lru") >= 2
    assert text.count("<-") == (ADVICE.recommended is not None)
    assert "recommended: " in text


def test_the_figure_names_every_policy_and_is_self_contained() -> None:
    figure = advice_figure(ADVICE, "a < b & c")
    assert figure.count("<polyline") == 2
    assert "a &lt; b &amp; c" in figure
    assert "href" not in figure


def test_the_figure_answers_first_names_its_axes_and_needs_no_colour() -> None:
    figure = advice_figure(ADVICE, "title")
    assert figure.index("Recommended") < figure.index("title") < figure.index("<polyline")
    assert "capacity of the cache" in figure
    assert "hit rate" in figure
    assert len(set(re.findall(r'<polyline[^>]*stroke-dasharray="([^"]*)"', figure))) == 2
