"""The page: one HTML file with its style, its script and every figure inside."""

from __future__ import annotations

import base64
import dataclasses
import gzip
import html
import importlib.resources
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plait.report.page import heat, palette, roofline, strips, sweeps, trees, words
from plait.report.page.draw import NARROW, WIDE, Figure, tag
from plait.report.page.samples import BARS, Run, Sample, samples_of

__all__ = ["Report", "document", "figure_html", "plain_table", "report_of"]

_KINDS = (
    ("op", "ops", "Operations", "bench ops"),
    ("layer", "layers", "Layers", "bench layers"),
    ("model", "models", "Models", "bench models"),
    ("plan", "plans", "Candidates of the planner", "bench plans"),
    ("predict", "predicted", "Layers with a price", "bench layers --predict"),
    ("loop", "loops", "Changing loops", "bench loops"),
)
_LONG = 30  # letters of a value that need a line of their own
_MOST_LETTERS = 2_000_000  # a page beyond this is slow to send and to open
_PANELS = 9  # curves of one axis before the rest is folded away


@dataclass(frozen=True)
class Report:
    """A run, read and arranged: `html()` is the page, `figures` what can be kept as files."""

    run: Run
    samples: tuple[Sample, ...]
    odd: int

    @property
    def figures(self) -> list[Figure]:
        """Every figure of the page."""
        maps = [heat.grid_figure(grid) for grid in self._grids()]
        curves = [sweeps.sweep_figure(sweep, place) for place, sweep in enumerate(self._sweeps())]
        return (
            maps
            + [f for _, f in self._rooflines()]
            + curves
            + self._spread_figures()
            + self._trees()
            + self._strip_figures()
        )

    def html(self, most: int = _MOST_LETTERS) -> str:
        """The whole page; where it would have more letters than `most`, its long sections are compressed.

        The page's script expands them before it does anything else.
        """
        page = self._page(lambda section: section)
        return page if len(page) <= most else self._page(_packed)

    def _page(self, wrap: Callable[[str], str]) -> str:
        sections = [
            self._ratios(),
            self._bars(),
            self._questions(),
            *(wrap(made) for made in (self._machine(), self._curves(), self._plans(), self._tables())),
        ]
        missing = tag("p", html.escape(self._left_out()), class_="left-out") if self._left_out() else ""
        body = tag("main", self._head(), self._filters(), *sections, missing)
        script = tag("script", _resource("page.js"))
        return document("plait report", body, script)

    def _grids(self) -> list[heat.Grid]:
        samples = self.samples
        return heat.op_grids(samples) + heat.layer_grids(samples) + heat.loop_grids(samples)

    def _sweeps(self) -> list[sweeps.Sweep]:
        return sweeps.sweeps_of(self.samples)

    def _rooflines(self) -> list[tuple[str | None, Figure]]:
        streams = roofline.bandwidths(self.samples)
        points = roofline.points_of(self.samples, self.run.plans)
        figures: list[tuple[str | None, Figure]] = [*roofline.roofline_figures(points, streams)]
        shares = roofline.bandwidth_figure(self.samples, streams)
        return figures + ([(None, shares)] if shares else [])

    def _predictions(self) -> list[trees.Prediction]:
        return trees.predictions_of(self.samples, self.run.plans)

    def _spread_figures(self) -> list[Figure]:
        found = (trees.prediction_figure(self._predictions()), trees.regret_figure(self.samples))
        return [figure for figure in found if figure is not None]

    def _trees(self) -> list[Figure]:
        drawn = [trees.tree_figure(name, plan) for name, plan in self.run.plans.items()]
        # how to read a tree is said once
        return drawn[:1] + [dataclasses.replace(figure, caption="") for figure in drawn[1:]]

    def _strip_figures(self) -> list[Figure]:
        return [
            strips.strip_figure(f"strips-{name}", title, members)
            for kind, name, title, _ in _KINDS
            if (members := [s for s in self.samples if s.kind == kind and s.is_timed])
        ]

    def _head(self) -> str:
        figures = words.key_figures(self.samples, self._predictions())
        numbers = [
            tag("li", tag("b", html.escape(figure.value)), tag("span", html.escape(figure.meaning)))
            for figure in figures
        ]
        warning = words.banner(self.run)
        sentences = words.findings(self.run, self.samples, self._sweeps(), self._predictions(), self.odd)
        bullets = (
            tag("ul", *(tag("li", html.escape(line)) for line in sentences), class_="findings")
            if sentences
            else ""
        )
        return tag(
            "header",
            tag("p", "plait report", class_="mark-word")
            + tag("button", "dark", type="button", id="theme", aria_label="switch between light and dark"),
            tag("h1", "What was measured, and the result"),
            tag("p", html.escape(words.lead(self.run, self.samples)), class_="lead"),
            tag("p", html.escape(warning), class_="banner", role="note") if warning else "",
            tag("ul", *numbers, class_="numbers") if numbers else "",
            bullets,
            self._environment(),
        )

    def _environment(self) -> str:
        rows = sorted(words.environment_rows(self.run), key=lambda row: len(row[1]) > _LONG)
        if not rows:
            return ""
        pairs = [
            tag(
                "div",
                tag("dt", html.escape(key)),
                tag("dd", html.escape(value)),
                class_="long" if len(value) > _LONG else None,
            )
            for key, value in rows
        ]
        return tag(
            "section", tag("h2", "Environment"), tag("dl", *pairs), id="environment", class_="environment"
        )

    def _filters(self) -> str:
        facets = (("op", "operation"), ("device", "device"), ("graph", "graph"))
        known = {
            "op": dict.fromkeys([s.op for s in self.samples] + [p.op for p in self._predictions()]),
            "device": dict.fromkeys(s.device for s in self.samples),
            "graph": dict.fromkeys(s.graph for s in self.samples),
        }
        selects = [
            tag("label", tag("span", text), _select(facet, text, list(known[facet])))
            for facet, text in facets
        ]
        clear = tag("button", "show all", type="button", id="clear", hidden="")
        count = tag("output", "", id="count", aria_live="polite")
        return tag("form", *selects, clear, count, id="filters", aria_label="filter figures and tables")

    def _ratios(self) -> str:
        grids = self._grids()
        blocks = [
            tag(
                "figure",
                _caption(grid.title, grid.caption),
                heat.grid_html(grid),
                _scale_key(),
                data_shrinks="tr[data-op]",
            )
            for grid in grids
        ]
        return _section("ratios", "Against the best peer", blocks)

    def _bars(self) -> str:
        """Mini-batches: targets next to what was measured, the worst case of each."""
        found = [
            (record.case, bar)
            for record in self.run.records
            if record.kind == BARS
            for bar in _list_of_dicts(record.result.get("bars"))
        ]
        if not found:
            return ""
        promises: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
        for case, bar in found:
            promises.setdefault((str(case.get("part", "")), str(bar.get("name", ""))), []).append(bar)
        summary = [(*names, *_promise(bars)) for names, bars in promises.items()]
        cases = [
            (*_bar_case(case), bar.get("name", ""), _figures(bar["value"]), _limit(bar), _held(bar))
            for case, bar in found
        ]
        folded = tag("details", tag("summary", "every case"), plain_table(_BAR_HEAD, cases))
        return _section("batches", "Mini-batches", [plain_table(_PROMISE_HEAD, summary), folded])

    def _questions(self) -> str:
        where = {
            str(record.result.get("group")): str(
                record.environment.get("gpu") or record.environment.get("cpu")
            )
            for record in self.run.records
            if record.kind == "op"
        }
        asked: dict[str, list[Mapping[str, Any]]] = {}
        for finding in self.run.findings:
            asked.setdefault(str(finding["question"]), []).append(finding)
        blocks = [_answers(question, found, where) for question, found in asked.items()]
        return _section("questions", "Questions answered", blocks)

    def _machine(self) -> str:
        blocks = [figure_html(figure, data_device=device) for device, figure in self._rooflines()]
        return _section("machine", "Against the machine", [_families(), *blocks] if blocks else [])

    def _curves(self) -> str:
        found = self._sweeps()
        if not found:
            return ""
        text = (
            "Time against one size, everything else fixed; axes are logarithmic. A ring marks where dense "
            "and the fastest sparse way take equally long."
        )
        blocks = [tag("p", text)]
        for axis in dict.fromkeys(sweep.axis for sweep in found):
            panels = [_panel(sweep, place) for place, sweep in enumerate(found) if sweep.axis == axis]
            grid = tag("div", *panels[:_PANELS], class_="panels")
            if len(panels) > _PANELS:
                rest = tag("div", *panels[_PANELS:], class_="panels")
                grid += tag("details", tag("summary", f"{len(panels) - _PANELS} more"), rest)
            head = tag("h3", html.escape(f"Over the {sweeps.AXES[axis].words}"))
            blocks.append(tag("section", head, grid, class_="axis", data_shrinks=".panel"))
        return _section("curves", "Where curves cross", blocks)

    def _plans(self) -> str:
        spread = [figure_html(figure) for figure in self._spread_figures()]
        drawn = [figure_html(figure, "g[data-op]") for figure in self._trees()]
        return _section("plans", "Plans", [tag("div", *spread, class_="pair") if spread else "", *drawn])

    def _tables(self) -> str:
        blocks = []
        for kind, name, title, _ in _KINDS:
            members = [s for s in self.samples if s.kind == kind]
            if any(s.is_timed for s in members):
                table = strips.strip_table(name, members)
                blocks.append(
                    tag("section", tag("h3", title), table, class_="table", data_shrinks="tbody tr")
                )
        left = strips.not_timed_table(self.samples)
        if left:
            blocks.append(
                tag("section", tag("h3", "Not timed"), left, class_="table", data_shrinks="tbody tr")
            )
        text = (
            "A dot is one sample, the line the median, the bar its 95% interval. The axis is the time over "
            "that of the fastest in the same case, so that all strips can be compared; what lies "
            "beyond 0.75× or 24× stands at the edge. ⚠ marks an interval wider than the value itself."
        )
        return _section("numbers", "Every number", [tag("p", text), *blocks] if blocks else [])

    def _left_out(self) -> str:
        kinds = {s.kind for s in self.samples}
        missing = [f"plait {command}" for kind, _, _, command in _KINDS if kind not in kinds]
        missing += [] if self.run.plans else ["plait explain --json"]
        parts = [f"no records of {', '.join(missing)}"] if missing else []
        if "op" in kinds and not self._sweeps():
            parts.append("no sweep with three sizes and two variants, so no curves")
        return f"Left out: {'; '.join(parts)}." if parts else ""


def document(title: str, body: str, script: str = "") -> str:
    """A page that loads nothing: its style is inside, and no script runs but the one given."""
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    policy += "; script-src 'unsafe-inline'" if script else ""
    head = (
        '<meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        + tag("title", html.escape(title))
        + tag("style", palette.css(), _resource("page.css"))
    )
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{body}{script}</body></html>\n'


def report_of(run: Run) -> Report:
    """The report of what was read."""
    samples, odd = samples_of(run)
    return Report(run, tuple(samples), odd)


def _packed(section: str) -> str:
    """A section as compressed text for the page's script; nothing where there is none."""
    if not section:
        return ""
    content = base64.b64encode(gzip.compress(section.encode(), 9, mtime=0)).decode()
    note = tag("noscript", tag("p", "This part is compressed; a browser with JavaScript shows it."))
    return tag("div", note, data_packed=content)


def _select(facet: str, text: str, values: Sequence[str]) -> str:
    options = [tag("option", f"all {text}s", value="")]
    options += [tag("option", html.escape(value), value=value) for value in sorted(values)]
    return tag("select", *options, name=facet, id=f"filter-{facet}")


def _section(name: str, title: str, blocks: Sequence[str]) -> str:
    return (
        tag("section", tag("h2", title), *blocks, id=name, data_shrinks="[data-shrinks]")
        if any(blocks)
        else ""
    )


_BAR_HEAD = ("part", "case", "what", "measured", "promised", "")
_SENTENCE = 40  # characters
_PROMISE_HEAD = ("part", "what", "worst", "promised", "kept")


def plain_table(names: Sequence[str], rows: Sequence[Sequence[object]], name: str | None = None) -> str:
    """A table that scrolls by itself where the page is narrow."""
    head = tag("tr", *(tag("th", html.escape(text), scope="col") for text in names))
    body = [tag("tr", *(_cell(str(cell)) for cell in row)) for row in rows]
    table = tag("table", tag("thead", head), tag("tbody", *body), class_="plain")
    return tag("div", table, class_="wide-scroll", tabindex=0, role="group", aria_label=name)


def _cell(text: str) -> str:
    """Sentences keep a width to be read in: a narrow page would put one word on a line."""
    return tag("td", html.escape(text), class_="words" if len(text) > _SENTENCE else None)


def _promise(bars: Sequence[Mapping[str, Any]]) -> tuple[str, str, str]:
    """The worst case of a promise, its limit, and in how many cases it was kept."""
    worst = min(
        bars, key=lambda bar: (bar["value"] - bar["limit"]) * (1 if bar.get("is_least", True) else -1)
    )
    kept = sum(bool(bar.get("holds")) for bar in bars)
    return _figures(worst["value"]), _limit(worst), f"{kept} of {len(bars)}"


def _bar_case(case: Mapping[str, Any]) -> tuple[str, str]:
    rest = ", ".join(f"{name.replace('_', ' ')} {_shown(v)}" for name, v in case.items() if name != "part")
    return str(case.get("part", "")), rest


def _figures(value: float) -> str:
    """Three figures, without an exponent for large numbers: "0.237", "2,670"."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _limit(bar: Mapping[str, Any]) -> str:
    return f"{'at least' if bar.get('is_least', True) else 'at most'} {_figures(bar['limit'])}"


def _held(bar: Mapping[str, Any]) -> str:
    return "kept" if bar.get("holds") else "missed"


def _list_of_dicts(value: object) -> list[Mapping[str, Any]]:
    """The bars of a record that have all they need; a damaged one is left out."""
    found = [bar for bar in value if isinstance(bar, dict)] if isinstance(value, list) else []
    return [bar for bar in found if all(isinstance(bar.get(key), int | float) for key in ("value", "limit"))]


def _answers(question: str, found: Sequence[Mapping[str, Any]], where: Mapping[str, str]) -> str:
    """A question with what each machine answers."""
    answers = []
    for finding in found:
        machines = dict.fromkeys(where[group] for group in finding.get("groups") or () if group in where)
        answers.append(_answer(question, finding, ", ".join(machines) if len(found) > 1 else ""))
    return tag("div", tag("h3", html.escape(question)), *answers, class_="answer")


def _answer(question: str, finding: Mapping[str, Any], machine: str) -> str:
    """An answer, the figures behind it folded away."""
    name = tag("b", html.escape(machine)) + ": " if machine else ""
    parts = [tag("p", name + html.escape(str(finding["answer"])))]
    figures = finding.get("figures") or ()
    names = list(dict.fromkeys(name for row in figures for name in row))
    if names:
        folded = plain_table(names, [[row.get(name, "") for name in names] for row in figures], question)
        parts.append(tag("details", tag("summary", "the figures behind it"), folded))
    return "".join(parts)


def _panel(sweep: sweeps.Sweep, place: int) -> str:
    figure = sweeps.sweep_figure(sweep, place)
    head = tag("figcaption", tag("h4", html.escape(figure.title)))
    return tag("figure", head, figure.draw(sweeps.PANEL), class_="panel", **sweep.first.facets)


def _caption(title: str, caption: str) -> str:
    return tag("figcaption", tag("h3", html.escape(title)), tag("p", html.escape(caption)) if caption else "")


def figure_html(figure: Figure, marks: str = ".mark", **facets: object) -> str:
    """A figure at both widths; the style shows the one that fits, while a filter leaves any of its marks."""
    drawings = tag("div", figure.draw(WIDE), class_="at-desk") + tag(
        "div", figure.draw(NARROW), class_="at-phone"
    )
    name = re.sub(r"[^a-z0-9-]+", "-", figure.name.lower())
    return tag(
        "figure", _caption(figure.title, figure.caption), drawings, id=name, data_shrinks=marks, **facets
    )


def _scale_key() -> str:
    steps = ("slow3", "slow2", "slow1", "even", "fast1", "fast2", "fast3", "fast4", "fast5")
    texts = ("<0.5", "<0.8", "<0.95", "level", "1.05+", "1.25+", "1.75+", "3+", "6+")
    cells = [tag("span", text, class_=f"h {step}") for step, text in zip(steps, texts, strict=True)]
    return tag("div", *cells, class_="key", aria_hidden="true")


def _families() -> str:
    """Which colour stands for which library."""
    names = {"plait": "plait", "torch": "torch", "pyg": "PyG", "dgl": "DGL", "dense": "dense", "": "others"}
    items = [tag("li", text, style=f"color:{palette.colour_of(variant)}") for variant, text in names.items()]
    return tag("ul", *items, class_="families")


def _resource(name: str) -> str:
    return importlib.resources.files("plait.report.page").joinpath(name).read_text(encoding="utf-8")
