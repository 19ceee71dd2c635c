"""plait report: records and plans as one HTML page, and its figures as files."""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.cli.options import check_output
from plait.errors import InputError
from plait.measure.whole import write_whole

if TYPE_CHECKING:
    from plait.report.page.draw import Figure

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Runs in, a page out."""
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="records of `plait bench`, its findings, plans of `plait explain --json`, or a folder of these",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("report.html"),
        metavar="FILE.html",
        help="default report.html",
    )
    parser.add_argument(
        "--figures", type=Path, metavar="FOLDER", help="keep every figure as SVG (and PNG) too"
    )


def run(args: argparse.Namespace) -> int:
    """Read, arrange, write."""
    from plait.report.page import read_runs, report_of

    check_output("-o", args.output)
    if args.figures is not None:
        check_output("--figures", args.figures / "figure.svg", makes_folder=True)
    read = read_runs(args.runs)
    for remark in read.remarks:
        print(f"note: {remark}", file=sys.stderr)
    report = report_of(read)
    if not report.samples and not read.plans and not read.findings:
        raise InputError(
            f"RUN: none of the {len(read.records)} records can be drawn; see `plait bench --help`"
        )
    write_whole(args.output, report.html().encode(), "-o")
    print(f"report: {args.output}")
    if args.figures is not None:
        print(_write_figures(args.figures, report.figures))
    return 0


def _write_figures(folder: Path, figures: Sequence[Figure]) -> str:
    from plait.report.page import printed
    from plait.report.page.draw import WIDE

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--figures: cannot make {folder} ({error.strerror})") from None
    converter = _converter()
    for figure in figures:
        name = re.sub(r"[^\w.-]+", "-", figure.name)
        text = printed(figure.draw(WIDE)).encode()
        write_whole(folder / f"{name}.svg", text, "--figures")
        if converter is not None:
            write_whole(folder / f"{name}.png", converter.svg2png(bytestring=text, scale=2), "--figures")
    what = "SVG and PNG" if converter else "SVG; for PNG too, install cairosvg"
    return f"figures: {len(figures)} in {folder} ({what})"


def _converter() -> Any:
    try:
        return importlib.import_module("cairosvg")
    except (ImportError, OSError):  # OSError: the package is there, the library it draws with is not
        return None
