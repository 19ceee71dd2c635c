"""Draws an analysis: figures of parallelism, roofline, strategies, pipelines and scaling on one page."""

from __future__ import annotations

from plait.report.analysis.page import figures_of, page_of

__all__ = ["figures_of", "page_of"]
