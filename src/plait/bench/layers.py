"""plait bench layers: one middle layer at a time, every peer on the same weights, checked, then timed."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from plait.bench.cases import LayerCase, find_graph
from plait.bench.check import TOLERANCE, answer, worst_error
from plait.bench.peers import DEFAULT, REFERENCE, Runner, SameAs, Unavailable, prepare
from plait.bench.problem import Problem, edge_index_of
from plait.errors import PlaitError
from plait.graph import Graph
from plait.measure import Record, Timing, append, environment, read, time_calls

__all__ = ["KIND", "Options", "measure", "run"]

KIND = "bench-layers"
# On graphs where PyG's gathered edges do not fit the memory the CSR answer is what others are compared with.
_REFERENCES = (REFERENCE, "pyg-csr")


@dataclass(frozen=True)
class Options:
    """How the grid is run."""

    peers: Sequence[str] = DEFAULT
    budget_seconds: float = 5.0
    warmup: int = 3
    repeats: int | None = None
    data_dir: str | None = None
    output: Path | None = None
    resume: bool = False
    environment: Mapping[str, object] = field(default_factory=environment)


def run(cases: Sequence[LayerCase], options: Options, watch: Callable[[Record], None]) -> list[Record]:
    """A record per case, handed to `watch` as each is taken and appended to the output file."""
    records: list[Record] = []
    done = _finished(options)
    left = [case for case in cases if case not in done]
    records.extend(done[case] for case in cases if case in done)
    for name, group in itertools.groupby(left, key=lambda case: case.graph):
        graph = find_graph(name, options.data_dir).graph
        for record in _run_graph(graph, list(group), options):
            if options.output is not None:
                append(options.output, record)
            records.append(record)
            watch(record)
    return records


def _finished(options: Options) -> dict[LayerCase, Record]:
    """The cases an interrupted run left in the output file."""
    if not options.resume or options.output is None or not options.output.exists():
        return {}
    names = LayerCase.__dataclass_fields__
    kept = (
        record for record in read(options.output) if record.kind == KIND and set(record.case) >= set(names)
    )
    return {LayerCase(**{name: record.case[name] for name in names}): record for record in kept}  # type: ignore[arg-type]


def _run_graph(graph: Graph, cases: list[LayerCase], options: Options) -> Iterator[Record]:
    edge_index = edge_index_of(graph)
    facts = {"num_nodes": graph.num_nodes, "num_edges": graph.num_edges}
    for (kind, width_in, width_out), group in itertools.groupby(
        cases, key=lambda case: (case.layer, case.width_in, case.width_out)
    ):
        problem = Problem(kind, graph, edge_index, width_in, width_out)
        for case in group:
            result = measure(problem, case.mode, options)
            yield Record(KIND, case.to_dict() | facts, result, options.environment)
            gc.collect()


def measure(problem: Problem, mode: str, options: Options) -> dict[str, object]:
    """What every peer did with one problem: {"peers": {name: its line}, "reference": name}."""
    lines: dict[str, dict[str, object]] = {}
    runners = _prepare_all(problem, mode, _with_references(options.peers), lines)
    reference = next((name for name in _REFERENCES if name in runners), None)
    if reference is None:
        return {"peers": lines, "reference": None}
    expected = answer(runners[reference], problem, mode)
    for name in list(runners):
        error, where = (
            (0.0, "output") if name == reference else _error(runners, name, problem, mode, expected)
        )
        lines[name]["error"] = error
        if not error <= TOLERANCE:
            reason = lines[name].get("reason") or f"{where} differs by {error:.1e} from {reference}"
            lines[name] |= {"status": "wrong", "reason": reason}
            del runners[name]
    del expected
    _time(problem, mode, {name: runners[name] for name in options.peers if name in runners}, lines, options)
    return {"peers": {name: lines[name] for name in options.peers}, "reference": reference}


def _with_references(peers: Iterable[str]) -> list[str]:
    """The peers plus the first reference, which must answer even when it is not timed."""
    return list(dict.fromkeys([*_REFERENCES, *peers]))


def _prepare_all(
    problem: Problem, mode: str, names: Iterable[str], lines: dict[str, dict[str, object]]
) -> dict[str, Runner]:
    runners = {}
    for name in names:
        try:
            runners[name] = prepare(name, problem, mode)
            lines[name] = {"status": "timed"}
        except SameAs as other:
            lines[name] = {"status": "same", "as": str(other)}
        except (Unavailable, PlaitError) as error:
            lines[name] = {"status": "missing", "reason": str(error)}
        except Exception as error:  # a peer that breaks while preparing is its own line, not the run's end
            lines[name] = {"status": "missing", "reason": f"{type(error).__name__}: {error}"}
    return runners


def _error(
    runners: dict[str, Runner], name: str, problem: Problem, mode: str, expected: dict[str, Tensor]
) -> tuple[float, str]:
    try:
        return worst_error(answer(runners[name], problem, mode), expected)
    except Exception as error:  # as above
        return float("inf"), f"failed with {type(error).__name__}: {error}"


def _time(
    problem: Problem,
    mode: str,
    runners: Mapping[str, Runner],
    lines: dict[str, dict[str, object]],
    options: Options,
) -> None:
    x, cotangent = problem.x, problem.cotangent
    calls = {
        name: runner.inference(x) if mode == "inference" else runner.training(x, cotangent)
        for name, runner in runners.items()
    }
    timings: dict[str, Timing] = {}
    if calls:
        timings = time_calls(
            calls, warmup=options.warmup, repeats=options.repeats, budget_seconds=options.budget_seconds
        )
    for name, timing in timings.items():
        lines[name] |= timing.to_dict()
    for line in lines.values():
        twin = lines.get(str(line.get("as")), {}) if line["status"] == "same" else {}
        line |= {key: value for key, value in twin.items() if key.endswith("seconds")}
