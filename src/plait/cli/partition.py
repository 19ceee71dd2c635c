"""plait partition: a graph to a folder of parts that several machines train on."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from plait.cli.options import add_graph, whole_numbers
from plait.errors import InputError

__all__ = ["add_arguments", "read_assignment", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Graph, parts, folder; what the printed statistics assume."""
    add = parser.add_argument
    add_graph(parser, default=None)
    add("--parts", type=int, default=4, metavar="K", help="number of parts (default 4)")
    add("-o", "--output", required=True, metavar="FOLDER", help="folder to write the parts to")
    add(
        "--method",
        default="metis",
        help="metis (default), fennel (streams, for graphs METIS cannot hold), random",
    )
    add("--assignment", metavar="FILE.npy", help="the part of every node, instead of a method")
    add("--seed", type=int, default=0, help="seed of the method random and of --train (default 0)")
    add(
        "--train", type=float, metavar="SHARE", help="mark this share of the nodes when the file has no masks"
    )
    add(
        "--features",
        type=int,
        metavar="WIDTH",
        help="random features and 16 random labels, to time exchanges",
    )
    add(
        "--fanout",
        default="10,25",
        metavar="K,...",
        help="neighbours per hop, for the expected bytes (default 10,25)",
    )
    add(
        "--batch",
        type=int,
        default=1000,
        metavar="N",
        help="seeds per batch, for the expected bytes (default 1000)",
    )
    add("--overwrite", action="store_true", help="replace parts of another graph")


def run(args: argparse.Namespace) -> int:
    """Divide, write, print what it costs."""
    from plait.bench.cases import find_graph
    from plait.distributed import partition
    from plait.report.parts import parts_text

    loaded = _completed(find_graph(args.data, args.data_dir), args)
    parts = partition(
        loaded,
        args.parts,
        args.output,
        method=args.method,
        seed=args.seed,
        assignment=None if args.assignment is None else read_assignment(args.assignment),
        fanout=whole_numbers("--fanout", args.fanout, "10,25", least=-1),
        batch_size=args.batch,
        overwrite=args.overwrite,
    )
    manifest = parts.manifest
    print(
        f"{args.data}: {manifest.num_nodes:,} nodes, {manifest.num_edges:,} edges in {manifest.parts} parts "
        f"({manifest.method}) in {args.output}\n"
    )
    print(parts_text(manifest.statistics, manifest.num_edges))
    return 0


def _completed(loaded: Any, args: argparse.Namespace) -> Any:
    """The graph with the masks and features that were asked for and that it lacks."""
    if args.seed < 0:
        raise InputError(f"--seed: {args.seed}; give a whole number of at least 0")
    if args.train is not None and not 0 < args.train <= 1:
        raise InputError(f"--train: {args.train} is not a share of the nodes; give more than 0, up to 1")
    if args.features is not None and args.features < 1:
        raise InputError(f"--features: {args.features} is not a width; give at least 1")
    rng, count = np.random.default_rng(args.seed), loaded.graph.num_nodes
    if args.train is not None and not loaded.masks:
        draw = rng.permutation(count) / max(1, count)
        loaded = replace(loaded, masks={"train": draw < args.train, "val": draw >= 1 - (1 - args.train) / 10})
    if args.features is not None and loaded.x is None:
        x = rng.standard_normal((count, args.features), dtype=np.float32)
        labels = rng.integers(0, 16, count) if loaded.y is None else loaded.y
        loaded = replace(loaded, x=x, y=labels)
    return loaded


def read_assignment(path: str) -> Any:
    """The array in a .npy file."""
    try:
        found = np.load(Path(path), allow_pickle=False)
    except OSError as error:
        raise InputError(f"--assignment: {path}: {error.strerror}; check the path") from error
    except (ValueError, EOFError):  # numpy's words may advise to load pickled objects, which run code
        found = None
    if not isinstance(found, np.ndarray):
        raise InputError(f"--assignment: {path} holds no plain array; write it with numpy.save")
    return found
