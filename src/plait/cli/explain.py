"""plait explain: the plan of a named model on a graph, as text or JSON."""

from __future__ import annotations

import argparse
import sys

from plait.errors import InputError, unknown

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Model, widths, graph and mode."""
    parser.add_argument(
        "--model",
        default="gcn",
        help="gcn, sage, sage-max, gin, sgc, tag, gat, gatv2, transformer (default gcn)",
    )
    parser.add_argument(
        "--widths", metavar="IN,...,OUT", help="default: number of features, 64, number of classes"
    )
    parser.add_argument(
        "--data", default="sbm", metavar="FILE|GENERATOR", help="an npz file, a name, or sbm, rmat:..."
    )
    parser.add_argument("--data-dir", metavar="FOLDER", help="where the graph files are")
    parser.add_argument("--mode", choices=("training", "inference"), default="training")
    parser.add_argument(
        "--memory-limit", metavar="BYTES", help="memory limit of the whole model, such as 8GB or 512MiB"
    )
    parser.add_argument(
        "--analyze", action="store_true", help="run it and show measured times next to predicted ones"
    )
    parser.add_argument(
        "--verbose", action="store_true", help="formulas, kernels and every rejected plan with its price"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print the plan."""
    from plait.bench.task import STACKS, build_stack, explain_data

    widths = None if args.widths is None else _widths(args.widths)
    if args.model not in STACKS:
        raise InputError(unknown("--model", args.model, tuple(STACKS)))
    data, widths, note = explain_data(args.data, args.data_dir, widths)
    if note:
        print(f"note: {note}", file=sys.stderr)
    import plait

    options = {"mode": args.mode}
    if args.memory_limit is not None:
        options["memory_limit"] = args.memory_limit
    plan = plait.explain(build_stack(args.model, widths), data, analyze=args.analyze, **options)
    if args.json:
        print(plan.to_json())
    else:
        plan.show(formulas=args.verbose)
    return 0


def _widths(text: str) -> tuple[int, ...]:
    parts = text.replace("->", ",").split(",")
    if len(parts) < 2 or not all(part.strip().isdigit() and int(part) for part in parts):
        raise InputError(f"--widths: {text!r} is not a list of widths; write for example 128,64,16")
    return tuple(int(part) for part in parts)
