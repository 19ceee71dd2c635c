"""A graph in a GPU's memory: made there from a CUDA edge_index, with what matrix expressions ask of a Graph.

Nothing is copied to the host. Up to `BOUNDED_EDGES` edges nothing is read from the device either, so a
mini-batch costs no wait and its graph can be made inside a CUDA graph; larger ones read a few numbers once.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from plait.errors import GraphError
from plait.graph.stats import FIRST_WINDOW_BITS, GraphStats

if TYPE_CHECKING:
    from plait.kernels.csr.gpu import Rows

__all__ = ["BOUNDED_EDGES", "PlacedGraph", "column_of", "index_of", "place_of"]

BOUNDED_EDGES = 1 << 20
_CPU = torch.device("cpu")


def index_of(numbers: Any) -> Tensor:
    """Node or edge numbers of either kind of graph as an int64 tensor where they lie."""
    return numbers.long() if isinstance(numbers, Tensor) else torch.from_numpy(np.asarray(numbers, np.int64))


def place_of(graph: Any) -> torch.device:
    """The device a graph's arrays are on."""
    return graph.device if isinstance(graph, PlacedGraph) else _CPU


def column_of(graph: Any) -> str:
    """The column of the table of kernels that reads such a graph."""
    return "cuda" if isinstance(graph, PlacedGraph) else "cpu"


class PlacedGraph:
    """The part of Graph's surface that matrix expressions use, with tensors of a device for arrays.

    Rows are targets, sources ascend inside a row. Like a Graph it never changes.
    """

    is_symmetric = False  # finding out would wait for the device
    has_self_loops = True  # as above: there may be some

    def __init__(
        self,
        num_nodes: int,
        num_sources: int,
        rows: Rows | None = None,
        key: Tensor | None = None,
        is_turned: bool = False,
    ):
        """Of rows, or of packed edges (kernels/csr/gpu.py: pack) from which rows are made when asked for."""
        self.num_nodes, self.num_sources, self.is_turned = num_nodes, num_sources, is_turned
        self._key = key
        self._is_listed = False  # whether its rows hold the edges in the caller's order
        if rows is not None:
            self.rows = rows
        made = key if rows is None else rows.indices
        assert made is not None
        self.num_edges, self.device = made.numel(), made.device
        self._more_loops: dict[int, tuple[PlacedGraph, Tensor]] = {}
        self.is_read = False  # whether it may wait for the device: of a graph that stays, once is nothing

    @classmethod
    def of(
        cls, edge_index: Tensor, num_nodes: int, num_sources: int, is_swapped: bool = False
    ) -> PlacedGraph:
        """The graph of [sources, targets] (is_swapped: the other way round), which is not kept.

        An edge out of range is a GraphError; in a small graph, where nothing is read, it is the device's own
        assertion, as in PyG.
        """
        from plait.kernels.csr.gpu import pack  # here: it needs triton

        edges = edge_index.flip(0) if is_swapped else edge_index
        key, is_right = pack(edges, num_nodes, num_sources)
        if key.numel() <= BOUNDED_EDGES:
            torch._assert_async(is_right)
        elif not int(is_right):
            raise GraphError(
                f"edge_index: a source is not in 0..{num_sources - 1} or a target not in 0..{num_nodes - 1}; "
                "check edge_index against x"
            )
        return cls(num_nodes, num_sources, key=key)

    @classmethod
    def listed(cls, source: Tensor, indptr: Tensor) -> PlacedGraph:
        """The square graph of edges listed target after target, as a sampler does: two casts and no sort.

        Target v has the edges from indptr[v] to indptr[v + 1]. Sources do not ascend; nothing is checked.
        """
        from plait.kernels.csr.gpu import Rows

        count, num_nodes = source.numel(), indptr.numel() - 1
        order = torch.arange(count, device=source.device, dtype=indptr.dtype)
        made = cls(num_nodes, num_nodes, Rows(indptr, source.to(indptr.dtype), num_nodes, order))
        made._is_listed = True
        return made

    def _packed(self) -> Tensor | None:
        """Its packed edges in the caller's order, where they are known."""
        from plait.kernels.csr.gpu import packed

        if self._key is None and self._is_listed:
            self._key = packed(self.rows)
        return self._key

    def __repr__(self) -> str:
        return f"PlacedGraph({self.num_nodes:,} nodes, {self.num_edges:,} edges on {self.device})"

    @property
    def is_square(self) -> bool:
        """True unless targets and sources are different node sets."""
        return self.num_nodes == self.num_sources

    @functools.cached_property
    def rows(self) -> Rows:
        """The matrix as kernels read it."""
        from plait.kernels.csr.gpu import sorted_rows

        assert self._key is not None
        rows = sorted_rows(self._key, self.num_nodes, self.num_sources)
        rows.is_read = self.is_read
        return rows

    @property
    def indices(self) -> Tensor:
        """Sources, row by row."""
        return self.rows.indices

    @property
    def order(self) -> Tensor | None:
        """order[p]: the caller's number of the edge at position p."""
        return self.rows.order

    @property
    def degrees(self) -> Tensor:
        """Edges of every target."""
        return self.rows.degrees

    @property
    def out_degrees(self) -> Tensor:
        """Edges that every source sends."""
        return self.transpose.degrees

    def edge_rows(self) -> Tensor:
        """The target of every edge; of edges that belong to no row, the last one."""
        edges = torch.arange(self.num_edges, device=self.device, dtype=self.rows.indptr.dtype)
        found = torch.searchsorted(self.rows.indptr, edges, right=True) - 1
        return found.clamp_(max=max(0, self.num_nodes - 1)) if self.rows.has_rest else found

    @functools.cached_property
    def transpose(self) -> PlacedGraph:
        """The graph with every edge reversed."""
        from plait.kernels.csr.gpu import transposed

        return PlacedGraph(self.num_sources, self.num_nodes, transposed(self.rows), is_turned=True)

    @property
    def transpose_order(self) -> Tensor:
        """transpose_order[p]: where the edge at position p of the transpose is here."""
        order = self.transpose.rows.order
        assert order is not None
        return order

    def with_order(self, order: Any) -> PlacedGraph:
        """The same edges as a graph of its own; its order stays what it is."""
        made = PlacedGraph(self.num_nodes, self.num_sources, self.rows, self._key, self.is_turned)
        made.is_read, made._is_listed = self.is_read, self._is_listed
        return made

    def without_self_loops(self) -> PlacedGraph:
        """This graph less every edge v -> v; in a small one they stay behind the last row, not counted."""
        return self._without_self_loops

    @functools.cached_property
    def _without_self_loops(self) -> PlacedGraph:
        from plait.kernels.csr.gpu import sorted_rows, without_loops

        key = self._packed()
        assert key is not None
        kept, count = without_loops(key, self.num_nodes)
        is_read = self.is_read or self.num_edges > BOUNDED_EDGES
        if is_read and not int(count):
            return self
        rows = sorted_rows(kept, self.num_nodes, self.num_sources, True)
        rows.is_read = self.is_read
        bare = PlacedGraph(self.num_nodes, self.num_sources, rows)
        return bare.trimmed() if is_read else bare

    def with_loops_last(self) -> PlacedGraph:
        """This graph with its own loops out and one for each node in; see Graph."""
        key = self._packed()
        if self.is_read or key is None or self.num_edges > BOUNDED_EDGES or not self.is_square:
            return self.without_self_loops().with_more_self_loops(1)[0]
        from plait.kernels.csr.gpu import sorted_rows, with_loops

        # of a graph that may come once: one sort for both
        rows = sorted_rows(with_loops(key, self.num_nodes), self.num_nodes, self.num_sources, True)
        rows.order = None
        return PlacedGraph(self.num_nodes, self.num_sources, rows)

    def trimmed(self) -> PlacedGraph:
        """The same with the edges that belong to rows alone; reads their number."""
        rows = self.rows
        if not rows.has_rest:
            return self
        from plait.kernels.csr.gpu import Rows

        count = int(rows.indptr[-1])
        order = None if rows.order is None else rows.order[:count]
        whole = Rows(rows.indptr, rows.indices[:count], self.num_sources, order)
        whole.is_read = rows.is_read
        return PlacedGraph(self.num_nodes, self.num_sources, whole)

    def with_more_self_loops(self, count: int) -> tuple[PlacedGraph, Tensor]:
        """(this graph with `count` more edges v -> v per node, order), made once; see Graph."""
        found = self._more_loops.get(count)
        if found is None:
            found = self._more_loops[count] = self._looped(count)
        return found

    def _looped(self, count: int) -> tuple[PlacedGraph, Tensor]:
        from plait.kernels.csr.gpu import sorted_rows

        rows = self.rows
        edges = torch.arange(self.num_edges, device=self.device, dtype=rows.indptr.dtype)
        target = torch.searchsorted(rows.indptr, edges, right=True) - 1  # the rest stays where it is
        nodes = torch.arange(self.num_nodes, device=self.device)
        key = torch.cat([(target << 32) | rows.indices, *[(nodes << 32) | nodes] * count])
        made = sorted_rows(key, self.num_nodes, self.num_sources, rows.has_rest)
        made.is_read = rows.is_read
        order, made.order = made.order, None
        assert order is not None
        return PlacedGraph(self.num_nodes, self.num_sources, made), order

    @functools.cached_property
    def stats(self) -> GraphStats:
        """The numbers the cost model reads: counted on the device, read in one piece."""
        from plait.kernels.csr.gpu import transposed

        whole = self.trimmed()
        # the transpose of a transpose is needed for nothing else: it is not kept
        return _stats(whole.rows, transposed(whole.rows) if self.is_turned else whole.transpose.rows)


def _stats(rows: Rows, turned: Rows) -> GraphStats:
    """Degrees, and the footprint of the sources as graph/stats.py defines it.

    `turned.order` lists for every source the positions at which it is read, ascending: the gaps between them
    are differences of neighbours.
    """
    degrees = rows.degrees.double()
    num_nodes, num_edges = rows.num_rows, rows.num_edges
    if not num_nodes or not num_edges:
        return GraphStats(num_nodes, turned.num_rows, num_edges, 0.0, 0, (0.0, 0.0, 0.0), 0.0, num_nodes, ())
    windows: list[int] = []
    while (window := 2 ** (FIRST_WINDOW_BITS + len(windows))) < num_edges:
        windows.append(window)
    counts, totals = _gaps(turned, len(windows) + 1)
    ranked = degrees.sort().values
    places = [round(q * (num_nodes - 1)) for q in (0.5, 0.9, 0.99)]
    facts = torch.stack([
        *(ranked[p] for p in places), ranked[-1], degrees.std(correction=0), (degrees == 0).sum(),
        (turned.degrees > 0).sum(),
    ])  # fmt: skip
    read = torch.cat([facts, counts, totals]).tolist()
    p50, p90, p99, most, spread, empty, distinct = read[: len(facts)]
    count, total = read[len(facts) : len(facts) + len(windows) + 1], read[len(facts) + len(windows) + 1 :]
    points = []
    for k, window in enumerate(windows):
        absent = sum(total[k + 1 :]) - (window - 1) * sum(count[k + 1 :])
        points.append((window, distinct - absent / (num_edges - window + 1)))
    mean = num_edges / num_nodes
    return GraphStats(
        num_nodes, turned.num_rows, num_edges, mean, int(most), (p50, p90, p99), spread / mean, int(empty),
        (*points, (num_edges, distinct)),
    )  # fmt: skip


def _gaps(turned: Rows, kinds: int) -> tuple[Tensor, Tensor]:
    """(number, total length) of the gaps between reads of a source, by digits of gap >> FIRST_WINDOW_BITS."""
    assert turned.order is not None
    end, order = turned.num_edges, turned.order.long()
    edges = torch.arange(end, device=order.device)
    # every source has one gap more than reads: room for it behind each row
    place = edges + torch.searchsorted(turned.indptr.long(), edges, right=True) - 1
    before = torch.full((end + turned.num_rows,), -1, device=order.device)
    after = torch.full_like(before, end)
    after[place] = order
    before[place + 1] = order
    degrees = turned.degrees.long()
    is_read = (degrees > 0).repeat_interleave(degrees + 1, output_size=before.numel())
    gap = torch.where(is_read, after - before - 1, 0)
    digits = torch.frexp((gap >> FIRST_WINDOW_BITS).double()).exponent.clamp(0, kinds - 1)
    counts = torch.bincount(digits, weights=is_read.double(), minlength=kinds)
    return counts, torch.bincount(digits, weights=gap.double(), minlength=kinds)
