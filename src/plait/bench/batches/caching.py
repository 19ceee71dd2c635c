"""The feature cache: every policy replayed, the look-up, an epoch behind a slow source, the advisor."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numba import njit
from torch_geometric.data import Data

from plait.bench.batches.part import Bar, Measured, Options, edge_list, load
from plait.errors import InputError
from plait.features import (
    POLICIES,
    Cache,
    Network,
    degree,
    inclusion_probability,
    pack,
    presample,
    simulate,
    slot_table,
)
from plait.graph import Graph
from plait.graph.partition import has_metis, metis
from plait.loader import NeighborLoader
from plait.loader.remote import remote_trace
from plait.measure import time_calls

__all__ = ["advisor", "lookup", "simulation", "throttled"]

SIMULATED = ("github_social", "gowalla", "ego_twitter")
FANOUTS = ((15, 10, 5), (10, 25))
SHARES = (0.05, 0.1, 0.25, 0.5, 0.75, 1.0)
PARTS = 4
TRAIN_SHARE = 0.25
SEEDS = 64
MOST_ROWS = 1_500_000
GIGABIT = Network(125e6)


def simulation(options: Options) -> Iterator[Measured]:
    """Rows fetched by every policy at every capacity, in one of four METIS parts."""
    if not has_metis():
        raise InputError("simulation: pymetis is not installed; pip install pymetis")
    graphs = options.graphs.values() if options.is_small else SIMULATED
    for name in graphs:
        graph = load(name, options.data_dir)
        part = metis(graph, PARTS, recursive=True)
        rng = np.random.default_rng(0)
        count = max(1, round(TRAIN_SHARE * graph.num_nodes))
        train = np.sort(rng.choice(graph.num_nodes, count, replace=False))
        for fanout in FANOUTS:
            replay, facts = _replay(graph, part, train, fanout)
            for share in SHARES[::2] if options.is_small else SHARES:
                case = {"graph": name, "parts": PARTS, "fanout": list(fanout), "batch": SEEDS, "share": share}
                rows = replay(share)
                yield case | facts, {"policies": rows}, _simulation_bars(rows)


def _replay(
    graph: Graph, part: Any, train: Any, fanout: Sequence[int]
) -> tuple[Callable[[float], dict[str, dict[str, float]]], dict[str, object]]:
    """(policies' rows at a capacity, facts of the trace): one trace for all, scores from another one."""
    given: dict[str, Any] = {"rank": 0, "train": train, "epochs": 4, "most_rows": MOST_ROWS}
    trace = remote_trace(graph, fanout, SEEDS, part, **given)
    before = remote_trace(graph, fanout, SEEDS, part, seed=1, **given)
    packed, is_far = pack(trace.batches), part != 0
    distinct = int((packed.counts() > 0).sum())
    mine = train[part[train] == 0]
    scores: dict[str, Any] = {
        "degree": np.where(is_far, degree(graph), 0),
        "vip": np.where(is_far, inclusion_probability(graph, fanout, mine, SEEDS), 0),
        "presample": presample(before.batches, graph.num_nodes),
    }
    variants: dict[str, tuple[str, dict[str, Any]]] = {
        name: (name, {"scores": scores[name]} if name in scores else {})
        for name in POLICIES
        if name != "none"
    }
    # as published: only rows one hop away are ever kept, and the threshold is rounded
    halo = is_far & _reaches(graph, part == 0)
    near = {"scores": scores["degree"], "halo": halo[: packed.num_ids], "rounded": True}
    variants["massivegnn"] = ("massivegnn", near)
    variants["massivegnn, mended"] = ("massivegnn", {"scores": scores["degree"], "rounded": False})

    def rows(share: float) -> dict[str, dict[str, float]]:
        capacity = max(1, round(share * distinct))
        found = {}
        for label, (name, params) in variants.items():
            outcome = simulate(packed, capacity, name, **params)
            found[label] = {
                "remote_rows": outcome.remote_rows,
                "hit_rate": outcome.hit_rate,
                "evictions": outcome.evictions,
            }
        return found

    facts: dict[str, object] = {
        "batches": len(packed),
        "requests": packed.requests,
        "distinct_rows": distinct,
        "is_cut": trace.is_cut,
    }
    return rows, facts


def _reaches(graph: Graph, mine: Any) -> Any:
    """Which nodes have an edge into those of `mine`."""
    found = np.zeros(graph.num_sources, bool)
    found[graph.indices[mine[graph.edge_rows()]]] = True
    return found


def _simulation_bars(rows: dict[str, dict[str, float]]) -> tuple[Bar, ...]:
    fetched = {name: line["remote_rows"] for name, line in rows.items()}
    published = min(fetched["massivegnn"], fetched["massivegnn, mended"])
    apart = abs(rows["presample"]["hit_rate"] - rows["vip"]["hit_rate"])
    return (
        Bar("look-ahead / Belady", fetched["lookahead"] / fetched["belady"], 1.03, is_least=False),
        Bar("MassiveGNN / auto", published / fetched["auto"], 1.0),
        Bar("presampling and VIP apart", apart, 0.03, is_least=False),
    )


def lookup(options: Options) -> Iterator[Measured]:
    """200,000 ids in a cache of a million rows, against binary search in its sorted ids."""
    held, asked = (10_000, 2_000) if options.is_small else (1_000_000, 200_000)
    rng = np.random.default_rng(0)
    for num_ids in (2 * held, 100 * held):
        ids = np.sort(rng.choice(num_ids, held, replace=False)).astype(np.int64)
        table = slot_table(held, num_ids)
        table.put(ids, np.arange(held, dtype=np.int32))
        wanted = rng.integers(0, num_ids, asked)
        out = np.empty(asked, np.int32)
        _binary_search(ids, wanted, out)
        is_equal = np.array_equal(out, table.find(wanted))
        timings = time_calls(
            {
                "binary search": lambda: _binary_search(ids, wanted, out),  # noqa: B023  run in this round
                "plait": lambda: table.find(wanted),  # noqa: B023  run in this round
            },
            budget_seconds=options.budget_seconds,
        )
        share = timings["plait"].median / timings["binary search"].median
        case = {"rows": held, "ids": asked, "range": num_ids, "table": type(table).__name__}
        lines = {name: timing.to_dict() for name, timing in timings.items()}
        bars = (Bar("share of binary search's time", share, 0.25, is_least=False),)
        yield case, {"peers": lines, "is_equal": is_equal}, bars


@njit(nogil=True)  # type: ignore[untyped-decorator]
def _binary_search(keys: Any, wanted: Any, out: Any) -> None:
    """As MassiveGNN looks its buffer up."""
    for i in range(wanted.size):
        low, high = 0, keys.size
        while low < high:
            middle = (low + high) >> 1
            if keys[middle] < wanted[i]:
                low = middle + 1
            else:
                high = middle
        out[i] = low if low < keys.size and keys[low] == wanted[i] else -1


def throttled(options: Options) -> Iterator[Measured]:
    """Epochs with features behind 1 Gbit/s: no cache and auto at a quarter of the rows, the same pipeline.

    Where a batch computes for 5 ms fetching is what an epoch takes, and a cache must shorten it; where it
    computes for 60 ms there is time to fetch behind it, and nothing must be waited for.
    """
    name, source = list(options.graphs.items())[-1]
    graph = load(source, options.data_dir)
    edge_index = torch.from_numpy(edge_list(graph))
    x = np.random.default_rng(0).standard_normal((graph.num_nodes, 128), np.float32)
    batches, size = (3, 64) if options.is_small else (40, 1024)
    seeds = torch.randperm(graph.num_nodes, generator=torch.Generator().manual_seed(0))[: batches * size]
    for compute in (0.005, 0.06):
        found: dict[str, list[dict[str, float]]] = {"none": [], "auto": []}
        loaders = {
            policy: _slow_loader(edge_index, x, seeds, size, policy, graph.num_nodes) for policy in found
        }
        for _, policy in itertools.product(range(4), found):
            found[policy].append(_epoch(*loaders[policy], compute))
        case = {"graph": name, "fanout": [10, 10], "batch": size, "batches": batches, "width": 128}
        rate = {"network": "1gbit", "compute_seconds": compute, "capacity_share": 0.25}
        yield case | rate, {"epochs": found}, _throttled_bars(found, compute)


def _slow_loader(
    edge_index: Any, x: Any, seeds: Any, size: int, policy: str, num_nodes: int
) -> tuple[Any, Cache]:
    def fetch(ids: Any) -> Any:
        begin = time.perf_counter()
        rows = x[ids]
        left = GIGABIT.seconds(rows.nbytes) - (time.perf_counter() - begin)
        if left > 0:
            time.sleep(left)
        return rows

    capacity = 0 if policy == "none" else num_nodes // 4
    cache = Cache(fetch, capacity, policy, num_rows=num_nodes)
    data = Data(edge_index=edge_index, num_nodes=num_nodes)
    given: dict[str, Any] = {"batch_size": size, "shuffle": True, "seed": 0, "prefetch": 4}
    return NeighborLoader(data, [10, 10], seeds, features=cache, **given), cache


def _epoch(loader: Any, cache: Cache, compute: float) -> dict[str, float]:
    fetched, begin = cache.counters.remote_rows, time.perf_counter()
    for _ in loader:
        time.sleep(compute)
    return {
        "seconds": time.perf_counter() - begin,
        "stalled_seconds": loader.stalled_seconds,
        "remote_rows": cache.counters.remote_rows - fetched,
    }


def _throttled_bars(found: dict[str, list[dict[str, float]]], compute: float) -> tuple[Bar, ...]:
    """The first epoch fills the cache; the others are what training is."""
    seconds, stalls = (
        {policy: float(np.median([e[key] for e in epochs[1:]])) for policy, epochs in found.items()}
        for key in ("seconds", "stalled_seconds")
    )
    if compute < 0.05:
        return (Bar("epoch of auto / of no cache", seconds["auto"] / seconds["none"], 0.6, is_least=False),)
    return (Bar("stall of auto", stalls["auto"] / seconds["auto"], 0.1, is_least=False),)


def advisor(options: Options) -> Iterator[Measured]:
    """`plait cache` from start to end on a million nodes and 20 million edges, drawing the graph included."""
    source = "rmat:scale=10,edges=2e4" if options.is_small else "rmat:scale=20,edges=2e7"
    given = ["--data", source, "--fanout", "10,25", "--batch", "1000", "--network", "1gbit"]
    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "plait.cli.main", "cache", *given], capture_output=True, text=True, check=False
    )
    seconds = time.perf_counter() - begin
    if done.returncode:
        raise InputError(f"plait cache failed: {done.stderr.strip()[-400:]}")
    line = next((text for text in done.stdout.splitlines() if "policy=" in text or "no cache" in text), "")
    bars = (Bar("seconds", seconds, 60.0, is_least=False),)
    yield {"graph": source, "arguments": given}, {"seconds": seconds, "answer": line.strip()}, bars
