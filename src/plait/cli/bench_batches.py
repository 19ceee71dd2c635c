"""plait bench batches: mini-batches from the sampler to the cache, measured against what was promised."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from plait.cli.bench_ops import dated
from plait.errors import InputError
from plait.measure.progress import Meter
from plait.measure.record import Record

__all__ = ["add_batches"]


def add_batches(parser: argparse.ArgumentParser) -> None:
    """The arguments of plait bench batches."""
    add = parser.add_argument
    add(
        "--parts", nargs="+", metavar="NAME",
        help="sampling loading training gathering simulation lookup throttled advisor leak (default all)",
    )  # fmt: skip
    add("--data-dir", metavar="FOLDER", help="where the graph files are")
    add("--output", type=Path, metavar="FILE", help="append JSON-lines records here")
    add("--budget", type=float, default=3.0, metavar="SECONDS", help="clock time per comparison (default 3)")
    add("--epochs", type=int, default=50, help="epochs of the leak part (default 50)")
    add("--breaks", type=int, default=1000, help="early breaks of the leak part (default 1000)")
    add(
        "--small",
        action="store_true",
        help="tiny graphs, to test that everything runs",
    )
    add(
        "--num-threads",
        type=int,
        metavar="N",
        help="threads of training and gathering (sampling tries 1 and 2)",
    )
    parser.set_defaults(measure=_batches, resume=False)


def _batches(args: argparse.Namespace) -> int:
    from plait.bench import batches
    from plait.bench.cases import known
    from plait.report.batches import batches_line, batches_text

    parts = [known("--parts", name, tuple(batches.PARTS)) for name in args.parts or batches.PARTS]
    if args.epochs < 4 or args.breaks < 1:
        raise InputError(f"--epochs {args.epochs} --breaks {args.breaks}: give at least 4 and 1")
    options = batches.Options(
        data_dir=args.data_dir,
        budget_seconds=args.budget,
        epochs=args.epochs,
        breaks=args.breaks,
        is_small=args.small,
    )
    output = args.output or dated("batches")
    meter = Meter("records", None, sys.stderr)

    def watch(record: Record) -> None:
        meter.note(batches_line(record))
        meter.advance()

    records = batches.run(parts, options, output, watch)
    meter.close()
    print(batches_text(records))
    print(f"\nrecords: {output}")
    return 0
