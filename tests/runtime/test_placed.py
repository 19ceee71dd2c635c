"""A graph made on a device against the host's; on a CPU in Triton's interpreter."""

from __future__ import annotations

import functools
import os
from typing import Any

import numpy as np
import pytest
import torch

from plait.graph import Graph, generate
from plait.graph.stats import FIRST_WINDOW_BITS
from tests.graph.hag.graphs import ODD_GRAPHS
from tests.graph.reference import footprint

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when kernels are defined
pytest.importorskip("triton", reason="triton is not installed; it comes with CUDA builds of torch")

from plait.errors import GraphError
from plait.pyg.operators import Operator, propagate
from plait.runtime import placed
from plait.runtime.placed import PlacedGraph

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GRAPHS = ODD_GRAPHS | {"random": generate.erdos(40, 300, 3)}


def with_loops(graph: Graph) -> Graph:
    """Some nodes with one loop, some with two."""
    some = np.arange(min(graph.num_nodes, graph.num_sources))[::3]
    rows = graph.edge_rows()
    source = np.concatenate([graph.indices, some, some[::2]])
    target = np.concatenate([rows, some, some[::2]])
    return Graph.from_edge_index(source, target, graph.num_nodes, graph.num_sources)


def placed_of(graph: Graph, seed: int = 0) -> tuple[PlacedGraph, Graph]:
    """The graph with its edges in any order, on the device and on the host."""
    rows = graph.edge_rows()
    mixed = np.random.default_rng(seed).permutation(graph.num_edges)
    edges = np.stack([graph.indices[mixed], rows[mixed]]).astype(np.int64)
    host = Graph.from_edge_index(edges[0], edges[1], graph.num_nodes, graph.num_sources)
    return PlacedGraph.of(torch.from_numpy(edges).to(DEVICE), graph.num_nodes, graph.num_sources), host


@functools.cache
def with_loops_placed(name: str) -> tuple[PlacedGraph, Graph]:
    return placed_of(with_loops(GRAPHS[name]))


def same(ours: PlacedGraph, theirs: Graph) -> None:
    whole = ours.trimmed()
    np.testing.assert_array_equal(whole.rows.indptr.cpu(), theirs.indptr)
    np.testing.assert_array_equal(whole.indices.cpu(), theirs.indices)
    np.testing.assert_array_equal(whole.edge_rows().cpu(), theirs.edge_rows())
    np.testing.assert_array_equal(whole.degrees.cpu(), theirs.degrees)
    if whole.order is not None:
        order = np.arange(theirs.num_edges) if theirs.order is None else theirs.order
        np.testing.assert_array_equal(whole.order.cpu(), order)
    turned = ours.transpose.trimmed()
    np.testing.assert_array_equal(turned.rows.indptr.cpu(), theirs.transpose.indptr)
    np.testing.assert_array_equal(turned.indices.cpu(), theirs.transpose.indices)
    count = turned.num_edges
    np.testing.assert_array_equal(ours.transpose_order[:count].cpu(), theirs.transpose_order)
    np.testing.assert_array_equal(ours.out_degrees.cpu(), theirs.out_degrees)


@pytest.mark.parametrize("is_read", [False, True])
@pytest.mark.parametrize("name", GRAPHS)
def test_the_same_graph_with_and_without_loops(
    name: str, is_read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placed, "BOUNDED_EDGES", -1 if is_read else 1 << 20)
    for graph in (GRAPHS[name], with_loops(GRAPHS[name])):
        ours, theirs = placed_of(graph)
        same(ours, theirs)
        bare = ours.without_self_loops()
        assert bare.rows.has_rest != is_read or bare is ours
        same(bare, theirs.without_self_loops())
        if graph.is_square:
            more, order = bare.with_more_self_loops(2)
            expected, listed = theirs.without_self_loops().with_more_self_loops(2)
            np.testing.assert_array_equal(more.trimmed().indices.cpu(), expected.indices)
            np.testing.assert_array_equal(more.rows.indptr.cpu(), expected.indptr)
            looped, own = ours.with_loops_last(), theirs.without_self_loops().with_more_self_loops(1)[0]
            np.testing.assert_array_equal(looped.trimmed().indices.cpu(), own.indices)
            np.testing.assert_array_equal(looped.rows.indptr.cpu(), own.indptr)
            turned = looped.transpose.trimmed()
            np.testing.assert_array_equal(turned.indices.cpu(), own.transpose.indices)
            if not is_read:
                continue
            listed = np.arange(expected.num_edges) if listed is None else listed
            np.testing.assert_array_equal(order.cpu(), listed)


def footprint_of(graph: Graph) -> Any:
    return footprint(graph.indices, 2**FIRST_WINDOW_BITS)


@pytest.mark.parametrize("name", GRAPHS)
def test_statistics_are_those_of_the_host(name: str) -> None:
    ours, theirs = placed_of(GRAPHS[name])
    for mine, other in ((ours, theirs), (ours.transpose, theirs.transpose)):
        np.testing.assert_allclose(mine.stats.footprint, footprint_of(other))
        assert (mine.stats.degree_max, mine.stats.num_empty_rows) == (
            other.stats.degree_max,
            other.stats.num_empty_rows,
        )
        assert mine.stats.skew == pytest.approx(other.stats.skew)


def test_statistics_of_a_longer_list() -> None:
    graph = generate.rmat(6, 3000, 5)
    ours, theirs = placed_of(graph)
    assert len(ours.stats.footprint) > 3
    np.testing.assert_allclose(ours.stats.footprint, footprint_of(theirs))


@pytest.mark.parametrize("normalise", ["none", "symmetric", "mean", "degree", "laplacian"])
@pytest.mark.parametrize("loops", ["none", "remaining", "replace", "add"])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_operators_are_those_of_the_host(normalise: str, loops: str, is_weighted: bool) -> None:
    options: Any = (("kind", "sym"), ("by", "source"))
    for name, graph in GRAPHS.items():
        if not graph.is_square:
            continue
        ours, theirs = with_loops_placed(name)
        for fill in (1.0, 2.0):
            operator = Operator(loops, fill, normalise, options)
            weight = torch.rand(theirs.num_edges, dtype=torch.float64) if is_weighted else None
            on_device = None if weight is None else weight.to(DEVICE)
            mine = propagate(operator, ours, on_device, torch.float64)  # type: ignore[arg-type]
            other = propagate(operator, theirs, weight, torch.float64)
            for part in ("p", "l", "q"):
                one, two = getattr(mine, part), getattr(other, part)
                assert (one is None) == (two is None), part
                if two is not None:
                    torch.testing.assert_close(one.cpu(), two, equal_nan=True)
            if is_weighted and other.edge_weight is not None:
                torch.testing.assert_close(mine.edge_weight.cpu(), other.edge_weight, equal_nan=True)  # type: ignore[union-attr]
            known = operator.has_unit_loops(is_weighted)
            if known is not None and other.l is not None:
                assert known == bool((other.l == 1).all())


def test_edges_out_of_range_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for edges in ([[0, 3], [1, 0]], [[0, 1], [1, 3]], [[-1, 1], [1, 0]]):
        monkeypatch.setattr(placed, "BOUNDED_EDGES", -1)
        with pytest.raises(GraphError, match="edge_index"):
            PlacedGraph.of(torch.tensor(edges, device=DEVICE), 3, 3)
        if DEVICE == "cpu":  # on a GPU the device's own assertion ends the process' use of it
            monkeypatch.setattr(placed, "BOUNDED_EDGES", 1 << 20)
            with pytest.raises(RuntimeError):
                PlacedGraph.of(torch.tensor(edges, device=DEVICE), 3, 3)


def test_swapped_edges_and_strides() -> None:
    edges = torch.tensor([[0, 2], [1, 2], [2, 0]], device=DEVICE).t()
    ours = PlacedGraph.of(edges, 3, 3, is_swapped=True)
    source, target = edges.cpu().numpy()
    same(ours, Graph.from_edge_index(target, source, 3, 3))


def test_edges_listed_target_by_target_need_no_sort() -> None:
    """As a sampler lists them: sources in any order inside a row, the last nodes without edges."""
    rng = np.random.default_rng(2)
    degrees = np.concatenate([rng.integers(0, 6, 20), np.zeros(9, np.int64)])
    indptr = np.concatenate([[0], degrees.cumsum()]).astype(np.int32)
    source, target = rng.integers(0, 29, indptr[-1]), np.repeat(np.arange(29), degrees)
    source[::5] = target[::5]
    ours = PlacedGraph.listed(torch.from_numpy(source).to(DEVICE), torch.from_numpy(indptr).to(DEVICE))
    theirs = Graph.from_edge_index(source, target, 29, 29)
    np.testing.assert_array_equal(ours.rows.indptr.cpu(), theirs.indptr)
    np.testing.assert_array_equal(ours.edge_rows().cpu(), theirs.edge_rows())
    assert ours.order is not None
    np.testing.assert_array_equal(ours.order.cpu(), np.arange(len(source)))
    turned, order = ours.transpose, ours.transpose_order.cpu().numpy()
    np.testing.assert_array_equal(turned.rows.indptr.cpu(), theirs.transpose.indptr)
    np.testing.assert_array_equal(turned.indices.cpu(), theirs.transpose.indices)
    np.testing.assert_array_equal(source[order], theirs.transpose.edge_rows())
    same(ours.without_self_loops(), theirs.without_self_loops())
    np.testing.assert_array_equal(
        ours.with_loops_last().trimmed().indices.cpu(),
        theirs.without_self_loops().with_more_self_loops(1)[0].indices,
    )
