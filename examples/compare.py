"""Run examples beside their PyG originals: the lines that differ and the gain on this machine.

python examples/compare.py            all of them
python examples/compare.py gcn link   some
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import torch  # noqa: E402
from graphs import Epoch, options  # noqa: E402
from torch_geometric import seed_everything  # noqa: E402

from plait.measure.environment import BusyElsewhere, environment  # noqa: E402

NAMES = ("gcn", "gat", "neighbor", "classify", "link", "hetero")


def difference(name: str) -> list[str]:
    """The lines of code removed from and added to the original; opening docstrings do not count."""
    before, after = (source(f"{name}_{side}")[1:] for side in ("pyg", "plait"))
    lines = difflib.unified_diff(before, after, lineterm="", n=0)
    return [
        line for line in lines if line[:1] in "+-" and line[:3] not in ("+++", "---") and line[1:].strip()
    ]


def source(module: str) -> list[str]:
    """The lines of one example."""
    return (HERE / f"{module}.py").read_text().splitlines()


def prepared(name: str, side: str, chosen: argparse.Namespace) -> Epoch:
    """One epoch of an example as a function of nothing, from the same random numbers on both sides."""
    seed_everything(0)
    epoch: Epoch = importlib.import_module(f"{name}_{side}").prepare(chosen)
    return epoch


def original(name: str, chosen: argparse.Namespace) -> tuple[Epoch, str]:
    """The original's epoch and what it is; PyG's NeighborLoader cannot run without compiled wheels."""
    try:
        epoch = prepared(name, "pyg", chosen)
        epoch()
        return epoch, "PyG"
    except ImportError as refused:
        with uncompiled():
            epoch = prepared(name, "plait", chosen)
        return uncompiled()(epoch), f"PyG's model on plait's loader (PyG's own loader: {refused})"


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Inside, compiled models run in plain PyG."""
    os.environ["PLAIT_DISABLE"] = "1"
    try:
        yield
    finally:
        del os.environ["PLAIT_DISABLE"]


def interleaved(epochs: dict[str, Epoch], rounds: int) -> dict[str, float]:
    """Median seconds of each after two untimed epochs, taken in turn: a busy moment hits all of them."""
    seconds: dict[str, list[float]] = {name: [] for name in epochs}
    for number in range(rounds + 2):
        for name, epoch in epochs.items():
            started = time.perf_counter()
            epoch()
            if number >= 2:
                seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(taken) for name, taken in seconds.items()}


def compare(name: str, chosen: argparse.Namespace) -> float:
    """Print one example's difference and gain; the gain is returned."""
    print(f"\n{name}: {source(f'{name}_pyg')[0].strip(chr(34))}")
    print("\n".join(f"  {line}" for line in difference(name)))
    peer, what = original(name, chosen)
    taken = interleaved({"pyg": peer, "plait": prepared(name, "plait", chosen)}, chosen.epochs)
    gain = taken["pyg"] / taken["plait"]
    print(
        f"  {what}: {1e3 * taken['pyg']:.1f} ms per epoch; plait: {1e3 * taken['plait']:.1f} ms; {gain:.2f}x"
    )
    return gain


def main(argv: list[str]) -> None:
    """Compare the examples named, or all; the other arguments are those of every example."""
    names = [word for word in argv if word in NAMES]
    chosen = options([word for word in argv if word not in NAMES])
    with BusyElsewhere() as busy:
        for name in names or NAMES:
            compare(name, chosen)
    machine = environment()
    print(
        f"\n{machine['cpu']}, threads: {torch.get_num_threads()}, torch {torch.__version__}; "
        f"{chosen.nodes:,} nodes"
    )
    if busy.share is not None and busy.share > 0.1:
        print(
            f"other programs used {100 * busy.share:.0f}% of the processor: times on an idle machine differ"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
