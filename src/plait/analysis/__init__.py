"""Work, depth, parallelism, communication, synchronisation and pipelines of a plan: pure Python and numpy."""

from __future__ import annotations

from plait.analysis.analysis import Analysis, Options, analyse
from plait.analysis.statistics import Statistics

__all__ = ["Analysis", "Options", "Statistics", "analyse"]
