"""Heat maps of plait's ratio to the best peer: a row per operation, a column per graph or size."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from plait.report.layers import geometric_mean
from plait.report.page.draw import Figure, label, short, svg, tag, titled
from plait.report.page.palette import heat_class
from plait.report.page.samples import GENERATED, Contest, Sample, contests, number
from plait.report.table import ratio_text, seconds_text

__all__ = ["Grid", "grid_figure", "grid_html", "layer_grids", "loop_grids", "op_grids"]

_MOST_SIZES = 10
_DEEP = ("slow3", "fast4", "fast5")


@dataclass(frozen=True)
class Row:
    """A row of the map: its name, what distinguishes it, and what the filters know it by."""

    op: str
    detail: str
    device: str


@dataclass(frozen=True)
class Grid:
    """Contests by row and column; several in one cell are averaged geometrically."""

    name: str
    title: str
    caption: str
    column_name: str
    columns: Mapping[str, str]  # its name -> the graph the filters know it by
    cells: Mapping[tuple[Row, str], list[Contest]] = field(default_factory=dict)

    @property
    def rows(self) -> list[Row]:
        """The rows in order of appearance; one that has neither a ratio nor a wrong answer is left out."""
        shown = [row for (row, _), found in self.cells.items() if any(map(_is_shown, found))]
        return list(dict.fromkeys(shown))


def _is_shown(contest: Contest) -> bool:
    return contest.is_own_wrong or not math.isnan(contest.ratio)


@dataclass(frozen=True)
class _Cell:
    """What a cell shows: its text, its colour and the sentence behind it."""

    text: str
    colour: str
    tip: str


def layer_grids(samples: Sequence[Sample]) -> list[Grid]:
    """The maps of `bench layers` and `bench models`: graphs from few edges to many."""
    grids = []
    for kind, title in (("layer", "One layer at a time"), ("model", "Whole models, trained from the start")):
        found = contests(s for s in samples if s.kind == kind)
        if any(contest.own or contest.is_own_wrong for contest in found):
            grids.append(_graph_grid(f"ratio-{kind}s", title, found))
    return grids


def _graph_grid(name: str, title: str, found: Sequence[Contest]) -> Grid:
    size = {c.samples[0].graph: number(c.samples[0].fields.get("num_edges")) for c in found}
    columns = sorted(size, key=lambda graph: (math.isnan(size[graph]), size[graph], graph))
    shared = _shared_ending([c.samples[0].case for c in found])
    caption = (
        "Time of the fastest peer divided by plait’s; graphs from few edges to many. Blue: plait is faster. "
        "Orange: it is slower." + (f" All of them: {shared}." if shared else "")
    )
    cells = _gathered(found, lambda c: c.samples[0].graph, _without(shared))
    return Grid(name, title, caption, "graph", {graph: graph for graph in columns}, cells)


def loop_grids(samples: Sequence[Sample]) -> list[Grid]:
    """The map of `bench loops`: what changes at every step, over the number of threads."""
    found = [c for c in contests(s for s in samples if s.kind == "loop") if c.own or c.is_own_wrong]
    if not found:
        return []
    columns = {c.samples[0].case: c.samples[0].graph for c in sorted(found, key=_num_threads)}
    caption = (
        "Time of a step in PyG divided by plait’s, where features, scalars, weights or the graph change at "
        "every step. Blue: plait is faster. Orange: it is slower."
    )
    cells = _gathered(found, lambda c: c.samples[0].case, lambda _: "")
    title = "Loops in which something changes at every step"
    return [Grid("ratio-loops", title, caption, "threads", columns, cells)]


def _num_threads(contest: Contest) -> float:
    return number(contest.samples[0].fields.get("threads"))


def op_grids(samples: Sequence[Sample]) -> list[Grid]:
    """The map of `bench ops`: operations that plait has, over the number of edges they were given."""
    found = [c for c in contests(s for s in samples if s.kind == "op") if c.own or c.is_own_wrong]
    # matrices of chosen density have their own figure: there the dense way wins by design
    sized = [c for c in found if _size(c) > 0 and c.samples[0].fields.get("sparsity") is None]
    if not sized:
        return []
    sizes = {_rounded(_size(c), 1) for c in sized if c.samples[0].graph == GENERATED}
    digits = 1 if len(sizes) <= _MOST_SIZES else 0
    names = {_op_column(c, digits): c for c in sorted(sized, key=_column_order)}
    several = len({c.samples[0].device for c in sized}) > 1
    cells = _gathered(
        sized, lambda c: _op_column(c, digits), lambda c: c.samples[0].device if several else ""
    )
    caption = (
        "Time of the fastest other implementation divided by plait’s; where several cases share a cell, "
        "their geometric mean. Blue: plait is faster. Orange: it is slower."
    )
    graphs = {name: contest.samples[0].graph for name, contest in names.items()}
    return [Grid("ratio-ops", "Operation by operation", caption, "edges or rows", graphs, cells)]


def _shared_ending(details: Sequence[str]) -> str:
    """What all details end with, whole or in their last word: said once instead of in every row."""
    if len(set(details)) == 1:
        return details[0]
    last = {detail.rpartition(" ")[2] for detail in details}
    return last.pop() if len(last) == 1 else ""


def _without(ending: str) -> Callable[[Contest], str]:
    return lambda contest: contest.samples[0].case.removesuffix(ending).rstrip()


def _size(contest: Contest) -> float:
    """Edges, or rows where there is no graph; zero when neither is known."""
    fields = contest.samples[0].fields
    sizes = (number(fields.get(name)) for name in ("edges", "nodes"))
    return next((size for size in sizes if size > 0), 0.0)


def _rounded(size: float, digits: int) -> float:
    """To one digit, or to the nearest power of ten."""
    return float(f"{size:.0e}") if digits else 10.0 ** round(math.log10(size))


def _op_column(contest: Contest, digits: int) -> str:
    graph = contest.samples[0].graph
    size = short(_rounded(_size(contest), digits)) if graph == GENERATED else graph
    return f"{size} {_direction(contest)}".rstrip()


def _column_order(contest: Contest) -> tuple[bool, str, bool, float]:
    direction = _direction(contest)
    return direction != "", direction, contest.samples[0].graph != GENERATED, _size(contest)


def _direction(contest: Contest) -> str:
    direction = str(contest.samples[0].fields.get("direction", "forward"))
    return "" if direction == "forward" else direction


def _gathered(
    found: Sequence[Contest], column: Callable[[Contest], str], detail: Callable[[Contest], str]
) -> dict[tuple[Row, str], list[Contest]]:
    cells: dict[tuple[Row, str], list[Contest]] = {}
    order = {op: place for place, op in enumerate(dict.fromkeys(c.samples[0].op for c in found))}
    for contest in sorted(found, key=lambda c: (order[c.samples[0].op], c.samples[0].device, detail(c))):
        first = contest.samples[0]
        cells.setdefault((Row(first.op, detail(contest), first.device), column(contest)), []).append(contest)
    return cells


def _cell(found: Sequence[Contest], row: Row, column: str) -> _Cell:
    where = f"{row.op} {row.detail}, {column}".replace(" ,", ",")
    ratio = geometric_mean(contest.ratio for contest in found)
    if math.isnan(ratio):
        wrong = [s for c in found if c.is_own_wrong for s in c.samples if s.is_own]
        if wrong:
            return _Cell(
                "wrong", "wrong", f"{where}: plait’s answer was wrong and not timed. {wrong[0].reason}"
            )
        return _Cell("", "none", f"{where}: not measured")
    text = ratio_text(ratio).removesuffix("x")
    contest = found[0]
    if len(found) == 1 and contest.own and contest.peer:
        tip = (
            f"{where}: {ratio_text(ratio)}. plait {seconds_text(contest.own.median)}, "
            f"{contest.peer.variant} {seconds_text(contest.peer.median)}"
        )
    else:
        every = sorted(c.ratio for c in found if not math.isnan(c.ratio))
        bounds = f"{ratio_text(every[0])} to {ratio_text(every[-1])}"
        tip = f"{where}: {ratio_text(ratio)}, from {bounds} in {len(every)} cases"
    return _Cell(text, heat_class(ratio), tip)


def grid_html(grid: Grid) -> str:
    """The map as a table: it shrinks with the filters and is read aloud as what it is."""
    head = "".join(
        tag("th", tag("span", _breakable(column)), scope="col", data_graph=graph)
        for column, graph in grid.columns.items()
    )
    rows = []
    for row in grid.rows:
        name = tag("b", html.escape(row.op)) + " " + html.escape(row.detail)
        cells = tag("th", name, scope="row")
        for column, graph in grid.columns.items():
            cell = _cell(grid.cells.get((row, column), ()), row, column)
            cells += tag(
                "td", html.escape(cell.text), class_=f"h {cell.colour}", data_tip=cell.tip, data_graph=graph
            )
        rows.append(tag("tr", cells, data_op=row.op, data_device=row.device))
    longest = max((len(f"{row.op} {row.detail}") for row in grid.rows), default=0)
    # a fixed table does not widen its first column for its names
    width = max(10.5, 0.48 * longest + 1.0)
    corner = tag("th", html.escape(grid.column_name + " →"), scope="col", class_="corner")
    table = tag(
        "table",
        tag("thead", tag("tr", corner, head)),
        tag("tbody", *rows),
        class_="heat",
        style=f"--names:{width:.1f}rem;max-width:{width + 7 * len(grid.columns):.1f}rem",
    )
    return tag("div", table, class_="wide-scroll", tabindex=0, role="group", aria_label=grid.title)


def _breakable(name: str) -> str:
    return html.escape(name).replace("_", "_<wbr>")


def grid_figure(grid: Grid) -> Figure:
    """The same map as a drawing."""
    return Figure(grid.name, grid.title, grid.caption, lambda width: _grid_svg(grid, width))


def _grid_svg(grid: Grid, width: int) -> str:
    left, top, step = 210.0, 40.0, 24.0
    cell_width = min(84.0, (width - left) / max(1, len(grid.columns)))
    parts = [
        label(text, left + (k + 0.5) * cell_width, top - 10 - 13 * line, text_anchor="middle")
        for k, column in enumerate(grid.columns)
        for line, text in enumerate(reversed(_lines(column, cell_width)))
    ]
    for place, row in enumerate(grid.rows):
        y = top + place * step
        parts.append(label(f"{row.op} {row.detail}", left - 8, y + 16, text_anchor="end"))
        for k, column in enumerate(grid.columns):
            cell = _cell(grid.cells.get((row, column), ()), row, column)
            parts.append(_svg_cell(cell, left + k * cell_width, y, cell_width - 2, step - 2))
    used = left + len(grid.columns) * cell_width
    return svg(used, top + len(grid.rows) * step + 6, *parts, title=grid.title)


def _lines(column: str, width: float) -> list[str]:
    """The name of a column in one line or, where it is wider than the column, in two."""
    head, mark, tail = column.partition("_")
    return [column] if 6.6 * len(column) <= width or not mark else [f"{head}_", tail]


def _svg_cell(cell: _Cell, x: float, y: float, width: float, height: float) -> str:
    if cell.colour == "none":
        return ""
    colour = "even" if cell.colour == "wrong" else cell.colour
    ink = "var(--on-deep)" if cell.colour in _DEEP else "var(--on-light)"
    box = tag("rect", x=x, y=y, width=width, height=height, rx=2, fill=f"var(--{colour})")
    return tag(
        "g", titled(cell.tip), box, label(cell.text, x + width / 2, y + 15, text_anchor="middle", fill=ink)
    )
