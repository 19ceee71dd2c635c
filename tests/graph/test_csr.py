"""csr.py: Graph against a dictionary of lists; symmetry, transposes, self loops; what is refused and how."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
import weakref

import numpy as np
import pytest
from hypothesis import given, settings

from plait.errors import GraphError, PlaitError
from plait.graph import Graph
from plait.graph import csr as csr_module

from .reference import as_lists, dense, edge_lists, lists_of, random_graph

many = settings(max_examples=150, deadline=None)


@many
@given(edge_lists(square=False))
def test_any_edge_list_becomes_the_sorted_lists_of_its_targets(case):
    src, dst, rows, columns = case
    graph = Graph.from_edge_index(src, dst, rows, columns)
    assert lists_of(graph) == as_lists(src, dst, rows)
    assert (graph.num_nodes, graph.num_sources, graph.num_edges) == (rows, columns, src.size)
    assert graph.indptr.dtype == graph.indices.dtype == np.int32
    np.testing.assert_array_equal(graph.degrees, [len(row) for row in lists_of(graph).values()])
    np.testing.assert_array_equal(graph.out_degrees, np.bincount(src, minlength=columns))


@many
@given(edge_lists(square=False))
def test_order_leads_back_to_the_callers_edges(case):
    src, dst, rows, columns = case
    graph = Graph.from_edge_index(src, dst, rows, columns)
    order = np.arange(src.size) if graph.order is None else graph.order
    np.testing.assert_array_equal(src[order], graph.indices)
    np.testing.assert_array_equal(dst[order], graph.edge_rows())
    assert sorted(order.tolist()) == list(range(src.size))


@many
@given(edge_lists(square=False))
def test_the_transpose_is_the_transpose_and_carries_edge_values(case):
    src, dst, rows, columns = case
    graph = Graph.from_edge_index(src, dst, rows, columns)
    flipped = graph.transpose
    np.testing.assert_array_equal(dense(flipped), dense(graph).T)
    assert flipped.transpose is graph
    assert graph.transpose is flipped
    along = graph.transpose_order
    np.testing.assert_array_equal(graph.edge_rows()[along], flipped.indices)
    np.testing.assert_array_equal(graph.indices[along], flipped.edge_rows())
    back = flipped.transpose_order
    np.testing.assert_array_equal(along[back], np.arange(src.size))
    if flipped is not graph:
        named = np.arange(src.size) if flipped.order is None else flipped.order
        np.testing.assert_array_equal(dst[named], flipped.indices)


@pytest.mark.parametrize("seed", range(4))
def test_edges_listed_by_target_give_the_same_graph_and_transpose(seed):
    rng = np.random.default_rng(seed)
    num_nodes, targets = 30, 20
    degrees = rng.integers(0, 6, targets) * (rng.random(targets) < 0.8)
    source = rng.integers(0, num_nodes, degrees.sum())  # with repeats and self loops, rows unsorted
    pointer = np.concatenate([[0], np.cumsum(degrees)])
    graph = Graph.from_grouped(source, pointer, num_nodes)
    expected = Graph.from_edge_index(source, np.repeat(np.arange(targets), degrees), num_nodes)
    for made, wanted in ((graph, expected), (graph.transpose, expected.transpose)):
        np.testing.assert_array_equal(made.indptr, wanted.indptr)
        np.testing.assert_array_equal(made.indices, wanted.indices)
        np.testing.assert_array_equal(made.order, wanted.order)
    np.testing.assert_array_equal(graph.transpose_order, expected.transpose_order)
    assert graph.transpose.transpose is graph


def test_the_head_of_a_graph_is_that_of_its_first_edges_or_nothing():
    source, pointer = np.array([2, 1, 3, 0, 4, 5]), np.array([0, 2, 4, 6])
    target = np.repeat(np.arange(3), 2)
    graph = Graph.from_grouped(source, pointer, 6)
    head = graph.head(4, 4)
    expected = Graph.from_edge_index(source[:4], target[:4], 4)
    np.testing.assert_array_equal(head.indptr, expected.indptr)
    np.testing.assert_array_equal(head.indices, expected.indices)
    np.testing.assert_array_equal(head.order, expected.order)
    assert graph.head(4, 3) is None  # cuts a row
    assert graph.head(3, 4) is None  # node 3 is a source of these edges
    assert graph.head(7, 6) is None
    assert graph.head(6, 0).num_edges == 0


def test_what_was_derived_of_one_graph_is_derived_of_the_next():
    first, second = (Graph.from_edge_index([0, 1, 2], [1, 1, 0], 4) for _ in range(2))
    _ = first.without_self_loops().transpose, first.degrees, first.stats
    second.anticipate(first)
    assert {"degrees", "_without_self_loops"} <= set(vars(second))
    assert "transpose" in vars(second.without_self_loops())
    assert not {"stats", "transpose"} & set(vars(second))
    loopless = Graph.from_edge_index([0, 1], [1, 2], 4)
    assert loopless.without_self_loops() is loopless
    _ = loopless.transpose
    third = Graph.from_edge_index([0, 1, 2], [1, 1, 0], 4)
    third.anticipate(loopless)  # one that had no loops to drop, before one that has
    assert "transpose" in vars(third.without_self_loops())
    loopless.anticipate(third)


def test_a_graph_and_its_transpose_are_freed_without_the_collector():
    graph = Graph.from_edge_index([0, 1, 1], [1, 2, 2], 4)
    gone = weakref.ref(graph.transpose)
    gc.disable()
    try:
        del graph
        assert gone() is None
    finally:
        gc.enable()


def test_transpose_order_is_the_same_whether_asked_before_or_after_the_transpose():
    first, second = random_graph(1), random_graph(1)
    _ = first.transpose
    np.testing.assert_array_equal(first.transpose_order, second.transpose_order)
    np.testing.assert_array_equal(np.sort(second.transpose_order), np.arange(second.num_edges))


@many
@given(edge_lists())
def test_symmetry_is_exact_with_multiplicities(case):
    src, dst, rows, _ = case
    graph = Graph.from_edge_index(src, dst, rows)
    assert graph.is_symmetric == bool((dense(graph) == dense(graph).T).all())
    doubled = Graph.from_edge_index(np.concatenate([src, dst]), np.concatenate([dst, src]), rows)
    assert doubled.is_symmetric
    assert doubled.transpose is doubled


def test_one_missing_copy_of_a_repeated_edge_breaks_symmetry():
    assert Graph.from_edge_index([0, 0, 1, 1], [1, 1, 0, 0], 2).is_symmetric
    assert not Graph.from_edge_index([0, 0, 1], [1, 1, 0], 2).is_symmetric


def test_two_node_sets_of_one_size_are_not_called_symmetric_by_shape_alone():
    assert not Graph.from_edge_index([0, 1], [1, 2], 3, 2).is_symmetric
    assert Graph.from_edge_index([], [], 3).is_symmetric


@many
@given(edge_lists())
def test_self_loops_are_counted_removed_and_made_one_per_node(case):
    src, dst, rows, _ = case
    graph = Graph.from_edge_index(src, dst, rows)
    counts = dense(graph)
    assert graph.num_self_loops == counts.diagonal().sum()
    assert graph.has_self_loops == (counts.diagonal().sum() > 0)
    without, looped = counts.copy(), counts.copy()
    np.fill_diagonal(without, 0)
    np.fill_diagonal(looped, 1)
    np.testing.assert_array_equal(dense(graph.without_self_loops()), without)
    np.testing.assert_array_equal(dense(graph.with_self_loops()), looped)
    for changed in (graph.without_self_loops(), graph.with_self_loops()):
        assert all(row == sorted(row) for row in lists_of(changed).values())
        assert changed.is_symmetric == graph.is_symmetric


@many
@given(edge_lists())
def test_order_follows_through_self_loop_changes(case):
    src, dst, rows, _ = case
    graph = Graph.from_edge_index(src, dst, rows)
    looped = graph.with_self_loops()
    old = looped.order >= 0
    np.testing.assert_array_equal(src[looped.order[old]], looped.indices[old])
    np.testing.assert_array_equal(dst[looped.order[old]], looped.edge_rows()[old])
    assert set(looped.indices[~old]) == set(range(rows)) - set(src[src == dst])
    for v in set(src[src == dst]):  # of several loops the last one's value stays, as in PyG
        place = np.flatnonzero((looped.indices == v) & (looped.edge_rows() == v))[0]
        assert looped.order[place] == np.flatnonzero((src == v) & (dst == v))[-1]
    bare = graph.without_self_loops()
    named = np.arange(bare.num_edges) if bare.order is None else bare.order
    np.testing.assert_array_equal(src[named], bare.indices)


def test_self_loop_weights_agree_with_pygs_remaining_self_loops():
    torch = pytest.importorskip("torch")
    from torch_geometric.utils import add_remaining_self_loops

    rng = np.random.default_rng(4)
    edge_index, weight = rng.integers(0, 8, (2, 40)), rng.random(40).astype(np.float32)
    wanted_edges, wanted = add_remaining_self_loops(
        torch.from_numpy(edge_index), torch.from_numpy(weight), fill_value=1.0, num_nodes=8
    )
    graph = Graph.from_edge_index(*edge_index, 8).with_self_loops()
    ours = np.where(graph.order < 0, np.float32(1), weight[graph.order])
    matrix, expected = np.zeros((8, 8)), np.zeros((8, 8))
    np.add.at(matrix, (graph.edge_rows(), graph.indices), ours)
    np.add.at(expected, (wanted_edges[1].numpy(), wanted_edges[0].numpy()), wanted.numpy())
    np.testing.assert_allclose(matrix, expected, rtol=1e-6)


def test_self_loop_forms_are_made_once_and_shared():
    graph = random_graph(2)
    assert graph.with_self_loops() is graph.with_self_loops()
    assert graph.without_self_loops().without_self_loops() is graph.without_self_loops()


def test_bipartite_graphs_have_no_self_loops_to_add():
    with pytest.raises(GraphError, match="different node sets"):
        Graph.from_edge_index([0], [1], 2, 3).with_self_loops()


@many
@given(edge_lists(square=False))
def test_a_csr_with_unsorted_rows_becomes_the_same_graph(case):
    src, dst, rows, columns = case
    by_row = np.argsort(dst, kind="stable")
    indptr = np.searchsorted(dst[by_row], np.arange(rows + 1))
    graph = Graph.from_csr(indptr, src[by_row], columns)
    assert lists_of(graph) == as_lists(src, dst, rows)
    order = np.arange(src.size) if graph.order is None else graph.order
    np.testing.assert_array_equal(src[by_row][order], graph.indices)


def test_nothing_of_the_callers_memory_is_kept():
    graph = random_graph(3)
    for make, arrays in (
        (Graph.from_csr, [graph.indptr.copy(), graph.indices.copy()]),
        (Graph.from_edge_index, [graph.indices.copy(), graph.edge_rows()]),  # already in CSR order
        (Graph.from_edge_index, [graph.edge_rows(), graph.indices.copy()]),  # in source order
    ):
        before = [array.copy() for array in arrays]
        made = make(*arrays)
        expected = lists_of(made)
        for array, copied in zip(arrays, before, strict=True):
            np.testing.assert_array_equal(array, copied)  # nor is it changed
            array[:] = 0
        assert lists_of(made) == expected


def test_read_only_and_strided_and_narrow_arrays_are_read():
    src, dst = np.array([2, 0, 1, 1], np.uint8), np.array([[0, 9], [1, 9], [1, 9], [2, 9]], np.int16)[:, 0]
    src.setflags(write=False)
    assert lists_of(Graph.from_edge_index(src, dst)) == {0: [2], 1: [0, 1], 2: [1]}
    assert lists_of(Graph.from_edge_index(src.astype(np.uint64), dst.astype(np.int32)))[1] == [0, 1]


def test_a_graph_does_not_change():
    graph = random_graph(5)
    with pytest.raises(AttributeError, match="cannot be changed"):
        graph.num_sources = 3


def test_a_graph_without_edges_answers_everything():
    graph = Graph.from_edge_index([], [], 3)
    assert (graph.num_nodes, graph.num_edges, graph.order) == (3, 0, None)
    assert graph.transpose is graph
    assert graph.degrees.tolist() == graph.out_degrees.tolist() == [0, 0, 0]
    assert graph.with_self_loops().indices.tolist() == [0, 1, 2]
    assert graph.with_self_loops().order.tolist() == [-1, -1, -1]
    assert graph.transpose_order.size == graph.edge_rows().size == 0
    assert graph.stats.num_empty_rows == 3
    assert len(graph.fingerprint) == 32


def test_a_graph_of_zero_nodes_is_one_only_when_asked_for():
    graph = Graph.from_edge_index([], [], 0)
    assert (graph.num_nodes, graph.num_edges) == (0, 0)
    assert graph.with_self_loops().num_edges == 0
    assert graph.stats.degree_mean == 0.0
    assert graph.is_symmetric
    with pytest.raises(GraphError, match="pass num_nodes"):
        Graph.from_edge_index([], [])


def test_sizes_are_inferred_where_not_given():
    assert Graph.from_edge_index([4], [1]).num_nodes == 5
    bipartite = Graph.from_edge_index([4], [1], num_sources=7)
    assert (bipartite.num_nodes, bipartite.num_sources) == (2, 7)
    assert Graph.from_edge_index([4], [1], num_nodes=np.int64(9)).num_sources == 9


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (([0, -1], [1, 1]), r"src holds -1; node numbers count from 0"),
        (([0, 1], [1, -7], 3), r"dst holds -7"),
        (([0, 5], [1, 1], 3), r"src holds node 5 but num_sources .* is 3; pass at least 6"),
        (([0, 1], [1, 3], 3), r"dst holds node 3 but num_nodes is 3; pass at least 4"),
        (([0, 1], [1, 2], 3, 1), r"src holds node 1 but num_sources"),
        (([0.0, 1.5], [1, 1]), r"src has dtype float64; node numbers are integers"),
        (([0], np.array([True])), r"dst has dtype bool"),
        (([0, 1], [1]), r"src has 2 entries and dst has 1"),
        (([[0, 1]], [[1, 0]]), r"src has shape \(1, 2\)"),
        ((np.zeros((2, 3), int), 3), r"give the number of nodes as num_nodes="),
        (([[0, 1], [1]],), r"edge_index: a list without an array of shape \[2, E\]"),
        ((np.array([2**63], np.uint64), [0]), r"beyond int64"),
        (([0], [0], -1), r"num_nodes=-1 is negative"),
        (([0], [0], 2.5), r"num_nodes=2.5 is not a whole number"),
        (([0], [0], 2, -3), r"num_sources=-3 is negative"),
    ],
)
def test_a_bad_edge_list_is_refused_with_the_argument_and_the_fault(arguments, says):
    with pytest.raises(GraphError, match=says) as caught:
        Graph.from_edge_index(*arguments)
    assert isinstance(caught.value, PlaitError)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (([], []), r"indptr is empty"),
        (([0, 2], [0]), r"indptr runs from 0 to 2, not from 0 to len\(indices\) = 1"),
        (([1, 1], [0]), r"indptr runs from 1"),
        (([0, 2, 1, 3], [0, 1, 2]), r"indptr decreases somewhere"),
        (([0, 1], [1]), r"indices holds node 1 but num_sources"),
        (([0, 1], [-1]), r"indices holds -1"),
        (([0, 1], [0.5]), r"indices has dtype float64"),
        (([0, 1], [0], 1.5), r"num_sources=1.5 is not a whole number"),
    ],
)
def test_a_bad_csr_is_refused_with_the_argument_and_the_fault(arguments, says):
    with pytest.raises(GraphError, match=says):
        Graph.from_csr(*arguments)


def test_a_graph_too_large_for_a_32_bit_path_is_refused(monkeypatch):
    graph = random_graph(6)
    assert graph.require_int32("spmm") is graph
    monkeypatch.setattr(csr_module.Graph, "num_edges", property(lambda self: 2**31))
    with pytest.raises(GraphError, match="spmm"):
        graph.require_int32("spmm")


@many
@given(edge_lists())
def test_the_fingerprint_sees_edges_and_shape_but_not_the_callers_order(case):
    src, dst, rows, _ = case
    graph = Graph.from_edge_index(src, dst, rows)
    assert Graph.from_edge_index(src[::-1], dst[::-1], rows).fingerprint == graph.fingerprint
    assert Graph.from_edge_index(src, dst, rows + 1).fingerprint != graph.fingerprint
    assert Graph.from_edge_index(src, dst, rows, rows + 1).fingerprint != graph.fingerprint
    more = Graph.from_edge_index(np.append(src, 0), np.append(dst, 0), rows)
    assert more.fingerprint != graph.fingerprint


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda g: pickle.loads(pickle.dumps(g))])
def test_copies_and_pickles_carry_edges_and_order_not_what_was_derived(duplicate):
    graph = random_graph(7).with_self_loops()
    _ = graph.transpose, graph.stats
    other = duplicate(graph)
    assert other.fingerprint == graph.fingerprint
    np.testing.assert_array_equal(other.order, graph.order)
    assert "transpose" not in vars(other)


def test_the_graph_room_does_not_load_torch():
    code = (
        "import sys, plait.graph; plait.graph.Graph.from_any([[0], [1]]); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_repr_says_shape_and_edges():
    assert repr(Graph.from_edge_index([0], [1], 2)) == "Graph(2 nodes, 1 edges, int32)"
    assert "2 x 3 nodes" in repr(Graph.from_edge_index([0], [1], 2, 3))


def test_more_self_loops_come_after_the_edges_and_are_made_once() -> None:
    graph = Graph.from_edge_index([2, 0, 1, 1], [0, 0, 1, 2], 3)
    more, order = graph.with_more_self_loops(2)
    assert order is not None
    source = np.concatenate([graph.indices, [0, 1, 2, 0, 1, 2]])
    target = np.concatenate([graph.edge_rows(), [0, 1, 2, 0, 1, 2]])
    assert more.indices.tolist() == source[order].tolist()
    assert more.edge_rows().tolist() == target[order].tolist()
    assert more.order is None
    assert graph.with_more_self_loops(2)[0] is more
    assert graph.with_more_self_loops(1)[0].num_edges == graph.num_edges + 3


@many
@given(edge_lists(square=False))
def test_loops_last_are_pygs_loops_removed_and_added_in_its_order(case):
    import torch
    from torch_geometric.utils import add_self_loops, remove_self_loops

    src, dst, rows, columns = case
    listed = torch.from_numpy(np.stack([src, dst]).astype(np.int64))
    listed = remove_self_loops(listed)[0]
    source, target = add_self_loops(listed, num_nodes=min(rows, columns))[0].numpy()
    looped = Graph.from_edge_index(src, dst, rows, columns).with_loops_last()
    wanted = Graph.from_edge_index(source, target, rows, columns)
    np.testing.assert_array_equal(looped.indptr, wanted.indptr)
    np.testing.assert_array_equal(looped.indices, wanted.indices)
    order = np.arange(wanted.num_edges) if wanted.order is None else wanted.order
    np.testing.assert_array_equal(looped.order, order)


def test_a_graph_and_its_forms_with_loops_are_freed_without_the_collector():
    graph = random_graph(7)
    _ = graph.with_loops_last().order, graph.with_self_loops().transpose
    gone = weakref.ref(graph), weakref.ref(graph.with_loops_last()), weakref.ref(graph.with_self_loops())
    gc.disable()
    try:
        del graph
        assert [reference() for reference in gone] == [None, None, None]
    finally:
        gc.enable()
