"""A plan in words: for every layer what is done and why, what it costs, and what would have cost more.

The formulas and every rejected plan are in `LayerPlan.lines`; this is what `print(plan)` shows.
"""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, TextIO

from plait.cost.price import Price
from plait.ops.operation import operation
from plait.ops.program import Program, Step
from plait.ops.work import size_of

if TYPE_CHECKING:
    from plait.plan.plan import LayerPlan

__all__ = [
    "CALLING", "PHASES", "TIE", "WIDTH", "Row", "blocks", "closest_ratio", "html_text", "next_best", "order",
    "plain_text", "sentence",
]  # fmt: skip

WIDTH = 100  # columns of a terminal
TIE = 1.1  # prices of whole layers are off by about this much: closer ones are not told apart
PHASES = {"once": "once", "fwd": "forward", "bwd": "backward"}
CALLING = "calling: Python and autograd around the steps"
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


# What is done and why -----------------------------------------------------------------------------------


def order(hoisted: Program, forward: Program, is_training: bool) -> str:
    """What a matrix expression does, in the imperative: "multiply by W first, then aggregate"."""
    once, each = _Trail(hoisted), _Trail(forward, hoisted)
    if hoisted.steps and not forward.steps:
        return "compute the whole layer once and reuse it"
    before = "before training" if is_training else "at the first call"
    if once.gathers and not each.gathers:
        return f"{_lowered(once)} once {before}, then only {_products(each)}"
    if not each.gathers:
        return _products(each)
    if not each.weights:
        return _lowered(each)
    if each.is_gathered_first:
        return f"{_lowered(each)} first, then {_products(each)}"
    return f"{_products(each)} first, then {_lowered(each)}"


def why(plan: Any) -> str:
    """Why the order of a LayerPlan is the cheapest, from the columns it gathers."""
    is_sparse = bool(plan.sparse_values)
    each = _Trail(plan.forward, plan.hoisted)
    if plan.hoisted.steps:
        return "x never changes" + (" and is mostly zeros" if is_sparse else "")
    if not each.gathers or not each.weights:
        return ""
    if any(step.op == "extremum" for step in plan.forward.steps):
        return "a maximum or minimum cannot change places with the product"
    narrow, wide = _widths(plan, each)
    if narrow == wide:
        return f"rows are {narrow} columns wide either way"
    columns = f"gathering {_columns(narrow)} per edge"
    if narrow < wide:
        return f"{columns} is cheaper than {wide}"
    if each.gathers[0].op == "chain":
        return f"one pass gathers {_columns(narrow)} per edge and multiplies them while they are in cache"
    return f"{columns} instead of {wide} is outweighed by cheaper products" + (
        ": x is mostly zeros" if is_sparse else ""
    )


def _columns(count: int) -> str:
    return "1 column" if count == 1 else f"{count} columns"


class _Trail:
    """What the steps of a forward program do, in order: sums over neighbours, products with weights."""

    def __init__(self, program: Program, before: Program | None = None):
        self.gathers = [step for step in program.steps if _is_gather(step)]
        self.reduce = next((step.reduce for step in self.gathers if step.op == "extremum"), "sum")
        earlier = () if before is None else before.steps
        summed = _downstream([*earlier, *program.steps])
        feeding = _upstream(program.steps, self.gathers)
        self.weights: list[str] = []
        others: list[str] = []  # of a node's own row, which is never aggregated
        for step in program.steps:
            for weight, rows in _multiplied(step):
                is_related = rows in summed or rows == step.get("block") or step.out in feeding
                place = self.weights if is_related else others
                place += [weight] if weight not in place else []
        self.weights = self.weights or others
        made = _made_by_products(program.steps)
        self.is_gathered_first = bool(self.gathers) and self.gathers[0]["x"] not in made


def _is_gather(step: Step) -> bool:
    return step.op in ("spmm", "extremum") or (step.op == "chain" and step.get("matrix") is not None)


def _multiplied(step: Step) -> list[tuple[str, str]]:
    """(weight, rows it multiplies) of a step; a chain may have several."""
    pairs = [(role, name) for role, name in step.reads if _is_weight(role)]
    return [(name, step["x"] if role == "w" else step[f"rows{role[1:]}"]) for role, name in pairs]


def _downstream(steps: Sequence[Step]) -> set[str]:
    """Values that hold sums over neighbours."""
    found: set[str] = set()
    for step in steps:
        if _is_gather(step) or found & {name for _, name in step.reads}:
            found |= {step.out, *step.more}
    return found


def _upstream(steps: Sequence[Step], gathers: Sequence[Step]) -> set[str]:
    """Values that are summed over neighbours, and those they are made of."""
    found = {step["x"] for step in gathers}
    for step in reversed(steps):
        if found & {step.out, *step.more} and not _is_gather(step):
            found |= {name for role, name in step.reads if not _is_weight(role)}
    return found


def _made_by_products(steps: Sequence[Step]) -> set[str]:
    found: set[str] = set()
    for step in steps:
        if _multiplied(step) or found & {name for _, name in step.reads}:
            found |= {step.out, *step.more}
    return found


def _is_weight(role: str) -> bool:
    return role == "w" or (role[0] == "w" and role[1:].isdigit())


def _lowered(trail: _Trail) -> str:
    what = "aggregate" if trail.reduce == "sum" else f"take the neighbours' {trail.reduce}imum"
    hops = len(trail.gathers)
    return what if hops == 1 else f"{what} {hops} times"


def _products(trail: _Trail) -> str:
    if not trail.weights:
        return "combine the parts"
    names = _listed(sorted(trail.weights))
    return f"multiply by {names}"


def _listed(names: Sequence[str]) -> str:
    if len(names) > 4:
        return f"{names[0]} to {names[-1]}"
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _widths(plan: Any, trail: _Trail) -> tuple[int, int]:
    """Columns of the rows that are gathered, and of those the other order would gather."""
    gathered = _columns_of(plan, trail.gathers[0]["x"])
    if trail.is_gathered_first:
        made = [s for s in plan.forward.steps if any(_is_weight(role) for role, _ in s.reads)]
        return gathered, _columns_of(plan, made[0].out)
    return gathered, _columns_of(plan, "X")


def _columns_of(plan: Any, name: str) -> int:
    shapes = {**plan.hoisted.shapes, **plan.forward.shapes}
    return int(size_of(shapes[name][1], plan.sizes))


_PASS = "in one pass over the edges"
_CHOICES = {
    "gat": f"multiply by W once per node, then score and attend {_PASS}",
    "gat folded": f"multiply by W and by the attention vectors together, then attend {_PASS}",
    "recompute": "attend over the input rows first, then multiply by W",
    "leaky": f"multiply by the weights once per node, then score and attend {_PASS}",
    "dot": f"multiply by the weights once per node, then score and attend {_PASS}",
    "dot recompute": "attend over the input rows first, then multiply by the weights",
    "project": "multiply by the weights once per node",
    "edge dots": "multiply the rows of both ends of every edge",
    "dot softmax": "multiply the rows of both ends of every edge, normalise over the edges of each target",
    "edge softmax": "normalise over the edges of each target",
    "leaky scores": "score edges in blocks that stay in cache, and normalise over the edges of each target",
    "edge sums": "sum rows weighted by edge",
    "keep": f"multiply by the weights once per node, then gate and sum {_PASS}",
    "gate again": f"multiply once per node, gate and sum {_PASS}, and again for gradients",
    "infer": f"multiply by the weights once per node, then gate and sum {_PASS}",
    "linear": "multiply by the weights once per node instead of once per edge, then aggregate",
    "rectified": "apply the first layer once per node, sum over edges, then apply the last layer",
    "rectified again": "apply the first layer once per node, sum over edges, and again for gradients",
    "blocks": "apply the first layer once per node, the rest per edge in blocks that stay in cache",
    "marked": "apply the first layer once per node, the rest per edge in blocks that stay in cache",
    "tiles": "apply the first layer once per node, the rest per edge in tiles that stay in cache",
    "messages": "multiply by the weights once per node, then make messages and add them up",
    "softmax": "make messages, weight them by a softmax over each target's edges, and add them up",
    "sums": "make messages once per node instead of once per edge, then aggregate",
    "aggregate": "aggregate by relation first, then multiply by all weights at once",
    "transform": "multiply by all weights at once first, then aggregate",
    "aggregate pairs": "aggregate by relation where there are edges, then multiply by its weights",
    "transform pairs": "multiply the rows each relation reads by its weights, then aggregate",
    "rows": "pick rows of the weights and sum them",
    "bases": "aggregate once per basis, then multiply by all bases at once",
    "after": "aggregate with all aggregators in one gather, multiply, then scale by degree",
    "before": "aggregate with all aggregators in one gather, scale by degree, then multiply",
    "prefixes": "run the LSTM once per distinct prefix of the neighbour lists",
    "padded": "run the LSTM over padded neighbour lists, as PyG does",
    "edge weights as an input": "aggregate with learned edge weights",
}


# how the backward pass works (ops/attention.py); the longest first
_SUFFIXES = {
    " targets first, lean": ", the gradients of the targets first, keeping less in memory",
    " targets first": ", the gradients of the targets first",
    " lean": ", keeping less in memory",
}


def of_choice(choice: str, text: str) -> str:
    """What a way of a program layer does; its formula where there is no description."""
    base, more = choice, ""
    for suffix, words in _SUFFIXES.items():
        if choice.endswith(suffix):
            base, more = choice.removesuffix(suffix), words
            break
    return _CHOICES.get(base, f"compute {text}") + more


# The steps ---------------------------------------------------------------------------------------------


def step_text(step: Step, wrt: Iterable[str] = ()) -> str:
    """What one step of a program does."""
    if step.op == "chain":
        return _chain_text(step)
    if step.op == "spmm":
        return "send gradients back along the edges" if step.is_transposed else "sum neighbours' rows"
    if step.op == "extremum":
        return f"take neighbours' {step.reduce}imum"
    if step.op == "gemm":
        return f"gradient of the input, by {step['w']}" if step.is_transposed else _product_text(step["w"])
    if step.op in ("exchange", "send", "receive"):
        return _EXCHANGE[step.op, step.is_transposed]
    said = operation(step.op).says
    if said:
        return said
    if step.op in ("gemm_transposed", "colsum") or step.out.startswith("d"):
        return _gradient_text(step)
    return _OTHER.get(step.op, step.op.replace("_", " "))


def _product_text(weight: str) -> str:
    """V is by convention the weight of a node's own row (pyg/layers/neighbourhood.py, arma.py)."""
    return "multiply own rows by V" if weight == "V" else f"multiply by {weight}"


_EXCHANGE = {
    ("exchange", False): "receive rows from other ranks",
    ("exchange", True): "receive gradients of the rows sent",
    ("send", False): "start sending rows that others need",
    ("send", True): "start sending gradients of received rows",
    ("receive", False): "wait for rows from other ranks",
    ("receive", True): "wait for gradients of the rows sent",
}
_OTHER = {
    "combine": "add the parts",
    "scale_rows": "scale the rows",
    "scale": "multiply by a number",
    "relu": "relu",
    "concat": "put columns side by side",
    "columns_of": "take columns apart",
    "stack": "put weights side by side",
    "rows_of": "take weights apart",
    "dot": "sum of products",
    "to_columns": "exchange rows for columns of all rows",
    "to_rows": "exchange columns back for rows",
}
_BACK = {
    "extremum_share": "split gradients between ties",
    "extremum_gather": "send gradients to the rows that were largest",
    "relu_backward": "gradient through relu",
}


def _gradient_text(step: Step) -> str:
    if step.op in _BACK:
        return _BACK[step.op]
    what = step.out.partition("_")[2]
    if step.op not in ("gemm_transposed", "colsum", "dot") or not what or what[0] in "vd":
        return _OTHER.get(step.op, step.op.replace("_", " "))
    return f"gradient of {what}"


def _chain_text(step: Step) -> str:
    """A chain does several things to a row while it is in cache."""
    is_backward = step.is_transposed or any(role.startswith(("wt", "right")) for role, _ in step.reads)
    parts = []
    if step.get("matrix") is not None:
        parts.append("send gradients back" if is_backward else "sum neighbours")
    weights = [name for role, name in step.reads if _is_weight(role)]
    if weights:
        parts.append(f"multiply by {_listed(weights)}")
    if is_backward:
        made = [name.partition("_")[2] for name in (step.out, *step.more)]
        learned = list(dict.fromkeys(name for name in made if name and name[0] not in "vd"))
        parts.append(f"gradients of {_listed(sorted(learned))}" if learned else "gradient of the input")
    return ", ".join(parts)


# The print ---------------------------------------------------------------------------------------------


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
    if tied:
        named = next((r.words for r in tied if r.words and r.words != layer.action()), "")
        variants = f"with {_counted(len(tied), 'variant', 'variants')} of the same order"
        lines.append(f"A tie (prices within 10%) {f'with: {named}' if named else variants}")
    if others:
        same = (others[0][0], "the same with other kernels")
        seconds, text = next((pair for pair in others if pair[1] and pair[1] != layer.action()), same)
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
        found.append((f"{_cut(block.name, room):<{room}}  {block.cost}", "layer"))
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
    name = f"  {PHASES[row.phase]:<10}{_cut(whole, _TITLE):<{_TITLE}}"
    if has_measured:
        measured = "" if row.measured is None else milliseconds(row.measured)
        return f"{name}{milliseconds(row.price.seconds):>12}{measured:>12}".rstrip()
    bar = "" if row.phase == "once" or not longest else _bar(row.price.seconds / longest)
    return f"{name}{milliseconds(row.price.seconds):>12}  {bar}".rstrip()


def _bar(share: float) -> str:
    eighths = max(1, round(share * _BAR * 8))
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def _cut(text: str, width: int) -> str:
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
