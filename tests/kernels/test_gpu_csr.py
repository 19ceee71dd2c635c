"""CSR made on a device against the host's, and the order of its rows against its definition."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from plait.errors import InputError
from plait.graph import Graph
from tests.graph.hag.graphs import ODD_GRAPHS, random_graph

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when kernels are defined
pytest.importorskip("triton", reason="triton is not installed; it comes with CUDA builds of torch")

from plait.kernels.csr import gpu
from plait.kernels.relaunch import Launcher
from plait.runtime.placed import PlacedGraph

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def edges_of(graph: Graph, rng: np.random.Generator) -> torch.Tensor:
    """The graph's edges in any order."""
    target = np.repeat(np.arange(graph.num_nodes), np.diff(graph.indptr))
    edges = np.stack([graph.indices.astype(np.int64), target])
    return torch.from_numpy(edges[:, rng.permutation(edges.shape[1])]).to(DEVICE)


def rows_of(graph: Graph) -> gpu.Rows:
    return gpu.Rows(
        *(torch.from_numpy(a).to(DEVICE) for a in (graph.indptr, graph.indices)), graph.num_sources
    )


@pytest.mark.parametrize("name", ODD_GRAPHS)
def test_rows_and_transpose_are_those_of_the_host(name: str) -> None:
    graph = ODD_GRAPHS[name]
    edge_index = edges_of(graph, np.random.default_rng(0))
    rows = gpu.rows_of(edge_index, graph.num_nodes, graph.num_sources)
    np.testing.assert_array_equal(rows.indptr.cpu(), graph.indptr)
    np.testing.assert_array_equal(rows.indices.cpu(), graph.indices)
    assert rows.order is not None
    placed = edge_index[:, rows.order.long()].cpu()
    np.testing.assert_array_equal(placed[0], graph.indices)
    turned = gpu.transposed(rows)
    np.testing.assert_array_equal(turned.indptr.cpu(), graph.transpose.indptr)
    np.testing.assert_array_equal(turned.indices.cpu(), graph.transpose.indices)
    assert turned.order is not None
    np.testing.assert_array_equal(
        rows.indices[turned.order.long()].cpu(), graph.indices[graph.transpose_order]
    )


@pytest.mark.parametrize("is_read", [False, True])
@pytest.mark.parametrize("name", [*ODD_GRAPHS, "random"])
def test_items_hold_every_edge_once(name: str, is_read: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With counts read from the device and with their bounds."""
    monkeypatch.setattr(gpu, "_BOUNDED_EDGES", -1 if is_read else 1 << 20)
    graph = random_graph(np.random.default_rng(3), repeats=True) if name == "random" else ODD_GRAPHS[name]
    rows, short, most = rows_of(graph), 2, 3
    made = rows.items(short, most)
    items = made.items.cpu().numpy()
    assert len(items) == made.num_pieces + made.num_short
    seen, parts = np.zeros(graph.num_edges, int), {}
    for k, (row, begin, end, part) in enumerate(items):
        if row < 0:
            assert begin == end
            continue
        seen[begin:end] += 1
        assert graph.indptr[row] <= begin <= end <= graph.indptr[row + 1]
        is_piece = k < made.num_pieces
        assert is_piece == (graph.degrees[row] > short)
        assert end - begin <= (most if is_piece else short)
        if part >= 0:
            parts[int(part)] = (int(row), int(begin))
    assert (seen == 1).all()
    listed = [row for row in items[made.num_pieces :, 0].tolist() if row >= 0]
    assert sorted(listed) == np.flatnonzero(graph.degrees <= short).tolist()
    for row, first, last in made.splits.cpu().numpy():
        if row >= 0:
            begins = [parts[p] for p in range(first, last)]
            assert begins == [(row, graph.indptr[row] + most * k) for k in range(last - first)]
            assert len(begins) == -(-graph.degrees[row] // most) > 1
    assert not is_read or (items[:, 0] >= 0).all()


def test_rows_of_one_group_keep_their_order() -> None:
    indptr = torch.tensor([0, 3, 3, 4, 8, 12, 14, 17], device=DEVICE)
    rows = gpu.Rows(indptr, torch.zeros(17, dtype=torch.int64, device=DEVICE), 1)
    assert rows.items(8, 8).items[-7:, 0].tolist() == [0, 3, 4, 6, 5, 1, 2]


def test_norms_are_finite_where_a_node_has_no_edge() -> None:
    rows = gpu.Rows(
        torch.tensor([0, 0, 4], device=DEVICE), torch.zeros(4, dtype=torch.int64, device=DEVICE), 1
    )
    assert gpu.inverse_degrees(rows).tolist() == [0.0, 0.25]


def test_a_wrong_edge_index_is_refused() -> None:
    with pytest.raises(InputError, match=r"\[2, edges\]"):
        gpu.rows_of(torch.zeros(3, dtype=torch.int64), 3)


@pytest.mark.parametrize("short", [1, 2, 8, 33, 64])
def test_short_rows_lie_by_powers_of_two_and_in_their_order(short: int) -> None:
    rng = np.random.default_rng(short)
    degrees = rng.integers(0, 3 * short, 700)
    indptr = np.concatenate([[0], degrees.cumsum()])
    rows = gpu.Rows(torch.from_numpy(indptr).to(DEVICE), torch.zeros(indptr[-1], device=DEVICE), 1)
    made = rows.items(short, 50)
    bits = np.array([max(0, int(d) - 1).bit_length() for d in degrees])
    expected = np.argsort(np.where(degrees > short, 99, -bits), kind="stable")
    expected = np.where(degrees[expected] > short, -1, expected)
    np.testing.assert_array_equal(made.items[made.num_pieces :, 0].cpu(), expected)


def test_a_transpose_without_kept_ends_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    edge_index = torch.from_numpy(np.random.default_rng(5).integers(0, 30, (2, 200))).to(DEVICE)
    for has_loops in (False, True):
        made = []
        for most in (1 << 20, -1):
            monkeypatch.setattr(gpu, "_BOUNDED_EDGES", most)
            key, _ = gpu.pack(edge_index, 30, 30)
            rows = gpu.sorted_rows(gpu.with_loops(key, 30) if has_loops else key, 30, 30, has_loops)
            assert (rows.ends is None) == (most < 0)
            made.append(gpu.transposed(rows))
        for name in ("indptr", "indices", "order"):
            torch.testing.assert_close(getattr(made[0], name), getattr(made[1], name), rtol=0, atol=0)


class Counted(TorchDispatchMode):
    """Counts torch's operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))


def test_a_mini_batch_with_loops_is_made_in_fourteen_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both directions, loops and the order of rows: two sorts, and nothing is read."""
    launched: list[Launcher] = []
    monkeypatch.setattr(Launcher, "__call__", lambda self, *_, **__: launched.append(self))
    edge_index = torch.from_numpy(np.random.default_rng(5).integers(0, 30, (2, 200))).to(DEVICE)
    with Counted() as torchs:
        looped = PlacedGraph.of(edge_index, 30, 30).with_loops_last()
        for rows in (looped.rows, looped.transpose.rows):
            rows.items(32, 512)
    assert len(launched) == 8
    del torchs.counts["empty"]
    assert torchs.counts == {"ones": 1, "_assert_async": 1, "sort": 2, "cumsum": 2}
