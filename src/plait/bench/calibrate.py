"""Measures this machine in under a minute and writes the profile the cost model reads.

Dense products are timed on a grid of shapes, with operands in cache and streamed, at the start and again at
the end. Then layers are trained on made-up graphs that differ in what the model distinguishes (rows found in
a near or far cache or in memory, long and short rows, even and uneven ones, wide and narrow), and constants
and corrections are fitted to what their steps took (bench/correct.py). What others did meanwhile is noted:
a part they disturbed is measured once more, and a profile that stays disturbed says so.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch_geometric.nn import GCNConv

from plait.bench.calibrate_attention import attention_factors
from plait.bench.correct import Seen, correction, fit_sparse, priced, seen_steps
from plait.cost.machine import MachineProfile, Rates, default_profile, profile_path
from plait.graph import Graph, generate
from plait.kernels import gemm as dense
from plait.kernels import launch
from plait.kernels import spmm as sparse
from plait.kernels.compiled import cache_folder
from plait.measure.environment import BusyElsewhere, environment
from plait.measure.timer import time_calls
from plait.pyg.compile import compile
from plait.runtime.session import forget_machine, using_machine

__all__ = ["calibrate"]

Progress = Callable[[str, float], None]
T = TypeVar("T")

_INNER = (4, 16, 64, 256, 1024)
_WIDTH = (4, 16, 64, 256)
_NEAR_BYTES = 1 << 20  # of a dense product's operands: in cache
_FAR_BYTES = 48 << 20  # ... and beyond every cache
_SPARSE_WIDTHS = (16, 64)
_ONES = torch.ones(2, 4)
# Share of the processor others may use, and how far two visits to the same products may be apart (the
# middle of all cells), before a calibration counts as disturbed. On a quiet machine: 0.00-0.02 and 2-4%.
_MOST_BUSY = 0.1
_MOST_APART = 0.12


def calibrate(progress: Progress | None = None, save: bool = True) -> MachineProfile:
    """The measured profile of this machine, saved under the user's cache folder; takes less than a minute.

    `progress` is called with what is measured next and the share that is done. On a machine that others
    keep busy it takes longer: disturbed parts are measured twice, and `disturbance` of the profile says so.
    """
    tell = progress or (lambda label, share: None)
    tell("memory bandwidth", 0.0)
    watch = _Watch()
    base = replace(
        default_profile(),
        is_default=False,
        correction={},
        threads=launch.num_threads(),
        stream_bytes_per_s=_stream(),
        **_cache_sizes(),
    )
    tell("dense products", 0.05)
    visits = [watch.part("dense products", _dense_times)]
    base = _with_rates(base, visits)
    tell("sparse products", 0.25)
    with using_machine(base):  # the profile in use may be a damaged one
        base = replace(base, call_seconds=_call_seconds())
        base = watch.part("sparse products", lambda: _with_factors(base))
        seen = watch.part(
            "layers", lambda: seen_steps(_graphs(), lambda share: tell("layers", 0.3 + 0.4 * share))
        )
    tell("dense products", 0.7)
    visits.append(watch.part("dense products", _dense_times))
    if _apart(visits[0], visits[1]) > _MOST_APART:
        visits.append(_dense_times())
    profile = _with_steps(_with_rates(base, visits), seen)
    with using_machine(profile):
        attention = watch.part(
            "attention",
            lambda: attention_factors(tell=lambda share: tell("attention", 0.85 + 0.15 * share)),
        )
    profile = _described(profile, attention, watch, min(_apart(visits[-1], other) for other in visits[:-1]))
    if save:
        profile.save(profile_path(cache_folder()))
        forget_machine()
    tell("done", 1.0)
    return profile


def _described(
    profile: MachineProfile, attention: dict[str, float], watch: _Watch, apart: float
) -> MachineProfile:
    """The profile with its name, its circumstances, and whether something disturbed it."""
    facts = environment()
    name = f"{facts.get('cpu', 'this machine')}, {profile.threads} threads"
    disturbed = watch.told()
    if apart > _MOST_APART:
        disturbed.append(f"repeats were {apart:.0%} apart")
    if disturbed:
        name += "; calibration disturbed, `plait calibrate` again"
    return replace(
        profile,
        name=name,
        measured={
            "by": "plait calibrate",
            "when": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "environment": facts,
            "attention": attention,
            "busy_elsewhere": dict(watch.shares),
            "measured_twice": sorted(watch.repeated),
            "dense_visits_apart": apart,
            "disturbed": ", ".join(disturbed),
        },
    )


@dataclass
class _Watch:
    """What others took of the processor during each part; a disturbed part is measured once more."""

    shares: dict[str, float] = field(default_factory=dict)
    repeated: set[str] = field(default_factory=set)

    def part(self, name: str, measure: Callable[[], T]) -> T:
        """What `measure` gives; of two attempts at a disturbed part, the one during the quieter time."""
        found, share = self._attempt(measure)
        if share > _MOST_BUSY:
            self.repeated.add(name)
            again, share_again = self._attempt(measure)
            if share_again < share:
                found, share = again, share_again
        self.shares[name] = max(share, self.shares.get(name, 0.0))
        return found

    def _attempt(self, measure: Callable[[], T]) -> tuple[T, float]:
        with BusyElsewhere() as busy:
            found = measure()
        return found, busy.share or 0.0

    def told(self) -> list[str]:
        """What is to be said of others: nothing where no part stayed disturbed."""
        share = max(self.shares.values(), default=0.0)
        return [f"others used {share:.0%} of the processor"] if share > _MOST_BUSY else []


def _seconds(call: Callable[[], object], budget: float = 0.08) -> float:
    # the fast end of the samples: what the machine does when nobody else wants it
    return time_calls({"it": call}, warmup=2, min_repeats=5, budget_seconds=budget)["it"].p20


def _stream() -> float:
    """Bytes a second of a copy, reads plus writes, larger than every cache."""
    a = torch.zeros(32 << 20)
    b = torch.empty_like(a)
    return 2 * a.numel() * 4 / _seconds(lambda: b.copy_(a), 0.5)


def _cache_sizes() -> dict[str, Any]:
    """Second-level (per core) and third-level cache, where the system tells; the default's otherwise."""
    found: dict[str, int] = {}
    for index in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        try:
            level = (index / "level").read_text().strip()
            text = (index / "size").read_text().strip()
            kind = (index / "type").read_text().strip()
        except OSError:
            continue
        if kind != "Instruction" and level in ("2", "3"):
            factor = {"K": 1 << 10, "M": 1 << 20}.get(text[-1], 1)
            found[f"l{level}_bytes"] = int(text.rstrip("KM")) * factor
    return found


# Dense ---------------------------------------------------------------------------------------------


# By (is_transposed, is_cached, backend): seconds a flop of every cell, [inner][width].
_Times = dict[tuple[bool, bool, str], np.ndarray[Any, Any]]


def _dense_times() -> _Times:
    """One visit to all dense products: both directions, operands in cache and streamed."""
    shape = (len(_INNER), len(_WIDTH))
    found: _Times = {}
    for is_transposed in (False, True):
        for is_cached in (True, False):
            for i, inner in enumerate(_INNER):
                for j, width in enumerate(_WIDTH):
                    for name, seconds in _dense_seconds(inner, width, is_transposed, is_cached).items():
                        found.setdefault((is_transposed, is_cached, name), np.zeros(shape))[i, j] = seconds
    return found


def _dense_seconds(inner: int, width: int, is_transposed: bool, is_cached: bool) -> dict[str, float]:
    count = max(64, (_NEAR_BYTES if is_cached else _FAR_BYTES) // (4 * (inner + width)))
    x, g = torch.ones(count, inner), torch.ones(count, width)
    w, out = torch.ones(inner, width), torch.empty(count, width)
    calls: dict[str, Callable[[], Any]]
    if is_transposed:
        wide, narrow = (x, g) if inner > width else (g, x)
        calls = {
            "plait": lambda: dense.gemm_transposed(narrow, wide),
            "torch": lambda: torch.mm(narrow.t(), wide),
        }
    else:
        calls = {"plait": lambda: dense.gemm(x, w, out), "torch": lambda: torch.mm(x, w, out=out)}
    timings = time_calls(
        calls, warmup=1, min_repeats=3, budget_seconds=0.03, min_sample_seconds=0.001 if is_cached else 0.0
    )
    return {name: timing.p20 / (2.0 * count * inner * width) for name, timing in timings.items()}


def _apart(one: _Times, other: _Times) -> float:
    """How far two visits are apart: the middle of all cells' ratios, less one."""
    logs = [np.abs(np.log(one[key] / other[key])) for key in one if key in other]
    return float(np.exp(np.median(np.concatenate([log.ravel() for log in logs]))) - 1.0)


def _with_rates(base: MachineProfile, visits: list[_Times]) -> MachineProfile:
    """The profile with the rates of each cell's best visit: what others do only makes a product slower."""
    best = {key: np.minimum.reduce([visit[key] for visit in visits]) for key in visits[0]}

    def tables(is_transposed: bool, is_cached: bool) -> dict[str, Rates]:
        return {
            name: Rates(_INNER, _WIDTH, tuple(tuple(map(float, row)) for row in 1e-9 / seconds))
            for (transposed, cached, name), seconds in best.items()
            if (transposed, cached) == (is_transposed, is_cached)
        }

    return replace(
        base,
        gemm=tables(False, False),
        gemm_cached=tables(False, True),
        gemm_transposed=tables(True, False),
        gemm_transposed_cached=tables(True, True),
    )


def _call_seconds() -> float:
    """What a step costs beside its kernel: the steps of a layer trained on a graph of two nodes."""
    compiled: Any = compile(GCNConv(4, 4), None)
    session = compiled._plait_plan_session
    x = torch.zeros(2, 4, requires_grad=True)
    edge_index = torch.tensor([[0, 1], [1, 0]])
    session.trace = []
    for _ in range(200):
        compiled(x, edge_index).backward(_ONES)
    return float(np.median([measured.seconds for _, measured in session.trace[100:]]))


# Sparse --------------------------------------------------------------------------------------------


def _graphs() -> list[Graph]:
    """Graphs apart in size, degree, evenness and locality; none of them is anyone's data."""
    return [
        generate.erdos(3_000, 12_000, 11),
        generate.rmat(12, 20_000, 18),
        generate.rmat(13, 100_000, 12),
        generate.sbm(20_000, 200, 10.0, 2.0, features=1, rng=13).graph,
        generate.cliques(300, 40),
        generate.erdos(16_000, 80_000, 16),
        generate.rmat(15, 200_000, 15),
        generate.sbm(40_000, 800, 5.0, 1.0, features=1, rng=14).graph,
        generate.grid(250, 250),
    ]


def _with_steps(base: MachineProfile, seen: list[Seen]) -> MachineProfile:
    """The profile with what steps of training loops tell: constants, then what is learned beside them."""
    views = [step.seconds for step in seen if step.backend == "view"]
    profile = replace(
        fit_sparse(seen, base), view_seconds=float(np.median(views)) if views else base.view_seconds
    )
    return replace(profile, correction=correction(priced(seen, profile)))


def _with_factors(base: MachineProfile) -> MachineProfile:
    """The profile with what scalings, extrema and torch's product cost beside plait's plain one."""
    extras = []
    for graph in _factor_graphs():
        pattern = sparse.Pattern(graph.indptr, graph.indices, graph.num_sources)
        extras += [(graph.num_edges, _time_sparse(graph, pattern, width)) for width in _SPARSE_WIDTHS]
    return replace(
        base,
        edge_weight_seconds=_more_per_edge(extras, "edge"),
        source_scale_seconds=_more_per_edge(extras, "source"),
        extremum_factor=float(np.median([t["max"] / t["plain"] for _, t in extras])),
        torch_spmm_factor=float(np.median([t["torch"] / t["plain"] for _, t in extras])),
    )


def _factor_graphs() -> Iterator[Graph]:
    yield generate.erdos(4_000, 120_000, 1)
    yield generate.rmat(15, 600_000, 3)
    yield generate.grid(300, 300)


def _more_per_edge(extras: list[tuple[int, dict[str, float]]], mode: str) -> float:
    return max(0.0, float(np.median([(t[mode] - t["plain"]) / edges for edges, t in extras])))


def _time_sparse(graph: Graph, pattern: sparse.Pattern, width: int) -> dict[str, float]:
    x, out = torch.randn(graph.num_sources, width), torch.empty(graph.num_nodes, width)
    edge, source = torch.rand(graph.num_edges), torch.rand(graph.num_sources)
    csr = torch.sparse_csr_tensor(
        torch.from_numpy(pattern.indptr), torch.from_numpy(pattern.indices), edge,
        size=(graph.num_nodes, graph.num_sources), check_invariants=False,
    )  # fmt: skip
    calls: dict[str, Callable[[], Any]] = {
        "plain": lambda: sparse.spmm(pattern, x, out),
        "edge": lambda: sparse.spmm(pattern, x, out, edge=edge),
        "source": lambda: sparse.spmm(pattern, x, out, source=source),
        "max": lambda: sparse.spmm(pattern, x, out, reduce="max"),
        "torch": lambda: torch.mm(csr, x, out=out),
    }
    timings = time_calls(calls, warmup=1, min_repeats=3, budget_seconds=0.12)
    return {name: timing.p20 for name, timing in timings.items()}
