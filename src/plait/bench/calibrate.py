"""Measures this machine in under a minute and writes the profile the cost model reads.

Dense products are timed on a grid of shapes. Sparse products are timed on made-up graphs that differ in what
the model distinguishes (rows found in the second or third cache level or in memory, long and short rows, wide
and narrow) and its constants are fitted to the logarithms of the times. Last, a few layers are trained, and
how long their steps took compared with the model is kept as a correction (bench/correct.py). The load from
other programs is watched, and a profile taken while they were busy says so.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch_geometric.nn import GCNConv

from plait.bench.calibrate_attention import attention_factors
from plait.bench.correct import VIEW, correction, samples, samples_of_features
from plait.bench.pace import at_pace, patient
from plait.cost.machine import MachineProfile, Rates, check_place, default_profile, profile_path
from plait.errors import InputError
from plait.graph import Graph, generate
from plait.graph.stats import GraphStats
from plait.kernels import gemm as dense
from plait.kernels import launch
from plait.kernels import spmm as sparse
from plait.kernels.compiled import cache_folder
from plait.kernels.csr.coalesced import torch_csr
from plait.measure.device import cache_sizes, stream_bytes_per_s
from plait.measure.environment import BusyElsewhere, environment
from plait.measure.timer import time_calls
from plait.pyg.compile import compile
from plait.pyg.probe import Probe, forget_machine, using_machine
from plait.runtime.probe import outside

__all__ = ["CONSTANTS", "Progress", "calibrate", "fit_gathers", "predictors_of", "with_gathers"]

Progress = Callable[[str, float], None]

_INNER = (8, 16, 32, 64, 128, 256, 1024)
_WIDTH = (4, 8, 16, 32, 64, 128, 256)
_SPARSE_WIDTHS = (8, 16, 32, 64, 256)
_ONES = torch.ones(2, 4)
_PATIENCE_SECONDS = 15.0  # for times to be taken again, a neighbour of the machine having slowed them
_MOST_BUSY = 0.1
"""Part of the processor that others may use: above it dense products were once measured 65% too slow."""


def calibrate(progress: Progress | None = None, save: bool = True, device: str = "cpu") -> MachineProfile:
    """The measured profile of this machine, saved under the user's cache folder; takes less than a minute.

    `progress` is called with what is measured next and the share that is done. device "cuda": the profile of
    the current GPU, in less than 90 seconds.
    """
    tell = progress or (lambda label, share: None)
    if device == "cuda":
        from plait.bench.gpu.calibrate import calibrate_gpu  # here: it needs triton

        return calibrate_gpu(tell, save)
    if device != "cpu":
        raise InputError(f"device: {device!r} is not one to calibrate; pass 'cpu' or 'cuda'")
    if save:
        check_place(profile_path(cache_folder()))
    patient(_PATIENCE_SECONDS)
    with BusyElsewhere() as busy, _modes_of_training():
        profile, attention = _measured(tell)
    profile = _described(profile, attention, busy.share)
    if save:
        profile.save(profile_path(cache_folder()))
        forget_machine()
    tell("done", 1.0)
    return profile


@contextlib.contextmanager
def _modes_of_training() -> Iterator[None]:
    """Gradients of float32, whatever the caller has switched off or on."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        torch.set_default_dtype(dtype)


def _measured(tell: Progress) -> tuple[MachineProfile, dict[str, float]]:
    """The constants of this machine, and the factors of attention's passes."""
    tell("memory bandwidth", 0.0)
    base = replace(
        default_profile(),
        is_default=False,
        threads=launch.num_threads(),
        stream_bytes_per_s=stream_bytes_per_s("cpu"),
        turned_byte_seconds=_turned(),
        **outside(),
        **_cache_sizes(),
    )
    tell("dense products", 0.05)
    base = replace(base, gemm=_dense_rates(False), gemm_transposed=_dense_rates(True))
    tell("sparse products", 0.45)
    with using_machine(base):  # the profile in use may be a damaged one
        base = replace(base, call_seconds=_call_seconds())
    profile = _fit_sparse(base, lambda share: tell("sparse products", 0.45 + 0.2 * share))
    profile = _corrected(profile, lambda share: tell("layers", 0.65 + 0.2 * share))
    with using_machine(profile):
        attention = attention_factors(tell=lambda share: tell("attention", 0.85 + 0.15 * share))
    return profile, attention


def _described(profile: MachineProfile, attention: dict[str, float], busy: float | None) -> MachineProfile:
    """The profile with its name, its circumstances, and whether other programs disturbed it."""
    facts = environment()
    name = f"{facts.get('cpu', 'this machine')}, {profile.threads} threads"
    disturbed = ""
    if busy is not None and busy > _MOST_BUSY:
        disturbed = f"other programs used {busy:.0%} of the processor"
        name += "; calibration disturbed, `plait calibrate` again"
    return replace(
        profile,
        name=name,
        measured={
            "by": "plait calibrate",
            "when": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "environment": facts,
            "attention": attention,
            "disturbed": disturbed,
        },
    )


def _seconds(call: Callable[[], object], budget: float = 0.08) -> float:
    # the fast end of the samples: what the machine does when nothing else runs
    return time_calls({"it": call}, warmup=2, min_repeats=5, budget_seconds=budget)["it"].p20


def _turned() -> float:
    """Seconds per byte, read or written, of a weight of 2,000 by 64 that is transposed."""
    weight = torch.zeros(64, 2000)
    return _seconds(lambda: weight.t().contiguous()) / (2 * 4 * weight.numel())


def _cache_sizes() -> dict[str, Any]:
    """Second-level (per core) and third-level cache, where the system tells; the default's otherwise."""
    return {f"l{level}_bytes": size for level, size in cache_sizes() if level in ("2", "3")}


# Dense ---------------------------------------------------------------------------------------------


def _dense_rates(is_transposed: bool) -> dict[str, Rates]:
    tables: dict[str, list[tuple[float, ...]]] = {"plait": [], "torch": []}
    for inner in _INNER:
        rows: dict[str, list[float]] = {"plait": [], "torch": []}
        for width in _WIDTH:
            for name, rate in _dense_rate(inner, width, is_transposed).items():
                rows[name].append(rate)
        for name in tables:
            tables[name].append(tuple(rows[name]))
    return {name: Rates(_INNER, _WIDTH, tuple(table)) for name, table in tables.items()}


def _dense_rate(inner: int, width: int, is_transposed: bool) -> dict[str, float]:
    count = int(np.clip(2e8 / (inner * width), 4000, 60000))
    # values do not matter to the time, and drawing them takes longer than the products
    x, g = torch.ones(count, inner), torch.ones(count, width)
    w, out = torch.ones(inner, width), torch.ones(count, width)
    calls: dict[str, Callable[[], Any]]
    if is_transposed:
        wide, narrow = (x, g) if inner > width else (g, x)
        calls = {
            "plait": lambda: dense.gemm_transposed(narrow, wide),
            "torch": lambda: torch.mm(narrow.t(), wide),
        }
    else:
        calls = {"plait": lambda: dense.gemm(x, w, out), "torch": lambda: torch.mm(x, w, out=out)}
    timings = time_calls(calls, warmup=1, min_repeats=4, budget_seconds=0.05)
    return {name: 2e-9 * count * inner * width / timing.p20 for name, timing in timings.items()}


def _call_seconds() -> float:
    """What a step costs on top of its kernel: the steps of a layer trained on a graph of two nodes."""
    compiled: Any = compile(GCNConv(4, 4), None)
    x = torch.zeros(2, 4, requires_grad=True)
    edge_index = torch.tensor([[0, 1], [1, 0]])
    seen = Probe(compiled).clock(lambda: compiled(x, edge_index).backward(_ONES), warm=50, repeats=150)
    return float(np.median([seconds for samples in seen.values() for seconds in samples]))


def _bare_call_seconds() -> float:
    """A kernel call on next to nothing, without the runtime around it."""
    pattern = sparse.Pattern(np.array([0, 1], np.int32), np.array([0], np.int32), 1)
    x, out = torch.zeros(1, 8), torch.zeros(1, 8)
    return _seconds(lambda: sparse.spmm(pattern, x, out), 0.1)


# Sparse --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Case:
    graph: Graph
    pattern: sparse.Pattern
    width: int


def _graphs() -> Iterator[Graph]:
    """Graphs apart in size, degree and locality; none of them is anyone's data."""
    yield generate.erdos(4_000, 120_000, 1)
    yield generate.erdos(30_000, 150_000, 2)
    yield generate.rmat(15, 600_000, 3)
    yield generate.grid(300, 300)
    yield generate.erdos(150_000, 1_200_000, 4)
    yield generate.cliques(600, 48)
    yield generate.regular(250_000, 3, 5)


def _fit_sparse(base: MachineProfile, tell: Callable[[float], None]) -> MachineProfile:
    cases, times, extras = [], [], []
    bare_call = _bare_call_seconds()
    graphs = list(_graphs())
    for k, graph in enumerate(graphs):
        pattern = sparse.Pattern(graph.indptr, graph.indices, graph.num_sources)
        for width in _SPARSE_WIDTHS:
            case = _Case(graph, pattern, width)
            timings = at_pace(functools.partial(_time_sparse, case))
            cases.append(case)
            times.append(timings["plain"] - bare_call)
            extras.append((graph.num_edges, timings))
        tell((k + 1) / len(graphs))

    def predictors(machine: MachineProfile) -> np.ndarray[Any, Any]:
        return np.array([predictors_of(case.graph.stats, case.width, machine) for case in cases])

    base, solution = fit_gathers(base, predictors, np.maximum(np.array(times), 1e-7))
    return with_gathers(base, solution, extras)


CONSTANTS = (
    "gather_l2", "gather_l3", "gather_memory", "write", "edge_seconds", "row_seconds", "tile_seconds",
    "l3_row_seconds", "memory_row_seconds",
)  # fmt: skip


def fit_gathers(
    base: MachineProfile,
    predictors_on: Callable[[MachineProfile], np.ndarray[Any, Any]],
    times: np.ndarray[Any, Any],
    shares: tuple[int, ...] = (8, 4, 2, 1),
    names: tuple[str, ...] = CONSTANTS,
) -> tuple[MachineProfile, dict[str, float]]:
    """The constants, and the size of the third-level cache that explains the times best.

    Page tables share it and so do other guests of the machine: gathers see less than the system tells.
    """
    best: tuple[float, MachineProfile, np.ndarray[Any, Any]] | None = None
    for share in shares:
        seen = replace(base, l3_bytes=base.l3_bytes // share)
        predictors = predictors_on(seen)
        found = _fit(predictors, times)
        error = float(np.mean(np.abs(np.log(predictors @ found / times))))
        if best is None or error < best[0]:
            best = error, seen, found
    assert best is not None
    return best[1], dict(zip(names, map(float, best[2]), strict=True))


def _corrected(profile: MachineProfile, tell: Callable[[float], None]) -> MachineProfile:
    """The profile with what training loops on made-up graphs say of it, itself in use meanwhile."""
    graphs = [
        generate.erdos(3_000, 12_000, 11),
        generate.rmat(13, 100_000, 12),
        generate.grid(200, 200),
        generate.sbm(20_000, 200, 10.0, 2.0, features=1, rng=13).graph,
        generate.cliques(300, 40),
        generate.sbm(36_000, 600, 5.0, 1.0, features=1, rng=14).graph,
    ]
    with using_machine(profile):
        found = samples(graphs, lambda share: tell(0.8 * share))
        found += samples_of_features(lambda share: tell(0.8 + 0.2 * share))
    views = [sample.seen for sample in found if sample.kind == VIEW]
    return replace(
        profile, correction=correction(found), view_seconds=float(np.median(views)) if views else 0.0
    )


def with_gathers(
    base: MachineProfile, solution: Mapping[str, float], extras: list[tuple[int, dict[str, float]]]
) -> MachineProfile:
    """The profile with the fitted gathers, and what other products took compared with plain sums."""
    return replace(
        base,
        gather_l2_bytes_per_s=_inverse(solution["gather_l2"]),
        gather_l3_bytes_per_s=_inverse(solution["gather_l3"]),
        gather_memory_bytes_per_s=_inverse(solution["gather_memory"]),
        write_bytes_per_s=_inverse(solution["write"]),
        edge_seconds=solution["edge_seconds"],
        row_seconds=solution["row_seconds"],
        tile_seconds=solution["tile_seconds"],
        l3_row_seconds=solution["l3_row_seconds"],
        memory_row_seconds=solution["memory_row_seconds"],
        pass_seconds=solution.get("pass_seconds", 0.0),
        edge_weight_seconds=_more_per_edge(extras, "edge"),
        source_scale_seconds=_more_per_edge(extras, "source"),
        extremum_factor=float(np.median([t["max"] / t["plain"] for _, t in extras])),
        torch_spmm_factor=float(np.median([t["torch"] / t["plain"] for _, t in extras])),
    )


def _inverse(seconds_per_byte: float) -> float:
    return 1.0 / max(seconds_per_byte, 1e-13)


def _more_per_edge(extras: list[tuple[int, dict[str, float]]], mode: str) -> float:
    return max(0.0, float(np.median([(t[mode] - t["plain"]) / edges for edges, t in extras])))


def _time_sparse(case: _Case) -> dict[str, float]:
    graph, pattern = case.graph, case.pattern
    x, out = torch.ones(graph.num_sources, case.width), torch.ones(graph.num_nodes, case.width)
    edge, source = torch.ones(graph.num_edges), torch.ones(graph.num_sources)
    csr = torch_csr(pattern.indptr, pattern.indices, edge, graph.num_sources)
    calls: dict[str, Callable[[], Any]] = {
        "plain": lambda: sparse.spmm(pattern, x, out),
        "edge": lambda: sparse.spmm(pattern, x, out, edge=edge),
        "source": lambda: sparse.spmm(pattern, x, out, source=source),
        "max": lambda: sparse.spmm(pattern, x, out, reduce="max"),
        "torch": lambda: torch.mm(csr, x, out=out),
    }
    made = torch.ones_like(x)
    seen: dict[str, list[float]] = {name: [] for name in calls}
    begun = time.perf_counter()
    while len(seen["torch"]) < 4 or (len(seen["torch"]) < 20 and time.perf_counter() - begun < 0.2):
        for name, call in calls.items():
            # as in a layer: the step before has just written what is gathered, and other matrices beside it
            out.zero_()
            x.copy_(made)
            started = time.perf_counter()
            call()
            seen[name].append(time.perf_counter() - started)
    return {name: float(np.median(times[1:])) for name, times in seen.items()}


def predictors_of(stats: GraphStats, width: int, machine: MachineProfile) -> list[float]:
    """The terms of cost/price.py's sparse product whose constants are to be found."""
    row_bytes = width * 4
    line_bytes = max(64, row_bytes)
    miss2 = stats.miss_rate(int(machine.l2_bytes * 0.8 / line_bytes))
    miss3 = min(miss2, stats.miss_rate(int(machine.l3_bytes * 0.8 / line_bytes)))
    gathered = stats.num_edges * max(row_bytes, 32.0)
    tiles = max(0.0, row_bytes / 512.0 - 1.0)
    return [
        gathered * (1 - miss2),
        gathered * (miss2 - miss3),
        gathered * miss3,
        float(stats.num_nodes * row_bytes),
        float(stats.num_edges),
        float(stats.num_nodes),
        stats.num_edges * tiles,
        stats.num_edges * (miss2 - miss3),
        stats.num_edges * miss3,
    ]


def _fit(predictors: np.ndarray[Any, Any], times: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Positive constants with the least squared logarithmic error, by damped Gauss-Newton steps.

    A relative error would be bounded below and not above, and so favour constants that are too small.
    """
    count = predictors.shape[1]
    each = np.median(times[:, None] / np.maximum(predictors, 1e-30), axis=0)
    start = np.log(each / count)
    logs, damping = start.copy(), 1e-2
    pull = np.sqrt(1e-3)  # keeps what no case exercised finite

    def gaps(at: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return np.concatenate([np.log(predictors @ np.exp(at) / times), pull * (at - start)])

    now = gaps(logs)
    for _ in range(200):
        parts = predictors * np.exp(logs)
        slopes = np.concatenate([parts / parts.sum(axis=1, keepdims=True), pull * np.eye(count)])
        step = np.linalg.solve(slopes.T @ slopes + damping * np.eye(count), -slopes.T @ now)
        then = gaps(logs + np.clip(step, -2.0, 2.0))
        if then @ then < now @ now:
            logs, now, damping = logs + np.clip(step, -2.0, 2.0), then, max(damping / 3, 1e-9)
        else:
            damping *= 4
    return np.asarray(np.exp(logs))
