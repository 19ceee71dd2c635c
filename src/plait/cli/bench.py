"""plait bench: layers, models and loops against the peers, and the planner against its own candidates."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.cli import bench_batches, bench_ops
from plait.cli.bench_ops import dated
from plait.cli.options import add_threads, check_device, check_output, use_threads
from plait.errors import InputError
from plait.measure.progress import Meter
from plait.measure.record import Record

if TYPE_CHECKING:
    from plait.bench.cases import LayerCase

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """layers, models, plans, loops, batches, ops and compare under bench."""
    parser.set_defaults(measure=None)
    kinds = parser.add_subparsers(metavar="KIND", title="kinds")

    def kind(name: str, what: str) -> argparse.ArgumentParser:
        return kinds.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.")

    bench_ops.add_ops(kind("ops", "single operations, every implementation side by side"))
    bench_ops.add_compare(kind("compare", "what became faster or slower between two runs"))
    bench_batches.add_batches(
        kind("batches", "mini-batches: sampling, loading, planned batches, feature cache")
    )
    layers = kind("layers", "one middle layer at a time: inference and training step")
    _add_common(layers)
    _add_layers(layers)
    layers.add_argument("--widths", nargs="+", metavar="IN:OUT", help="default 64:64 256:32 32:256")
    layers.add_argument("--modes", nargs="+", metavar="MODE", help="inference training")
    layers.add_argument("--repeats", type=int, help="samples per peer instead of as many as needed")
    layers.add_argument("--warmup", type=int, default=3, help="untimed calls first (default 3)")
    layers.add_argument(
        "--budget", type=float, default=5.0, metavar="SECONDS", help="time per cell after warm-up (default 5)"
    )
    layers.add_argument(
        "--predict", action="store_true", help="no peers: the price of every step next to its time"
    )
    _add_device(layers)
    layers.set_defaults(measure=_layers)
    models = kind("models", "training of whole two-layer models, preparation included")
    _add_common(models)
    models.add_argument("--models", nargs="+", metavar="NAME", help="gcn sage gin (the default), gat")
    models.add_argument("--epochs", type=int, default=200, help="training steps (default 200)")
    models.add_argument("--repeats", type=int, default=1, help="whole trainings per peer (default 1)")
    models.set_defaults(measure=_models)
    plans = kind("plans", "every surviving candidate of a layer: the planner's regret")
    _add_common(plans)
    _add_layers(plans)
    plans.add_argument("--widths", nargs="+", metavar="IN:OUT", help="default 64:64 256:32 32:256")
    plans.add_argument("--modes", nargs="+", metavar="MODE", help="inference training (default training)")
    plans.add_argument(
        "--models", nargs="*", metavar="NAME",
        help="whole models on a graph's own features instead of layers: gcn sage gin (default all)",
    )  # fmt: skip
    plans.add_argument(
        "--steps", action="store_true",
        help="instead of candidates: whether the measured steps of a layer add up to its own time",
    )  # fmt: skip
    plans.add_argument(
        "--budget", type=float, default=2.0, metavar="SECONDS", help="time per cell (default 2)"
    )
    _add_device(plans)
    plans.set_defaults(measure=_plans)
    _add_loops(kind("loops", "loops in which something changes at every step, against PyG"))


def _add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", default="cpu",
        help="cpu or cuda (default cpu); cuda also has graphs rmat-arxiv, grid-road, cliques, rmat-reddit",
    )  # fmt: skip


def _add_loops(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--loops", nargs="+", metavar="NAME", help="names in quotes (default all)")
    add("--graph", metavar="GRAPH", help="a name, file or generator (default 30,000 edges)")
    add("--threads", nargs="+", type=int, default=[1, 2], metavar="N", help="default 1 2")
    add("--data-dir", metavar="FOLDER", help="where the graph files are")
    add("--output", type=Path, metavar="FILE", help="append JSON-lines records here")
    add("--resume", action="store_true", help="skip the loops already in --output")
    add("--repeats", type=int, help="samples per peer instead of as many as needed")
    add(
        "--budget", type=float, default=4.0, metavar="SECONDS", help="time per loop after warm-up (default 4)"
    )
    parser.set_defaults(measure=_loops, num_threads=None)


def _add_layers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--layers", nargs="+", metavar="NAME",
        help="gcn sage-mean sage-max gin sgc tag (the default); gat gatv2 transformer; "
        "rgcn pna edgeconv resgated",
    )  # fmt: skip
    parser.add_argument(
        "--heads",
        type=int,
        default=4,
        help="heads of attention layers, which share OUT (default 4)",
    )


def _add_common(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--datasets", "--graphs", nargs="+", metavar="GRAPH", help="names, files or generators")
    add("--peers", nargs="+", metavar="PEER", help="names, or all (torch.compile too)")
    add("--data-dir", metavar="FOLDER", help="where the graph files are")
    add("--output", type=Path, metavar="FILE", help="append JSON-lines records here")
    add("--resume", action="store_true", help="skip the cells already in --output")
    add("--memory", action="store_true", help="measure the peak memory of a step too")
    add_threads(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and print the table."""
    if args.measure is None:
        raise InputError(
            "bench: name a kind: plait bench ops, layers, models, plans, loops, batches or compare"
        )
    if args.resume and args.output is None:
        raise InputError("--resume: give --output FILE, the records to continue from")
    for name in ("output", "csv", "findings"):
        path = getattr(args, name, None)
        if path is not None:
            check_output(f"--{name}", path, makes_folder=True)
    use_threads(args.num_threads)
    return int(args.measure(args))


def _layers(args: argparse.Namespace) -> int:
    check_device(args.device)
    from plait.bench import cases, layers, peers
    from plait.report.layers import cell_line, layers_text

    grid = cases.layer_cases(
        args.datasets or (cases.GRAPHS if args.device == "cpu" else cases.DEVICE_GRAPHS),
        args.layers or cases.LAYERS,
        [cases.parse_widths(text) for text in args.widths] if args.widths else cases.WIDTHS,
        args.modes or cases.MODES,
        args.heads,
    )
    if args.predict:
        return _predict(args, grid)
    options = layers.Options(
        peers=_peers(args.peers, peers.DEFAULT, tuple(peers.PEERS)),
        budget_seconds=args.budget,
        warmup=args.warmup,
        repeats=args.repeats,
        data_dir=args.data_dir,
        output=args.output or dated("layers"),
        resume=args.resume,
        memory=args.memory,
        device=args.device,
    )
    return _measured(layers, grid, options, "cells", cell_line, layers_text)


def _predict(args: argparse.Namespace, grid: list[LayerCase]) -> int:
    from plait.bench import predict
    from plait.report.predict import predict_line, predict_text

    options = predict.Options(**_of_plans(args, "predict"))
    return _measured(predict, grid, options, "cells", predict_line, predict_text)


def _of_plans(args: argparse.Namespace, kind: str) -> dict[str, Any]:
    """The options of suites that look inside plans."""
    where = {"data_dir": args.data_dir, "output": args.output or dated(kind), "resume": args.resume}
    return {"budget_seconds": args.budget, "device": args.device, **where}


def _models(args: argparse.Namespace) -> int:
    from plait.bench import cases, models, peers
    from plait.report.models import model_line, models_text

    grid = models.cases(args.datasets or cases.MODEL_GRAPHS, args.models or cases.MODELS, args.epochs)
    options = models.Options(
        peers=_peers(args.peers, models.DEFAULT, tuple(peers.PEERS)),
        repeats=args.repeats,
        data_dir=args.data_dir,
        output=args.output or dated("models"),
        resume=args.resume,
        memory=args.memory,
    )
    return _measured(models, grid, options, "models", model_line, models_text)


def _plans(args: argparse.Namespace) -> int:
    check_device(args.device)
    if args.device != "cpu" and args.models is not None:
        raise InputError("--models: whole models are compared on a CPU only; leave out --device or --models")
    from plait.bench import cases, clocks, plans
    from plait.report.clocks import clocks_line, clocks_text
    from plait.report.plans import plans_text, regret_line

    if args.steps and args.models is not None:
        raise InputError("--steps: of layers, not of whole models; leave out --models")
    grid: list[LayerCase | plans.ModelCase] = []
    if args.models is not None:
        grid += plans.model_cases(args.datasets or plans.MODEL_GRAPHS, args.models or plans.MODELS)
    else:
        grid += cases.layer_cases(
            args.datasets or cases.GRAPHS,
            args.layers or (clocks.LAYERS if args.steps else cases.LAYERS),
            [cases.parse_widths(text) for text in args.widths] if args.widths else cases.WIDTHS,
            args.modes or ("training",),
            args.heads,
        )
    options = plans.Options(**_of_plans(args, "clocks" if args.steps else "plans"))
    if args.steps:
        return _measured(clocks, grid, options, "layers", clocks_line, clocks_text)
    return _measured(plans, grid, options, "cells", regret_line, plans_text)


def _loops(args: argparse.Namespace) -> int:
    from plait.bench import loops
    from plait.report.loops import loop_line, loops_text

    grid = loops.cases(args.loops, args.graph or loops.GRAPH, args.threads)
    options = loops.Options(
        budget_seconds=args.budget,
        repeats=args.repeats,
        data_dir=args.data_dir,
        output=args.output or dated("loops"),
        resume=args.resume,
    )
    return _measured(loops, grid, options, "loops", loop_line, loops_text)


def _measured(
    suite: Any,
    grid: Sequence[Any],
    options: Any,
    noun: str,
    line: Callable[[Record], str],
    text: Callable[[Sequence[Record]], str],
) -> int:
    """Runs a suite with a line on the terminal for each case, then prints the table and where records are."""
    meter = Meter(noun, len(suite.left(grid, options)), sys.stderr)

    def watch(record: Record) -> None:
        meter.note(line(record))
        meter.advance()

    records = suite.run(grid, options, watch)
    meter.close()
    print(text(records))
    print(f"\nrecords: {options.output}")
    return 0


def _peers(given: list[str] | None, default: tuple[str, ...], every: tuple[str, ...]) -> tuple[str, ...]:
    from plait.bench.cases import known

    if not given:
        return default
    if given == ["all"]:
        return every
    return tuple(known("--peers", name, every) for name in given)
