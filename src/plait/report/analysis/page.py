"""An analysis as one HTML page: what pays, the figures, every number."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Sequence

from plait.analysis.analysis import Analysis
from plait.report.analysis.bars import epoch_figure, parallelism_figure, traffic_figure
from plait.report.analysis.gantt import gantt_figure
from plait.report.analysis.roofline import roofline_figure
from plait.report.analysis.scaling import scaling_figure
from plait.report.page.draw import Figure, short, tag
from plait.report.page.layout import document, figure_html, plain_table
from plait.report.table import bytes_text, seconds_text

__all__ = ["figures_of", "page_of"]


def page_of(analysis: Analysis) -> str:
    """The whole page: nothing is loaded from elsewhere, and it works without a script."""
    figures = "".join(figure_html(figure) for figure in figures_of(analysis))
    body = tag("main", _head(analysis), figures, _tables(analysis))
    return document(f"plait analyze: {analysis.model}", body)


def figures_of(analysis: Analysis) -> list[Figure]:
    """Every figure there is something to draw for."""
    found = [
        epoch_figure(analysis),
        traffic_figure(analysis),
        scaling_figure(analysis),
        parallelism_figure(analysis),
        roofline_figure(analysis),
        gantt_figure(analysis),
    ]
    return [figure for figure in found if figure is not None]


def _head(analysis: Analysis) -> str:
    found, network = analysis.statistics, analysis.options.network
    lead = (
        f"{analysis.model}: {found.nodes:,} nodes and {found.edges:,} edges, {analysis.workers} workers of "
        f"{bytes_text(analysis.options.memory)} on {network.name} ({short(network.bytes_per_s, 'B/s')}, "
        f"{network.latency * 1e6:g} µs per message, {network.meeting * 1e6:g} µs more wherever workers wait "
        f"for each other). Prices are those of {analysis.machine}."
    )
    numbers = [tag("li", tag("b", value), tag("span", text)) for value, text in _numbers(analysis)]
    sentences = _findings(analysis)
    return tag(
        "header",
        tag("p", "plait analyze", class_="mark-word"),
        tag("h1", "Which strategy pays"),
        tag("p", html.escape(lead), class_="lead"),
        tag("ul", *numbers, class_="numbers"),
        tag("ul", *(tag("li", html.escape(line)) for line in sentences), class_="findings"),
    )


def _numbers(analysis: Analysis) -> list[tuple[str, str]]:
    if analysis.advice is None:
        return []
    named = {strategy.name: strategy for strategy in analysis.strategies}
    best, alone = named[analysis.advice.winner], named["one worker"]
    gain = alone.seconds_per_epoch / max(best.seconds_per_epoch, 1e-300)
    return [
        (html.escape(best.name), "is the fastest strategy that computes the same numbers"),
        (seconds_text(best.seconds_per_epoch), "predicted for an epoch"),
        (f"{gain:.2f}×", f"one worker's speed, with {best.workers}"),
        (bytes_text(best.traffic.total), "sent in an epoch by all workers"),
        (bytes_text(best.memory_per_worker), "held by a worker"),
    ]


def _findings(analysis: Analysis) -> list[str]:
    from plait.analysis.text import limit_text, tie_text

    lines = []
    if analysis.advice is not None:
        lines.append(f"{analysis.advice.winner}, {analysis.advice.because}.")
        limits = [tie_text(analysis.advice)] if analysis.advice.tied else []
        limits += [limit_text(limit) for limit in analysis.advice.break_even]
        lines += [f"{text[0].upper()}{text[1:]}." for text in limits]
    return lines + [f"Note: {note}." for note in analysis.notes]


def _table(title: str, names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    table = plain_table(names, [[_whole(cell) for cell in row] for row in rows], title)
    return tag("section", tag("h3", html.escape(title)), table, class_="table")


def _whole(cell: str) -> str:
    """A number and its unit stay on one line."""
    return re.sub(r"^([\d.,]+) (\S+)$", "\\1\u00a0\\2", cell)


def _tables(analysis: Analysis) -> str:
    return _layers(analysis) + _strategies(analysis) + _schemes(analysis) + _published(analysis)


def _layers(analysis: Analysis) -> str:
    rows = [
        (
            f"{layer.name}, {name}", short(phase.work), short(phase.flops), short(phase.bytes_least, "B"),
            str(phase.depth), short(phase.parallelism), str(phase.formulas.get("flops", "")),
        )
        for layer in analysis.layers
        for name, phase in layer.phases.items()
    ]  # fmt: skip
    rows += [(layer.name, layer.note, "", "", "", "", "") for layer in analysis.layers if layer.is_black_box]
    return _table("Layers", ("pass", "work", "flop", "bytes", "depth", "W/D", "flop as a formula"), rows)


def _strategies(analysis: Analysis) -> str:
    head = (
        "form", "family", "epoch", "sent", "memory", "syncs", "nodes that fit", "same numbers", "run by",
        "how",
    )  # fmt: skip
    nodes, memory = analysis.statistics.nodes, analysis.options.memory
    rows = []
    for s in analysis.strategies:
        most = s.largest_nodes(nodes, memory)
        rows.append((
            s.name, s.family, seconds_text(s.seconds_per_epoch), bytes_text(s.traffic.total),
            bytes_text(s.memory_per_worker), str(s.synchronisations),
            "any" if math.isinf(most) else short(most), "yes" if s.same_numbers else "no", s.run_by or "–",
            s.note,
        ))  # fmt: skip
    return _table("Strategies", head, rows)


def _schemes(analysis: Analysis) -> str:
    head = ("scheme", "work", "published", "here", "depth of a step", "steps", "")
    rows = [
        (s.row.model, short(s.work), str(s.row.work), short(s.published), str(s.depth), f"{s.steps:,}",
         s.note)
        for s in analysis.schemes
    ]  # fmt: skip
    return _table("An epoch of training", head, rows) if rows else ""


def _published(analysis: Analysis) -> str:
    head = ("model", "work, published", "here", "work, executed", "here", "why they differ")
    values = analysis.published_values
    rows = [
        (row.model, str(row.work), short(row.work(**values)), str(row.executed_work),
         short(row.executed_work(**values)), row.because)
        for row in analysis.published
    ]  # fmt: skip
    return _table("The paper's bounds next to what is executed", head, rows) if rows else ""
