"""plait analyze: work, depth, strategies and pipelines of a named model, as text, JSON or one HTML page."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from plait.cli.options import check_output, refuse_ignored, whole_numbers
from plait.errors import InputError
from plait.measure.whole import write_whole

if TYPE_CHECKING:
    from plait.analysis import Analysis

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Model, graph or its statistics, workers and network."""
    add = parser.add_argument
    add("--model", default="gcn", metavar="NAME", help="gcn, sage, gin, gat, ... (default gcn)")
    add("--widths", metavar="IN,...,OUT", help="default: number of features, 64, number of classes")
    add("--data", metavar="FILE|GENERATOR", help="an npz file, a name, or sbm, rmat:... (default sbm)")
    add("--data-dir", metavar="FOLDER", help="where the graph files are")
    add("--nodes", type=int, metavar="N", help="instead of --data: the number of nodes")
    add("--edges", type=int, metavar="N", help="the number of edges, counting both directions")
    add("--degrees", metavar="KIND", help="powerlaw (default), poisson or regular")
    add("--max-degree", type=int, metavar="N", help="the largest degree, if known")
    add("--halo", type=float, metavar="SHARE", help="remote rows of a part divided by its own")
    add("--workers", default="4", metavar="N,...", help="numbers of workers (default 4)")
    add(
        "--network",
        metavar="NAME|FILE",
        help="10gbit, 100gbit,5us, 2GB/s, ..., or the file of a measured one (default: what was kept of one, "
        "or 10gbit)",
    )
    add("--memory", default="16GB", metavar="BYTES", help="memory of one worker (default 16GB)")
    add("--batch-size", type=int, default=1024, metavar="N", help="seeds per mini-batch")
    add("--train-nodes", type=int, metavar="N", help="seeds per epoch (default all)")
    add("--fanouts", metavar="N,...", help="neighbours sampled per hop (default 10)")
    add("--mode", choices=("training", "inference"), default="training")
    add("--html", type=Path, metavar="FILE", help="write figures and tables as one page")
    add("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print the analysis; write the page where asked."""
    if args.html is not None:
        check_output("--html", args.html)
    analysis = _of_statistics(args) if args.nodes is not None or args.edges is not None else _of_data(args)
    print(json.dumps(analysis.to_dict(), indent=1) if args.json else analysis)
    if args.html is not None:
        from plait.report.analysis import page_of

        write_whole(args.html, page_of(analysis), "--html")
        print(f"page: {args.html}", file=sys.stderr if args.json else sys.stdout)
    return 0


def _of_statistics(args: argparse.Namespace) -> Analysis:
    """A graph that is not here: no tensor and no torch."""
    from plait.analysis.analysis import Options, analyse, check_workers, halo_of, memory_of
    from plait.analysis.models import HIDDEN, assumed, layers_by_name
    from plait.analysis.network import network_in_use
    from plait.analysis.statistics import Statistics
    from plait.cost.machine import profile_in_use
    from plait.kernels.compiled import cache_folder

    if args.data is not None:
        raise InputError("--data: give a graph or its --nodes and --edges, not both")
    refuse_ignored(args, {"data_dir": None}, "--nodes and --edges read no file; leave it out")
    if args.nodes is None or args.edges is None:
        raise InputError("--nodes, --edges: one is missing; give both")
    widths = (HIDDEN,) * 3 if args.widths is None else _widths(args.widths)
    if args.widths is None:
        print(f"note: {assumed(widths)}; --widths gives others", file=sys.stderr)
    statistics = Statistics(args.nodes, args.edges, args.degrees or "powerlaw", args.max_degree)
    machine = profile_in_use(cache_folder())
    layers = layers_by_name(args.model, widths, statistics, machine, is_training=args.mode == "training")
    options = Options(
        workers=check_workers(_workers(args.workers), statistics.nodes),
        network=network_in_use(args.network, cache_folder()),
        memory=memory_of(args.memory),
        halo=halo_of(args.halo),
        batch_size=args.batch_size,
        fanouts=_fanouts(args.fanouts),
        train_share=_train_share(args.train_nodes, statistics.nodes) or 1.0,
    )
    return analyse(args.model, layers, statistics, machine, options)


def _of_data(args: argparse.Namespace) -> Analysis:
    """A graph in a file or from a generator; models plait has rules for are built in PyG and planned."""
    from plait.bench.task import STACKS, build_stack, explain_data
    from plait.pyg.analyze import analyze

    refuse_ignored(
        args,
        {"degrees": None, "max_degree": None},
        "describes a graph given by --nodes and --edges; leave it out, the degrees of --data are known",
    )
    workers = _workers(args.workers)
    widths = None if args.widths is None else _widths(args.widths)
    data, used, note = explain_data(args.data or "sbm", args.data_dir, widths)
    if note:
        print(f"note: {note}", file=sys.stderr)
    model = build_stack(args.model, used) if args.model in STACKS else args.model
    found = analyze(
        model, data, workers, args.network, memory=args.memory, widths=used, halo=args.halo,
        batch_size=args.batch_size, fanouts=_fanouts(args.fanouts), mode=args.mode,
        train_share=_train_share(args.train_nodes, int(data.num_nodes)),
    )  # fmt: skip
    return replace(found, model=f"{args.model} {'-'.join(map(str, used))} on {Path(args.data or 'sbm').stem}")


def _train_share(seeds: int | None, nodes: int) -> float | None:
    """The share of the nodes that are trained on; None where it was not said."""
    if seeds is not None and not 1 <= seeds <= nodes:
        raise InputError(f"--train-nodes: {seeds} of {nodes} nodes; give 1 to {nodes}")
    return None if seeds is None else seeds / nodes


def _widths(text: str) -> tuple[int, ...]:
    return whole_numbers("--widths", text, "128,64,16")


def _workers(text: str) -> tuple[int, ...]:
    return whole_numbers("--workers", text, "1,2,4,8")


def _fanouts(text: str | None) -> tuple[int | None, ...] | None:
    if text is None:
        return None
    hops = [part.strip() for part in text.split(",")]
    return tuple(None if hop == "all" else whole_numbers("--fanouts", hop, "15,10")[0] for hop in hops)
