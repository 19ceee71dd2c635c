"""report/page/palette: colours have a name in light and dark, and enough contrast to be read."""

from __future__ import annotations

import pytest

from plait.report.page.palette import DARK, LIGHT, colour_of, css, heat_class, printed


def _luminance(colour: str) -> float:
    parts = (int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5))
    linear = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def _contrast(a: str, b: str) -> float:
    low, high = sorted((_luminance(a), _luminance(b)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", [LIGHT, DARK], ids=["light", "dark"])
def test_text_can_be_read(scheme: dict[str, str]) -> None:
    for name in ("ink", "soft", "own", "torch", "pyg", "dgl", "peer"):
        assert _contrast(scheme[name], scheme["paper"]) >= 4.5, name
    for name in ("slow2", "slow1", "even", "fast1", "fast2", "fast3"):
        assert _contrast(scheme[name], scheme["on-light"]) >= 4.5, name
    for name in ("slow3", "fast4", "fast5"):
        assert _contrast(scheme[name], scheme["on-deep"]) >= 4.5, name


def test_both_schemes_name_the_same_colours() -> None:
    assert list(LIGHT) == list(DARK)
    assert css().count("--ink:") == 3


def test_ratios_have_a_side() -> None:
    names = [heat_class(r) for r in (0.1, 0.6, 0.9, 1.0, 1.1, 1.5, 2.0, 4.0, 40.0)]
    assert names == ["slow3", "slow2", "slow1", "even", "fast1", "fast2", "fast3", "fast4", "fast5"]


def test_variants_of_a_library_share_its_colour_and_files_have_it_written_out() -> None:
    assert colour_of("torch-csr") == colour_of("torch")
    assert colour_of("unheard of") == "var(--peer)"
    drawn = printed('<svg><title>a</title><a fill="var(--own)"/></svg>')
    assert drawn.endswith(f'<a fill="{LIGHT["own"]}"/></svg>')
    assert f'fill="{LIGHT["paper"]}"' in drawn
