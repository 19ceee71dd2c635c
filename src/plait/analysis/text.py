"""An analysis as text: tables of at most 100 columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from plait.analysis.advice import TIE
from plait.plan.plan import wrapped
from plait.plan.printed import cut

if TYPE_CHECKING:
    from plait.analysis.advice import Advice, BreakEven
    from plait.analysis.analysis import Analysis
    from plait.analysis.layers import Layer

__all__ = ["limit_text", "lines", "tie_text"]

_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def lines(analysis: Analysis) -> Iterator[str]:
    """The whole analysis, line by line."""
    return (line.rstrip() for line in _all(analysis))


def _all(analysis: Analysis) -> Iterator[str]:
    found = analysis.statistics
    yield (
        f"analysis of {analysis.model}: {found.nodes:,} nodes, {found.edges:,} edges, largest degree "
        f"{found.bins.largest:,}"
    )
    yield f"machine: {analysis.machine}"
    network = analysis.options.network
    met = f", {_three(network.meeting * 1e6)} µs wherever workers wait for each other" * bool(network.meeting)
    met += f", {_three(network.busy * 1e6)} µs of processor time per message" * bool(network.busy)
    yield from wrapped(
        f"network: {network.name}, {_unit(network.bytes_per_s, 'B/s')}, {network.latency * 1e6:g} µs per "
        f"message{met}; {analysis.workers} workers with {_unit(analysis.options.memory, 'B')} each",
        "",
    )
    for note in analysis.notes:
        yield from wrapped(f"note: {note}", "")
    yield from _advice(analysis)
    yield ""
    yield from _work(analysis)
    yield from _formulas(analysis.layers)
    yield from _published(analysis)
    if analysis.work.loads:  # of black boxes alone there is nothing to price
        yield from _strategies(analysis)
    yield from _pipelines(analysis)
    yield from _schemes(analysis)


def _work(analysis: Analysis) -> Iterator[str]:
    p = analysis.workers
    yield (
        f"{'layer':<26}{'pass':<6}{'work':>8}{'flop':>8}{'bytes':>8}{'depth':>6}{'W/D':>8}"
        f"{f'W/{p}+D':>9}{'flop/B':>8} {'bound by':<11}"
    )
    for layer in analysis.layers:
        name = cut(layer.name, 25)
        if layer.is_black_box:
            yield f"{name:<26}{'black box, runs in PyG'}"
        for phase, short in (("once", "once"), ("forward", "fwd"), ("backward", "bwd")):
            if phase not in layer.phases:
                continue
            cost = layer.phases[phase]
            mark = "" if cost.is_exact else "~"
            yield (
                f"{name:<26}{short:<6}{mark + _short(cost.work):>8}{mark + _short(cost.flops):>8}"
                f"{_short(cost.bytes_least):>8}{cost.depth:>6}{_short(cost.parallelism):>8}"
                f"{_short(cost.brent(p)):>9}{cost.intensity:>8.2f} {analysis.roof.bound(cost.intensity):<11}"
            )
            name = ""
    if any(not layer.is_exact and not layer.is_black_box for layer in analysis.layers):
        yield "~ counted by formulas of the layer's sizes, not step by step"
    roof = analysis.roof
    yield from wrapped(
        "work W: number of operations; depth D: the longest chain of dependent operations; W/D: how many "
        f"could run at the same time on average; W/{p}+D: most time steps that {p} processors need (Brent)",
        "",
    )
    yield (
        f"the machine does at most {_unit(roof.flops_per_s, 'flop/s')} and {_unit(roof.bytes_per_s, 'B/s')}: "
        f"below {roof.ridge:.1f} flop/B memory limits it"
    )


def _formulas(layers: Sequence[Layer]) -> Iterator[str]:
    shown: set[str] = set()
    for layer in layers:
        formula = layer.forward.formulas.get("flops")
        if formula is None or str(formula) in shown:
            continue
        shown.add(str(formula))
        yield from wrapped(
            f"{layer.name}: flops = {formula}; depth = {layer.forward.formulas['depth']}", "  "
        )


def _published(analysis: Analysis) -> Iterator[str]:
    for row in analysis.published:
        values = analysis.published_values
        yield from wrapped(
            f"published for {row.model}: work {row.work} = {_short(row.work(**values))}, depth {row.depth}; "
            f"executed {row.executed_work} = {_short(row.executed_work(**values))}"
            + (f": {row.because}" if row.because else ""),
            "  ",
        )


def _strategies(analysis: Analysis) -> Iterator[str]:
    yield ""
    yield (
        f"{'strategy':<35}{'epoch':>9}{'compute':>10}{'network':>10}{'sent':>9}{'memory':>9}{'syncs':>7}"
        f"{'max nodes':>11}"
    )
    nodes, memory = analysis.statistics.nodes, analysis.options.memory
    for found in analysis.strategies:
        mark = " " if found.same_numbers else "*"
        room = "" if found.memory_per_worker <= memory else "!"
        yield (
            f"{cut(found.name, 34):<34}{mark}{_time(found.seconds_per_epoch):>9}"
            f"{_time(found.compute_seconds):>10}{_time(found.communication_seconds):>10}"
            f"{_short(found.traffic.total) + 'B':>9}{room + _short(found.memory_per_worker) + 'B':>9}"
            f"{found.synchronisations:>7}{_short(found.largest_nodes(nodes, memory)):>11}"
        )
    yield from wrapped(
        "epoch: compute time of the most loaded worker plus network time, waiting included; compute: of "
        "mini-batches with what preparing them takes, and what training loses to threads that answer other "
        "workers where cores are few; sent: by all workers; memory: of one worker; syncs: times that all "
        "workers wait for each other; max nodes: of a graph like this one that would still fit",
        "",
    )
    yield "* samples, or uses rows of an earlier step: results differ from one worker's; ! does not fit"
    for found in analysis.strategies:
        if found.note:
            yield from wrapped(f"{found.name}: {found.note}", "  ")


def _pipelines(analysis: Analysis) -> Iterator[str]:
    if not analysis.pipelines:
        return
    yield ""
    yield f"{'forward pipeline, one worker per stage':<48}{'makespan':>10}{'bubble':>8}"
    for run in analysis.pipelines:
        yield f"{run.mode.name:<48}{_time(run.makespan):>10}{run.bubble:>8.0%}"
    yield "makespan: from the first start to the last end; bubble: the share of their time that workers wait"


def _schemes(analysis: Analysis) -> Iterator[str]:
    if not analysis.schemes:
        return
    yield ""
    yield f"{'an epoch of training':<22}{'work':>8}{'published':>11}{'depth':>7}{'steps':>9}  "
    for scheme in analysis.schemes:
        yield (
            f"{scheme.row.model:<22}{_short(scheme.work):>8}{_short(scheme.published):>11}{scheme.depth:>7}"
            f"{scheme.steps:>9}  {cut(scheme.note, 40)}"
        ).rstrip()


def _advice(analysis: Analysis) -> Iterator[str]:
    if analysis.advice is None:
        return
    yield ""
    yield from wrapped(f"best: {analysis.advice.winner}, {analysis.advice.because}", "")
    if analysis.advice.tied:
        yield from wrapped(tie_text(analysis.advice), "  ")
    for limit in analysis.advice.break_even:
        yield from wrapped(limit_text(limit), "  ")


def tie_text(advice: Advice) -> str:
    """The strategies that may be as fast as the winner."""
    return f"a tie (predicted times within {TIE:.0%}) with: {', '.join(advice.tied)}"


def limit_text(limit: BreakEven) -> str:
    """A break-even in words."""
    if limit.what == "bandwidth":
        side = "above" if limit.side == "from" else "below"
        return f"{side} {_unit(limit.value, 'B/s')}, {limit.instead} would be faster"
    if limit.what == "workers":
        return f"with {limit.value:g} workers, {limit.instead} would be best"
    return f"with layers {limit.value:g} times as wide, {limit.instead} would be best"


def _short(value: float) -> str:
    if value == float("inf"):
        return "any"
    for scale, prefix in _PREFIXES:
        if abs(value) >= scale * 0.9995:
            return f"{_three(value / scale)}{prefix}"
    return _three(value)


def _unit(value: float, unit: str) -> str:
    text = _short(value)
    return f"{text[:-1]} {text[-1]}{unit}" if text[-1].isalpha() else f"{text} {unit}"


def _three(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 99.95 else f"{value:.3g}"


def _time(seconds: float) -> str:
    return f"{_three(seconds)} s" if seconds >= 1.0 else f"{_three(seconds * 1e3)} ms"
