"""plait hag: what summing shared neighbours once would save on a graph, in counts and in measured time."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.cli.options import (
    add_threads,
    check_device,
    check_output,
    refuse_ignored,
    use_threads,
    whole_numbers,
)
from plait.errors import InputError

if TYPE_CHECKING:
    from plait.graph import Graph, hag
    from plait.measure import Record
    from plait.report.table import Table

__all__ = ["add_arguments", "run"]

# options of --data alone, with their defaults
_OF_DATA = {
    "data_dir": None, "capacity": None, "max_depth": 10, "min_count": 6, "time_budget": 30.0,
    "widths": "16,64,256", "device": "cpu",
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Graph, limits of the search, widths; or which graphs to compare with CSR."""
    add = parser.add_argument
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--data", metavar="FILE|GENERATOR", help="an npz file, a name, or sbm, ...")
    which.add_argument(
        "--all",
        metavar="FOLDER",
        help="check on every graph of a folder that the planner's choice never loses to CSR",
    )
    which.add_argument(
        "--train", metavar="FILE", help="train models on a union of graphs and compare with the peers"
    )
    add(
        "--layers",
        default=None,
        metavar="NAME,...",
        help="layers for --all (default gcn,gin,sage-max) and --train (default gcn,gin)",
    )
    add("--output", metavar="FILE", help="append the JSON lines of --all, --train and --device cuda here")
    add(
        "--device",
        choices=("cpu", "cuda"),
        help="device on which --data is timed (default cpu)",
    )
    add("--data-dir", metavar="FOLDER", help="where the graph files are")
    add(
        "--capacity",
        metavar="N",
        help="most shared sums: a count, or a fraction of the nodes such as 0.25",
    )
    add("--max-depth", type=int, metavar="N", help="longest chain of sums (default 10)")
    add("--min-count", type=int, metavar="N", help="fewest rows that may share a sum (default 6)")
    add(
        "--time-budget",
        type=float,
        metavar="SECONDS",
        help="time limit of the search (default 30)",
    )
    add("--widths", metavar="N,...", help="widths to time (default 16,64,256)")
    add_threads(parser)
    parser.set_defaults(**_OF_DATA)


def run(args: argparse.Namespace) -> int:
    """Print the counts, the times and the verdict."""
    if args.output is not None:
        check_output("--output", Path(args.output), makes_folder=True)
    if args.all is not None or args.train is not None:
        return _bench(args)
    capacity, widths = _capacity(args.capacity), whole_numbers("--widths", args.widths, "16,64,256")
    if args.layers is not None:
        raise InputError("--layers: names the layers of --all and --train; --data times sums without layers")
    if args.output is not None and args.device == "cpu":
        raise InputError("--output: --data on a CPU writes no records; leave it out, or use --all or --train")
    if args.device == "cuda":
        check_device(args.device)  # before ten seconds of searching
    from plait.bench.cases import find_graph
    from plait.graph import hag

    use_threads(args.num_threads)
    graph = find_graph(args.data, args.data_dir).graph
    started = time.perf_counter()
    expected = hag.forecast(graph)
    print(
        f"forecast: {'worth a search' if expected.worth_trying else 'not worth a search'}\n"
        f"  {expected.reason} ({time.perf_counter() - started:.2f} s)\n"
    )
    print(_twins(graph))
    started = time.perf_counter()
    found = hag.search(
        graph,
        capacity=capacity,
        max_depth=args.max_depth,
        min_count=args.min_count,
        time_budget=args.time_budget,
    )
    searched = time.perf_counter() - started
    forward = hag.tile_schedule(found)
    backward = forward if graph.is_symmetric else hag.tile_schedule(found.transpose(graph))
    print(_counts(graph, found, forward, searched, time.perf_counter() - started - searched))
    if args.device == "cuda":
        table, worst, total = _device_times(graph, forward, backward, widths, args)
    else:
        table, worst, total = _times(graph, forward, backward, widths)
    print(f"\n{table}\n\nverdict: {_verdict(worst, total)}")
    return 0


def _twins(graph: Graph) -> str:
    """How far the graph shrinks where layers cannot tell nodes apart."""
    from plait.graph.twins import closed_twins

    started = time.perf_counter()
    twins = closed_twins(graph)
    if twins is None:
        return "twins: not searched for, the graph is directed\n"
    left = twins.between(graph).num_edges
    return (
        f"twins: {graph.num_nodes:,} nodes are {twins.num_classes:,} classes, {graph.num_edges:,} edges are "
        f"{left:,} between them ({time.perf_counter() - started:.2f} s)\n"
    )


def _bench(args: argparse.Namespace) -> int:
    """Compare steps and whole runs with CSR; 1 when a choice was below what is allowed."""
    from plait.bench import forms
    from plait.bench.cases import LAYERS, known

    refuse_ignored(args, _OF_DATA, "is for --data; leave it out with --all and --train")
    use_threads(args.num_threads)
    layers = tuple((args.layers or ("gcn,gin,sage-max" if args.all else "gcn,gin")).split(","))
    for layer in layers:
        known("--layers", layer, LAYERS)
    options = forms.Options(layers, None if args.output is None else Path(args.output))
    if args.train is not None:
        for record in forms.train(Path(args.train), layers, options):
            print(_training_line(record), flush=True)
        return 0
    lost = 0
    for record in forms.run(forms.graphs_in(args.all), options):
        print(_form_line(record), flush=True)
        lost += min(_number(record, "gain"), _number(record, "run_gain")) < forms.LEAST
    print(f"{lost} choices below {forms.LEAST} of CSR")
    return int(lost > 0)


def _number(record: Record, name: str) -> float:
    value = record.result[name]
    return float(value) if isinstance(value, (int, float)) else 0.0


def _form_line(record: Record) -> str:
    sides: Any = record.result["sides"]
    used = next((form for form in ("twins", "hag") if form in sides["forms"]["backends"]), "csr")
    case = record.case
    return (
        f"{case['graph']:<20} {case['model']:<9} {used:<5} {_number(record, 'gain'):.2f}x CSR per step, "
        f"{case['epochs']} epochs with preparation {_number(record, 'run_gain'):.2f}x"
    )


def _training_line(record: Record) -> str:
    sides: Any = record.result["sides"]
    parts = [
        f"{name} {side['median_seconds'] * 1e3:.0f} ms + {side['prepare_seconds']:.1f} s"
        for name, side in sides.items()
        if "median_seconds" in side
    ]
    return f"{record.case['graph']} {record.case['model']}, step + preparation: {', '.join(parts)}"


def _capacity(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        return int(text) if text.lstrip("+-").isdigit() else float(text)
    except ValueError:
        raise InputError(
            f"--capacity: {text!r} is not a number; give a count, or a fraction of the nodes such as 0.25"
        ) from None


def _counts(graph: Graph, found: hag.Hag, forward: hag.Schedule, searched: float, placed: float) -> Table:
    from plait.report.table import Table, bytes_text

    table = Table(["count", "graph", "hierarchy", "ratio"], align="lrrr")
    edges, traffic = found.num_graph_edges, found.graph_traffic
    table.add("rows read", f"{edges:,}", f"{found.reads:,}", f"{edges / max(1, found.reads):.2f}x")
    table.add("rows read and written", f"{traffic:,}", f"{found.traffic:,}", f"{found.traffic_ratio:.2f}x")
    adds = found.graph_aggregations
    table.add("additions", f"{adds:,}", f"{found.aggregations:,}", f"{found.aggregation_ratio:.2f}x")
    table.add("shared sums", 0, f"{found.num_aggregation_nodes:,}")
    table.add("levels", 0, found.num_levels)
    own = graph.indptr.nbytes + graph.indices.nbytes
    table.add(
        "memory, one direction",
        bytes_text(own),
        bytes_text(forward.bytes),
        f"{own / max(1, forward.bytes):.2f}x",
    )
    table.add("most sums in scratch at once", None, f"{forward.num_slots:,}")
    table.add("sums that several tiles read", None, f"{forward.num_shared:,}")
    table.add("tiles, phases", None, f"{forward.num_tiles:,}, {forward.num_phases}")
    ended = "" if found.is_complete else ", ended by --time-budget"
    table.add(f"search (then placing), s{ended}", None, f"{searched:.2f} ({placed:.2f})")
    return table


def _times(
    graph: Graph, forward: hag.Schedule, backward: hag.Schedule, widths: tuple[int, ...]
) -> tuple[Table, float, float]:
    """(table, worst gain, gain of all products together) of both ways at every width."""
    import torch

    from plait.kernels.launch import num_threads
    from plait.kernels.partial import Sums
    from plait.kernels.spmm import Pattern
    from plait.report.table import Table, count_text, seconds_text
    from plait.runtime.forms import Use, timed

    table = Table(
        ["width", "direction", "csr", "hag", "gain"],
        title=f"one product, {count_text(num_threads(), 'thread')}",
        align="rlrrr",
    )
    turned = graph.transpose
    ways = {
        "forward": (Pattern(graph.indptr, graph.indices, graph.num_sources), Sums(forward)),
        "backward": (Pattern(turned.indptr, turned.indices, turned.num_sources), Sums(backward)),
    }
    gains, spent = [], [0.0, 0.0]
    for width in widths:
        for way, (pattern, sums) in ways.items():
            csr, form = timed(pattern, sums, Use(way == "backward", width), torch.float32)
            gains.append(csr / form)
            spent = [spent[0] + csr, spent[1] + form]
            table.add(width, way, seconds_text(csr), seconds_text(form), f"{csr / form:.2f}x")
    return table, min(gains), spent[0] / spent[1]


def _device_times(
    graph: Graph,
    forward: hag.Schedule,
    backward: hag.Schedule,
    widths: tuple[int, ...],
    args: argparse.Namespace,
) -> tuple[Table, float, float]:
    """The same on a GPU, against the faster of torch's CSR and plait's."""
    from plait.bench import products
    from plait.measure import append
    from plait.report.table import Table, seconds_text

    table = Table(
        ["width", "direction", "torch csr", "csr", "hag", "gain"],
        title="one product on the GPU",
        align="rlrrrr",
    )
    case = {"graph": Path(args.data).stem, "num_nodes": graph.num_nodes, "num_edges": graph.num_edges}
    case |= {"rows_read": int(forward.operands.size), "steps": forward.num_steps}
    gains, spent = [], [0.0, 0.0]
    for record in products.run(graph, forward, backward, widths, args.device, case):
        if args.output is not None:
            append(args.output, record)
        sides: Any = record.result["sides"]
        seconds = [sides[name]["median_seconds"] for name in ("torch-csr", "csr", "hag")]
        gains.append(products.gain(record))
        spent = [spent[0] + min(seconds[:2]), spent[1] + seconds[2]]
        texts = map(seconds_text, seconds)
        table.add(record.case["width"], record.case["way"], *texts, f"{gains[-1]:.2f}x")
    return table, min(gains), spent[0] / spent[1]


def _verdict(worst: float, total: float) -> str:
    from plait.runtime.forms import MARGIN

    if worst >= MARGIN:
        return f"the planner would use it: {worst:.2f}x or more everywhere, {total:.2f}x over all products"
    if total >= MARGIN:
        return f"it pays for some products only ({worst:.2f}x at worst): the planner times each one it needs"
    return f"the planner would keep CSR: {total:.2f}x over all products, less than {MARGIN:.2f}x"
