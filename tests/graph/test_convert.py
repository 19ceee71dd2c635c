"""convert.py: every form users hold gives the graph of its edges; unusable forms are named."""

from __future__ import annotations

import numpy as np
import pytest

from plait.errors import GraphError
from plait.graph import Graph, LoadedGraph

from .reference import as_lists, dense, lists_of

torch = pytest.importorskip("torch")
pyg = pytest.importorskip("torch_geometric")
scipy_sparse = pytest.importorskip("scipy.sparse")

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")  # torch calls its sparse layouts beta

# repeated edge 3 -> 0, self loop 2 -> 2, node 4 isolated; not in any order
EDGES = np.array([[3, 0, 2, 1, 3, 2], [0, 2, 2, 3, 0, 1]])
ADJ_T = np.zeros((5, 5), int)
np.add.at(ADJ_T, (EDGES[1], EDGES[0]), 1)
SIMPLE = EDGES[:, 1:]  # for forms that cannot hold repeats


def data_of(edge_index, **more):
    return pyg.data.Data(edge_index=torch.from_numpy(edge_index), num_nodes=5, **more)


class SparseTensorLike:
    """What plait reads of torch_sparse.SparseTensor."""

    def __init__(self, matrix):
        self.matrix = scipy_sparse.csr_matrix(matrix)

    def csr(self):
        return torch.from_numpy(self.matrix.indptr), torch.from_numpy(self.matrix.indices), None

    def sparse_sizes(self):
        return self.matrix.shape


COO = torch.sparse_coo_tensor(
    torch.from_numpy(EDGES[::-1].copy()), torch.ones(6), (5, 5), check_invariants=True
)
FORMS = {
    "PyG Data": data_of(EDGES),
    "PyG Data with adj_t": pyg.data.Data(adj_t=COO, num_nodes=5),
    "EdgeIndex": pyg.EdgeIndex(torch.from_numpy(EDGES), sparse_size=(5, 5)),
    "EdgeIndex in Data": pyg.data.Data(edge_index=pyg.EdgeIndex(torch.from_numpy(EDGES)), num_nodes=5),
    "torch COO, not coalesced": COO,
    "scipy COO": scipy_sparse.coo_matrix((np.ones(6), (EDGES[1], EDGES[0])), (5, 5)),
    "plait Graph": Graph.from_edge_index(*EDGES, 5),
    "LoadedGraph": LoadedGraph(Graph.from_edge_index(*EDGES, 5)),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_keeps_repeats_and_reads_edges_as_source_to_target(form):
    graph = Graph.from_any(FORMS[form])
    np.testing.assert_array_equal(dense(graph), ADJ_T)


SIMPLE_ADJ_T = (ADJ_T > 0).astype(np.float32)
MATRICES = {
    "torch CSR": lambda: torch.from_numpy(SIMPLE_ADJ_T).to_sparse_csr(),
    "torch CSC": lambda: torch.from_numpy(SIMPLE_ADJ_T).to_sparse_csc(),
    "torch COO": lambda: torch.from_numpy(SIMPLE_ADJ_T).to_sparse_coo(),
    "scipy CSR": lambda: scipy_sparse.csr_matrix(SIMPLE_ADJ_T),
    "scipy CSC": lambda: scipy_sparse.csc_matrix(SIMPLE_ADJ_T),
    "scipy CSR array": lambda: scipy_sparse.csr_array(SIMPLE_ADJ_T),
    "scipy LIL": lambda: scipy_sparse.lil_matrix(SIMPLE_ADJ_T),
    "SparseTensor": lambda: SparseTensorLike(SIMPLE_ADJ_T),
}


@pytest.mark.parametrize("form", MATRICES)
def test_rows_of_a_matrix_are_targets(form):
    np.testing.assert_array_equal(dense(Graph.from_any(MATRICES[form]())), SIMPLE_ADJ_T)
    with pytest.raises(GraphError, match="num_nodes=6 but the graph has 5 targets"):
        Graph.from_any(MATRICES[form](), num_nodes=6)


@pytest.mark.parametrize("form", MATRICES)
def test_a_rectangular_matrix_is_a_bipartite_graph(form):
    wide = np.concatenate([SIMPLE_ADJ_T, np.ones((5, 2), np.float32)], axis=1)
    make = {"torch": torch.from_numpy(wide).to_sparse, "scipy": lambda: scipy_sparse.csr_matrix(wide)}
    matrix = SparseTensorLike(wide) if form == "SparseTensor" else make[form.split()[0]]()
    graph = Graph.from_any(matrix)
    assert (graph.num_nodes, graph.num_sources) == (5, 7)
    np.testing.assert_array_equal(dense(graph), wide)


@pytest.mark.parametrize(
    "edges",
    [
        EDGES,
        EDGES.astype(np.int32),
        torch.from_numpy(EDGES),
        EDGES.tolist(),
        (EDGES[0], torch.from_numpy(EDGES[1])),
    ],
    ids=["array", "int32", "tensor", "lists", "pair"],
)
def test_edge_indices_of_any_kind_are_read(edges):
    graph = Graph.from_any(edges, num_nodes=5)
    assert lists_of(graph) == as_lists(EDGES[0], EDGES[1], 5)
    assert Graph.from_any(edges).num_nodes == 4
    np.testing.assert_array_equal(EDGES[0][graph.order], graph.indices)


def test_edge_weights_follow_the_order_of_an_edge_index():
    weight = np.random.default_rng(0).random(6)
    graph = Graph.from_any(data_of(EDGES))
    matrix, expected = np.zeros((5, 5)), np.zeros((5, 5))
    np.add.at(matrix, (graph.edge_rows(), graph.indices), weight[graph.order])
    np.add.at(expected, (EDGES[1], EDGES[0]), weight)
    np.testing.assert_allclose(matrix, expected)


def test_a_sorted_edge_index_object_keeps_its_rectangular_shape():
    edges = pyg.EdgeIndex(torch.tensor([[0, 6, 2], [1, 0, 1]]), sparse_size=(7, 3)).sort_by("col").values
    graph = Graph.from_any(edges)
    assert (graph.num_nodes, graph.num_sources) == (3, 7)
    assert lists_of(graph) == {0: [6], 1: [0, 2], 2: []}


def test_a_dataset_without_edges_is_a_graph_of_isolated_nodes():
    empty = pyg.data.Data(x=torch.zeros(4, 2), edge_index=torch.zeros(2, 0, dtype=torch.long))
    assert Graph.from_any(empty).degrees.tolist() == [0, 0, 0, 0]


def test_a_later_change_of_the_tensor_does_not_reach_the_graph():
    edges = torch.tensor([[0, 0, 1], [0, 1, 1]])
    graph = Graph.from_any(edges)
    edges.zero_()
    assert lists_of(graph) == {0: [0], 1: [0, 1]}


@pytest.mark.parametrize(
    ("obj", "says"),
    [
        (torch.zeros(2, 3), "dtype float32; node numbers are integers"),
        (torch.zeros(3, 2, dtype=torch.long), r"shape \(3, 2\), not \[2, E\]; transpose it"),
        (np.zeros((3, 3, 3), int), r"not \[2, E\]"),
        (torch.zeros(5, dtype=torch.long), r"not \[2, E\]"),
        (data_of(EDGES + 4), "holds node 7"),
        (pyg.data.Data(x=torch.zeros(3, 1)), "neither edge_index nor adj_t"),
        (pyg.data.HeteroData(), "several edge types"),
        ({"edge_index": EDGES}, "dict is not a graph; pass a plait Graph, PyG Data"),
        (None, "NoneType is not a graph"),
        (torch.zeros(2, 2, 2).to_sparse_coo(), "is not a graph; pass a matrix"),
    ],
)
def test_what_is_not_a_graph_is_refused_with_the_next_step(obj, says):
    with pytest.raises(GraphError, match=says):
        Graph.from_any(obj)
