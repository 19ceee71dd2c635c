"""Measures a GPU and writes the profile the cost model reads: plait calibrate --device cuda.

Dense products are timed on a grid of shapes, sparse ones on made-up graphs as CUDA graphs, without Python;
the model's constants are fitted as on a CPU (bench/calibrate.py). What a step costs on top of its kernels is
measured with a layer on a graph of two nodes. Last, layers are trained, and the time of their steps
compared with the model becomes its correction.
"""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch_geometric.nn import GCNConv

from plait.bench.calibrate import CONSTANTS, Progress, fit_gathers, predictors_of, with_gathers
from plait.bench.correct import VIEW, correction, samples_on
from plait.bench.gpu.clock import replayed_milliseconds
from plait.bench.gpu.graphs import cliques, grid, rmat, uniform
from plait.cost.machine import MachineProfile, Rates, check_place, gpu_profile, gpu_profile_path
from plait.kernels.compiled import cache_folder
from plait.kernels.csr.gpu import Rows
from plait.kernels.spmm.gpu import spmm
from plait.measure.device import stream_bytes_per_s
from plait.measure.environment import environment
from plait.pyg.compile import compile
from plait.pyg.probe import Probe, forget_machine, using_machine
from plait.runtime.placed import PlacedGraph

__all__ = ["calibrate_gpu"]

_INNER = (1, 8, 32, 64, 128, 256, 1024)
_WIDTH = (1, 8, 32, 64, 128, 256, 1024)
_SPARSE_WIDTHS = (8, 16, 32, 64, 128, 256)
_MOST_ELEMENTS = 1 << 26  # of the larger operand of a dense product
_FITTED = (
    functools.partial(uniform, 20_000, 80_000, 8),
    functools.partial(rmat, 12, 40_000, 9),
    functools.partial(rmat, 14, 200_000, 3),
    functools.partial(rmat, 17, 2_000_000, 4),
    functools.partial(grid, 800),
    functools.partial(cliques, 1500, 50),
    functools.partial(uniform, 1_000_000, 8_000_000, 5),
    functools.partial(uniform, 60_000, 6_000_000, 6),
    functools.partial(uniform, 2_000_000, 6_000_000, 7),
)
_TRAINED = (
    functools.partial(rmat, 13, 60_000, 15),
    functools.partial(uniform, 20_000, 100_000, 11),
    functools.partial(rmat, 16, 1_000_000, 12),
    functools.partial(grid, 600),
    functools.partial(uniform, 400_000, 4_000_000, 13),
    functools.partial(cliques, 1000, 60),
    functools.partial(rmat, 18, 16_000_000, 14),
)


def calibrate_gpu(tell: Progress, save: bool = True) -> MachineProfile:
    """The measured profile of the current GPU, saved under the user's cache folder by the card's name."""
    facts = torch.cuda.get_device_properties(torch.cuda.current_device())
    if save:
        check_place(gpu_profile_path(cache_folder(), facts.name))
    base = gpu_profile(facts.name, (facts.major, facts.minor))
    cache = int(getattr(facts, "L2_cache_size", 0)) or base.l3_bytes
    tell("memory bandwidth", 0.0)
    base = replace(
        base,
        is_default=False,
        l2_bytes=cache // 2,
        l3_bytes=cache,
        stream_bytes_per_s=stream_bytes_per_s("cuda"),
    )
    tell("dense products", 0.05)
    base = replace(
        base,
        gemm={"torch": _dense_rates(False)},
        gemm_transposed={"torch": _dense_rates(True)},
        correction={},
    )
    tell("sparse products", 0.25)
    with using_machine(base):
        base = replace(base, call_seconds=_call_seconds())
    profile = _fit_sparse(base, lambda share: tell("sparse products", 0.25 + 0.3 * share))
    with using_machine(profile):
        found = samples_on(_TRAINED, lambda share: tell("layers", 0.55 + 0.45 * share))
    views = [sample.seen for sample in found if sample.kind == VIEW]
    profile = replace(
        profile,
        correction=correction(found, least=len(_TRAINED)),  # a layer of attention on each
        view_seconds=float(np.median(views)) if views else 0.0,
        measured={
            "by": "plait calibrate --device cuda",
            "when": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "environment": environment(),
        },
    )
    if save:
        profile.save(gpu_profile_path(cache_folder(), facts.name))
        forget_machine()
    tell("done", 1.0)
    return profile


def _dense_rates(is_transposed: bool) -> Rates:
    """GFLOP/s of cuBLAS; tall operands, as a layer's."""
    table = []
    for inner in _INNER:
        row = []
        for width in _WIDTH:
            count = min(1 << 18, _MOST_ELEMENTS // max(inner, width))
            x, g = (torch.randn(count, n, device="cuda") for n in (inner, width))
            w = torch.randn(inner, width, device="cuda")
            call = (
                functools.partial(torch.mm, g.t(), x) if is_transposed else functools.partial(torch.mm, x, w)
            )
            row.append(2e-9 * count * inner * width / (1e-3 * replayed_milliseconds(call, 4, 2)))
        table.append(tuple(row))
    return Rates(_INNER, _WIDTH, tuple(table))


def _call_seconds() -> float:
    """What a step costs on top of its kernel: the steps of a layer trained on a graph of two nodes."""
    compiled: Any = compile(GCNConv(4, 4).cuda(), None)
    x = torch.zeros(2, 4, requires_grad=True, device="cuda")
    edge_index, ones = torch.tensor([[0, 1], [1, 0]], device="cuda"), torch.ones(2, 4, device="cuda")
    seen = Probe(compiled).clock(lambda: compiled(x, edge_index).backward(ones), warm=20, repeats=100)
    return float(np.median([seconds for times in seen.values() for seconds in times]))


def _fit_sparse(base: MachineProfile, tell: Callable[[float], None]) -> MachineProfile:
    stats, widths, times, extras = [], [], [], []
    for k, make in enumerate(_FITTED):
        edge_index, num_nodes = make()
        graph = PlacedGraph.of(edge_index, num_nodes, num_nodes)
        for width in _SPARSE_WIDTHS:
            found = _time_sparse(graph.rows, width)
            stats.append(graph.stats)
            widths.append(width)
            times.append(found["plain"])
            extras.append((graph.num_edges, found))
        tell((k + 1) / len(_FITTED))

    def predictors(machine: MachineProfile) -> np.ndarray[Any, Any]:
        # a pass takes a while however short: its longest row is walked edge by edge
        return np.array([[*predictors_of(*case, machine), 1.0] for case in zip(stats, widths, strict=True)])

    seen = np.array(times)
    beyond = np.maximum(seen - base.call_seconds, 0.2 * seen)
    base, solution = fit_gathers(base, predictors, beyond, (1,), (*CONSTANTS, "pass_seconds"))
    return with_gathers(base, solution, extras)


def _time_sparse(rows: Rows, width: int) -> dict[str, float]:
    """Seconds of one product, all ways to run it, as the device takes them."""
    x = torch.randn(rows.num_columns, width, device="cuda")
    out, edge = torch.empty_like(x), torch.rand(rows.num_edges, device="cuda")
    source, ties = torch.rand(rows.num_columns, device="cuda"), torch.empty_like(x, dtype=torch.int32)
    shape = (rows.num_rows, rows.num_columns)
    matrix = torch.sparse_csr_tensor(rows.indptr, rows.indices, edge, shape, check_invariants=False)
    calls: dict[str, Callable[[], object]] = {
        "plain": lambda: spmm(rows, x, out),
        "edge": lambda: spmm(rows, x, out, edge=edge),
        "source": lambda: spmm(rows, x, out, source=source),
        "max": lambda: spmm(rows, x, out, reduce="max", ties=ties),
        "torch": lambda: torch.mm(matrix, x),
    }
    return {name: 1e-3 * replayed_milliseconds(call, 4, 2) for name, call in calls.items()}
