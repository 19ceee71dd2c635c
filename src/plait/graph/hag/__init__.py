"""The hierarchical form of a graph: shared neighbours summed once."""

from __future__ import annotations

from plait.graph.hag.hierarchy import Hag
from plait.graph.hag.search import search

__all__ = ["Hag", "search"]
