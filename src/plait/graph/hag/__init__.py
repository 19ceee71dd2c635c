"""The hierarchical form of a graph: shared neighbours summed once; other forms, and schedules of them."""

from __future__ import annotations

from plait.graph.hag.difference import Differences, difference_rows, difference_schedule
from plait.graph.hag.forecast import Forecast, forecast
from plait.graph.hag.hierarchy import Hag
from plait.graph.hag.prefix import PrefixLevels, prefix_levels
from plait.graph.hag.schedule import Schedule, tile_schedule
from plait.graph.hag.search import search

__all__ = [
    "Differences", "Forecast", "Hag", "PrefixLevels", "Schedule", "difference_rows", "difference_schedule",
    "forecast", "prefix_levels", "search", "tile_schedule",
]  # fmt: skip
