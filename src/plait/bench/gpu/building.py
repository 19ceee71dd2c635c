"""The graph work on the device: edge_index to CSR, transpose and row order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from plait.bench.gpu.clock import milliseconds
from plait.bench.gpu.graphs import rmat
from plait.kernels.csr.gpu import rows_of, transposed
from plait.runtime.placed import PlacedGraph

__all__ = ["measure"]


def _is_right(edge_index: torch.Tensor, num_nodes: int) -> bool:
    """Rows and transpose hold the edges, each in its place."""
    rows = rows_of(edge_index, num_nodes)
    turned = transposed(rows)
    assert rows.order is not None
    assert turned.order is not None
    target = torch.repeat_interleave(rows.degrees.long())
    placed = edge_index[:, rows.order.long()]
    source = torch.repeat_interleave(turned.degrees.long())
    at = turned.order.long()
    return bool(
        torch.equal(placed[0], rows.indices.long())
        and torch.equal(placed[1], target)
        and torch.equal(rows.indices.long()[at], source)
        and torch.equal(target[at], turned.indices.long())
    )


def measure() -> Iterator[dict[str, Any]]:
    """One record per size: everything a training step on a new graph needs."""
    for name, scale, num_edges in (
        ("mini-batch", 16, 200_000),
        ("rmat-arxiv", 17, 2_200_000),
        ("rmat-64M", 18, 64_400_000),
    ):
        edge_index, num_nodes = rmat(scale, num_edges)
        is_right = _is_right(edge_index, num_nodes)

        def build(edge_index: torch.Tensor = edge_index, num_nodes: int = num_nodes) -> None:
            rows = rows_of(edge_index, num_nodes)
            turned = transposed(rows)
            rows.items(32, 512), turned.items(32, 512)

        def forward(edge_index: torch.Tensor = edge_index, num_nodes: int = num_nodes) -> None:
            rows_of(edge_index, num_nodes)

        def looped(edge_index: torch.Tensor = edge_index, num_nodes: int = num_nodes) -> None:
            graph = PlacedGraph.of(edge_index, num_nodes, num_nodes).with_loops_last()
            graph.rows.items(32, 512), graph.transpose.rows.items(32, 512)

        ms, csr = milliseconds(build), milliseconds(forward)
        yield {
            "kernel": "build", "graph": name, "edges": num_edges, "ms": ms, "csr_ms": csr,
            "looped_ms": milliseconds(looped),
            "error": 0.0 if is_right else 1.0,
        }  # fmt: skip
