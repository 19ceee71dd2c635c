"""`print(plan)`: every layer in words, its cost, and the alternatives that cost more."""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, TextIO

from plait.cost.price import Price

if TYPE_CHECKING:
    from plait.plan.plan import LayerPlan

__all__ = [
    "CALLING", "LETTERS", "PHASES", "TIE", "WIDTH", "Row", "blocks", "closest_ratio", "coloured_text", "cut",
    "has_colour", "html_text", "milliseconds", "next_best", "plain_text", "sentence",
]  # fmt: skip

WIDTH = 100  # columns of a terminal
TIE = 1.1  # prices of whole layers are off by about this much: closer ones count as equal
PHASES = {"once": "once", "fwd": "forward", "bwd": "backward"}
CALLING = "calling: Python and autograd around the steps"
LETTERS = "Letters: W, V weights; a attention vectors; b, c biases; X the layer's input."
_TITLE = 58  # columns of a step's description
_BAR = 16  # columns of the longest bar
_EIGHTHS = " ▏▎▍▌▋▊▉"


@dataclass(frozen=True)
class Row:
    """One step in words: when it runs, what it does, the size of what it makes, its price and its time."""

    phase: str  # "once", "fwd" or "bwd"
    text: str
    size: tuple[int, int] | None
    price: Price
    measured: float | None = None


def milliseconds(seconds: float) -> str:
    """A time with three figures: "0.523 ms", "11.4 ms"."""
    if seconds >= 10:
        return f"{seconds:.1f} s"
    value = seconds * 1e3
    digits = 3 if value < 1 else 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{digits}f} ms"


def sentence(layer: LayerPlan) -> str:
    """What a layer does and why: "Multiply by W first, then aggregate: ..."."""
    text, reason = layer.action(), layer.reason()
    text = text[:1].upper() + text[1:]
    return f"{text}: {reason}." if reason else f"{text}."


def next_best(layer: LayerPlan) -> str:
    """The cheapest plan that does something else and how much slower it is; ties are named."""
    by_price = [(r.seconds, r) for r in layer.rejected if r.seconds is not None]
    by_price.sort(key=lambda pair: pair[0])
    small = [r for _, r in by_price if "limit" in r.why]
    priced = [pair for pair in by_price if "limit" not in pair[1].why]
    if not priced and not small:
        return ""
    own = max(layer.seconds, 1e-12)
    tied = [r for seconds, r in priced if seconds <= TIE * own]
    others = [(seconds, r.words) for seconds, r in priced if seconds > TIE * own]
    lines = []
    named = next((r.words for r in tied if r.words and r.words != layer.action()), "")
    if tied:
        variants = f"with {_counted(len(tied), 'variant', 'variants')} of the same order of operations"
        lines.append(f"A tie (predicted times within 10%) {f'with: {named}' if named else variants}")
    if others:
        # what is named as a tie may also lose, in a variant: to name it twice would look like a contradiction
        same = (others[0][0], f"a variant of {'one of these' if named else 'the same order of operations'}")
        known = ("", named, layer.action())
        seconds, text = next((pair for pair in others if pair[1] not in known), same)
        lines.append(f"Next best: {text}, {_times(seconds / own)} slower")
    if small:
        lines.append(f"Not considered, over memory_limit: {_counted(len(small), 'way', 'ways')}")
    return ". ".join(lines) + "."


def closest_ratio(layer: LayerPlan) -> float:
    """Price ratio of the nearest plan that does something else; infinite where there is none."""
    own = max(layer.seconds, 1e-12)
    others = [
        r.seconds for r in layer.rejected if r.seconds is not None and r.words not in ("", layer.action())
    ]
    return min(others, default=math.inf) / own


def _counted(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"


def _times(ratio: float) -> str:
    if ratio < 2:
        return f"{ratio - 1:.0%}"
    return f"{ratio:.1f}x" if ratio < 10 else f"{ratio:.0f}x"


@dataclass(frozen=True)
class Block:
    """One layer of the print: its headline, its sentences, its steps with bars."""

    name: str
    cost: str
    sentences: tuple[str, ...]
    rows: tuple[Row, ...]
    calling: Mapping[str, float]  # by phase


def blocks(layers: Iterable[LayerPlan]) -> list[Block]:
    """The layers as blocks of a print."""
    made = []
    for layer in layers:
        rows = layer.rows()
        said = [sentence(layer), next_best(layer)]
        sentences = tuple(text for text in said if text)
        made.append(Block(layer.layer, _cost(layer, rows), sentences, tuple(rows), layer.calling))
    return made


def _cost(layer: LayerPlan, rows: Sequence[Row]) -> str:
    step = sum(row.price.seconds for row in rows if row.phase != "once")
    once = sum(row.price.seconds for row in rows if row.phase == "once")
    each = "training step" if layer.mode == "training" else "call"
    text = f"{milliseconds(step)} per {each}" if rows else "not priced"
    if once:
        text += f" + {milliseconds(once)} once"
    measured = sum(row.measured or 0.0 for row in rows if row.phase != "once") + sum(layer.calling.values())
    return text + (f", measured {milliseconds(measured)}" if measured else "")


def plain_text(title: str, warnings: Sequence[str], layers: Sequence[LayerPlan], after: Sequence[str]) -> str:
    """The whole print, without colour."""
    return "\n".join(text for text, _ in _lines(title, warnings, layers, after))


def coloured_text(
    title: str, warnings: Sequence[str], layers: Sequence[LayerPlan], after: Sequence[str]
) -> str:
    """The whole print for a terminal that has colours."""
    return "\n".join(
        f"\x1b[{_COLOURS[kind]}m{text}\x1b[0m" if kind in _COLOURS and text else text
        for text, kind in _lines(title, warnings, layers, after)
    )


def has_colour(stream: TextIO) -> bool:
    """Whether a stream is a terminal with colours (NO_COLOR and TERM=dumb turn them off)."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return bool(getattr(stream, "isatty", lambda: False)())


_COLOURS = {"title": "1", "warning": "33", "layer": "1;36", "once": "2", "note": "2"}


def _lines(
    title: str, warnings: Sequence[str], layers: Sequence[LayerPlan], after: Sequence[str]
) -> list[tuple[str, str]]:
    """(text, kind of line) of everything that is shown."""
    found = [(line, "warning") for text in warnings for line in _wrap(f"warning: {text}", "")]
    first, *rest = title.splitlines()
    found += [(first, "title"), *((line, "note") for text in rest for line in _wrap(text, ""))]
    shown = blocks(layers)
    longest = max((r.price.seconds for b in shown for r in b.rows if r.phase != "once"), default=0.0)
    for block in shown:
        found.append(("", ""))
        room = WIDTH - len(block.cost) - 2
        found.append((f"{cut(block.name, room):<{room}}  {block.cost}", "layer"))
        found += [(line, "") for text in block.sentences for line in _wrap(text, "  ")]
        has_measured = any(row.measured is not None for row in block.rows)
        if has_measured:
            found.append((f"  {'':<{_TITLE + 10}}{'predicted':>12}{'measured':>12}", "note"))
        for row in block.rows:
            found.append((_row_text(row, longest, has_measured), row.phase))
        for phase, seconds in block.calling.items():
            found.append((f"  {PHASES[phase]:<10}{CALLING:<{_TITLE + 12}}{milliseconds(seconds):>12}", phase))
    if after:
        found.append(("", ""))
    return found + [(line, "note") for text in after for line in _wrap(text, "")]


def _row_text(row: Row, longest: float, has_measured: bool) -> str:
    size = "" if row.size is None else f" ({row.size[0]} x {row.size[1]})"
    whole = row.text + size if len(row.text + size) <= _TITLE else row.text
    name = f"  {PHASES[row.phase]:<10}{cut(whole, _TITLE):<{_TITLE}}"
    if has_measured:
        measured = "" if row.measured is None else milliseconds(row.measured)
        return f"{name}{milliseconds(row.price.seconds):>12}{measured:>12}".rstrip()
    bar = "" if row.phase == "once" or not longest else _bar(row.price.seconds / longest)
    return f"{name}{milliseconds(row.price.seconds):>12}  {bar}".rstrip()


def _bar(share: float) -> str:
    eighths = max(1, round(share * _BAR * 8))
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def cut(text: str, width: int) -> str:
    """The text in at most `width` columns."""
    return text if len(text) <= width else text[: width - 1] + "…"


def _wrap(text: str, first: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=first, subsequent_indent=first + ("" if first else "  "),
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


# Notebooks ---------------------------------------------------------------------------------------------


def html_text(title: str, warnings: Sequence[str], layers: Sequence[LayerPlan], after: Sequence[str]) -> str:
    """The print as HTML for a notebook: no scripts, nothing loaded, readable on light and dark."""
    shown = blocks(layers)
    longest = max((r.price.seconds for b in shown for r in b.rows if r.phase != "once"), default=0.0)
    parts = ['<div style="font-family:system-ui,sans-serif;max-width:60em">']
    parts += [f'<p style="color:#b45309;margin:.2em 0">warning: {escape(text)}</p>' for text in warnings]
    first, _, rest = title.partition("\n")
    parts.append(f'<p style="margin:.2em 0"><b>{escape(first)}</b><br>{escape(rest)}</p>')
    for block in shown:
        parts.append(
            f'<p style="margin:.9em 0 0"><b>{escape(block.name)}</b> '
            f'<span style="opacity:.7">{escape(block.cost)}</span></p>'
        )
        parts += [f'<p style="margin:.1em 0">{escape(text)}</p>' for text in block.sentences]
        parts.append('<table style="border-collapse:collapse;font-size:90%">')
        parts += [_html_row(row, longest) for row in block.rows]
        parts += [
            _html_cells([PHASES[phase], CALLING, "", "", f"measured {milliseconds(seconds)}"], "")
            for phase, seconds in block.calling.items()
        ]
        parts.append("</table>")
    parts += [f'<p style="opacity:.7;margin:.4em 0">{escape(text)}</p>' for text in after]
    return "".join((*parts, "</div>"))


def _html_row(row: Row, longest: float) -> str:
    size = "" if row.size is None else f"{row.size[0]} × {row.size[1]}"
    share = 0.0 if row.phase == "once" or not longest else row.price.seconds / longest
    bar = (
        f'<div style="background:#0d9488;height:.7em;width:{12 * share:.2f}em;min-width:1px"></div>'
        if share
        else ""
    )
    cells = [PHASES[row.phase], row.text, size, milliseconds(row.price.seconds)]
    cells += [] if row.measured is None else [f"measured {milliseconds(row.measured)}"]
    return _html_cells(cells, bar)


def _html_cells(cells: list[str], bar: str) -> str:
    style = "padding:0 .8em 0 0;text-align:left"
    return (
        "<tr>" + "".join(f'<td style="{style}">{escape(c)}</td>' for c in cells)
        + f'<td style="{style}">{bar}</td></tr>'
    )  # fmt: skip
