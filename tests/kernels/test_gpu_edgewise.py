"""Rows of blocks of edges on a GPU against the reference: on one where there is one, else interpreted."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from plait.kernels.edgewise import reference
from tests.graph.hag.graphs import ODD_GRAPHS

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when kernels are defined
pytest.importorskip("triton", reason="triton is not installed; it comes with CUDA builds of torch")

from plait.kernels.edgewise import gpu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("width", [1, 130])
@pytest.mark.parametrize("name", ODD_GRAPHS)
def test_sums_of_both_ends_and_who_attained_an_extremum(name: str, width: int) -> None:
    graph, rng = ODD_GRAPHS[name], np.random.default_rng(0)
    near, share = (rng.standard_normal((graph.num_nodes, width)) for _ in range(2))
    far, targets = rng.standard_normal((graph.num_sources, width)), graph.edge_rows()
    rows = rng.integers(0, 2, (graph.num_edges, width)).astype(np.float64)
    best = rng.integers(0, 2, (graph.num_nodes, width)).astype(np.float64)
    given = {"targets": targets, "sources": graph.indices, "near": near, "far": far}
    given |= {"rows": rows, "best": best, "share": share}
    placed = {name: torch.from_numpy(np.ascontiguousarray(value)).to(DEVICE) for name, value in given.items()}
    ends = [placed[name] for name in ("targets", "sources", "near", "far")]
    expected = reference.pair(graph.indptr, graph.indices, near, far, 0, graph.num_nodes)
    made, again = (gpu.pair(*ends, torch.full_like(placed["rows"], float("nan"))) for _ in range(2))
    assert torch.equal(made, again)
    np.testing.assert_array_equal(made.cpu(), expected)
    parts = [placed[name] for name in ("targets", "rows", "best", "share")]
    found = gpu.attained(*parts, torch.full_like(placed["rows"], float("nan")))
    np.testing.assert_array_equal(found.cpu(), reference.marked(targets, best, rows, share))
