"""The report as one HTML page, and its figures as files."""

from __future__ import annotations

from plait.report.page.layout import Report, report_of
from plait.report.page.palette import printed
from plait.report.page.samples import Run, read_runs

__all__ = ["Report", "Run", "printed", "read_runs", "report_of"]
