"""What commands share: the options they all have, lists of numbers, folders, devices and threads."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from plait.errors import InputError

__all__ = ["add_graph", "add_threads", "check_device", "check_folder", "use_threads", "whole_numbers"]

_MOST = max(1024, 4 * (os.cpu_count() or 1))  # systems refuse tens of thousands, and torch crashes then


def add_graph(parser: argparse.ArgumentParser, default: str | None = "sbm") -> None:
    """--data and --data-dir; without a default --data is required."""
    parser.add_argument(
        "--data", default=default, required=default is None, metavar="FILE|GENERATOR",
        help="an npz file, a name in --data-dir, or a generator such as sbm or rmat:scale=14,edges=2e5",
    )  # fmt: skip
    parser.add_argument("--data-dir", metavar="FOLDER", help="where the graph files are")


def add_threads(parser: argparse.ArgumentParser) -> None:
    """--num-threads, for use_threads."""
    parser.add_argument("--num-threads", type=int, metavar="N", help="threads of torch and plait")


def whole_numbers(flag: str, text: str, example: str, least: int = 1) -> tuple[int, ...]:
    """(128, 64) of "128,64" or "128->64"; InputError with the example where it is anything else."""
    try:
        found = tuple(int(part) for part in text.replace("->", ",").split(","))
    except ValueError:
        found = ()
    if not found or min(found) < least:
        what = "whole numbers" if least < 1 else f"whole numbers of at least {least}"
        raise InputError(f"{flag}: {text!r} is not a list of {what}; write for example {example}")
    return found


def check_folder(flag: str, path: Path) -> None:
    """InputError where the folder of a file that is to be written does not exist."""
    if not path.resolve().parent.is_dir():
        raise InputError(f"{flag}: folder {path.parent} does not exist; make it first")


def check_device(device: str) -> None:
    """InputError where the device is unknown or not there."""
    if device not in ("cpu", "cuda"):
        raise InputError(f"--device: unknown name {device!r}; known are cpu, cuda")
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise InputError("--device: torch sees no CUDA device here; use --device cpu")


def use_threads(count: int | None) -> None:
    """torch, and with it plait's kernels, use this many threads; None leaves them as they are."""
    if count is None:
        return
    if count < 1:
        raise InputError(f"--num-threads: {count} is not a number of threads; give 1 or more")
    if count > _MOST:
        raise InputError(
            f"--num-threads: {count} is more than {_MOST}; this machine runs {os.cpu_count()} at once"
        )
    import torch

    torch.set_num_threads(count)
