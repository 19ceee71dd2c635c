"""The graph as data: CSR by destination, its statistics, generators and files."""

from __future__ import annotations

from plait.graph import generate
from plait.graph.build import index_dtype
from plait.graph.csr import Graph
from plait.graph.io import LoadedGraph, SparseFeatures, load, load_arrays, save
from plait.graph.stats import GraphStats

__all__ = [
    "Graph", "GraphStats", "LoadedGraph", "SparseFeatures", "generate", "index_dtype", "load", "load_arrays",
    "save",
]  # fmt: skip
