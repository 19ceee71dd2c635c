"""A graph by its statistics alone: counts and a distribution of degrees, measured or assumed.

Degrees are kept as bins (a degree, how many nodes have it), a few hundred whatever the graph's size, so that
a graph of a billion nodes is analysed in milliseconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.errors import InputError
from plait.graph import Graph

__all__ = ["DISTRIBUTIONS", "Bins", "Popularity", "Statistics"]

Floats = NDArray[np.float64]

DISTRIBUTIONS = ("powerlaw", "poisson", "regular")
_NUM_BINS = 400
_EXPONENT = 2.5  # between the 2.1 of the web and the 3 of preferential attachment


@dataclass(frozen=True, eq=False)
class Bins:
    """Degrees and how many nodes have each; both may be fractions, of an expected graph."""

    degree: Floats
    count: Floats

    @property
    def nodes(self) -> float:
        """The number of nodes."""
        return float(self.count.sum())

    @property
    def edges(self) -> float:
        """The number of edges."""
        return float(self.degree @ self.count)

    @property
    def largest(self) -> int:
        """The largest degree."""
        return math.ceil(float(self.degree.max(initial=0.0)))

    @classmethod
    def of(cls, degrees: NDArray[Any]) -> Bins:
        """The bins of measured degrees."""
        degree, count = np.unique(np.asarray(degrees), return_counts=True)
        return cls(degree.astype(np.float64), count.astype(np.float64))


@dataclass(frozen=True, eq=False)
class Popularity:
    """How often rows are found in a cache when only their degrees are known.

    Reads come in random order; a cache of c rows then holds a node of degree δ with probability
    1 - exp(-δ t), t such that c rows are expected in it (Che et al. 2002).
    """

    bins: Bins  # of how often each source is read
    degree_max: int  # of the rows that read them

    def miss_rate(self, cache_rows: int) -> float:
        """Share of reads that miss a cache of that many rows."""
        degree, count = self.bins.degree, self.bins.count
        distinct = float(count[degree > 0].sum())
        if cache_rows >= distinct or not self.bins.edges:
            return min(1.0, distinct / max(1.0, self.bins.edges))
        low, high = 0.0, 1.0
        while count @ -np.expm1(-degree * high) < cache_rows:
            high *= 2.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if count @ -np.expm1(-degree * middle) < cache_rows else (low, middle)
        missed = float((degree * count) @ np.exp(-degree * low))
        return max(distinct / self.bins.edges, missed / self.bins.edges)


@dataclass(frozen=True)
class Statistics:
    """Nodes, edges and how the edges are spread: "powerlaw", "poisson" (random graphs) or "regular".

    Edges count as a sparse matrix stores them: both directions of an undirected one. `max_degree` is the
    largest in-degree, where it is known; `exponent` that of the power law.
    """

    nodes: int
    edges: int
    degrees: str = "powerlaw"
    max_degree: int | None = None
    exponent: float = _EXPONENT
    graph: Graph | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, value in (("nodes", self.nodes), ("edges", self.edges)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise InputError(f"{name}: {value!r}; give a whole number of at least 0")
        if self.degrees not in (*DISTRIBUTIONS, "measured"):
            raise InputError(f"degrees: {self.degrees!r}; known are {', '.join(DISTRIBUTIONS)}")
        if self.edges and not self.nodes:
            raise InputError(f"edges: {self.edges} edges between no nodes; give nodes too")
        if self.exponent <= 2.0:
            raise InputError(f"exponent: {self.exponent}; a power law has a mean from above 2 on")
        mean = self.edges / max(1, self.nodes)
        if self.max_degree is not None and self.max_degree < mean:
            raise InputError(f"max_degree: {self.max_degree} is below the mean degree {mean:.1f}")

    @classmethod
    def of(cls, graph: Graph) -> Statistics:
        """The statistics of a given graph."""
        largest = int(graph.degrees.max()) if graph.num_nodes else 0
        return cls(graph.num_nodes, graph.num_edges, "measured", largest, graph=graph)

    @cached_property
    def bins(self) -> Bins:
        """Of the in-degrees: edges a row gathers."""
        if self.graph is not None:
            return Bins.of(self.graph.degrees)
        if not self.nodes or not self.edges:
            return Bins(np.zeros(1), np.array([float(self.nodes)]))
        mean = self.edges / self.nodes
        if self.degrees == "regular":
            return Bins(np.array([mean]), np.array([float(self.nodes)]))
        return self._poisson(mean) if self.degrees == "poisson" else self._powerlaw(mean)

    @cached_property
    def out_bins(self) -> Bins:
        """Of the out-degrees: how often a row is gathered; without a graph, assumed to be the same."""
        return self.bins if self.graph is None else Bins.of(self.graph.out_degrees)

    def locality(self, is_transposed: bool = False) -> Any:
        """The cost model's description of a graph: measured, or derived from the degrees."""
        if self.graph is not None:
            return (self.graph.transpose if is_transposed else self.graph).stats
        read, rows = (self.bins, self.out_bins) if is_transposed else (self.out_bins, self.bins)
        return Popularity(read, rows.largest)

    def _poisson(self, mean: float) -> Bins:
        most = max(8, math.ceil(mean + 12 * math.sqrt(mean)))
        degree = np.unique(np.linspace(0, most, min(most, 4000) + 1).round())
        logs = degree * math.log(mean) - mean - np.array([math.lgamma(x + 1) for x in degree])
        share = np.exp(logs)
        return self._scaled(degree, share)

    def _powerlaw(self, mean: float) -> Bins:
        """p(x) ∝ x^-γ between a least degree that gives the mean and the largest."""
        gamma = self.exponent
        low, high = mean * 1e-6, mean
        for _ in range(100):
            least = (low + high) / 2
            low, high = (least, high) if self._mean(least, gamma) < mean else (low, least)
        edges = np.geomspace(least, self._largest(least), _NUM_BINS + 1)
        share = edges[:-1] ** (1 - gamma) - edges[1:] ** (1 - gamma)
        moment = (edges[:-1] ** (2 - gamma) - edges[1:] ** (2 - gamma)) * (gamma - 1) / (gamma - 2)
        return self._scaled(moment / share, share)

    def _largest(self, least: float) -> float:
        """The largest degree: given, or what the largest of n draws is expected to be; at most n."""
        natural = least * self.nodes ** (1.0 / (self.exponent - 1.0))
        return max(least * 1.000001, float(min(self.max_degree or natural, self.nodes)))

    def _mean(self, least: float, gamma: float) -> float:
        most = self._largest(least)
        moment = (least ** (2 - gamma) - most ** (2 - gamma)) * (gamma - 1) / (gamma - 2)
        return float(moment / (least ** (1 - gamma) - most ** (1 - gamma)))

    def _scaled(self, degree: Floats, share: Floats) -> Bins:
        """Shares as counts of nodes, with degrees scaled to give the number of edges."""
        count = share * (self.nodes / share.sum())
        return Bins(degree * (self.edges / float(degree @ count)), count)
