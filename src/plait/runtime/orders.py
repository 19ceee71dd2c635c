"""A graph's edges in their two orders, by target and by source, as passes over edges read them."""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from plait.graph import Graph
from plait.graph.compiled import compiled
from plait.kernels import edgewise, multi
from plait.kernels import spmm as sparse
from plait.kernels.edgewise import Groups
from plait.kernels.multi import Layout
from plait.kernels.spmm import Pattern

__all__ = ["EdgeBlock", "EdgeOrders", "Incidence"]

_BLOCK_BYTES = 2 << 20  # of the widest rows of a block that a map goes over; a second-level cache and a bit
_LEAST_EDGES = 256
_BLOCK_FLOATS = 1 << 17  # of the rows gathered for a block: half a megabyte stays in the second cache


@compiled
def _invert(order: np.ndarray[Any, Any], places: np.ndarray[Any, Any]) -> None:
    """places[order[p]] = p; numpy makes 0, 1, 2, ... first and takes three times as long."""
    for p in range(order.size):
        places[order[p]] = p


class Incidence:
    """Edges as the rows that targets gather: the same surface as EdgeOrders, sources are the edges."""

    def __init__(self, of: Pattern):
        count = of.num_edges
        kind = of.indices.dtype
        self.order = np.arange(count, dtype=kind)
        self.pattern = Pattern(of.indptr, self.order, count)
        rows = np.repeat(np.arange(of.num_rows, dtype=kind), np.diff(of.indptr))
        self.transpose = Pattern(np.arange(count + 1, dtype=kind), rows, of.num_rows)
        self.sources, self.targets = torch.from_numpy(self.order), torch.from_numpy(rows)


class EdgeBlock:
    """The edges of the targets from `first` to `last`, numbered from 0."""

    def __init__(self, of: Pattern, first: int, last: int):
        self.of, self.first, self.last = of, first, last
        self.start, self.end = int(of.indptr[first]), int(of.indptr[last])
        self.rows, self.edges = slice(first, last), slice(self.start, self.end)
        self._starts = of.indptr[first : last + 1] - of.indptr[first]
        self._sources = of.indices[self.edges]
        self.num_edges = len(self._sources)

    @cached_property
    def to_targets(self) -> Pattern:
        """[targets, edges]: a one for each edge in its target's row."""
        return Pattern(self._starts, np.arange(self.num_edges, dtype=self._starts.dtype), self.num_edges)

    @cached_property
    def to_edges(self) -> Pattern:
        """[edges, targets]: the transpose."""
        targets = np.repeat(
            np.arange(self.last - self.first, dtype=self._starts.dtype), np.diff(self._starts)
        )
        return Pattern(np.arange(self.num_edges + 1, dtype=targets.dtype), targets, self.last - self.first)

    @cached_property
    def groups(self) -> Groups:
        """The edges by source."""
        return Groups.of(self._sources)

    def pair(self, near: torch.Tensor, far: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """out[e] = near[i] + far[j] of the block's edges."""
        return edgewise.pair(self.of, self.first, self.last, near, far, out)

    def reduce(self, rows: torch.Tensor, out: torch.Tensor, reduce: str = "sum") -> None:
        """out[i] = the reduction of the edges' rows, for the block's targets i alone."""
        sparse.spmm(self.to_targets, rows, out[self.rows], reduce=reduce)

    def extremum(self, rows: torch.Tensor, out: torch.Tensor, ties: torch.Tensor, reduce: str) -> None:
        """The same of max and min; ties[i]: how many edges attain it."""
        sparse.extremum(self.to_targets, rows, out[self.rows], ties[self.rows], reduce)

    def spread(self, rows: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """out[e] = rows[i] of the edge's target."""
        return sparse.spmm(self.to_edges, rows[self.rows], out)

    def attained(
        self, rows: torch.Tensor, best: torch.Tensor, share: torch.Tensor, out: torch.Tensor
    ) -> torch.Tensor:
        """out[e] = share[i] where the edge's row attains best[i], else 0."""
        return sparse.extremum_gather(self.to_edges, rows, best[self.rows], share[self.rows], out)

    def scatter(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """out[j] += the rows of the edges from source j."""
        edgewise.scatter(self.groups, rows, out)

    def aggregate(self, rows: torch.Tensor, layout: Layout, out: torch.Tensor) -> None:
        """Every aggregator of the edges' rows, for the block's targets alone."""
        multi.aggregate(self.to_targets, rows, layout, out[self.rows])

    def aggregate_back(self, rows: torch.Tensor, layout: Layout, grad: torch.Tensor) -> torch.Tensor:
        """The gradients of the edges' rows from those of their targets' aggregates, which are made again."""
        grad = grad[self.rows]
        count, columns = grad.shape[0], rows.shape[1]
        out = rows.new_empty((count, grad.shape[1]))
        shares = rows.new_empty((count, layout.sections * columns))
        ties = rows.new_empty((count, 2 * columns)) if layout.has_ends else None
        multi.aggregate(self.to_targets, rows, layout, out, ties)
        multi.aggregate_shares(self.to_targets, layout, grad, out, ties, shares)
        return multi.aggregate_sources(self.to_edges, rows, layout, shares, torch.empty_like(rows))


class EdgeOrders:
    """Edges by target, by source, and where each order finds the other's values."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self.pattern = Pattern(graph.indptr, graph.indices, graph.num_sources)
        self._blocks: dict[int, list[EdgeBlock]] = {}
        self._counts: dict[tuple[torch.dtype, bool], torch.Tensor] = {}

    @cached_property
    def transpose(self) -> Pattern:
        turned = self.graph.transpose
        return (
            self.pattern
            if turned is self.graph
            else Pattern(turned.indptr, turned.indices, turned.num_sources)
        )

    @cached_property
    def order(self) -> np.ndarray[Any, Any]:
        """order[t]: the position among rows of the transpose's edge t."""
        return np.ascontiguousarray(self.graph.transpose_order.astype(self.transpose.indices.dtype))

    @cached_property
    def inverse(self) -> np.ndarray[Any, Any]:
        """inverse[e]: the position in the transpose of the row-order edge e."""
        result = np.empty_like(self.order, dtype=self.pattern.indices.dtype)
        _invert(self.order, result)
        return result

    @cached_property
    def slopes_by_target(self) -> Pattern:
        """Sums, for every target, values that lie in the transpose's order."""
        return Pattern(self.pattern.indptr, self.inverse, self.pattern.num_edges)

    @cached_property
    def incidence(self) -> Incidence:
        """Edges as rows of their own."""
        return Incidence(self.pattern)

    @cached_property
    def targets(self) -> torch.Tensor:
        """The target of each edge, by target."""
        return torch.from_numpy(self.incidence.transpose.indices)

    @cached_property
    def sources(self) -> torch.Tensor:
        """The source of each edge, by target."""
        return torch.from_numpy(self.pattern.indices)

    @cached_property
    def symmetric_norm(self) -> torch.Tensor:
        """1 / sqrt of the degrees of both ends of each edge, counted at targets; 0 where one has none."""
        degrees = np.diff(self.pattern.indptr).astype(np.float64)
        scale = np.divide(1.0, np.sqrt(degrees), out=np.zeros_like(degrees), where=degrees > 0)
        return torch.from_numpy(scale)[self.targets] * torch.from_numpy(scale)[self.sources]

    @cached_property
    def inverse_degrees(self) -> torch.Tensor:
        """1 / in-degree of each target, 1 where it has no edge."""
        return torch.from_numpy(1.0 / np.maximum(1.0, np.diff(self.pattern.indptr)))

    @cached_property
    def bare(self) -> torch.Tensor:
        """The targets without edges."""
        return torch.from_numpy(np.flatnonzero(np.diff(self.pattern.indptr) == 0))

    def counts(self, dtype: torch.dtype, is_once: bool) -> torch.Tensor:
        """[targets, 1]: the number of edges of each target; is_once: 1 where it has any."""
        if (dtype, is_once) not in self._counts:
            numbers = torch.from_numpy(np.diff(self.pattern.indptr)).to(dtype).unsqueeze(1)
            self._counts[dtype, is_once] = numbers.clamp_(max=1) if is_once else numbers
        return self._counts[dtype, is_once]

    def row_blocks(self, width: int, element_size: int) -> list[EdgeBlock]:
        """Blocks whose gathered rows of this many columns stay in the second cache."""
        columns = 1 << max(4, (max(1, width) - 1).bit_length())
        return self.blocks(max(64, _BLOCK_FLOATS // columns))

    def wide_blocks(self, width: int, element_size: int) -> list[EdgeBlock]:
        """Blocks for a map whose widest rows have this many columns."""
        return self.blocks(max(_LEAST_EDGES, _BLOCK_BYTES // max(1, width * element_size)))

    def blocks(self, count: int) -> list[EdgeBlock]:
        """All rows in blocks of about `count` edges; a row is never cut."""
        if count not in self._blocks:
            indptr, rows = self.pattern.indptr, self.pattern.num_rows
            cuts = [0]
            while cuts[-1] < rows:
                reach = int(np.searchsorted(indptr, int(indptr[cuts[-1]]) + count, side="right")) - 1
                cuts.append(min(rows, max(cuts[-1] + 1, reach)))
            self._blocks[count] = [EdgeBlock(self.pattern, a, b) for a, b in pairwise(cuts)]
        return self._blocks[count]
