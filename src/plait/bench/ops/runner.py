"""Runs cases: draws, checks every variant against float64, times the right ones side by side, records all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plait.bench.ops.case import Case, group_key, with_graph_sizes
from plait.bench.ops.catalogue import find
from plait.bench.ops.inputs import Draw, Inputs
from plait.bench.ops.operation import Operation, Unsupported, Variant, worst_difference
from plait.bench.pace import threads
from plait.bench.trial import fate, first_line, in_short
from plait.errors import InputError, PlaitError
from plait.measure import (
    BusyElsewhere,
    Record,
    Timing,
    append,
    clock_of,
    environment,
    flusher,
    free_bytes,
    host_seconds,
    peak_bytes,
    processor_clock,
    read,
    stream_bytes_per_s,
    time_calls,
)

__all__ = ["KIND", "TOLERANCE", "Group", "Options", "left", "measure", "require_memory", "run"]

KIND = "op"
# Largest difference as a share of the largest magnitude. Sums of a thousand float32 in another order stay
# below 1e-5; half precision keeps 11 (bfloat16: 8) bits of each intermediate.
TOLERANCE = {"float64": 1e-10, "float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}
_ROOM = 0.8  # of the free memory
_APART = 16  # groups between two visits to the same one

Call = Callable[[], Any]
# Cases whose variants are timed together, in interleaved rounds.
Group = tuple[Case, ...]


@dataclass(frozen=True)
class Options:
    """How cases are run. `stream` keeps the copy bandwidths measured in this run.

    With several `visits` a group is drawn and timed again after others had their turn, for a share of the
    budget each time: what differs between visits is what differs between runs (pages, clock, neighbours).
    """

    budget_seconds: float = 0.5
    warmup: int = 2
    repeats: int | None = None
    variants: Sequence[str] | None = None
    is_cold: bool = False
    has_processor_clock: bool = False
    memory: bool = True
    visits: int = 1
    output: Path | None = None
    resume: bool = False
    environment: Mapping[str, object] = field(default_factory=environment)
    stream: dict[str, float] = field(default_factory=dict)


def run(
    groups: Sequence[Group], options: Options, watch: Callable[[list[Record]], None] = lambda records: None
) -> list[Record]:
    """The records of all groups, one per case and variant; handed to `watch` and written group by group."""
    keys = {group_key(_settled(group)) for group in groups}
    records = [record for record in _finished(options) if record.result.get("group") in keys]
    todo = left(groups, options)
    for first in range(0, len(todo), _APART):
        several = todo[first : first + _APART]
        visits = [[measure(group, options, visit) for group in several] for visit in range(options.visits)]
        for own in zip(*visits, strict=True):
            found = _merged(own)
            if options.output is not None:
                for record in found:
                    append(options.output, record)
            records += found
            watch(found)
    return records


def _merged(visits: Sequence[list[Record]]) -> list[Record]:
    """The records of the first visit with the samples of all; one that was not timed stays as it is."""
    if len(visits) == 1:
        return visits[0]
    return [_together(own) for own in zip(*visits, strict=True)]


def _together(visits: Sequence[Record]) -> Record:
    timed = [record.result for record in visits if record.result.get("status") == "ok"]
    if visits[0].result.get("status") != "ok" or len(timed) < 2:
        return visits[0]
    timings = [Timing.from_dict(result["seconds"]) for result in timed]  # type: ignore[arg-type]
    samples = tuple(sample for timing in timings for sample in timing.samples)
    joined = Timing(samples, timings[0].warmup, timings[0].calls_per_sample)
    seconds = joined.to_dict() | {"visit_repeats": [timing.repeats for timing in timings]}
    busy = [float(share) for result in timed if isinstance(share := result.get("busy_elsewhere"), float)]
    result = {**visits[0].result, "seconds": seconds, "busy_elsewhere": max(busy, default=None)}
    return replace(visits[0], result={**result, **_rates(result, result)})


def left(groups: Sequence[Group], options: Options) -> list[Group]:
    """The groups still to be measured: each once, less those a resumed run has or no chosen variant is in."""
    done = {str(record.result.get("group")) for record in _finished(options)}
    todo: dict[str, Group] = {}
    for group in map(_settled, groups):
        if group_key(group) not in done and any(_variants(case, options) for case in group):
            todo.setdefault(group_key(group), group)
    return list(todo.values())


def _settled(group: Group) -> Group:
    """The cases with the number of threads they will have, which is part of what they are."""
    return tuple(
        replace(case, threads=torch.get_num_threads())
        if case.device == "cpu" and case.threads is None
        else case
        for case in group
    )


def _finished(options: Options) -> list[Record]:
    if not options.resume or options.output is None or not options.output.exists():
        return []
    return [record for record in read(options.output) if record.kind == KIND]


def require_memory(case: Case) -> None:
    """Refuses a case that does not fit, with what it needs and the largest that fits."""
    free = free_bytes(case.device)
    needed = find(case.op).bytes_needed(case)
    if free is None or needed <= _ROOM * free:
        return
    name, most = _largest(case, _ROOM * free)
    fits = f"the largest that fits has about {most:.2g} {name}" if most else "no size of it fits"
    raise InputError(
        f"{case.op}: this size needs about {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free; {fits}"
    )


def _largest(case: Case, room: float) -> tuple[str, int]:
    """The size to shrink and its largest value that fits, by halving the interval."""
    operation = find(case.op)
    name = "nodes" if case.sparsity is not None or case.edges is None else "edges"

    def scaled(value: int) -> Case:
        if name == "edges":
            share = value / case.size("edges")
            return replace(case, edges=value, nodes=max(1, round(case.size("nodes") * share)))
        edges = None if case.sparsity is None else max(1, round(value * value * (1.0 - case.sparsity)))
        return replace(case, nodes=value, edges=edges)

    low, high = 0, case.size(name)
    while low < high:
        middle = (low + high + 1) // 2
        if operation.bytes_needed(scaled(middle)) <= room:
            low = middle
        else:
            high = middle - 1
    return name, low


def measure(group: Group, options: Options, visit: int = 0) -> list[Record]:
    """A record for every variant of every case of a group, all timed side by side.

    Memory and the copy are measured at the first visit.
    """
    options = replace(options, memory=options.memory and visit == 0)
    group = _settled(group)
    with threads(group[0].threads):
        entries = [entry for case in group for entry in _entries(case, options)]
        # variant by variant: a series right behind one on the same operands would find them in the cache, and
        # of several cases the first variant of each would not (a scatter of 4 MB took 0.34 ms for 0.19)
        order = list(dict.fromkeys(entry.variant for entry in entries))
        ready = sorted(
            (entry for entry in entries if entry.call), key=lambda entry: order.index(entry.variant)
        )
        _share_memory(ready)
        common: dict[str, object] = {"group": group_key(group)}
        if ready:
            common |= _time(ready, group[0], options)
    records = [
        Record(
            KIND,
            entry.case_dict(),
            {**entry.line, **common, **_rates(entry.line, common)},
            options.environment,
        )
        for entry in entries
    ]
    if group[0].device == "cuda":
        del entries, ready
        torch.cuda.empty_cache()
    return records


@dataclass(eq=False)
class _Entry:
    """One variant of one case on its way: its call when it was right, its line of the record."""

    case: Case
    variant: str
    line: dict[str, object]
    call: Call | None = None
    checker: _Checker | None = None
    load: Call | None = None  # ahead of every sample: its values into the memory it shares

    def case_dict(self) -> dict[str, object]:
        return {**self.case.to_dict(), "variant": self.variant}


def _variants(case: Case, options: Options) -> list[Variant]:
    """The implementations of a case that were chosen."""
    chosen = options.variants
    return [v for v in find(case.op).variants if chosen is None or v.name in chosen]


def _entries(case: Case, options: Options) -> list[_Entry]:
    """The variants of a case, checked; what does not fit or cannot be drawn is a line for each."""
    operation, variants = find(case.op), _variants(case, options)
    try:
        case = _with_sizes(case)
        require_memory(case)
        facts = _work_facts(operation, case)
        inputs = Inputs(case, operation.draw(case, Draw(case)), operation.leaves)
        checker = _Checker(operation, inputs)
    except (PlaitError, ImportError, RuntimeError, MemoryError) as error:
        why: dict[str, object] = {"status": "unsupported", "reason": first_line(error)}
        return [_Entry(case, variant.name, dict(why)) for variant in variants]
    entries = []
    for variant in variants:
        line, call = _checked(variant, inputs, checker)
        entries.append(_Entry(case, variant.name, {**line, **facts}, call, checker))
    return entries


def _share_memory(entries: Sequence[_Entry]) -> None:
    """Cases that differ in the zeros among their values are timed on the same memory, loaded before a sample.

    On tensors of their own they differ by where those lie: the same values took 1.26 to 1.46 ms.
    """
    first: dict[str, _Entry] = {}
    for entry in entries:
        base = first.setdefault(entry.variant, entry)
        if replace(entry.case, value_sparsity=None) != replace(base.case, value_sparsity=None):
            continue
        assert base.checker is not None
        assert entry.checker is not None
        held = base.checker.inputs
        values = {name: tensor.detach().clone() for name, tensor in entry.checker.inputs.tensors.items()}
        assert base.call is not None
        load = _loader(held.tensors, values, base.call)
        if entry is not base:
            load()
            with _gradients(entry.case):
                is_right = entry.checker.error(base.call) <= entry.checker.tolerance
            if not is_right:  # what was prepared holds the values: it keeps its own memory
                continue
            entry.call = base.call
        if len(entries) > 1 and entry.case.value_sparsity is not None:
            entry.load = load


def _loader(held: Mapping[str, Tensor], values: Mapping[str, Tensor], call: Call) -> Call:
    """Writes the values, and makes one call: the series before a sample is then its own, not another's."""

    def load() -> None:
        with torch.no_grad():
            for name, tensor in held.items():
                tensor.copy_(values[name])
            call()

    return load


def _with_sizes(case: Case) -> Case:
    """The case with the sizes of its graph file."""
    if case.graph is None:
        return case
    from plait.bench.cases import find_graph

    graph = find_graph(case.graph).graph
    return with_graph_sizes(case, graph.num_nodes, graph.num_edges)


def _work_facts(operation: Operation, case: Case) -> dict[str, object]:
    """Work of the forward pass; a gradient has its own, which is not counted here."""
    if case.direction != "forward":
        return {}
    work = operation.work(case)
    return {"flops": work.flops, "bytes_least": work.bytes_least, "bytes_most": work.bytes_most}


def _time(entries: Sequence[_Entry], case: Case, options: Options) -> dict[str, object]:
    """Time and weigh the series into their lines; what is common to them is returned."""
    clock = processor_clock if options.has_processor_clock else clock_of(case.device)
    calls: dict[str, Call] = {str(k): _with_gradients(entry) for k, entry in enumerate(entries)}
    with BusyElsewhere() as busy:
        timings = time_calls(
            calls,
            warmup=options.warmup,
            repeats=options.repeats,
            budget_seconds=options.budget_seconds / options.visits,
            min_repeats=max(2, 5 // options.visits),
            # behind a cold cache only the first call is cold
            min_sample_seconds=0.0 if options.is_cold else 0.002,
            before=flusher(case.device) if options.is_cold else _loads(entries),
            clock=clock,
        )
    for (name, call), entry in zip(calls.items(), entries, strict=True):
        entry.line |= {"status": "ok", "seconds": timings[name].to_dict()}
        if case.device == "cuda":
            entry.line["host_seconds"] = host_seconds(call)
        if options.memory:
            entry.line["peak_bytes"] = peak_bytes(call, case.device)
    # threads share the bandwidth, so a copy is timed for every number of them
    where = f"{case.device} {case.threads}"
    if where not in options.stream:
        options.stream[where] = stream_bytes_per_s(case.device, clock)
    name = "processor" if options.has_processor_clock else "wall" if case.device == "cpu" else "events"
    facts = {"stream_bytes_per_s": options.stream[where], "busy_elsewhere": busy.share}
    return facts | {"clock": name, "is_cold": options.is_cold}


def _loads(entries: Sequence[_Entry]) -> dict[str, Call]:
    return {str(k): entry.load for k, entry in enumerate(entries) if entry.load is not None}


def _with_gradients(entry: _Entry) -> Call:
    """The call under the gradient mode of its case: entering it costs a microsecond in every series."""
    call, is_on = entry.call, entry.case.direction != "forward"
    assert call is not None
    if not is_on:
        return torch.no_grad()(call)
    return call


class _Checker:
    """Holds the float64 answer: the output, or the gradients where those are measured."""

    def __init__(self, operation: Operation, inputs: Inputs) -> None:
        self.operation, self.inputs = operation, inputs
        self.tolerance = TOLERANCE[inputs.case.dtype or "float32"]
        self.cotangent: Tensor | None = None
        self.expected: tuple[Tensor, ...] = ()
        if operation.reference is None:
            return
        wide = inputs.double()
        with _gradients(inputs.case):
            out = operation.reference(wide)
            if inputs.case.direction == "forward":
                self.expected = operation.answer(out, wide)
                return
            generator = torch.Generator(out.device).manual_seed(1)
            drawn = torch.randn(out.shape, generator=generator, device=out.device)
            self.cotangent = drawn.to(inputs[operation.leaves[0]].dtype)
            leaves = [wide[name] for name in operation.leaves]
            self.expected = torch.autograd.grad(out, leaves, self.cotangent.double())

    def call(self, forward: Call) -> Call:
        """What is timed: the forward pass, its gradient, or both."""
        direction = self.inputs.case.direction
        if direction == "forward":
            return forward
        leaves = [self.inputs[name] for name in self.operation.leaves]
        cotangent = self.cotangent
        if direction == "step":
            return lambda: torch.autograd.grad(forward(), leaves, cotangent)
        out = forward()
        return lambda: torch.autograd.grad(out, leaves, cotangent, retain_graph=True)

    def error(self, call: Call) -> float:
        """How far a call's answer is from the expected one."""
        out = call()
        if self.operation.check is not None:
            return self.operation.check(out, self.inputs)
        if self.inputs.case.direction == "forward":
            out = self.operation.answer(out, self.inputs)
        return worst_difference(tuple(out), self.expected)


def _checked(variant: Variant, inputs: Inputs, checker: _Checker) -> tuple[dict[str, object], Call | None]:
    """(line, call): the line says what is wrong or missing, and then there is no call."""
    killed = _fate(variant, inputs, checker)
    if killed is not None:
        return {"status": "unsupported", "reason": killed}, None
    try:
        with _gradients(inputs.case):
            call = checker.call(variant.prepare(inputs))
            error = checker.error(call)
    except ImportError as missing:
        return {"status": "absent", "reason": first_line(missing)}, None
    except Unsupported as why:
        return {"status": "unsupported", "reason": str(why)}, None
    except Exception as broken:  # a variant that breaks is its own line, not the run's end
        return {"status": "unsupported", "reason": in_short(broken)}, None
    if not error <= checker.tolerance:
        reason = f"differs by {error:.1e} of the largest value from float64"
        return {"status": "wrong", "error": error, "reason": reason}, None
    return {"error": error}, call


def _fate(variant: Variant, inputs: Inputs, checker: _Checker) -> str | None:
    """What kills a process that runs this variant; plait's own is not tried: its crash is a bug here."""

    def call() -> None:
        with _gradients(inputs.case):
            checker.call(variant.prepare(inputs))()

    return None if variant.name == "plait" or inputs.case.device != "cpu" else fate(call)


def _rates(line: Mapping[str, Any], common: Mapping[str, Any]) -> dict[str, object]:
    """Achieved bytes per second, counting each once, and their share of the copy's."""
    if line.get("status") != "ok" or "bytes_least" not in line:
        return {}
    rate = line["bytes_least"] / line["seconds"]["median_seconds"]
    return {"gbytes_per_s": rate / 1e9, "bandwidth_share": rate / common["stream_bytes_per_s"]}


def _gradients(case: Case) -> contextlib.AbstractContextManager[object]:
    return torch.set_grad_enabled(case.direction != "forward")
