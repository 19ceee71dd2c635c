"""The graph as data: CSR by destination, statistics, generators, files."""

from __future__ import annotations

from plait.graph.build import index_dtype
from plait.graph.csr import Graph
from plait.graph.stats import GraphStats

__all__ = ["Graph", "GraphStats", "index_dtype"]
