"""plait cache: would a cache of remote features help on this graph, which one, and how large."""

from __future__ import annotations

import argparse
import math
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from plait.cli.options import add_graph, check_output, whole_numbers
from plait.cli.partition import read_assignment
from plait.errors import InputError
from plait.measure.whole import write_whole
from plait.report.table import count_text

if TYPE_CHECKING:
    from plait.graph import Graph

__all__ = ["add_arguments", "run"]

# METIS takes about a second per million edges; larger graphs are cut by node number.
_METIS_EDGES = 10_000_000
# Up to this many parts recursive bisection cuts fewer edges, as METIS's manual says.
_RECURSIVE_PARTS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Graph, partition, sampling, network."""
    add = parser.add_argument
    add_graph(parser)
    add("--parts", type=int, default=4, metavar="K", help="partitions (default 4)")
    add("--assignment", metavar="FILE.npy", help="the partition of every node")
    add("--rank", type=int, default=0, help="the partition to trace (default 0)")
    add("--fanout", default="10,25", metavar="K,...", help="neighbours per hop (default 10,25)")
    add("--batch", type=int, default=1000, metavar="N", help="seeds per batch (default 1000)")
    add("--train", type=float, default=0.1, metavar="SHARE", help="seeds when the file has none")
    add("--width", type=int, metavar="N", help="features per node (default: the file's, or 128)")
    add("--wire", default="float32", help="rows are sent and kept as float32 (default), float16 or bfloat16")
    add("--network", default="1gbit", help="such as 1gbit or 10gbit,50us (default 1gbit)")
    add("--compute", type=float, default=50.0, metavar="MS", help="computation per batch (default 50 ms)")
    add("--epochs", type=int, default=2, metavar="N", help="epochs to trace (default 2)")
    add("--plot", metavar="FILE.svg", help="draw hit rate over capacity")


def run(args: argparse.Namespace) -> int:
    """Trace, simulate, print, draw."""
    from plait.bench.cases import find_graph
    from plait.features.advise import advise
    from plait.features.scores import degree, inclusion_probability
    from plait.loader.remote import remote_trace
    from plait.report.cache import advice_figure, advice_text

    fanout = whole_numbers("--fanout", args.fanout, "15,10,5", least=-1)
    number_bytes = _number_bytes(args.wire)
    if args.width is not None and args.width < 1:
        raise InputError(f"--width: {args.width} is not a width; give at least 1")
    if not 0 <= args.compute < math.inf:
        raise InputError(f"--compute: {args.compute} is not a time; give milliseconds, 0 or more")
    if args.plot is not None:
        check_output("--plot", Path(args.plot))
    loaded = find_graph(args.data, args.data_dir)
    graph = loaded.graph
    part, how = _partition(graph, args.parts, args.assignment)
    train = _train(loaded, args.train)
    trace = remote_trace(graph, fanout, args.batch, part, rank=args.rank, train=train, epochs=args.epochs)
    if trace.is_cut:
        print("note: the trace was cut short; it represents the whole", file=sys.stderr)
    width = _width(loaded) if args.width is None else args.width
    mine = train[part[train] == args.rank]
    remote = part != args.rank
    scores = {
        "degree": np.where(remote, degree(graph), 0),
        "vip": np.where(remote, inclusion_probability(graph, fanout, mine, args.batch), 0),
    }
    advice = advise(
        trace.batches,
        number_bytes * width,
        args.network,
        epochs=trace.epochs,
        compute_seconds=args.compute / 1e3,
        sample_seconds=trace.sample_seconds,
        scores=scores,
    )
    title = (
        f"{args.data}, part {args.rank} of {how}, fanout {args.fanout}, batch {args.batch}, {args.network}"
    )
    print(
        f"{textwrap.fill(title, 100)}\n"
        f"{graph.num_nodes:,} nodes, {graph.num_edges:,} edges, rows of {width} {args.wire}\n"
        f"per epoch: {count_text(advice.batches, 'batch', 'batches')} of {trace.rows_per_batch:,.0f} rows, "
        f"{advice.none.remote_rows / advice.batches:,.0f} of them remote\n"
        f"per batch: computing is assumed to take {args.compute:g} ms, sampling took "
        f"{trace.sample_seconds * 1e3:.1f} ms here\n"
    )
    print(advice_text(advice))
    if args.plot:
        write_whole(Path(args.plot), advice_figure(advice, title), "--plot")
        print(f"figure: {args.plot}")
    return 0


def _number_bytes(wire: str) -> int:
    from plait.features.narrow import PRECISIONS

    if wire not in ("float32", *PRECISIONS):
        raise InputError(f"--wire: {wire!r} is unknown; choose float32, {' or '.join(PRECISIONS)}")
    return 4 if wire == "float32" else 2


def _width(loaded: Any) -> int:
    return 128 if loaded.x is None else int(loaded.x.shape[1])


def _train(loaded: Any, share: float) -> Any:
    """The training nodes of the file, else a seeded share of all nodes."""
    if not 0 < share <= 1:
        raise InputError(f"--train: {share} is not a share of the nodes; give more than 0 and up to 1")
    mask = loaded.masks.get("train")
    if mask is not None:
        return np.flatnonzero(mask if mask.ndim == 1 else mask[0])
    count = max(1, round(share * loaded.graph.num_nodes))
    return np.sort(np.random.default_rng(0).choice(loaded.graph.num_nodes, count, replace=False))


def _partition(graph: Graph, parts: int, assignment: str | None) -> tuple[Any, str]:
    """The partition of every node, and how it was made."""
    from plait.graph.partition import has_metis, metis

    if assignment is not None:
        given = read_assignment(assignment)
        if given.shape != (graph.num_nodes,) or given.dtype.kind not in "iu":
            raise InputError(
                f"--assignment: {assignment} has shape {given.shape} and type {given.dtype}; it needs a "
                f"whole number for each of {graph.num_nodes} nodes"
            )
        return given, f"{int(given.max()) + 1} ({Path(assignment).name})"
    if parts < 2:
        raise InputError(f"--parts: {parts} leaves nothing remote; give 2 or more")
    by_number = np.arange(graph.num_nodes) * parts // graph.num_nodes
    if graph.num_edges > _METIS_EDGES:
        return by_number, f"{parts} (by node number: over {_METIS_EDGES:,} edges)"
    if not has_metis():
        return by_number, f"{parts} (by node number: pymetis is not installed)"
    return metis(graph, parts, recursive=parts <= _RECURSIVE_PARTS), f"{parts} (METIS)"
