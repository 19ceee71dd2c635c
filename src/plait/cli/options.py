"""What commands share: the options they all have, lists of numbers, folders, devices and threads."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path

from plait.errors import InputError

__all__ = [
    "add_graph", "add_threads", "check_device", "check_output", "refuse_ignored", "use_threads",
    "whole_numbers",
]  # fmt: skip

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


def check_output(flag: str, path: Path, makes_folder: bool = False) -> None:
    """InputError where no file can be written to: said before the work, not after it."""
    if path.is_dir():
        raise InputError(f"{flag}: {path} is a folder; name a file")
    folder = path.resolve().parent
    while makes_folder and not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        what = "is a file; name another place" if folder.exists() else "does not exist; make it first"
        raise InputError(f"{flag}: folder {folder} {what}")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise InputError(f"{flag}: {path} cannot be written to; name another place")


def refuse_ignored(args: argparse.Namespace, defaults: Mapping[str, object], why: str) -> None:
    """InputError where an option that would not be read is not at its default."""
    for name, default in defaults.items():
        if getattr(args, name) != default:
            raise InputError(f"--{name.replace('_', '-')}: {why}")


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
