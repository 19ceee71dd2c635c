"""plait hag --device cuda: one product by torch's CSR, plait's CSR and a form, checked, then timed.

Backward is the product with the transposed matrix, built beforehand for all: torch's own backward would
build it again every time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from plait.errors import InputError
from plait.graph import Graph, hag
from plait.kernels.csr.coalesced import torch_csr
from plait.kernels.partial import Sums, partial_sums
from plait.kernels.spmm import Pattern, spmm
from plait.measure import Record, environment, time_calls
from plait.measure.device import clock_of

__all__ = ["KIND", "gain", "run"]

KIND = "bench-products"
_MOST_ERROR = 1e-5
_SECONDS = 0.5


def run(
    graph: Graph,
    forward: hag.Schedule,
    backward: hag.Schedule,
    widths: Sequence[int],
    device: str,
    case: dict[str, object],
) -> Iterator[Record]:
    """A record of every width and way, as each is taken."""
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: torch sees no GPU here; leave the option out to time the CPU")
    where = environment()
    ways = {"forward": (graph, Sums(forward)), "backward": (graph.transpose, Sums(backward))}
    for width in widths:
        for way, (matrix, sums) in ways.items():
            result = _compared(matrix, sums, width, device)
            yield Record(KIND, case | {"width": width, "way": way, "device": device}, result, where)


def gain(record: Record) -> float:
    """How many times faster the form is than the faster CSR."""
    sides: Any = record.result["sides"]
    csr = min(sides[name]["median_seconds"] for name in ("torch-csr", "csr"))
    return float(csr / sides["hag"]["median_seconds"])


def _compared(graph: Graph, sums: Sums, width: int, device: str) -> dict[str, object]:
    x = torch.from_numpy(np.random.default_rng(width).standard_normal((graph.num_sources, width), np.float32))
    x = x.to(device)
    out = x.new_empty((graph.num_nodes, width))
    matrix = _torch_csr(graph, device)
    pattern = Pattern(graph.indptr, graph.indices, graph.num_sources)
    sides: dict[str, Callable[[], torch.Tensor]] = {
        "torch-csr": lambda: matrix @ x,
        "csr": lambda: spmm(pattern, x, out),
        "hag": lambda: partial_sums(sums, x, out),
    }
    expected = matrix.double() @ x.double()
    errors = {}
    for name, call in sides.items():
        out.fill_(float("nan"))
        difference = call().double() - expected
        errors[name] = float(difference.norm() / expected.norm().clamp_min(1e-30))
        if not errors[name] <= _MOST_ERROR:
            raise InputError(
                f"{name} at width {width} differs from float64 by {errors[name]:.1e}; no time is taken of a "
                f"wrong result. Report the graph"
            )
    timing = time_calls(sides, budget_seconds=_SECONDS, clock=clock_of(device))
    return {
        "sides": {
            name: {"median_seconds": t.median, "p20": t.p20, "p80": t.p80, "repeats": t.repeats,
                   "error": errors[name]}
            for name, t in timing.items()
        }
    }  # fmt: skip


def _torch_csr(graph: Graph, device: str) -> torch.Tensor:
    indptr, indices = (np.asarray(a, np.int32) for a in (graph.indptr, graph.indices))
    return torch_csr(indptr, indices, torch.ones(graph.num_edges), graph.num_sources).to(device)
