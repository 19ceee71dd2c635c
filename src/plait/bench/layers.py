"""plait bench layers: one middle layer at a time, every peer on the same weights, checked, then timed."""

from __future__ import annotations

import functools
import gc
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plait.bench import suite
from plait.bench.cases import LayerCase
from plait.bench.check import Verdict, answer, judge
from plait.bench.floor import floor_seconds
from plait.bench.pace import patient
from plait.bench.peers import DEFAULT, REFERENCE, UNTRIED, Runner, Unavailable, prepare
from plait.bench.peers.pyg import in_double
from plait.bench.peers.runner import share_times, tried
from plait.bench.problem import Forms, Problem, forms_of
from plait.bench.suite import Suite, case_reader
from plait.bench.trial import in_short
from plait.measure import BusyElsewhere, Record, Timing, step_peak, time_calls
from plait.measure.device import clock_of

__all__ = ["KIND", "Options", "left", "measure", "run"]

KIND = "bench-layers"
# On graphs where PyG's gathered edges do not fit the memory the CSR answer is what others are compared with.
_REFERENCES = (REFERENCE, "pyg-csr")


@dataclass(frozen=True)
class Options(suite.Options):
    """How the grid is run."""

    peers: Sequence[str] = DEFAULT
    budget_seconds: float = 5.0
    warmup: int = 3
    repeats: int | None = None
    memory: bool = False
    device: str = "cpu"


def _take(cases: list[LayerCase], options: Options) -> Iterator[Record]:
    for name, group in itertools.groupby(cases, key=lambda case: case.graph):
        yield from _run_graph(forms_of(name, options.data_dir, options.device), list(group), options)
        _empty(options.device)


_SUITE = Suite(KIND, case_reader(LayerCase), _take)
run, left = _SUITE.run, _SUITE.left


def _empty(device: str) -> None:
    """Give a GPU's memory back between graphs: what one peer pooled is missing to the next."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def _run_graph(forms: Forms, cases: list[LayerCase], options: Options) -> Iterator[Record]:
    facts = {"num_nodes": forms.num_nodes, "num_edges": forms.edge_index.shape[1], "device": options.device}
    for (kind, width_in, width_out, heads), group in itertools.groupby(
        cases, key=lambda case: (case.layer, case.width_in, case.width_out, case.heads)
    ):
        problem = Problem(kind, forms, width_in, width_out, heads=heads)
        for case in group:
            result = measure(problem, case.mode, options)
            yield Record(KIND, case.to_dict() | facts, result, options.environment)
            _empty(options.device)


def measure(problem: Problem, mode: str, options: Options) -> dict[str, object]:
    """What every peer did with one problem: {"peers": {name: its line}, "reference": name}."""
    lines: dict[str, dict[str, object]] = {}
    runners = _prepare_all(problem, mode, _with_references(options.peers), lines)
    reference, expected = _first_answer(runners, problem, mode, lines)
    if reference is None:
        for name in runners:
            lines[name] |= {"status": "missing", "reason": "no reference answers here to check it by"}
        return {"peers": {name: lines[name] for name in options.peers}, "reference": None}
    _check_all(runners, reference, expected, problem, mode, lines)
    with BusyElsewhere() as busy:
        _time(
            problem, mode, {name: runners[name] for name in options.peers if name in runners}, lines, options
        )
    if options.memory:
        timed = [name for name in options.peers if name in runners]
        runners.clear()
        for name in timed:
            lines[name] |= _memory(name, problem, mode)
    shown = {name: lines[name] for name in options.peers}
    floor = floor_seconds(problem, mode) if "plait" in options.peers else None
    return {"peers": shown, "reference": reference, "busy_elsewhere": busy.share, "floor_seconds": floor}


def _with_references(peers: Iterable[str]) -> list[str]:
    """The peers plus the first reference, which must answer even when it is not timed."""
    return list(dict.fromkeys([*_REFERENCES, *peers]))


def _prepare_all(
    problem: Problem, mode: str, names: Iterable[str], lines: dict[str, dict[str, object]]
) -> dict[str, Runner]:
    runners = {}
    for name in names:
        made = functools.partial(prepare, name, problem, mode)
        trial = functools.partial(_answered, made, problem, mode)
        runner, lines[name] = tried(made, None if name in UNTRIED else trial, "preparation_seconds")
        if runner is not None:
            runners[name] = runner
    return runners


def _answered(made: Callable[[], Runner], problem: Problem, mode: str) -> object:
    return answer(made(), problem, mode)


def _first_answer(
    runners: dict[str, Runner], problem: Problem, mode: str, lines: dict[str, dict[str, object]]
) -> tuple[str | None, Any]:
    """The first reference that answers, and its answer; those that break leave, with a line."""
    for name in [name for name in _REFERENCES if name in runners]:
        try:
            return name, answer(runners[name], problem, mode)
        except Exception as error:  # a peer that breaks is its own line, not the run's end
            lines[name] |= {"status": "wrong", "reason": f"failed with {in_short(error)}"}
            del runners[name]
    return None, None


def _check_all(
    runners: dict[str, Runner],
    reference: str,
    expected: Any,
    problem: Problem,
    mode: str,
    lines: dict[str, dict[str, object]],
) -> None:
    """Every runner's answer held against the reference's; those that are wrong leave, with a line."""
    truth = functools.cache(lambda: _truth(problem, mode))
    lines[reference]["error"] = 0.0
    for name in [name for name in runners if name != reference]:
        try:
            verdict = judge(answer(runners[name], problem, mode), expected, truth, problem.kind)
        except Exception as error:  # as above
            verdict = Verdict(False, float("inf"), f"failed with {in_short(error)}")
        lines[name] |= verdict.to_dict()
        if not verdict.is_right:
            reason = f"{verdict.where} differs by {verdict.error:.1e} from {reference}"
            lines[name] |= {"status": "wrong", "reason": reason}
            del runners[name]


def _truth(problem: Problem, mode: str) -> Mapping[str, Tensor] | None:
    try:
        return answer(in_double(problem, mode), problem, mode)
    except Unavailable:
        return None


def _memory(name: str, problem: Problem, mode: str) -> dict[str, object]:
    """Peak bytes of one step of a peer that starts from nothing but the edges."""
    forms = problem.forms

    def ready() -> Callable[[], object]:
        alone = Forms(forms.edge_index, forms.num_nodes, forms.is_symmetric)
        twin = Problem(problem.kind, alone, problem.width_in, problem.width_out, problem.layer)
        return _call(prepare(name, twin, mode), problem, mode)

    peak = step_peak(ready)
    problem.x.grad = None
    return {"peak_tensor_bytes": peak.tensor_bytes, "peak_process_bytes": peak.process_bytes}


def _call(runner: Runner, problem: Problem, mode: str) -> Callable[[], object]:
    if mode == "inference":
        return runner.inference(problem.x)
    return runner.training(problem.x, problem.cotangent)


def _time(
    problem: Problem,
    mode: str,
    runners: Mapping[str, Runner],
    lines: dict[str, dict[str, object]],
    options: Options,
) -> None:
    calls = {name: _call(runner, problem, mode) for name, runner in runners.items()}
    timings: dict[str, Timing] = {}
    if calls:
        timings = time_calls(
            calls,
            warmup=options.warmup,
            repeats=options.repeats,
            budget_seconds=options.budget_seconds,
            is_settled=True,
            pace=patient(options.budget_seconds) if options.device == "cpu" else None,
            clock=clock_of(options.device),
        )
    for name, timing in timings.items():
        lines[name] |= timing.to_dict()
    share_times(lines)
