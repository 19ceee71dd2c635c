"""plait train: mini-batch training over the parts of a graph, one process or several under torchrun."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.cli.options import check_output, refuse_ignored, use_threads, whole_numbers
from plait.errors import InputError
from plait.report.table import count_text

if TYPE_CHECKING:
    from plait.distributed import NeighborLoader, Position, Session
    from plait.distributed.report import Prediction
    from plait.distributed.trace import Trace
    from plait.distributed.train import EpochReport, Trainer

__all__ = ["add_arguments", "line", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Parts, model, sampling, exchange."""
    add = parser.add_argument
    add("--parts", required=True, metavar="FOLDER", help="the folder that plait partition wrote")
    add("--model", default="sage", help="sage (default), gcn, gin or gat")
    add("--hidden", type=int, default=128, metavar="N", help="hidden width (default 128)")
    add("--dropout", type=float, default=0.5, help="(default 0.5)")
    add("--lr", type=float, default=0.01, help="learning rate of Adam (default 0.01)")
    add(
        "--fanout",
        default="10,25",
        metavar="K,...",
        help="neighbours per hop, one layer each (default 10,25)",
    )
    add("--batch", type=int, default=1000, metavar="N", help="seeds per part (default 1000)")
    add("--epochs", type=int, default=10, metavar="N", help="(default 10)")
    add("--eval", type=int, default=1, metavar="N", help="evaluate every N epochs (default 1), 0: never")
    add(
        "--cache",
        type=float,
        default=0.25,
        metavar="ROWS",
        help="remote rows kept, or a share of the halo (default 0.25)",
    )
    add("--policy", default="auto", help="which rows stay (default auto; see plait cache)")
    add(
        "--wire",
        default="float32",
        help="float16 or bfloat16: features are rounded to it, sent and cached in half the bytes",
    )
    add("--prefetch", type=int, default=4, metavar="N", help="batches prepared ahead (default 4)")
    add(
        "--coalesce",
        type=int,
        default=2,
        metavar="N",
        help="batches whose rows are requested in one exchange (default 2)",
    )
    add(
        "--topology",
        default="auto",
        help="the graph's structure: replicated in every process, partitioned over them, or auto (default): "
        "replicated where it fits",
    )
    add("--seed", type=int, default=0, help="(default 0)")
    add("--no-compile", action="store_true", help="run the layers in PyG")
    add("--num-threads", type=int, metavar="N", help="torch's threads, per process")
    add(
        "--interface",
        metavar="NAME",
        help="the network interface that ranks use (default: loopback, or the host name's)",
    )
    add(
        "--timeout",
        type=float,
        default=300.0,
        metavar="S",
        help="seconds a rank waits for others (default 300)",
    )
    add("--verify", action="store_true", help="verify the checksums of all files first")
    add("--checkpoint", metavar="FOLDER", help="keep checkpoints here, and continue from the newest one")
    add("--every", type=int, metavar="N", help="a checkpoint every N steps (default 100)")
    add("--every-minutes", type=float, metavar="M", help="... or every M minutes")
    add("--keep", type=int, default=2, metavar="N", help="checkpoints to keep (default 2)")
    add("--output", metavar="FILE.jsonl", help="one record per rank and epoch")
    add(
        "--trace",
        metavar="FILE.json",
        help="what every thread did and when, for chrome://tracing; one per rank",
    )
    add("--network", metavar="NAME", help="10gbit, 1gbit,50us, ...: also print what the analysis predicts")


def run(args: argparse.Namespace) -> int:
    """Train, print a line per epoch, keep the records."""
    from plait.distributed import init

    use_threads(args.num_threads)
    for flag, name in (("--output", args.output), ("--trace", args.trace)):
        if name is not None:
            check_output(flag, Path(name))
    if args.epochs < 1 or args.hidden < 1:
        raise InputError(f"--epochs {args.epochs}, --hidden {args.hidden}: both are at least 1")
    if args.checkpoint is None:
        refuse_ignored(args, {"every": None, "every_minutes": None, "keep": 2}, "needs --checkpoint FOLDER")
    else:
        check_output("--checkpoint", Path(args.checkpoint) / "step", makes_folder=True)
    if not 0 <= args.dropout <= 1:
        raise InputError(f"--dropout: {args.dropout} is not a probability; give 0 to 1")
    if not 0 < args.lr < math.inf:
        raise InputError(f"--lr: {args.lr} is not a learning rate; give a positive number such as 0.01")
    with init(
        args.parts, wire=args.wire, timeout_seconds=args.timeout, interface=args.interface, verify=args.verify
    ) as session:
        _train(session, args)
    return 0


def _train(session: Session, args: argparse.Namespace) -> None:
    from plait.distributed.train import of_all, together

    trainer, loader, evaluation = _prepared(session, args)
    trace = _traced(session, args)
    is_first = session.rank == 0
    held = max(size for (size,) in session.gathered([loader.topology_bytes]))
    prediction = _predicted(session, loader, args) if is_first and args.network is not None else None
    if is_first:
        print(_title(session, loader, args, held), flush=True)
    at = _resumed(trainer, args)
    if is_first and at.step:
        print(f"resumed after batch {at.batch} of epoch {at.epoch}, step {at.step}", flush=True)
    if evaluation is not None and args.eval > 0:
        evaluation.set_epoch(at.epoch // args.eval)  # its samples go on where they were, too
    for epoch in range(at.epoch, args.epochs):
        reports = of_all(session, trainer.epoch())
        is_evaluated = evaluation is not None and args.eval > 0 and (epoch + 1) % args.eval == 0
        accuracy = trainer.accuracy(evaluation) if is_evaluated and evaluation is not None else None
        if is_first:
            whole = together(reports)
            print(line(epoch, whole, accuracy, prediction), flush=True)
            if args.output:
                _append(Path(args.output), epoch, reports, accuracy, prediction)
    if trace is not None:
        trace.write(args.trace)


def _traced(session: Session, args: argparse.Namespace) -> Trace | None:
    """A trace of this rank from now on, where one is asked for."""
    from plait.distributed.trace import Trace

    if args.trace is None:
        return None
    session.exchange.trace = Trace(session.rank)
    return session.exchange.trace


def _predicted(session: Session, loader: NeighborLoader, args: argparse.Namespace) -> Prediction | None:
    """What plait analyze says of an epoch on the network that was named."""
    from plait.analysis.network import network_of
    from plait.distributed.report import predicted

    classes = int(session.parts.y().max()) + 1  # type: ignore[union-attr]  # checked when it was prepared
    inner = [args.hidden] * (len(loader.fanouts) - 1)
    widths = (session.exchange.local.width, *inner, classes)
    seeds = session.parts.split("train")
    return predicted(session, loader, args.model, widths, network_of(args.network), seeds)


def _resumed(trainer: Trainer, args: argparse.Namespace) -> Position:
    """Where training begins: at the newest checkpoint, where any are kept."""
    if args.checkpoint is None:
        return trainer.position
    steps = 100 if args.every is None and args.every_minutes is None else args.every
    return trainer.checkpoint(
        args.checkpoint, every_steps=steps, every_minutes=args.every_minutes, keep=args.keep
    )


def _prepared(
    session: Session, args: argparse.Namespace
) -> tuple[Trainer, NeighborLoader, NeighborLoader | None]:
    """The trainer, its batches and those of the evaluation."""
    import torch

    from plait.distributed import NeighborLoader
    from plait.distributed.train import Trainer, make_model

    labels = session.parts.y()
    if labels is None or labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise InputError(
            f"--parts: {args.parts} has no labels of one class per node; partition a file with y"
        )
    fanout = whole_numbers("--fanout", args.fanout, "10,25", least=-1)
    common: dict[str, Any] = {
        "batch_size": args.batch,
        "seed": args.seed,
        "prefetch": args.prefetch,
        "topology": args.topology,
    }
    loader = NeighborLoader(
        session,
        fanout,
        "train",
        shuffle=True,
        cache=args.cache,
        policy=args.policy,
        coalesce=args.coalesce,
        **common,
    )
    has_val = "val_mask.npy" in session.parts.manifest.files and session.parts.split("val").size
    evaluation = NeighborLoader(session, fanout, "val", pad=False, **common) if has_val else None
    torch.manual_seed(args.seed)
    width = session.exchange.local.width
    model = make_model(args.model, width, args.hidden, len(fanout), int(labels.max()) + 1, args.dropout)
    trainer = Trainer(session, model, loader, learning_rate=args.lr, compiled=not args.no_compile)
    return trainer, loader, evaluation


def _title(session: Session, loader: NeighborLoader, args: argparse.Namespace, held: float) -> str:
    """What is trained on what; `held` are the bytes of structure on the rank that has most."""
    manifest = session.parts.manifest
    cache = loader.cache
    rows = 0 if cache is None else cache.capacity
    whole = session.parts.topology_bytes
    kept = f"{rows:,} remote rows kept ({args.policy})" if rows else "no cache"
    return (
        f"{manifest.name or args.parts}: {manifest.num_nodes:,} nodes in "
        f"{count_text(manifest.parts, 'part')}, {count_text(session.size, 'rank')}, {args.model}, {kept}, "
        f"features in {args.wire}, "
        f"topology {loader.topology} (at most {held / 1e6:.3g} of {whole / 1e6:.3g} MB per rank)\n"
        f"{count_text(len(loader), 'step')} of {count_text(args.batch, 'seed')} per part, "
        f"{count_text(loader.padding, 'seed')} repeated per epoch; "
        "times in s of the slowest rank, bytes of all"
    )


def line(
    epoch: int, report: EpochReport, accuracy: float | None, prediction: Prediction | None = None
) -> str:
    """An epoch in one line, with what was predicted of it."""
    beside = "" if prediction is None else f" | {prediction.beside(report.seconds, report.bytes_out)}"
    right = "" if accuracy is None else f" val {accuracy:.4f}"
    return (
        f"epoch {epoch:3d} loss {report.loss:.4f}{right} | {report.seconds:.2f} s: "
        f"sampling {report.sampling:.2f}, look-up {report.look_up:.2f}, exchange {report.exchange:.2f}, "
        f"stall {report.stall:.2f}, compute {report.compute:.2f}, all-reduce {report.all_reduce:.2f} | "
        f"in {report.bytes_in / 1e6:.1f} MB, out {report.bytes_out / 1e6:.1f} MB, "
        f"hits {report.hit_rate:.0%}{beside}"
    )


def _append(
    path: Path,
    epoch: int,
    reports: list[EpochReport],
    accuracy: float | None,
    prediction: Prediction | None = None,
) -> None:
    """One line per rank; what was predicted is in each."""
    known = (
        {}
        if prediction is None
        else {f"predicted_{name}": value for name, value in asdict(prediction).items()}
    )
    try:
        with open(path, "a", encoding="utf-8") as file:
            for rank, report in enumerate(reports):
                record = {"epoch": epoch, "rank": rank, "accuracy": accuracy, **asdict(report), **known}
                file.write(json.dumps(record) + "\n")
    except OSError as error:
        raise InputError(f"--output: cannot write {path} ({error})") from error
