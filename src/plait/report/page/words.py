"""A run summed up in sentences: how much was measured, how plait compares, what stands out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plait.measure import Record
from plait.report.layers import geometric_mean, load_warning
from plait.report.page.samples import FEWEST, GENERATED, Contest, Run, Sample, contests, number
from plait.report.page.sweeps import Sweep, crossings
from plait.report.page.trees import Prediction
from plait.report.table import ratio_text, seconds_text

__all__ = ["KeyFigure", "banner", "environment_rows", "findings", "key_figures", "lead"]

_LEVEL = 0.95
_NOUNS = {
    "op": ("case of an operation", "cases of operations"),
    "layer": ("layer", "layers"),
    "model": ("model", "models"),
    "plan": ("layer in every plan", "layers in every plan"),
    "predict": ("layer with its price", "layers with their prices"),
    "loop": ("changing loop", "changing loops"),
}
_LABELS = {"op": "Operations", "layer": "Layers", "model": "Models", "loop": "Loops"}


@dataclass(frozen=True)
class KeyFigure:
    """A number shown in large letters, and what it counts."""

    value: str
    meaning: str


def _counted(count: int, singular: str, plural: str) -> str:
    return f"{count:,} {singular if count == 1 else plural}"


def lead(run: Run, samples: Sequence[Sample]) -> str:
    """One paragraph: what was measured, how many times, when, on what."""
    parts = []
    for kind, nouns in _NOUNS.items():
        found = contests(s for s in samples if s.kind == kind)
        if found:
            parts.append(_counted(len(found), *nouns))
    if run.plans:
        parts.append(_counted(len(run.plans), "plan", "plans"))
    if run.findings:
        parts.append(_counted(len(run.findings), "answered question", "answered questions"))
    timed = [s for s in samples if s.is_timed]
    graphs = {s.graph for s in samples} - {GENERATED}
    text = f"This page shows {_listed(parts)}"
    text += f" on {_counted(len(graphs), 'graph', 'graphs')}" if graphs else ""
    text += f": {len(timed):,} timings from {sum(len(s.times) for s in timed):,} samples" if timed else ""
    days = sorted({str(record.taken_at)[:10] for record in run.records})
    if days:
        text += f", taken {days[0]}" + (f" to {days[-1]}" if len(days) > 1 else "")
    machines = list(dict.fromkeys(_machine(record.environment) for record in run.records))
    return text + (f" on {_listed(machines)}." if machines else ".")


def _machine(environment: Mapping[str, Any]) -> str:
    count = environment.get("threads", "?")
    cpu = f"{environment.get('cpu', 'an unnamed processor')} with {count} thread{'' if count == 1 else 's'}"
    return f"{environment['gpu']} ({cpu})" if environment.get("gpu") else cpu


def _listed(parts: Sequence[str]) -> str:
    return " and ".join([", ".join(parts[:-1]), parts[-1]]) if len(parts) > 1 else "".join(parts)


def key_figures(samples: Sequence[Sample], predictions: Sequence[Prediction]) -> list[KeyFigure]:
    """The few numbers that matter most."""
    figures = []
    for kind, (_, plural) in _NOUNS.items():
        ratios = _ratios(contests(s for s in samples if s.kind == kind)) if kind != "plan" else []
        if ratios:
            figures.append(
                KeyFigure(
                    f"{geometric_mean(ratios):.2f}×",
                    f"best peer ÷ plait, geometric mean of {len(ratios)} {plural}",
                )
            )
    named = contests(s for s in samples if s.kind in ("layer", "model"))
    ratios = _ratios(named)
    if ratios:
        # an answer that was wrong is not level with anything
        whole = len(ratios) + sum(contest.is_own_wrong for contest in named)
        level = sum(ratio >= _LEVEL for ratio in ratios)
        figures.append(
            KeyFigure(f"{level} of {whole}", "layers and models level with the best peer or ahead")
        )
    regrets = _regrets(samples)
    if regrets:
        figures.append(
            KeyFigure(f"{geometric_mean(regrets):.2f}×", f"regret of the planner over {len(regrets)} layers")
        )
    if predictions:
        errors = sorted(abs(p.error) for p in predictions if p.is_chosen)
        if errors:
            figures.append(
                KeyFigure(f"{errors[len(errors) // 2]:.0%}", "median error of predicted times, either sign")
            )
    wrong = sum(s.status == "wrong" for s in samples)
    if wrong:
        figures.append(KeyFigure(str(wrong), f"wrong answers, never timed: {_whose(samples)}"))
    return figures


def _whose(samples: Sequence[Sample]) -> str:
    """Wrong answers by implementation, plait's first even where there are none."""
    counts = {"plait": sum(s.is_own and s.status == "wrong" for s in samples)}
    for sample in samples:
        if sample.status == "wrong" and not sample.is_own:
            counts[sample.variant] = counts.get(sample.variant, 0) + 1
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def banner(run: Run) -> str:
    """A sentence for above the numbers when other programs disturbed the run, else nothing."""
    return " ".join(_load(run.records))


def _unsure(samples: Sequence[Sample]) -> list[str]:
    count = sum(contest.is_unsure for contest in contests(samples))
    if not count:
        return []
    cases = _counted(count, "case has", "cases have")
    return [f"{cases} fewer than {FEWEST} samples of some implementation: those times are in no mean."]


def _ratios(found: Sequence[Contest]) -> list[float]:
    return [contest.ratio for contest in found if not math.isnan(contest.ratio)]


def _regrets(samples: Sequence[Sample]) -> list[float]:
    chosen = [s for s in samples if s.kind == "plan" and s.result.get("is_chosen")]
    return [regret for s in chosen if (regret := number(s.result.get("regret"))) > 0.0]


def findings(
    run: Run, samples: Sequence[Sample], sweeps: Sequence[Sweep], predictions: Sequence[Prediction], odd: int
) -> list[str]:
    """What stands out, best and worst alike, and what to be careful about."""
    sentences = []
    for kind, name in _LABELS.items():
        sentences += _extremes(contests(s for s in samples if s.kind == kind), name)
    sentences += _wrong(samples) + _crossed(sweeps) + _planner(samples, predictions)
    sentences += _unsure(samples)
    if odd:
        sentences.append(
            f"{_counted(odd, 'record was', 'records were')} left out: they lack required fields."
        )
    return sentences + [f"{remark[0].upper()}{remark[1:]}." for remark in run.remarks]


def _load(records: Sequence[Record]) -> list[str]:
    watched = [record for record in records if number(record.result.get("busy_elsewhere")) >= 0.0]
    return [f"{line[0].upper()}{line[1:]}." for line in load_warning(watched)]


def _extremes(found: Sequence[Contest], name: str) -> list[str]:
    compared = sorted((c for c in found if not math.isnan(c.ratio)), key=lambda c: c.ratio)
    if not compared:
        return []
    worst, best = compared[0], compared[-1]
    behind = sum(c.ratio < _LEVEL for c in compared)
    text = f"{name}: best {_described(best)}" + (
        f"; worst {_described(worst)}." if len(compared) > 1 else "."
    )
    if behind:
        text += f" Behind the best peer by more than 5% in {behind} of {len(compared)}."
    return [text]


def _described(contest: Contest) -> str:
    own, peer = contest.own, contest.peer
    if own is None or peer is None:
        return ""
    where = f"{own.op} {own.case}" + (f" on {own.graph}" if own.graph != GENERATED else "")
    times = f"{seconds_text(own.median)} against {seconds_text(peer.median)} of {peer.variant}"
    return f"{ratio_text(contest.ratio).replace('x', '×')} for {where} ({times})"


def _wrong(samples: Sequence[Sample]) -> list[str]:
    counts: dict[str, int] = {}
    for sample in samples:
        if sample.status == "wrong":
            counts[sample.variant] = counts.get(sample.variant, 0) + 1
    if not counts:
        return []
    parts = [f"{variant} in {count}" for variant, count in sorted(counts.items(), key=lambda item: -item[1])]
    return [f"Answers beyond the tolerance, not timed: {_listed(parts)}. The reasons are under “Not timed”."]


def _crossed(sweeps: Sequence[Sweep]) -> list[str]:
    parts = [
        f"{crossing.at:.2%} ({sweep.detail})"
        for sweep in sweeps
        if sweep.axis == "density"
        for crossing in crossings(sweep)
    ]
    return [f"Dense and sparse products cross at a density of {_listed(parts[:4])}."] if parts else []


def _planner(samples: Sequence[Sample], predictions: Sequence[Prediction]) -> list[str]:
    sentences = []
    regrets = _regrets(samples)
    if regrets:
        sentences.append(
            f"Regret of the planner: geometric mean {geometric_mean(regrets):.3f}, worst {max(regrets):.2f}, "
            f"over {_counted(len(regrets), 'layer', 'layers')}."
        )
    if predictions:
        near = sum(abs(p.error) <= 0.25 for p in predictions)
        sentences.append(f"Predicted within 25% of measured: {near} of {len(predictions)} plans and steps.")
    return sentences


def environment_rows(run: Run) -> list[tuple[str, str]]:
    """What the records say of where they were taken; a value that changed is given with its counts."""
    seen: dict[str, dict[str, int]] = {}
    for record in run.records:
        for key, value in record.environment.items():
            text = _environment_text(key, value)
            if text:
                counts = seen.setdefault(str(key), {})
                counts[text] = counts.get(text, 0) + 1
    rows = []
    for key, counts in sorted(seen.items(), key=lambda item: _place(item[0])):
        several = len(counts) > 1
        rows.append(
            (key.replace("_", " "), ", ".join(f"{t} ({n})" if several else t for t, n in counts.items()))
        )
    return rows


_ORDER = (
    "cpu",
    "gpu",
    "cores",
    "threads",
    "memory_bytes",
    "os",
    "plait",
    "commit",
    "torch",
    "torch_geometric",
)


def _place(key: str) -> tuple[int, str]:
    return (_ORDER.index(key) if key in _ORDER else len(_ORDER), key)


def _environment_text(key: str, value: object) -> str:
    if value is None:
        return ""
    if key.endswith("_bytes") and isinstance(value, (int, float)):
        return f"{value / 1e9:.1f} GB"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
