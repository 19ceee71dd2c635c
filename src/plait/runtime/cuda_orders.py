"""A graph's edges in their two orders in a GPU's memory: what runtime/orders.py is on a CPU."""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from plait.kernels.multi import Layout
from plait.runtime.cuda import whole_rows
from plait.runtime.placed import PlacedGraph

if TYPE_CHECKING:
    from plait.kernels.csr.gpu import Rows

__all__ = ["PlacedBlock", "PlacedIncidence", "PlacedOrders", "with_listed_loops"]

_BLOCK_BYTES = 256 << 20  # of rows gathered for a block: its launches take long beside what issues them


class PlacedIncidence:
    """Edges as the rows that targets gather: sources are the edges."""

    def __init__(self, of: Rows, targets: Tensor):
        from plait.kernels.csr.gpu import Rows  # here: it needs triton

        count, kind = of.num_edges, of.indptr.dtype
        self.order = torch.arange(count, device=of.indices.device, dtype=kind)
        self.pattern = Rows(of.indptr, self.order, count)
        starts = torch.arange(count + 1, device=of.indices.device, dtype=kind)
        self.transpose = Rows(starts, targets.to(kind), of.num_rows)
        self.pattern.is_read, self.transpose.is_read = of.is_read, of.is_read
        self.sources, self.targets = self.order.long(), targets


class PlacedBlock:
    """The edges of the targets from `first` to `last`, which are those from `start` to `end`."""

    def __init__(self, of: PlacedOrders, first: int, last: int, start: int, end: int):
        self.of, self.first, self.last, self.start, self.end = of, first, last, start, end
        self.rows, self.edges = slice(first, last), slice(start, end)
        self.num_edges = end - start

    @property
    def is_whole(self) -> bool:
        """Whether it holds every edge."""
        return self.num_edges == self.of.pattern.num_edges and self.first == 0

    @cached_property
    def _starts(self) -> Tensor:
        found: Tensor = self.of.pattern.indptr[self.first : self.last + 1]
        return found if self.start == 0 else found - self.start

    @cached_property
    def targets(self) -> Tensor:
        """The target of each edge, counted from `first`."""
        found = self.of.targets[self.edges]
        return found if self.first == 0 else found - self.first

    @cached_property
    def to_targets(self) -> Rows:
        """[targets, edges]: a one for each edge in its target's row."""
        from plait.kernels.csr.gpu import Rows

        if self.is_whole:
            return self.of.incidence.pattern
        kind = self._starts.dtype
        numbers = torch.arange(self.num_edges, device=self._starts.device, dtype=kind)
        return Rows(self._starts, numbers, self.num_edges)

    @cached_property
    def local(self) -> Rows:
        """[targets, sources]: the block's rows of the graph."""
        from plait.kernels.csr.gpu import Rows

        whole = self.of.pattern
        if self.is_whole:
            return whole
        return Rows(self._starts, whole.indices[self.edges], whole.num_columns)

    @cached_property
    def to_edges(self) -> Rows:
        """[edges, targets]: the transpose."""
        from plait.kernels.csr.gpu import Rows

        if self.is_whole:
            return self.of.incidence.transpose
        kind = self._starts.dtype
        starts = torch.arange(self.num_edges + 1, device=self._starts.device, dtype=kind)
        return Rows(starts, self.targets.to(kind), self.last - self.first)

    @cached_property
    def to_sources(self) -> Rows:
        """[sources, edges]: a one for each edge in its source's row."""
        from plait.kernels.csr.gpu import Rows, transposed

        whole = self.of.pattern
        if self.is_whole:
            turned, order = self.of.transpose, self.of.order
        else:
            turned = transposed(Rows(self._starts, whole.indices[self.edges], whole.num_columns))
            assert turned.order is not None
            order = turned.order
        return Rows(turned.indptr, order, self.num_edges)

    def pair(self, near: Tensor, far: Tensor, out: Tensor) -> Tensor:
        """out[e] = near[i] + far[j] of the block's edges."""
        from plait.kernels.edgewise import gpu

        sources = self.of.pattern.indices[self.edges]
        return gpu.pair(self.of.targets[self.edges], sources, whole_rows(near), whole_rows(far), out)

    def reduce(self, rows: Tensor, out: Tensor, reduce: str = "sum") -> None:
        """out[i] = the reduction of the edges' rows, for the block's targets i alone."""
        from plait.kernels.spmm import gpu

        gpu.spmm(self.to_targets, rows, out[self.rows], reduce=reduce)

    def extremum(self, rows: Tensor, out: Tensor, ties: Tensor, reduce: str) -> None:
        """The same of max and min; ties[i]: how many edges attain it."""
        from plait.kernels.spmm import gpu

        counts = torch.empty(ties[self.rows].shape, dtype=torch.int32, device=ties.device)
        gpu.extremum(self.to_targets, rows, out[self.rows], counts, reduce)
        ties[self.rows] = counts

    def spread(self, rows: Tensor, out: Tensor) -> Tensor:
        """out[e] = rows[i] of the edge's target."""
        return torch.index_select(rows[self.rows], 0, self.targets, out=out)

    def attained(self, rows: Tensor, best: Tensor, share: Tensor, out: Tensor) -> Tensor:
        """out[e] = share[i] where the edge's row attains best[i], else 0."""
        from plait.kernels.edgewise import gpu

        ends = whole_rows(best[self.rows]), whole_rows(share[self.rows])
        return gpu.attained(self.targets, whole_rows(rows), *ends, out)

    def scatter(self, rows: Tensor, out: Tensor) -> None:
        """out[j] += the rows of the edges from source j."""
        from plait.kernels.spmm import gpu

        gpu.spmm(self.to_sources, rows, out, addend=out)

    def aggregate(self, rows: Tensor, layout: Layout, out: Tensor) -> None:
        """Every aggregator of the edges' rows, for the block's targets alone."""
        from plait.kernels.multi import gpu

        gpu.aggregate(self.to_targets, rows, layout, out[self.rows])

    def aggregate_back(self, rows: Tensor, layout: Layout, grad: Tensor) -> Tensor:
        """The gradients of the edges' rows from those of their targets' aggregates, which are made again."""
        from plait.kernels.multi import gpu

        grad = grad[self.rows]
        out = torch.empty_like(grad)
        ties = gpu.ties_like(rows, grad.shape[0], layout) if layout.has_ends else None
        gpu.aggregate(self.to_targets, rows, layout, out, ties)
        shares = gpu.aggregate_shares(self.to_targets, layout, grad, out, ties)
        return gpu.aggregate_sources(self.to_edges, rows, layout, shares, torch.empty_like(rows))


class PlacedOrders:
    """The edges of a placed graph by target and by source: the surface of runtime/orders.py: EdgeOrders."""

    def __init__(self, graph: PlacedGraph):
        self.graph = graph
        self._blocks: dict[int, list[PlacedBlock]] = {}

    @cached_property
    def _whole(self) -> PlacedGraph:
        """The graph with the edges that belong to rows alone."""
        return self.graph.trimmed()

    @property
    def pattern(self) -> Rows:
        """The rows that hold every edge."""
        return self._whole.rows

    @property
    def transpose(self) -> Rows:
        """The same by source."""
        return self._whole.transpose.rows

    @property
    def order(self) -> Tensor:
        """order[t]: the position among rows of the transpose's edge t."""
        return self._whole.transpose_order

    @cached_property
    def incidence(self) -> PlacedIncidence:
        """Edges as rows of their own."""
        return PlacedIncidence(self.pattern, self.targets)

    @cached_property
    def sources(self) -> Tensor:
        """The source of each edge, by target."""
        return self.pattern.indices.long()

    @cached_property
    def targets(self) -> Tensor:
        """The target of each edge, by target."""
        return self._whole.edge_rows().long()

    @cached_property
    def symmetric_norm(self) -> Tensor:
        """1 / sqrt of the degrees of both ends of each edge, counted at targets; 0 where one has none."""
        degrees = self.pattern.degrees.double()
        scale = torch.where(degrees > 0, degrees.rsqrt(), 0.0)
        return scale[self.targets] * scale[self.sources]

    @cached_property
    def inverse_degrees(self) -> Tensor:
        """1 / in-degree of each target, 1 where it has no edge."""
        return 1.0 / self.pattern.degrees.double().clamp(min=1.0)

    @cached_property
    def bare(self) -> Tensor:
        """The targets without edges; waits for the device."""
        return torch.nonzero(self.pattern.degrees == 0).flatten()

    def counts(self, dtype: torch.dtype, is_once: bool) -> Tensor:
        """[targets, 1]: the number of edges of each target; is_once: 1 where it has any."""
        numbers = self.pattern.degrees.to(dtype).unsqueeze(1)
        return numbers.clamp_(max=1) if is_once else numbers

    def row_blocks(self, width: int, element_size: int) -> list[PlacedBlock]:
        """Blocks whose gathered rows of this many columns take a fixed part of the memory."""
        return self.blocks(max(1, _BLOCK_BYTES // max(1, width * element_size)))

    wide_blocks = row_blocks

    def blocks(self, count: int) -> list[PlacedBlock]:
        """All rows in blocks of about `count` edges; a row is never cut.

        One block takes all edges of a small graph, and nothing is read; the ends of several are read once.
        """
        if count not in self._blocks:
            rows, edges = self.pattern.num_rows, self.pattern.num_edges
            bounds = [(0, 0), (rows, edges)] if edges <= count else self._cuts(count)
            self._blocks[count] = [PlacedBlock(self, a, b, s, e) for (a, s), (b, e) in pairwise(bounds)]
        return self._blocks[count]

    def _cuts(self, count: int) -> list[tuple[int, int]]:
        """(first row, first edge) of every block, and (rows, edges)."""
        indptr = self.pattern.indptr
        wanted = torch.arange(count, self.pattern.num_edges, count, device=indptr.device, dtype=indptr.dtype)
        rows = torch.unique(torch.searchsorted(indptr, wanted, right=True) - 1)
        starts = torch.stack([rows, indptr[rows].long()], 1).tolist()
        inner = [(row, start) for row, start in starts if row > 0 and start]
        return [(0, 0), *inner, (self.pattern.num_rows, self.pattern.num_edges)]


def with_listed_loops(graph: PlacedGraph) -> PlacedGraph:
    """The graph with its own loops out and one for each node in, all of its edges in rows.

    Its order numbers edges as PyG lists them: the others in their order, then the loops by node.
    """
    bare = graph.without_self_loops().trimmed()
    looped, order = bare.with_more_self_loops(1)
    number = bare.order
    assert number is not None
    rank = torch.empty(bare.num_edges, dtype=order.dtype, device=order.device)
    listed = number.argsort(stable=True)
    rank[listed] = torch.arange(bare.num_edges, dtype=order.dtype, device=order.device)
    place = torch.cat([rank, torch.arange(bare.num_edges, looped.num_edges, device=order.device).to(rank)])
    rows = looped.rows
    from plait.kernels.csr.gpu import Rows

    made = Rows(rows.indptr, rows.indices, rows.num_columns, place[order.long()])
    made.is_read = rows.is_read
    return PlacedGraph(looped.num_nodes, looped.num_sources, made)
