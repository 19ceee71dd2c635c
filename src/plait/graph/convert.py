"""Graphs from what users hold: PyG data, torch and scipy sparse matrices, edge index arrays.

torch is never imported here: an object of its types can only come from a process that has it loaded.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.errors import GraphError
from plait.graph.csr import Graph

__all__ = ["to_graph"]

ACCEPTED = (
    "a plait Graph, PyG Data, EdgeIndex, SparseTensor, torch sparse CSR/CSC/COO tensor, scipy sparse matrix, "
    "or an integer edge_index of shape [2, E]"
)


def to_graph(obj: Any, num_nodes: int | None = None) -> Graph:
    """The graph of `obj`; rows of a matrix are targets (PyG's adj_t), an edge_index is [sources, targets].

    num_nodes is for edge lists that do not say it; for the others it must agree. Matrix values and edge
    attributes are left out; `Graph.order` tells where each of them went.
    """
    if isinstance(obj, Graph):
        return _agreeing(obj, num_nodes)
    if isinstance(getattr(obj, "graph", None), Graph):  # LoadedGraph
        return _agreeing(obj.graph, num_nodes)
    if _is_tensor(obj):
        return _from_tensor(obj, num_nodes)
    if hasattr(obj, "csr") and hasattr(obj, "sparse_sizes"):
        return _from_sparse_tensor(obj, num_nodes)
    if hasattr(obj, "tocoo") and hasattr(obj, "shape"):
        return _from_scipy(obj, num_nodes)
    if hasattr(obj, "edge_types"):
        raise GraphError(
            f"{type(obj).__name__} holds several edge types; pass the edge_index of one of them, "
            "or convert it with to_homogeneous()"
        )
    if hasattr(obj, "edge_index") or hasattr(obj, "adj_t"):
        return _from_data(obj, num_nodes)
    if isinstance(obj, np.ndarray | list | tuple):
        return _from_edge_index(obj, num_nodes)
    raise GraphError(f"{type(obj).__name__} is not a graph; pass {ACCEPTED}")


def _is_tensor(obj: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(obj, torch.Tensor)


def _array(tensor: Any) -> NDArray[Any]:
    """A tensor, wherever it is, as a numpy array; anything else as np.asarray reads it."""
    return np.asarray(tensor.detach().cpu().numpy() if hasattr(tensor, "detach") else tensor)


def _agreeing(graph: Graph, num_nodes: int | None) -> Graph:
    if num_nodes is not None and num_nodes != graph.num_nodes:
        raise GraphError(
            f"num_nodes={num_nodes} but the graph has {graph.num_nodes} targets; leave num_nodes out, "
            "or build from an edge_index"
        )
    return graph


def _from_data(data: Any, num_nodes: int | None) -> Graph:
    edges = getattr(data, "edge_index", None)
    if num_nodes is None:
        num_nodes = data.num_nodes
    if edges is not None:
        return to_graph(edges, num_nodes)
    matrix = getattr(data, "adj_t", None)
    if matrix is None:
        raise GraphError(f"{type(data).__name__} has neither edge_index nor adj_t; set one of them")
    return to_graph(matrix, num_nodes)


def _from_tensor(tensor: Any, num_nodes: int | None) -> Graph:
    layout = str(tensor.layout)
    if layout == "torch.strided":
        return _from_edge_index(tensor, num_nodes)
    if tensor.dim() != 2:
        raise GraphError(f"a sparse tensor of shape {tuple(tensor.shape)} is not a graph; pass a matrix")
    rows, columns = tensor.shape
    if layout == "torch.sparse_csr":
        pointer, column = _array(tensor.crow_indices()), _array(tensor.col_indices())
        return _agreeing(Graph.from_csr(pointer, column, columns), num_nodes)
    if layout == "torch.sparse_csc":
        source = np.repeat(np.arange(columns), np.diff(_array(tensor.ccol_indices())))
        graph = Graph.from_edge_index(source, _array(tensor.row_indices()), rows, columns)
        return _agreeing(graph, num_nodes)
    if layout == "torch.sparse_coo":
        # _indices() because indices() refuses a tensor that is not coalesced, and repeats are kept here
        target, source = _array(tensor._indices())
        return _agreeing(Graph.from_edge_index(source, target, rows, columns), num_nodes)
    raise GraphError(f"a tensor of layout {layout} is not read as a graph; convert it with to_sparse_csr()")


def _from_sparse_tensor(matrix: Any, num_nodes: int | None) -> Graph:
    pointer, column, _ = matrix.csr()
    graph = Graph.from_csr(_array(pointer), _array(column), int(matrix.sparse_sizes()[1]))
    return _agreeing(graph, num_nodes)


def _from_scipy(matrix: Any, num_nodes: int | None) -> Graph:
    if len(matrix.shape) != 2:
        raise GraphError(f"a sparse array of shape {matrix.shape} is not a graph; pass a matrix")
    rows, columns = matrix.shape
    if getattr(matrix, "format", "") == "csr":
        return _agreeing(Graph.from_csr(matrix.indptr, matrix.indices, columns), num_nodes)
    entries = matrix.tocoo()
    return _agreeing(Graph.from_edge_index(entries.col, entries.row, rows, columns), num_nodes)


def _from_edge_index(edges: Any, num_nodes: int | None) -> Graph:
    if isinstance(edges, list | tuple) and len(edges) == 2:
        return Graph.from_edge_index(_array(edges[0]), _array(edges[1]), num_nodes)
    array = _array(edges)
    if array.ndim != 2 or array.shape[0] != 2:
        hint = "transpose it" if array.ndim == 2 and array.shape[1] == 2 else "row 0 sources, row 1 targets"
        raise GraphError(f"edge_index has shape {array.shape}, not [2, E]; {hint}")
    num_sources = None
    if hasattr(edges, "sparse_size"):  # PyG's EdgeIndex knows its shape: (sources, targets)
        num_sources, known_nodes = edges.sparse_size()
        num_nodes = known_nodes if num_nodes is None else num_nodes
    return Graph.from_edge_index(array[0], array[1], num_nodes, num_sources)
