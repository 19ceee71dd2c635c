"""plait bench ops and plait bench compare: single operations measured, and two runs held side by side."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from plait.cli.options import check_device
from plait.errors import InputError, unknown
from plait.measure.progress import Meter
from plait.measure.record import Record, read
from plait.measure.whole import write_whole

__all__ = ["add_compare", "add_ops", "dated"]

_SIZES = ("edges", "nodes", "width", "inner", "heads", "batch", "reduction")
_SHARES = ("degree", "exponent", "sparsity", "value_sparsity")
_NAMES = ("law", "order", "index_dtype", "dtype", "fanout", "graph", "direction")
_HELP = {
    "edges": "number of edges (1e6)",
    "nodes": "number of nodes; with --sparsity, the side of a square matrix",
    "inner": "inner dimension of a dense product",
    "batch": "matrices of bmm, seeds of sampling, rows of feature_gather",
    "reduction": "divide the number of target rows by this",
    "degree": "mean degree; nodes = edges / degree",
    "exponent": "of the power law, more than 2",
    "sparsity": "share of a square matrix that is empty",
    "value_sparsity": "share of zeros among the stored values",
    "law": "of degrees: regular uniform powerlaw",
    "order": "of edges: sorted random clustered",
    "index_dtype": "int64 int32",
    "dtype": "float32 float64 float16 bfloat16",
    "fanout": "neighbours per hop of sampling, such as 10,5",
    "graph": "a graph file, name or generator instead of drawn edges",
    "direction": "forward backward step",
}


def add_ops(parser: argparse.ArgumentParser) -> None:
    """The arguments of plait bench ops."""
    what = parser.add_argument_group("what to run")
    what.add_argument("--suite", metavar="NAME", help="quick paper calibrate full (default quick)")
    what.add_argument("--op", nargs="+", metavar="NAME", help="only these operations, at the sizes below")
    what.add_argument("--variants", nargs="+", metavar="NAME", help="only these implementations")
    what.add_argument("--device", default="cpu", help="cpu or cuda (default cpu)")
    what.add_argument("--list", action="store_true", help="list the operations and their variants, and exit")
    sizes = parser.add_argument_group("sizes of --op (defaults differ by operation)")
    for name in (*_SIZES, *_SHARES, *_NAMES):
        kind: Any = _count if name in _SIZES else _number if name in _SHARES else str
        sizes.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="X", help=_HELP.get(name))
    sizes.add_argument("--axis", type=int, metavar="X", help="indexed axis: 0 rows, 1 columns")
    how = parser.add_argument_group("how")
    how.add_argument(
        "--budget",
        type=float,
        metavar="SECONDS",
        help="time per group of implementations timed together, after warm-up",
    )
    how.add_argument("--repeats", type=int, help="samples per variant instead of as many as needed")
    how.add_argument("--warmup", type=int, default=2, help="untimed calls first (default 2)")
    how.add_argument(
        "--clock", metavar="NAME", default="wall",
        help="wall, or processor: processor time of one thread, for a machine that is not quiet",
    )  # fmt: skip
    how.add_argument("--cold", action="store_true", help="flush the last-level cache before every sample")
    how.add_argument("--no-memory", action="store_true", help="leave out the peak memory of each variant")
    how.add_argument("--num-threads", type=int, metavar="N", help="threads of torch and plait")
    out = parser.add_argument_group("results")
    out.add_argument("--output", type=Path, metavar="FILE", help="append JSON-lines records here")
    out.add_argument("--resume", action="store_true", help="skip the cases already in --output")
    out.add_argument("--csv", type=Path, metavar="FILE", help="write the records as a table too")
    out.add_argument(
        "--findings", type=Path, metavar="FILE", help="write the findings of --suite paper as JSON"
    )
    parser.set_defaults(measure=_ops)


def add_compare(parser: argparse.ArgumentParser) -> None:
    """The arguments of plait bench compare."""
    parser.add_argument("before", type=Path, metavar="A", help="records of the run to compare with")
    parser.add_argument("after", type=Path, metavar="B", help="records of the other run")
    parser.add_argument("--all", action="store_true", help="list the unchanged ones too")
    parser.set_defaults(measure=_compare, resume=False, num_threads=None)


def _count(text: str) -> int:
    value = _number(text)
    if not value.is_integer():
        raise argparse.ArgumentTypeError(f"{text} is not a whole number")
    return int(value)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is not a number") from None


def _ops(args: argparse.Namespace) -> int:
    from plait.bench.ops import runner, suites
    from plait.report.ops import csv_text, group_line, ops_text

    if args.list:
        return _list()
    check_device(args.device)
    _check_clock(args)
    groups = _groups(args)
    options = runner.Options(
        budget_seconds=args.budget or suites.BUDGETS.get(args.suite or "quick", 1.0),
        visits=1 if args.op else suites.VISITS.get(args.suite or "quick", 1),
        warmup=args.warmup,
        repeats=args.repeats,
        variants=args.variants,
        is_cold=args.cold,
        has_processor_clock=args.clock == "processor",
        memory=not args.no_memory,
        output=args.output or dated("ops"),
        resume=args.resume,
    )
    meter = Meter("groups", len(runner.left(groups, options)), sys.stderr)

    def watch(records: list[Record]) -> None:
        meter.note(group_line(records))
        meter.advance()

    try:
        records = runner.run(groups, options, watch)
    finally:
        meter.close()
    if args.csv:
        write_whole(args.csv, csv_text(records), "--csv", makes_folder=True)
    print(ops_text(records))
    if args.suite == "paper" or args.findings:
        _findings(records, args.findings)
    print(f"\nrecords: {options.output}")
    return 0


def dated(kind: str) -> Path:
    """Where records go that were given no place."""
    return Path("benchmarks") / "results" / time.strftime(f"{kind}-%Y%m%d-%H%M%S.jsonl")


def _list() -> int:
    from plait.bench.ops.catalogue import OPERATIONS
    from plait.report.ops import catalogue_text

    print(catalogue_text([(op.name, op.about, [v.name for v in op.variants]) for op in OPERATIONS.values()]))
    return 0


def _check_clock(args: argparse.Namespace) -> None:
    if args.clock not in ("wall", "processor"):
        raise InputError(f"--clock: unknown name {args.clock!r}; known are wall, processor")
    if args.clock == "processor" and (args.device != "cpu" or args.num_threads != 1):
        raise InputError("--clock: processor adds up the time of all threads; use it with --num-threads 1")


def _groups(args: argparse.Namespace) -> list[Any]:
    from plait.bench.cases import find_graph
    from plait.bench.ops import runner, suites
    from plait.bench.ops.catalogue import find, make_case

    sizes = {name: getattr(args, name) for name in (*_SIZES, *_SHARES, *_NAMES, "axis")}
    given = [f"--{name.replace('_', '-')}" for name, value in sizes.items() if value is not None]
    if not args.op:
        if given:
            raise InputError(f"{given[0]}: sizes are of one operation; name it with --op")
        groups = suites.groups_of(args.suite or "quick", args.device)
        _check_variants(args, [find(case.op) for group in groups for case in group])
        return groups
    if args.suite:
        raise InputError("--suite: a suite has its own operations; give --suite or --op, not both")
    _check_variants(args, [find(op) for op in args.op])
    cases = [make_case(op, device=args.device, **sizes) for op in args.op]
    for case in cases:
        if case.graph is None:
            runner.require_memory(case)
        else:
            find_graph(case.graph)  # a name that is none ends here, not in a record
    return [(case,) for case in cases]


def _check_variants(args: argparse.Namespace, operations: list[Any]) -> None:
    known = list(dict.fromkeys(variant.name for op in operations for variant in op.variants))
    for name in args.variants or ():
        if name not in known:
            raise InputError(unknown("--variants", name, known))


def _findings(records: list[Record], path: Path | None) -> None:
    from plait.bench.ops.findings import findings
    from plait.report.ops import findings_text

    found = findings(records)
    print("\n" + findings_text(found))
    if path is not None:
        text = json.dumps([finding.to_dict() for finding in found], indent=1) + "\n"
        write_whole(path, text, "--findings", makes_folder=True)
        print(f"\nfindings: {path}")


def _compare(args: argparse.Namespace) -> int:
    from plait.bench.compare import compare
    from plait.report.compare import compare_text

    print(compare_text(compare(read(args.before), read(args.after)), show_all=args.all))
    return 0
