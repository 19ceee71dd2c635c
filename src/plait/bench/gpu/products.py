"""Sparse products against torch's CSR (cuSPARSE): widths, weights, backward, maxima."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from plait.bench.gpu.clock import fastest_first, milliseconds, relative_error, replayed_milliseconds
from plait.kernels.csr.gpu import Rows, rows_of, transposed
from plait.kernels.spmm.gpu import Tiles, extremum, extremum_gather, spmm, tiles_of

__all__ = ["WIDTHS", "candidates", "measure", "sweep"]

WIDTHS = (16, 32, 64, 128, 256)
ODD_WIDTHS = (1, 7, 33, 100, 602, 1024)
CUTS = ((8, 256), (16, 512), (32, 256), (32, 512), (64, 512), (64, 1024))
"""(longest short row, edges of a piece) worth a try."""


def _cusparse(rows: Rows, weights: torch.Tensor) -> torch.Tensor:
    return torch.sparse_csr_tensor(
        rows.indptr, rows.indices, weights, (rows.num_rows, rows.num_columns), check_invariants=False
    )


def _gathered_bytes(rows: Rows, width: int, element_size: int, is_weighted: bool) -> int:
    """Bytes of all operands and results, each gathered row counted as often as it is asked for."""
    per_edge = width * element_size + 4 + (4 if is_weighted else 0)
    return rows.num_edges * per_edge + rows.num_rows * width * element_size


def measure(name: str, edge_index: torch.Tensor, num_nodes: int) -> Iterator[dict[str, Any]]:
    """One record per width, with and without weights; then forward and backward, 16-bit and maxima at 128."""
    rows = rows_of(edge_index, num_nodes)
    ones = torch.ones(rows.num_edges, device="cuda")
    weights = torch.rand(rows.num_edges, device="cuda")
    for width in (*WIDTHS, *ODD_WIDTHS):
        x = torch.randn(num_nodes, width, device="cuda")
        out = torch.full_like(x, float("nan"))
        for edge in (None, weights) if width in WIDTHS else (None,):
            matrix = _cusparse(rows, ones if edge is None else edge)
            error = relative_error(spmm(rows, x, out, edge=edge), matrix @ x)
            peer = milliseconds(functools.partial(torch.mm, matrix, x))
            call = functools.partial(spmm, rows, x, out, edge=edge)
            own = milliseconds(call)
            moved = _gathered_bytes(rows, width, 4, edge is not None)
            yield {
                "kernel": "spmm" if edge is None else "spmm-weighted", "graph": name, "width": width,
                "ms": own, "GB/s": moved / own / 1e6, "peer": "cusparse", "peer_ms": peer,
                "ratio": peer / own, "replayed_ms": replayed_milliseconds(call), "error": error,
            }  # fmt: skip
    yield from _step(name, rows)
    yield from _half(name, rows)


def _step(name: str, rows: Rows, width: int = 128) -> Iterator[dict[str, Any]]:
    """Forward and backward of a sum, and of a maximum."""
    turned = transposed(rows)
    x, grad = (torch.randn(rows.num_rows, width, device="cuda") for _ in range(2))
    out, best, to_x = (torch.empty_like(x) for _ in range(3))
    ties = torch.empty_like(x, dtype=torch.int32)

    def step() -> None:
        spmm(rows, x, out)
        spmm(turned, grad, to_x)

    def largest() -> None:
        extremum(rows, x, best, ties, "max")
        extremum_gather(turned, x, best, grad / ties, to_x)

    step()
    error = relative_error(to_x, _cusparse(turned, torch.ones(rows.num_edges, device="cuda")) @ grad)
    yield {"kernel": "spmm fwd+bwd", "graph": name, "width": width, "ms": milliseconds(step), "error": error}
    largest()
    error = _largest_error(rows, x, grad, best, to_x)
    own = milliseconds(lambda: extremum(rows, x, best, ties, "max"))
    yield {"kernel": "max", "graph": name, "width": width, "ms": own, "error": error}
    yield {
        "kernel": "max fwd+bwd",
        "graph": name,
        "width": width,
        "ms": milliseconds(largest),
        "error": error,
    }


def _largest_error(
    rows: Rows, x: torch.Tensor, grad: torch.Tensor, best: torch.Tensor, to_x: torch.Tensor, columns: int = 4
) -> float:
    """The larger error of maxima and their gradient, in a few columns, against sums over the edge list."""
    source, target = rows.indices.long(), torch.repeat_interleave(rows.degrees.long())
    x, grad = x[:, :columns].double(), grad[:, :columns].double()
    seen = x[source]
    index = target[:, None].expand(-1, columns)
    want = torch.zeros_like(x).scatter_reduce(0, index, seen, "amax", include_self=False)
    attains = seen == want[target]
    ties = torch.zeros_like(x).index_add(0, target, attains.double()) + (want == 0)
    share = (grad / ties.clamp(min=1))[target]
    wanted = torch.zeros_like(x).index_add(0, source, torch.where(attains, share, 0.0))
    return max(relative_error(best[:, :columns], want), relative_error(to_x[:, :columns], wanted))


def _half(name: str, rows: Rows, width: int = 128) -> Iterator[dict[str, Any]]:
    x = torch.randn(rows.num_rows, width, device="cuda").bfloat16()
    out = torch.full_like(x, float("nan"))
    matrix = _cusparse(rows, torch.ones(rows.num_edges, device="cuda"))
    error = relative_error(spmm(rows, x, out), matrix @ x.float())
    own = milliseconds(lambda: spmm(rows, x, out))
    moved = _gathered_bytes(rows, width, 2, False)
    yield {
        "kernel": "spmm bf16",
        "graph": name,
        "width": width,
        "ms": own,
        "GB/s": moved / own / 1e6,
        "error": error,
    }


def candidates(width: int) -> list[Tiles]:
    """Tile sizes worth a try at a width; those that differ in `short` and `most` share their code."""
    found = []
    for columns in sorted({width, *((width // 2, 64) if width >= 128 else ())}):
        for per_warp in (256, 512, 1024):
            for ahead in (1, 2, 4):
                for warps in (1, 2, 4) if columns == width else (1, 2):
                    slots = per_warp * warps // columns
                    if per_warp * ahead <= 2048 and per_warp * ahead >= 512 and 2 <= slots <= 64:
                        found.append(Tiles(32, 512, columns, slots, ahead, warps))
    return found


def sweep(name: str, edge_index: torch.Tensor, num_nodes: int) -> Iterator[dict[str, Any]]:
    """The milliseconds of every candidate and cut, fastest first."""
    rows = rows_of(edge_index, num_nodes)
    matrix = _cusparse(rows, torch.ones(rows.num_edges, device="cuda"))
    for width in WIDTHS:
        x = torch.randn(num_nodes, width, device="cuda")
        out = torch.empty_like(x)
        times = {}
        for tiles in candidates(width):
            for short, most in CUTS:
                cut = replace(tiles, short=short, most=most)
                times[cut] = milliseconds(functools.partial(spmm, rows, x, out, tiles=cut), 3, 1, 1)
        yield {
            "sweep": "spmm", "graph": name, "width": width, "default": str(tiles_of(width)),
            "peer_ms": milliseconds(functools.partial(torch.mm, matrix, x)),
            "default_ms": milliseconds(functools.partial(spmm, rows, x, out)),
            "times": fastest_first(times),
        }  # fmt: skip
