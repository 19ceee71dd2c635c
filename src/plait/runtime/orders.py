"""A graph's edges in their two orders, by target and by source, as passes over edges read them."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import torch

from plait.graph import Graph
from plait.kernels.spmm import Pattern

__all__ = ["EdgeOrders", "Incidence"]


class Incidence:
    """Edges as the rows that targets gather: the same surface as EdgeOrders, sources are the edges."""

    def __init__(self, of: Pattern):
        count = of.num_edges
        kind = of.indices.dtype
        self.order = np.arange(count, dtype=kind)
        self.pattern = Pattern(of.indptr, self.order, count)
        rows = np.repeat(np.arange(of.num_rows, dtype=kind), np.diff(of.indptr))
        self.transpose = Pattern(np.arange(count + 1, dtype=kind), rows, of.num_rows)


class EdgeOrders:
    """Edges by target, by source, and where each order finds the other's values."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self.pattern = Pattern(graph.indptr, graph.indices, graph.num_sources)

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
