"""Draws plans, analyses and records."""

from __future__ import annotations

from plait.report.table import Table, amount, bytes_text, ratio_text, seconds_text

__all__ = ["Table", "amount", "bytes_text", "ratio_text", "seconds_text"]
