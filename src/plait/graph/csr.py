"""The graph as data: CSR by destination, with everything derived from it computed once."""

from __future__ import annotations

import hashlib
import operator
import os
import weakref
from collections.abc import Callable
from functools import cached_property
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from plait.errors import GraphError, InputError
from plait.graph import build, stats

__all__ = ["Graph"]

Ints = NDArray[Any]

_FORMS = ("_without_self_loops", "_with_self_loops", "_with_loops_last")
_ANTICIPATED = ("transpose", "transpose_order", "degrees", "out_degrees", "num_self_loops", *_FORMS)


class Graph:
    """A directed graph as CSR by destination: row v lists the sources u of the edges u -> v, ascending.

    Repeated edges are kept. Indices are int32 when they fit, else int64. The object never changes: the
    transpose, the statistics and the fingerprint are computed once and kept, so do not write to its arrays.
    """

    indptr: Ints
    """[num_nodes + 1]: row v is indices[indptr[v] : indptr[v + 1]]."""
    indices: Ints
    """[num_edges]: sources, ascending inside each row."""
    num_sources: int
    """Number of columns; num_nodes unless targets and sources are different node sets."""

    def __init__(
        self, indptr: Ints, indices: Ints, num_sources: int, order: Ints | Callable[[], Ints] | None = None
    ) -> None:
        """Keeps and trusts its arguments; `order` may be a function that makes it at first use.

        Use from_edge_index, from_csr or from_any for data that was not checked.
        """
        vars(self).update(indptr=indptr, indices=indices, num_sources=num_sources, _order=order)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"Graph.{name}: a graph cannot be changed; build a new one")

    def __getstate__(self) -> dict[str, Any]:
        """What pickle and copy carry: the edges, not what was derived from them."""
        state = {name: vars(self)[name] for name in ("indptr", "indices", "num_sources")}
        return state | {"_order": self.order}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def __repr__(self) -> str:
        shape = f"{self.num_nodes:,}" if self.is_square else f"{self.num_nodes:,} x {self.num_sources:,}"
        return f"Graph({shape} nodes, {self.num_edges:,} edges, {self.indices.dtype})"

    @classmethod
    def from_edge_index(
        cls,
        src: ArrayLike,
        dst: ArrayLike | None = None,
        num_nodes: int | None = None,
        num_sources: int | None = None,
        validate: bool = True,
    ) -> Graph:
        """The graph with an edge src[e] -> dst[e] for every e, in any order, repeats kept.

        `src` alone is an edge_index: an array or tensor of shape [2, E], sources first.
        num_nodes counts targets; num_sources defaults to it. With neither given both are the largest index
        plus one. validate=False trusts that the indices are in range. Nothing of the caller's is kept.
        """
        if dst is None:
            src, dst = _ends(src)
        elif getattr(src, "ndim", 1) == 2:
            raise GraphError(
                "dst: an edge_index of shape [2, E] has both ends; give the number of nodes as num_nodes=..."
            )
        source, target = _as_edges(src, dst)
        facts = build.scan(source, target)
        rows, columns = _sizes(facts, num_nodes, num_sources)
        if validate:
            _check_range("src", facts.min_src, facts.max_src, columns)
            _check_range("dst", facts.min_dst, facts.max_dst, rows)
        indptr, indices, order = build.build_csr(source, target, rows, columns, facts)
        graph = cls(indptr, indices, columns, order)
        vars(graph)["num_self_loops"] = facts.num_loops
        return graph

    @classmethod
    def from_csr(
        cls, indptr: ArrayLike, indices: ArrayLike, num_sources: int | None = None, validate: bool = True
    ) -> Graph:
        """The graph of a CSR whose rows are targets; rows need not be sorted inside. Arrays are copied.

        num_sources defaults to the number of rows. validate=False trusts pointers and ranges.
        """
        pointer, column = _as_index(indptr, "indptr"), _as_index(indices, "indices")
        if not pointer.size:
            raise GraphError("indptr is empty; a CSR of n rows has n + 1 pointers")
        rows = pointer.size - 1
        columns = rows if num_sources is None else _as_size(num_sources, "num_sources")
        if validate:
            _check_pointers(pointer, column.size)
            if column.size:
                _check_range("indices", int(column.min()), int(column.max()), columns)
        dtype = build.index_dtype(max(rows, columns), column.size)
        if build.rows_are_sorted(pointer, column):
            return cls(pointer.astype(dtype), column.astype(dtype), columns)
        target = np.repeat(np.arange(rows, dtype=column.dtype), np.diff(pointer))
        facts = build.scan(column, target)
        sorted_indptr, sorted_indices, order = build.build_csr(column, target, rows, columns, facts)
        return cls(sorted_indptr, sorted_indices, columns, order)

    @classmethod
    def from_grouped(cls, source: Ints, pointer: Ints, num_nodes: int) -> Graph:
        """The square graph of edges listed target by target, as a sampler does, its transpose made with it.

        Target v has the edges source[pointer[v] : pointer[v + 1]], those from pointer.size - 1 on have none;
        `order` numbers the edges as they are listed. Nothing is checked.
        """
        indptr, indices, order, *turned = build.build_both(source, pointer, num_nodes)
        graph = cls(indptr, indices, num_nodes, order)
        vars(graph)["transpose"] = graph._turned(*turned)
        return graph

    def head(self, num_nodes: int, num_edges: int) -> Graph | None:
        """The square graph of the first `num_nodes` nodes with the caller's first `num_edges` edges.

        None unless these are whole rows: that is how a sampled neighbourhood is trimmed by its last hop.
        """
        if not num_nodes <= self.num_nodes or not num_edges <= self.num_edges:
            return None
        indptr = np.minimum(self.indptr[: num_nodes + 1], num_edges)
        indices = self.indices[:num_edges]
        cut = int(np.searchsorted(self.indptr, num_edges))
        if self.indptr[cut] != num_edges or cut > num_nodes or (num_edges and indices.max() >= num_nodes):
            return None
        order = self.order
        return Graph(indptr, indices, num_nodes, None if order is None else order[:num_edges])

    @classmethod
    def from_any(cls, obj: object, num_nodes: int | None = None) -> Graph:
        """The graph of a PyG Data, EdgeIndex, SparseTensor, torch or scipy sparse matrix, or [2, E] array.

        Of a matrix the rows are targets (PyG's adj_t) and the values are left out; see `order`.
        """
        from plait.graph import convert

        return convert.to_graph(obj, num_nodes)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Graph:
        """The graph in a file: plait's own npz or the shared one; nothing is unpickled."""
        from plait.graph import io

        return io.load(path)

    def save(self, path: str | os.PathLike[str], **arrays: Any) -> None:
        """Write the graph and further arrays to an npz file that `load` and `load_arrays` read."""
        from plait.graph import io

        io.save(path, self, **arrays)

    @property
    def num_nodes(self) -> int:
        """Number of targets (rows)."""
        return int(self.indptr.size - 1)

    @property
    def num_edges(self) -> int:
        """Number of edges, repeats counted."""
        return int(self.indices.size)

    @property
    def is_square(self) -> bool:
        """True unless targets and sources are different node sets."""
        return self.num_nodes == self.num_sources

    @property
    def order(self) -> Ints | None:
        """order[p]: the caller's number of the edge at CSR position p; None when that is p everywhere.

        Edge values follow as values[order]. -1 marks a self loop that with_self_loops added.
        """
        kept = vars(self)["_order"]
        if callable(kept):
            kept = vars(self)["_order"] = kept()
        return cast("Ints | None", kept)

    def with_order(self, order: Ints | Callable[[], Ints] | None) -> Graph:
        """The same edges, numbered by `order`, for a caller that lists them differently."""
        graph = Graph(self.indptr, self.indices, self.num_sources, order)
        if "is_symmetric" in vars(self):
            vars(graph)["is_symmetric"] = self.is_symmetric
        return graph

    @cached_property
    def is_symmetric(self) -> bool:
        """True when u -> v is stored as often as v -> u for every pair."""
        if not self.is_square:
            return False
        return bool(build.matches_transpose(self.indptr, self.indices, self.indptr[:-1].copy()))

    @cached_property
    def transpose(self) -> Graph:
        """The graph with every edge reversed; `self` when symmetric.

        Edge values in CSR order follow as values[transpose_order], in the symmetric case too.
        """
        origin = vars(self).get("_origin", lambda: None)()
        if origin is not None:
            return cast(Graph, origin)
        if self.is_symmetric:
            return self
        turned = self._turned(*build.transpose_csr(self.indptr, self.indices, self.num_sources))
        vars(turned)["is_symmetric"] = False
        return turned

    def _turned(self, indptr: Ints, indices: Ints, order: Ints) -> Graph:
        """The transpose with these arrays.

        It refers back weakly: in a cycle the graphs of mini-batches would wait for the collector, which
        counts objects and not their bytes.
        """
        vars(self)["transpose_order"] = order
        kept = vars(self)["_order"]
        turned = Graph(
            indptr, indices, self.num_nodes, lambda: follow(kept() if callable(kept) else kept, order)
        )
        vars(turned)["_origin"] = weakref.ref(self)
        return turned

    @cached_property
    def transpose_order(self) -> Ints:
        """transpose_order[p]: position in this CSR of the edge at position p of the transpose's CSR."""
        if not self.is_symmetric and "transpose" not in vars(self):
            _ = self.transpose
            return cast(Ints, vars(self)["transpose_order"])  # came with it
        return build.transpose_csr(self.indptr, self.indices, self.num_sources)[2]

    @cached_property
    def degrees(self) -> Ints:
        """In-degree of every target: the row lengths."""
        return np.diff(self.indptr)

    @cached_property
    def out_degrees(self) -> Ints:
        """Number of edges every source sends."""
        if self.is_symmetric:
            return self.degrees
        return np.bincount(self.indices, minlength=self.num_sources).astype(self.indptr.dtype)

    @cached_property
    def num_self_loops(self) -> int:
        """Number of edges v -> v, repeats counted."""
        return int(build.count_self_loops(self.indptr, self.indices))

    @property
    def has_self_loops(self) -> bool:
        """True when some edge v -> v is stored."""
        return self.num_self_loops > 0

    def without_self_loops(self) -> Graph:
        """This graph less every edge v -> v; `self` when it has none."""
        return self._without_self_loops

    def with_self_loops(self) -> Graph:
        """This graph with exactly one edge v -> v per node: PyG's "remaining" self loops.

        A loop that was there keeps its place in `order` (the last one, of several), a new one has -1.
        """
        return self._with_self_loops

    def with_more_self_loops(self, count: int) -> tuple[Graph, Ints | None]:
        """(this graph with `count` more edges v -> v per node, order), made once.

        Values of this graph's edges in CSR order, followed by those of the loops, follow as values[order];
        None: they stay where they are.
        """
        made = vars(self).setdefault("_more_loops", {})
        found: tuple[Graph, Ints | None] | None = made.get(count)
        if found is None:
            nodes = np.arange(self.num_nodes)
            source = np.concatenate([self.indices, *[nodes] * count])
            target = np.concatenate([self.edge_rows(), *[nodes] * count])
            graph = Graph.from_edge_index(source, target, self.num_nodes, self.num_sources, validate=False)
            found = made[count] = graph.with_order(None), graph.order
        return found

    def with_loops_last(self) -> Graph:
        """This graph with one edge v -> v for each node that is a source and a target, and no other loop.

        `order` numbers the edges as PyG then lists them: those that are not self loops in the caller's order,
        followed by the loops node by node (`remove_self_loops` and `add_self_loops`).
        """
        return self._with_loops_last

    @cached_property
    def _without_self_loops(self) -> Graph:
        if not self.num_self_loops:
            return self
        return self._relooped(build.drop_self_loops, self.num_edges - self.num_self_loops)

    @cached_property
    def _with_self_loops(self) -> Graph:
        if not self.is_square:
            raise GraphError(
                f"with_self_loops: targets ({self.num_nodes}) and sources ({self.num_sources}) are different "
                "node sets, so no node has an edge to itself; leave self loops off for bipartite graphs"
            )
        num_edges = self.num_edges - self.num_self_loops + self.num_nodes
        return self._relooped(build.one_loop_per_row, num_edges, self.num_nodes)

    @cached_property
    def _with_loops_last(self) -> Graph:
        num_loops = min(self.num_nodes, self.num_sources)
        num_edges = self.num_edges - self.num_self_loops + num_loops
        looped = self._relooped(build.one_loop_per_row, num_edges, num_loops)
        # not self, which would hold itself: the graphs of mini-batches must not wait for the collector
        bare, kept = Graph(self.indptr, self.indices, self.num_sources), vars(self)["_order"]
        return looped.with_order(lambda: _loops_last(bare.with_order(kept), looped))

    def _relooped(self, kernel: Callable[..., None], num_edges: int, *options: int) -> Graph:
        dtype = build.index_dtype(max(self.num_nodes, self.num_sources), num_edges)
        indptr = np.zeros(self.num_nodes + 1, dtype)
        indices, order = np.empty(num_edges, dtype), np.empty(num_edges, dtype)
        kernel(self.indptr, self.indices, indptr, indices, order, *options)
        kept = vars(self)["_order"]
        graph = Graph(
            indptr, indices, self.num_sources, lambda: follow(kept() if callable(kept) else kept, order)
        )
        if "is_symmetric" in vars(self):  # one loop more or less on the diagonal changes nothing
            vars(graph)["is_symmetric"] = self.is_symmetric
        return graph

    def anticipate(self, other: Graph) -> None:
        """Derives now what was derived of `other`, a graph of another mini-batch: the same will be asked for.

        Statistics and fingerprints are left out: they serve plans, which are made for sizes, not for graphs.
        """
        for name in _ANTICIPATED:
            if name not in vars(other):
                continue
            mine, theirs = getattr(self, name), vars(other)[name]
            if name in _FORMS and mine is not self:
                mine.anticipate(theirs)

    @cached_property
    def stats(self) -> stats.GraphStats:
        """The numbers the cost model reads."""
        return stats.measure(self.indptr, self.indices, self.num_sources)

    @cached_property
    def fingerprint(self) -> str:
        """Content hash: equal for graphs of equal shape and edges, whatever the caller's edge order was."""
        digest = hashlib.blake2b(f"{self.num_nodes}x{self.num_sources}".encode(), digest_size=16)
        digest.update(self.indptr.data)
        digest.update(self.indices.data)
        return digest.hexdigest()

    def edge_rows(self) -> Ints:
        """The row (target) of every CSR position."""
        return np.repeat(np.arange(self.num_nodes, dtype=self.indptr.dtype), self.degrees)

    def require_int32(self, path: str) -> Graph:
        """`self`; GraphError when `path` indexes with 32 bits and this graph does not fit."""
        build.require_int32(max(self.num_nodes, self.num_sources), self.num_edges, path)
        return self


def require_graph(graph: object, function: str) -> Graph:
    """`graph`; InputError where it is none, such as the edge_index it would be made from."""
    if not isinstance(graph, Graph):
        raise InputError(
            f"{function}: graph: {type(graph).__name__} is not a plait.Graph; make one with "
            "plait.Graph.from_edge_index(edge_index, num_nodes=...)"
        )
    return graph


def follow(order: Ints | None, positions: Ints) -> Ints:
    """The caller's edge numbers at `positions` of a CSR with this `order`; -1 stays -1."""
    if order is None:
        return positions
    if not order.size:
        return np.full_like(positions, -1)
    return np.where(positions < 0, -1, order[positions]).astype(order.dtype)


def _ends(edge_index: Any) -> tuple[Ints, Ints]:
    """(sources, targets) of an edge_index of shape [2, E]."""
    # a tensor, wherever it is; torch is not imported here
    try:
        edges = np.asarray(edge_index.detach().cpu() if hasattr(edge_index, "detach") else edge_index)
    except (
        TypeError,
        ValueError,
        NotImplementedError,
    ):  # sparse, on the device meta, lists of unequal length
        kind = type(edge_index).__name__
        raise GraphError(f"edge_index: a {kind} without an array of shape [2, E]; pass that array") from None
    if edges.ndim != 2 or edges.shape[0] != 2:
        is_turned = edges.ndim == 2 and edges.shape[1] == 2
        hint = "transpose it" if is_turned else "pass it as [sources, targets], or pass dst too"
        raise GraphError(f"edge_index has shape {edges.shape}, not [2, E]; {hint}")
    return edges[0], edges[1]


def _loops_last(graph: Graph, looped: Graph) -> Ints:
    """The numbers of the edges of `looped` when the caller's loops are left out and one per node appended."""
    rows = looped.edge_rows()
    listed = looped.order
    assert listed is not None
    if graph.num_self_loops:
        was_loop = graph.edge_rows() == graph.indices
        if graph.order is not None:
            was_loop[graph.order] = was_loop.copy()
        listed = (np.cumsum(~was_loop) - 1)[listed]
    loop = graph.num_edges - graph.num_self_loops + rows
    return np.where(rows == looped.indices, loop, listed).astype(rows.dtype)


def _as_edges(src: ArrayLike, dst: ArrayLike) -> tuple[Ints, Ints]:
    """Both ends as arrays of one length and dtype."""
    source, target = _as_index(src, "src"), _as_index(dst, "dst")
    if source.size != target.size:
        raise GraphError(
            f"src has {source.size} entries and dst has {target.size}; every edge needs both ends"
        )
    if source.dtype != target.dtype:
        source, target = source.astype(np.int64), target.astype(np.int64)
    return source, target


def _as_index(values: ArrayLike, name: str) -> Ints:
    """A contiguous int32 or int64 array of one dimension, not necessarily a copy."""
    array = np.asarray(values)
    if array.shape == (0,):
        array = array.astype(np.int64)  # np.asarray([]) is float
    if array.dtype.kind not in "iu":
        raise GraphError(f"{name} has dtype {array.dtype}; node numbers are integers, convert it first")
    if array.ndim != 1:
        raise GraphError(f"{name} has shape {array.shape}; pass a flat array, one entry per edge")
    if array.dtype == np.uint64 and int(array.max()) >= 2**63:
        raise GraphError(f"{name} holds {int(array.max())}, beyond int64; node numbers count from 0")
    return np.ascontiguousarray(array, dtype=np.int32 if array.dtype == np.int32 else np.int64)


def _as_size(value: int, name: str) -> int:
    try:
        size = operator.index(value)
    except TypeError:
        raise GraphError(f"{name}={value!r} is not a whole number; pass the number of nodes") from None
    if size < 0:
        raise GraphError(f"{name}={size} is negative; pass the number of nodes")
    return size


def _sizes(facts: build.EdgeScan, num_nodes: int | None, num_sources: int | None) -> tuple[int, int]:
    """(targets, sources), inferred where not given."""
    columns = None if num_sources is None else _as_size(num_sources, "num_sources")
    if num_nodes is not None:
        rows = _as_size(num_nodes, "num_nodes")
    elif facts.max_dst < 0 and facts.max_src < 0:
        raise GraphError("num_nodes cannot be inferred from an edge list without edges; pass num_nodes")
    else:
        rows = 1 + (max(facts.max_dst, facts.max_src) if columns is None else facts.max_dst)
    return rows, rows if columns is None else columns


def _check_range(name: str, low: int, high: int, limit: int) -> None:
    if low < 0:
        raise GraphError(f"{name} holds {low}; node numbers count from 0, remove or renumber such edges")
    if high >= limit:
        size = "num_nodes" if name == "dst" else "num_sources (num_nodes when not given)"
        raise GraphError(f"{name} holds node {high} but {size} is {limit}; pass at least {high + 1}")


def _check_pointers(pointer: Ints, num_edges: int) -> None:
    if pointer[0] != 0 or pointer[-1] != num_edges:
        raise GraphError(
            f"indptr runs from {pointer[0]} to {pointer[-1]}, not from 0 to len(indices) = {num_edges}; "
            "check that both arrays belong to the same matrix"
        )
    if (np.diff(pointer) < 0).any():
        raise GraphError("indptr decreases somewhere; row pointers never do, check how the CSR was made")
