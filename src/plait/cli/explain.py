"""plait explain: the plan of a named model on a graph, as text or JSON."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

from plait.cli.options import add_graph, whole_numbers
from plait.errors import InputError, unknown

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Model, widths, graph and mode."""
    add = parser.add_argument
    add(
        "--model",
        default="gcn",
        help="gcn, sage, sage-max, gin, sgc, tag, gat, gatv2, transformer (default gcn)",
    )
    add("--widths", metavar="IN,...,OUT", help="default: number of features, 64, number of classes")
    add_graph(parser)
    add("--mode", choices=("training", "inference"), default="training")
    add("--memory-limit", metavar="BYTES", help="memory limit of the whole model, such as 8GB or 512MiB")
    add("--analyze", action="store_true", help="run it and show measured times next to predicted ones")
    add("--verbose", action="store_true", help="formulas, kernels and every rejected plan with its price")
    add("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print the plan."""
    from plait.bench.task import STACKS, build_stack, explain_data

    widths = None if args.widths is None else whole_numbers("--widths", args.widths, "128,64,16")
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
    plan = replace(plan, model=f"{args.model} {'-'.join(map(str, widths))}")
    if args.json:
        print(plan.to_json())
    else:
        plan.show(formulas=args.verbose)
    return 0
