"""Reads runs for the page: every measured number with its circumstances, whatever command recorded it."""

from __future__ import annotations

import json
import math
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from plait.errors import InputError, did_you_mean
from plait.measure import Record, read
from plait.report.layers import SUBJECT
from plait.report.page.draw import short

__all__ = [
    "BARS", "FEWEST", "GENERATED", "Contest", "Run", "Sample", "contests", "number", "read_runs",
    "samples_of",
]  # fmt: skip

KINDS = {
    "op": "op",
    "bench-layers": "layer",
    "bench-models": "model",
    "bench-plans": "plan",
    "bench-predict": "predict",
    "bench-forms-training": "forms",
    "bench-loops": "loop",
}
BARS = "bench-batches"  # records of promises kept or not
GENERATED = "generated"  # the graph of a case that names none
FEWEST = 3  # samples that make a measurement; runs for memory take one
PLAN_FORMAT = "plait-plan-1"
_STATUS = {"timed": "ok", "ok": "ok", "missing": "absent", "absent": "absent"}


@dataclass(frozen=True)
class Sample:
    """One measured number: operation, variant, circumstances and every sample.

    `group` is shared by what was timed side by side; only those are compared. `low` and `high` bound the
    median with 95% confidence.
    """

    kind: str
    op: str
    variant: str
    graph: str
    device: str
    case: str
    group: str
    status: str
    reason: str = ""
    median: float = math.nan
    low: float = math.nan
    high: float = math.nan
    times: tuple[float, ...] = ()
    repeats: int | None = None
    file: int = 0
    fields: Mapping[str, Any] = field(default_factory=dict)
    result: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_own(self) -> bool:
        """Whether the implementation is plait's."""
        return self.variant.partition("-")[0] == SUBJECT

    @property
    def is_timed(self) -> bool:
        """Whether the result was right and was timed."""
        return self.status == "ok" and self.median > 0.0

    @property
    def is_sure(self) -> bool:
        """Whether its time may enter a mean: not one of a sample or two, but a whole training is long."""
        return self.is_timed and (self.kind == "model" or self.repeats is None or self.repeats >= FEWEST)

    @property
    def facets(self) -> dict[str, str]:
        """What the page's filters ask for, as attributes of a mark."""
        return {"data_op": self.op, "data_device": self.device, "data_graph": self.graph}


@dataclass(frozen=True)
class Contest:
    """What was timed side by side."""

    samples: tuple[Sample, ...]

    @property
    def own(self) -> Sample | None:
        """plait's fastest."""
        return _fastest(s for s in self.samples if s.is_own and s.is_sure)

    @property
    def peer(self) -> Sample | None:
        """The fastest of the others."""
        return _fastest(s for s in self.samples if not s.is_own and s.is_sure)

    @property
    def fastest(self) -> Sample | None:
        """The fastest of all."""
        return _fastest(self.samples)

    @property
    def ratio(self) -> float:
        """Seconds of the best peer over plait's: above one plait is faster; NaN when either is missing."""
        own, peer = self.own, self.peer
        return peer.median / own.median if own and peer else math.nan

    @property
    def is_own_wrong(self) -> bool:
        """Whether plait's answer was wrong, so that it was not timed."""
        return self.own is None and any(s.is_own and s.status == "wrong" for s in self.samples)

    @property
    def is_unsure(self) -> bool:
        """Whether it has too few samples (below FEWEST) to count as a measurement."""
        return any(s.is_timed and not s.is_sure for s in self.samples)


@dataclass(frozen=True)
class Run:
    """Everything read: records by file, plans by name, findings, and remarks on what was left out."""

    files: tuple[tuple[Record, ...], ...]
    plans: Mapping[str, Mapping[str, Any]]
    remarks: tuple[str, ...]
    findings: tuple[Mapping[str, Any], ...] = ()

    @property
    def records(self) -> list[Record]:
        """The records of all files."""
        return [record for file in self.files for record in file]


def read_runs(paths: Sequence[str | Path]) -> Run:
    """The records and plans of all files and folders; InputError where none of them holds any."""
    files: list[tuple[Record, ...]] = []
    plans: dict[str, Mapping[str, Any]] = {}
    remarks: list[str] = []
    findings: list[Mapping[str, Any]] = []
    foreign: list[str] = []
    for path in _files(paths):
        content = _json(path)
        if isinstance(content, dict) and content.get("format") == PLAN_FORMAT:
            plans[_free_name(path.stem, plans)] = _plan(path, content)
            continue
        if _are_findings(content):
            findings += content
            continue
        found, notes = _records(path)
        if found:
            files.append(tuple(found))
            remarks += notes
        else:
            foreign.append(f"{path.name} holds no records ({'; '.join(notes) or 'the file is empty'})")
    if foreign and not (files or plans or findings):
        raise InputError(
            f"RUN: {'; '.join(foreign)}; give the file that `plait bench … --output` wrote, "
            "or a plan of `plait explain --json`"
        )
    remarks += foreign
    known = {*KINDS, BARS}
    unknown = sorted({record.kind for file in files for record in file if record.kind not in known})
    if unknown:
        remarks.append(f"records of kind {', '.join(unknown)} are not drawn")
    return Run(tuple(files), plans, tuple(remarks), tuple(findings))


def _files(paths: Sequence[str | Path]) -> list[Path]:
    """The files, those of a folder in order of their names."""
    found: list[Path] = []
    for path in map(Path, paths):
        inside = sorted(p for p in path.iterdir() if p.suffix in (".json", ".jsonl")) if path.is_dir() else []
        if path.is_dir() and not inside:
            raise InputError(f"RUN: folder {path} has no .jsonl or .json files; name a file of records")
        found += inside or [path]
    return found


def _free_name(stem: str, taken: Iterable[str]) -> str:
    names = (stem if k == 1 else f"{stem} ({k})" for k in range(1, 1 + len(list(taken)) + 1))
    return next(name for name in names if name not in taken)


def _json(path: Path) -> Any:
    """What the file holds when it is one JSON value; None when it is not, as with lines of records."""
    try:
        return json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except OSError as error:
        near = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        step = did_you_mean(path.name, near).rstrip() or "check the path"
        raise InputError(f"RUN: {path} cannot be read ({error.strerror}); {step}") from None
    except ValueError:
        return None


def _plan(path: Path, content: Mapping[str, Any]) -> Mapping[str, Any]:
    if not is_whole(content):
        raise InputError(f"RUN: {path} is a damaged plan; write it again with `plait explain --json`")
    return content


def _are_findings(content: object) -> bool:
    """Whether this is what `bench ops --findings` writes."""
    if not content or not isinstance(content, list) or not _are_rows(content):
        return False
    return all({"question", "answer"} <= set(row) and _are_rows(row.get("figures")) for row in content)


def is_whole(plan: Mapping[str, Any]) -> bool:
    """Whether layers and steps of a plan have the fields of `Plan.to_dict`."""
    layers = plan.get("layers")
    if layers is None or not _are_rows(layers) or not _are_rows(plan.get("not_planned")):
        return False
    parts = [layer.get(name) for layer in layers for name in ("hoisted", "steps", "rejected")]
    if not all(_are_rows(part) for part in parts):
        return False
    return all(isinstance(row.get("reads", {}), dict) for part in parts for row in part or ())


def _are_rows(value: object) -> bool:
    return value is None or (isinstance(value, list) and all(isinstance(row, dict) for row in value))


def _records(path: Path) -> tuple[list[Record], list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = read(path)
    return found, [str(w.message).replace(str(path), path.name) for w in caught]


def samples_of(run: Run) -> tuple[list[Sample], int]:
    """All numbers of the run, and how many records lack fields that their kind requires."""
    readers = {
        "op": _of_op, "layer": _of_layer, "model": _of_model, "plan": _of_plan, "predict": _of_predict,
        "forms": _of_forms, "loop": _of_loop,
    }  # fmt: skip
    samples: list[Sample] = []
    odd = 0
    for number_of_file, file in enumerate(run.files):
        for place, record in enumerate(file):
            kind = KINDS.get(record.kind)
            if kind is None:
                continue
            # the variants of an operation are records of their own, which share all else of the case
            shared = _shared(record.case) if kind == "op" else place
            try:
                found = readers[kind](record, f"{kind}-{number_of_file}-{shared}")
                samples += [replace(sample, file=number_of_file) for sample in found]
            except (KeyError, TypeError, ValueError, AttributeError):
                odd += 1
    return samples, odd


def _shared(case: Mapping[str, Any]) -> str:
    return json.dumps({k: v for k, v in case.items() if k not in ("variant", "suite")}, sort_keys=True)


def contests(samples: Iterable[Sample]) -> list[Contest]:
    """The samples by what was timed side by side, in order of appearance."""
    groups: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        groups[sample.group].append(sample)
    return [Contest(tuple(members)) for members in groups.values()]


def _fastest(samples: Iterable[Sample]) -> Sample | None:
    return min((s for s in samples if s.is_timed), key=lambda s: s.median, default=None)


def number(value: object) -> float:
    """A number of a record; NaN for anything else, and for sizes no measurement has."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return math.nan
    return float(value) if value == 0 or 1e-30 < abs(value) < 1e30 else math.nan


def _times(line: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a Timing, each missing one left to its default."""
    median = number(line.get("median_seconds"))
    bounds = line.get("interval_seconds") or [line.get("p20_seconds"), line.get("p80_seconds")]
    low, high = (number(bound) for bound in bounds)
    repeats = line.get("repeats")
    times = tuple(t for t in map(number, line.get("samples_seconds") or ()) if t > 0.0)
    return {
        "median": median,
        "low": low if low > 0.0 else median,
        "high": high if high > 0.0 else median,
        "times": times,
        "repeats": repeats if isinstance(repeats, int) else len(times) or None,
    }


def _sample(record: Record, kind: str, group: str, line: Mapping[str, Any], **fields: Any) -> Sample:
    """A sample of a record; `line` holds its times, its status and, where it has none, the reason."""
    case: Mapping[str, Any] = record.case
    usual: dict[str, Any] = {
        "graph": str(case.get("graph") or GENERATED),
        "device": str(case.get("device", "cpu")),
        "status": _STATUS.get(str(line.get("status")), str(line.get("status"))),
        "reason": str(line.get("reason") or ""),
        "result": record.result,
    }
    return Sample(kind=kind, group=group, fields=case, **(usual | fields), **_times(line))


def _of_op(record: Record, group: str) -> list[Sample]:
    case: Mapping[str, Any] = record.case
    result: Mapping[str, Any] = record.result
    line = {**(result.get("seconds") or {}), "status": result["status"], "reason": result.get("reason")}
    words = _op_case(case, record.environment.get("threads"))
    return [_sample(record, "op", group, line, op=str(case["op"]), variant=str(case["variant"]), case=words)]


def _op_case(case: Mapping[str, Any], threads: object) -> str:
    """The circumstances in a few words; what is usual, or follows from the rest, is left out."""
    direction = str(case.get("direction", "forward"))
    parts = [] if direction == "forward" else [direction]
    parts += [f"{short(case[name])} {name}" for name in ("edges", "nodes") if number(case.get(name)) > 0]
    usual = {"reduction": 1, "heads": 1, "axis": 0, "threads": threads, "law": "uniform", "order": "sorted"}
    usual |= {"dtype": "float32", "index_dtype": "int64"}
    named = ("width", "inner", "heads", "batch", "fanout", "reduction", "threads", "axis")
    parts += [f"{name} {case[name]}" for name in named if case.get(name) not in (None, usual.get(name))]
    if number(case.get("sparsity")) >= 0:
        parts.append(f"density {1.0 - float(case['sparsity']):.3g}")
    if number(case.get("value_sparsity")) >= 0:
        parts.append(f"{float(case['value_sparsity']):.0%} zeros")
    words = ("law", "order", "dtype", "index_dtype")
    parts += [str(case[name]) for name in words if case.get(name) not in (None, usual.get(name))]
    return " · ".join(parts)


def _of_layer(record: Record, group: str) -> list[Sample]:
    return _of_peers(record, "layer", str(record.case["layer"]), _layer_case(record.case), group)


def _layer_case(case: Mapping[str, Any]) -> str:
    return f"{case['width_in']}→{case['width_out']} {case['mode']}"


def _of_model(record: Record, group: str) -> list[Sample]:
    case: Mapping[str, Any] = record.case
    return _of_peers(record, "model", str(case["model"]), f"{case['epochs']} epochs", group)


def _of_loop(record: Record, group: str) -> list[Sample]:
    case: Mapping[str, Any] = record.case
    return _of_peers(record, "loop", str(case["loop"]), _threads(case), group)


def _threads(case: Mapping[str, Any]) -> str:
    count = int(case["threads"])
    return f"{count} thread" if count == 1 else f"{count} threads"


def _of_forms(record: Record, group: str) -> list[Sample]:
    """A training step with the form of the graph against the peers; plait on CSR is not a peer of plait."""
    case: Mapping[str, Any] = record.case
    sides: Any = record.result["sides"]
    names = {name: SUBJECT if name == "forms" else name for name in sides if name != "csr"}
    peers = {names[name]: {"status": "timed", **sides[name]} for name in names}
    changed = replace(record, result={**record.result, "peers": peers})
    return _of_peers(changed, "model", f"{case['model']} by its form", f"{case['width']} wide, a step", group)


def _of_peers(record: Record, kind: str, op: str, label: str, group: str) -> list[Sample]:
    lines: Any = record.result["peers"]
    graph = str(record.case["graph"])
    return [
        _sample(record, kind, group, line, op=op, variant=str(name), graph=graph, case=label)
        for name, line in lines.items()
        if line["status"] != "same"  # its twin's line says it all
    ]


def _of_plan(record: Record, group: str) -> list[Sample]:
    case: Mapping[str, Any] = record.case
    candidates: Any = record.result["candidates"]
    own = {"op": str(case["layer"]), "graph": str(case["graph"]), "case": _layer_case(case)}
    samples = []
    for place, candidate in enumerate(candidates):
        result = {
            "predicted_seconds": candidate["predicted_seconds"],
            "is_chosen": place == 0,
            "regret": record.result["regret"],
        }
        line, variant = {**candidate, "status": "ok"}, str(candidate["candidate"])
        samples.append(_sample(record, "plan", group, line, **own, variant=variant, result=result))
    return samples


def _of_predict(record: Record, group: str) -> list[Sample]:
    """One layer as a user runs it; its steps stay in the result."""
    case: Mapping[str, Any] = record.case
    result: Mapping[str, Any] = record.result
    steps = result["steps"]
    if not isinstance(steps, list) or not _are_rows(steps):
        raise ValueError("steps of another form")
    line = {**result, "status": "ok" if "median_seconds" in result else "unsupported"}
    own = {"op": str(case["layer"]), "graph": str(case["graph"]), "case": _layer_case(case)}
    return [
        _sample(record, "predict", group, line, **own, variant=SUBJECT, result={**result, "is_chosen": True})
    ]
