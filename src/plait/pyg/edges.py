"""The edges of a call in any of PyG's representations: graph, weights, and the key that recognises them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch_geometric import EdgeIndex

from plait.errors import GraphError, InputError
from plait.graph import Graph
from plait.runtime.identity import identity
from plait.runtime.placed import PlacedGraph

__all__ = [
    "Demand", "Given", "attach", "attach_starts", "carry", "from_edge_list", "is_attached", "is_placed",
    "plain", "read", "starts_of",
]  # fmt: skip


@dataclass(frozen=True)
class Given:
    """Edges as given; `build` makes the graph (and a matrix's weights) when first needed."""

    key: tuple[Any, ...]
    owners: tuple[Tensor, ...]
    """The tensors the key names, but for the weights."""
    weight: Tensor | None
    weight_key: tuple[Any, ...]
    is_sparse: bool
    build: Callable[[], tuple[Graph, Tensor | None]]


def _nothing() -> None:
    return None


@dataclass
class Demand:
    """Whether planned layers use the graphs of a loader's batches, and which parts of the latest one."""

    is_met: bool = False
    latest: Callable[[], Graph | None] = _nothing

    def prepare(self, graph: Graph) -> None:
        """Derives from a graph whatever was derived from the latest one."""
        latest = self.latest()
        if latest is not None:
            graph.anticipate(latest)


class _Listed:
    """The edges of a batch as its sampler listed them, target by target, so the graph needs no sort.

    Kept on edge_index under `plait_graph`, and valid as long as edge_index is unchanged.
    """

    def __init__(self, edge_index: Tensor, source: Any, pointer: Any, num_nodes: int, demand: Demand) -> None:
        self.identity = identity(edge_index)[1:]
        # not edge_index[0]: what edge_index carries must not hold edge_index
        self.source, self.pointer, self.num_nodes = source, pointer, num_nodes
        self.demand = demand
        self.starts: Tensor | None = None  # the pointers in pinned memory, if they are
        self._graph: Graph | None = None

    def __reduce__(self) -> Any:
        return set, ()  # copies, also those for other processes, go without; torch.load knows sets

    def graph(self) -> Graph:
        """All of it, built when first asked for."""
        if self._graph is None:
            self._graph = Graph.from_grouped(self.source, self.pointer, self.num_nodes)
        return self._graph


class _Starts:
    """Where in a GPU's memory the edges of each target begin, of edges listed target after target."""

    def __init__(self, edge_index: Tensor, indptr: Tensor) -> None:
        self.identity, self.indptr = identity(edge_index)[1:], indptr

    def __reduce__(self) -> Any:
        return set, ()  # as above

    def graph(self, edge_index: Tensor, num_nodes: int) -> Graph | None:
        """The graph of edge_index if it is unchanged: no sort, and nothing is checked."""
        if num_nodes != self.indptr.numel() - 1 or self.identity != identity(edge_index)[1:]:
            return None
        return cast(Graph, PlacedGraph.listed(plain(edge_index)[0], self.indptr))


def attach(edge_index: Tensor, source: Any, pointer: Any, num_nodes: int, demand: Demand) -> None:
    """Gives a batch's edge_index its graph to carry: `source` is its first row, the pointers are by target.

    The graph is built here, in the thread that prepares the batch, if one of an earlier batch was asked for.
    """
    listed = _Listed(edge_index, source, pointer, num_nodes, demand)
    if demand.is_met:
        demand.prepare(listed.graph())
    edge_index.plait_graph = listed  # type: ignore[attr-defined]


def attach_starts(edge_index: Tensor, indptr: Tensor) -> None:
    """Attach to an edge_index on a GPU the positions where its targets' edges begin, [nodes + 1]."""
    edge_index.plait_graph = _Starts(edge_index, indptr)  # type: ignore[attr-defined]


def starts_of(edge_index: Tensor) -> Tensor | None:
    """Where the edges of each target begin, int32 [nodes + 1], if edge_index carries that."""
    listed = getattr(edge_index, "plait_graph", None)
    if not isinstance(listed, _Listed | _Starts) or listed.identity != identity(edge_index)[1:]:
        return None
    if isinstance(listed, _Starts):
        return listed.indptr
    if listed.starts is None and edge_index.shape[1] < 1 << 31:
        # nodes that were not expanded have no edges. Not by torch, which wakes threads for so many numbers:
        # on 16 cores, beside four threads that sample, an epoch took 0.26 s instead of 0.10
        found = np.full(listed.num_nodes + 1, edge_index.shape[1], np.int32)
        found[: len(listed.pointer)] = listed.pointer
        listed.starts = torch.from_numpy(found)
    return listed.starts


def carry(edge_index: Tensor, copied: Tensor) -> None:
    """Attach to a pinned copy of an edge_index the graph that came with it, its pointers pinned too."""
    listed, starts = getattr(edge_index, "plait_graph", None), starts_of(edge_index)
    if starts is None or not isinstance(listed, _Listed):
        return
    made = _Listed(copied, listed.source, listed.pointer, listed.num_nodes, listed.demand)
    made.starts, made._graph = starts.pin_memory(), listed._graph
    copied.plait_graph = made  # type: ignore[attr-defined]


def is_attached(edge_index: Tensor) -> bool:
    """Whether edge_index, or the tensor of which it is a part, came with its graph."""
    base = edge_index._base
    return hasattr(edge_index, "plait_graph") or (base is not None and hasattr(base, "plait_graph"))


def _attached(edge_index: Tensor, num_nodes: int) -> Graph | None:
    """The graph that came with edge_index, or with the tensor of which it is the first columns."""
    listed, owner = getattr(edge_index, "plait_graph", None), edge_index
    if isinstance(listed, _Starts):
        return listed.graph(edge_index, num_nodes)
    if listed is None and edge_index._base is not None:
        owner = edge_index._base
        listed = getattr(owner, "plait_graph", None)
    if not isinstance(listed, _Listed) or listed.identity != identity(owner)[1:]:
        return None
    listed.demand.is_met = True
    if owner is edge_index:
        if num_nodes != listed.num_nodes:
            return None
        graph = listed.graph()
        listed.demand.latest = weakref.ref(graph)
        return graph
    # trim_to_layer: the same memory, fewer columns
    is_head = edge_index.data_ptr() == owner.data_ptr() and edge_index.stride() == owner.stride()
    return listed.graph().head(num_nodes, edge_index.shape[1]) if is_head else None


def read(
    edge_index: Any, edge_weight: Tensor | None, num_nodes: int, num_sources: int, is_swapped: bool
) -> Given:
    """The edges of a call on `num_sources` source rows and `num_nodes` target rows."""
    sizes = (num_nodes, num_sources, is_swapped)
    if isinstance(edge_index, Tensor) and edge_index.layout == torch.strided:
        _check_edge_list(edge_index, edge_weight)
        if type(edge_index) is not Tensor:
            _check_sparse_size(
                edge_index, (num_nodes, num_sources) if is_swapped else (num_sources, num_nodes)
            )
        key = (*identity(edge_index), *sizes)
        weight_key = () if edge_weight is None else identity(edge_weight)
        return Given(
            key, (edge_index,), edge_weight, weight_key, False,
            # the graph is that of calls without weights too
            lambda: (from_edge_list(edge_index, num_nodes, num_sources, is_swapped), None),
        )  # fmt: skip
    return _read_matrix(edge_index, sizes)


def _check_edge_list(edge_index: Tensor, edge_weight: Tensor | None) -> None:
    if edge_index.dim() != 2 or edge_index.shape[0] != 2:
        raise InputError(f"edge_index: shape {tuple(edge_index.shape)}; pass [2, E], sources above targets")
    if edge_index.dtype.is_floating_point or edge_index.dtype.is_complex or edge_index.dtype == torch.bool:
        raise InputError(f"edge_index: {edge_index.dtype} is not an index type; convert it with .long()")
    if edge_weight is not None and edge_weight.shape[0] != edge_index.shape[1]:
        raise InputError(
            f"edge_weight: {edge_weight.shape[0]} weights for {edge_index.shape[1]} edges; "
            "pass one for each edge"
        )


def _check_sparse_size(edge_index: Any, sizes: tuple[int, int]) -> None:
    """PyG's EdgeIndex may say how many nodes its two rows number."""
    said = edge_index.sparse_size() if hasattr(edge_index, "sparse_size") else (None, None)
    if any(one is not None and one != other for one, other in zip(said, sizes, strict=True)):
        raise InputError(
            f"edge_index: its sparse_size is {tuple(said)}, but x has rows for {sizes} nodes; "
            "build it again with EdgeIndex(..., sparse_size=...)"
        )


def is_placed(edge_index: Tensor) -> bool:
    """Whether the graph of these edges is made in a GPU's memory."""
    return edge_index.is_cuda


def plain(edge_index: Tensor) -> Tensor:
    """The plain tensor of PyG's EdgeIndex, which supports few operations; anything else unchanged."""
    if isinstance(edge_index, EdgeIndex):
        return cast(Tensor, edge_index.as_tensor())
    return edge_index.as_subclass(Tensor)


def from_edge_list(edge_index: Tensor, num_nodes: int, num_sources: int, is_swapped: bool) -> Graph:
    """The graph of [sources, targets], where the edges are; is_swapped: the other way round."""
    if num_nodes == num_sources and not is_swapped:
        graph = _attached(edge_index, num_nodes)
        if graph is not None:
            return graph
    pair = plain(edge_index)
    if is_placed(pair):  # it has the part of Graph's interface that planned layers use on a GPU
        return cast(Graph, PlacedGraph.of(pair, num_nodes, num_sources, is_swapped))
    source, target = pair.numpy()
    if is_swapped:
        source, target = target, source
    try:
        return Graph.from_edge_index(source, target, num_nodes, num_sources)
    except GraphError as error:  # its message is about arrays and counts; the caller has edge_index and x
        raise GraphError(
            f"edge_index: nodes {int(pair.min())} to {int(pair.max())} on {num_sources} source and "
            f"{num_nodes} target rows of x; check edge_index against x, or give x a row for every node"
        ) from error


def _read_matrix(adj_t: Tensor, sizes: tuple[int, int, bool]) -> Given:
    """A torch CSR or COO matrix: rows are targets."""
    if tuple(adj_t.shape) != sizes[:2]:
        raise InputError(
            f"edge_index: a {adj_t.shape[0]} x {adj_t.shape[1]} matrix on {sizes[1]} source and {sizes[0]} "
            "target rows of x; pass adj_t, whose rows are targets"
        )
    known = identity(adj_t)
    return Given((*known, *sizes), (adj_t,), None, known, True, lambda: _from_matrix(adj_t))


def _from_matrix(adj_t: Tensor) -> tuple[Graph, Tensor | None]:
    """The graph of a matrix, and its values where they are not all one."""
    # entries and values of one and the same matrix: coalescing sorts and joins them
    matrix = adj_t.coalesce() if adj_t.layout == torch.sparse_coo else adj_t
    values = matrix.values()
    return Graph.from_any(matrix), None if _are_ones(values) else values


def _are_ones(values: Tensor) -> bool:
    return bool((values.detach() == 1).all()) and not values.requires_grad
