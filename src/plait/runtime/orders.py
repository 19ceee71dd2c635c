"""A graph's edges in their two orders, by target and by source, as passes over edges read them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from plait.graph import Graph
from plait.kernels.spmm import Pattern

__all__ = ["EdgeOrders", "Incidence", "RowBlock"]


class Incidence:
    """Edges as the rows that targets gather: the same surface as EdgeOrders, sources are the edges."""

    def __init__(self, of: Pattern):
        count = of.num_edges
        kind = of.indices.dtype
        self.order = np.arange(count, dtype=kind)
        self.pattern = Pattern(of.indptr, self.order, count)
        rows = np.repeat(np.arange(of.num_rows, dtype=kind), np.diff(of.indptr))
        self.transpose = Pattern(np.arange(count + 1, dtype=kind), rows, of.num_rows)


@dataclass(frozen=True)
class RowBlock:
    """Some rows, their edges, and the pattern that sums values of these edges by row."""

    rows: slice
    edges: slice
    pattern: Pattern


class EdgeOrders:
    """Edges by target, by source, and where each order finds the other's values."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self.pattern = Pattern(graph.indptr, graph.indices, graph.num_sources)
        self._blocks: dict[int, list[RowBlock]] = {}

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
        result = np.empty_like(self.order)
        result[self.order] = np.arange(len(self.order), dtype=self.order.dtype)
        return result.astype(self.pattern.indices.dtype)

    @cached_property
    def slopes_by_target(self) -> Pattern:
        """Sums, for every target, values that lie in the transpose's order."""
        return Pattern(self.pattern.indptr, self.inverse, self.pattern.num_edges)

    @cached_property
    def by_source(self) -> Pattern:
        """Sums, for every source, values that lie in the rows' order."""
        return Pattern(self.transpose.indptr, self.order, self.pattern.num_edges)

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

    def blocks(self, count: int) -> list[RowBlock]:
        """All rows in blocks of about `count` edges; a row is never cut."""
        if count not in self._blocks:
            self._blocks[count] = list(_row_blocks(self.pattern, count))
        return self._blocks[count]


def _row_blocks(pattern: Pattern, count: int) -> Iterator[RowBlock]:
    indptr, kind = pattern.indptr, pattern.indices.dtype
    first = 0
    while first < pattern.num_rows:
        wanted = int(np.searchsorted(indptr, indptr[first] + count, side="right")) - 1
        last = min(pattern.num_rows, max(first + 1, wanted))
        start, end = int(indptr[first]), int(indptr[last])
        own = Pattern(
            indptr[first : last + 1] - indptr[first], np.arange(end - start, dtype=kind), end - start
        )
        yield RowBlock(slice(first, last), slice(start, end), own)
        first = last
