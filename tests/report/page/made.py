"""Records made up for the page's tests, in the forms `plait bench` and `plait explain` write."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from plait.measure import Record, Timing

ENVIRONMENT = {"cpu": "made up", "threads": 2, "torch": "2.x", "commit": "0123456789ab", "memory_bytes": 8e9}
STREAM = 20e9
# seconds per byte of each way, relative to a copy, and a fixed cost of a call
WAYS = {"torch-csr": (2.0, 6e-6), "torch-coo": (6.0, 9e-6), "pyg": (5.0, 4e-5), "plait": (1.3, 1e-5)}


def write(path: Path, records: Iterable[Record]) -> None:
    """A file of these records."""
    path.write_text("".join(record.to_json() + "\n" for record in records))


def timing(seconds: float, rng: np.random.Generator, repeats: int = 15) -> Timing:
    """A median of about `seconds`, with the long right tail timings have."""
    return Timing(tuple(seconds * (1.0 + 0.04 * rng.exponential(size=repeats))), 3)


def op_record(
    op: str, variant: str, seconds: float, rng: np.random.Generator, flops: float, moved: float, **case: Any
) -> Record:
    """A timed record of `bench ops`."""
    case = {"op": op, "direction": "forward", "device": "cpu", "dtype": "float32", "suite": "quick"} | case
    group = hashlib.sha256(json.dumps(case, sort_keys=True).encode()).hexdigest()[:12]
    taken = timing(seconds, rng)
    result = {
        "status": "ok",
        "seconds": taken.to_dict(),
        "error": 1e-7,
        "flops": flops,
        "bytes_least": moved,
        "bytes_most": 2 * moved,
        "gbytes_per_s": moved / taken.median / 1e9,
        "bandwidth_share": moved / taken.median / STREAM,
        "peak_bytes": int(moved),
        "group": group,
    }
    return Record("op", case | {"variant": variant}, result, ENVIRONMENT)


def untimed(op: str, variant: str, status: str, reason: str) -> Record:
    """A record of what has no time."""
    case = {"op": op, "variant": variant, "direction": "forward", "device": "cpu", "edges": 1000, "width": 8}
    return Record("op", case, {"status": status, "reason": reason, "group": f"{op}-none"}, ENVIRONMENT)


def ops(rng: np.random.Generator) -> Iterator[Record]:
    """A small suite: two operations over edges and widths, a dense product, a sort, a sweep of densities."""
    for edges in (1_000, 10_000, 100_000, 1_000_000):
        for width in (1, 16, 64, 256):
            sizes = {"edges": edges, "nodes": edges // 16, "degree": 16.0, "width": width, "law": "uniform"}
            moved = 4.0 * width * (edges + edges / 16) + 12.0 * edges
            for op in ("spmm", "scatter_add"):
                for name, (cost, start) in WAYS.items():
                    # short rows make plait's vectors idle
                    extra = 2.5 if name == "plait" and width == 1 else 1.0
                    seconds = start + extra * cost * moved / STREAM
                    yield op_record(op, name, seconds, rng, 2.0 * edges * width, moved, **sizes)
        yield op_record("sort", "torch", 3e-8 * edges, rng, 0.0, 16.0 * edges, edges=edges, nodes=edges // 16)
    for inner in (16, 64, 256):
        flops, moved = 2.0 * 20_000 * inner * 64, 4.0 * (20_000 * (inner + 64) + 64 * inner)
        for name, rate in (("torch", 90e9), ("plait", 110e9)):
            yield op_record("mm", name, flops / rate, rng, flops, moved, nodes=20_000, inner=inner, width=64)
    yield from _densities(rng)
    yield untimed("spmm", "torch_scatter", "absent", "torch_scatter is not installed")
    yield untimed("gather", "pyg", "wrong", "output differs by 3.1e-01")
    yield untimed("segment_reduce", "torch", "unsupported", "no gradient here")


def _densities(rng: np.random.Generator) -> Iterator[Record]:
    nodes = 2_000
    for width in (8, 64, 256):
        for sparsity in (0.5, 0.9, 0.97, 0.99, 0.999, 0.9999):
            edges = round(nodes * nodes * (1.0 - sparsity))
            sizes = {
                "edges": edges,
                "nodes": nodes,
                "width": width,
                "sparsity": sparsity,
                "degree": edges / nodes,
            }
            flops, moved = 2.0 * edges * width, 12.0 * edges + 4.0 * width * nodes * 2
            yield op_record("spmm", "dense", 2.0 * nodes**2 * width / 90e9, rng, flops, moved, **sizes)
            yield op_record("spmm", "torch-csr", 2e-5 + flops / 6e9, rng, flops, moved, **sizes)
            yield op_record("spmm", "plait", 1e-5 + flops / 12e9, rng, flops, moved, **sizes)


def layers(rng: np.random.Generator) -> Iterator[Record]:
    """A grid of two layers on three graphs, one answer wrong."""
    for graph, edges in (("large", 900_000), ("small", 9_000), ("middle", 90_000)):
        for layer in ("gcn", "gin"):
            case = {"graph": graph, "layer": layer, "width_in": 64, "width_out": 32, "mode": "training"}
            peers: dict[str, dict[str, object]] = {
                name: {"status": "timed", **timing(edges * cost * 1e-9, rng).to_dict()}
                for name, cost in (
                    ("pyg-default", 60.0),
                    ("dgl", 20.0),
                    ("plait", 8.0 if layer == "gcn" else 25.0),
                )
            }
            peers["pyg"] = {"status": "same", "as": "pyg-default"}
            if graph == "middle" and layer == "gin":
                peers["plait"] = {"status": "wrong", "reason": "gradient of x differs by 3.4e-03"}
            yield Record(
                "bench-layers",
                case | {"num_edges": edges},
                {"peers": peers, "busy_elsewhere": 0.01},
                ENVIRONMENT,
            )


def models(rng: np.random.Generator) -> Iterator[Record]:
    """One model on one graph, trained once."""
    case = {"graph": "small", "model": "sage", "epochs": 200, "num_edges": 9_000}
    times = {"pyg-default": 4.0, "plait": 1.0}
    peers = {name: {"status": "timed", **timing(t, rng, 1).to_dict()} for name, t in times.items()}
    yield Record("bench-models", case, {"peers": peers}, ENVIRONMENT)


def loop_record(name: str, threads: int, pyg: float, plait: float, repeats: int = 9) -> Record:
    """One loop of `bench loops` whose samples are all alike."""
    times = {"pyg": pyg, "plait": plait}
    peers = {
        side: {"status": "timed", "median_seconds": t, "repeats": repeats, "samples_seconds": [t] * repeats}
        for side, t in times.items()
    }
    case = {"loop": name, "threads": threads, "graph": "small", "num_edges": 9_000}
    return Record("bench-loops", case, {"peers": peers, "ratio": pyg / plait}, ENVIRONMENT)


def loops(rng: np.random.Generator) -> Iterator[Record]:
    """One loop on one thread and on two."""
    for threads in (1, 2):
        yield loop_record("new features", threads, 4e-3 / threads, 2e-3 / threads * rng.uniform(0.9, 1.1))


def plans(rng: np.random.Generator) -> Iterator[Record]:
    """Two layers with three candidates each; in one the planner was wrong."""
    for layer, times in (("gcn", (1e-3, 2e-3, 3e-3)), ("sgc", (3e-3, 2e-3, 5e-3))):
        case = {"graph": "small", "layer": layer, "width_in": 64, "width_out": 32, "mode": "training"}
        candidates = [
            {"candidate": f"A @ X{k}", "predicted_seconds": 1.1e-3 * (k + 1), **timing(t, rng).to_dict()}
            for k, t in enumerate(times)
        ]
        result = {"regret": times[0] / min(times), "prediction_error": 0.1, "candidates": candidates}
        yield Record("bench-plans", case, result, ENVIRONMENT)


def predicted(rng: np.random.Generator) -> Iterator[Record]:
    """A layer with its price and those of its steps, and one that is not planned."""
    case = {"graph": "small", "layer": "gcn", "width_in": 64, "width_out": 32, "mode": "training"}
    steps = [
        {"op": "gemm", "backend": "plait", "flops": 1e6, "bytes_least": 1e5, "predicted_seconds": 1e-4}
        | {"measured_seconds": 2e-4}
    ]
    result = {"predicted_seconds": 1e-3, "steps": steps, **timing(1.1e-3, rng).to_dict()}
    yield Record("bench-predict", case, result, ENVIRONMENT)
    yield Record(
        "bench-predict", case | {"layer": "odd"}, {"reason": "not planned", "steps": []}, ENVIRONMENT
    )


def plan() -> dict[str, Any]:
    """A plan of one layer as `Plan.to_dict` gives it, analysed."""

    def step(phase: str, op: str, seconds: float, measured: float | None) -> dict[str, Any]:
        return {
            "phase": phase,
            "op": op,
            "is_transposed": phase == "backward",
            "reads": {"matrix": "A", "x": "X"},
            "rows": 100,
            "columns": 8,
            "backend": "plait",
            "flops": 1e6,
            "bytes_least": 2e5,
            "bytes_gathered": 4e5,
            "seconds": seconds,
            "share": 0.5,
            "because": "vector rows",
            "measured_seconds": measured,
            "measured_peak_bytes": None,
        }

    layer = {
        "layer": "convs.0 GCNConv",
        "expression": "(A @ X) @ W",
        "form": "edges",
        "because": "2 x cheaper",
        "seconds": 2e-4,
        "hoisted": [step("once", "spmm", 3e-4, None)],
        "steps": [step("forward", "gemm", 1e-4, 1.2e-4), step("backward", "spmm", 1e-4, 9e-5)],
        "rejected": [
            {"candidate": "A @ (X @ W)", "seconds": 4e-4, "peak_bytes": 10, "why": "2 x the chosen plan"},
            {"candidate": "never", "seconds": None, "peak_bytes": None, "why": "beaten"},
        ],
    }
    skipped = [{"layer": "convs.1 OddConv", "reason": "edge features"}]
    return {"format": "plait-plan-1", "seconds": 2e-4, "layers": [layer], "not_planned": skipped, "notes": []}
