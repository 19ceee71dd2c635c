"""The hierarchical form of a graph: shared neighbours summed once."""

from __future__ import annotations

from plait.graph.hag.forecast import Forecast, forecast
from plait.graph.hag.hierarchy import Hag
from plait.graph.hag.schedule import Schedule, level_schedule, tile_schedule
from plait.graph.hag.search import search

__all__ = ["Forecast", "Hag", "Schedule", "forecast", "level_schedule", "search", "tile_schedule"]
