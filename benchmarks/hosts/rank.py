"""What the training programs of all systems share: the first weights, the clock, and what is recorded."""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.hosts.graphs import CLASSES, WIDTH
from benchmarks.hosts.network import INTERFACE
from torch import Tensor

__all__ = ["Record", "first_weights", "received_bytes", "set_weights", "values_of"]


def first_weights(hidden: int, seed: int) -> list[Tensor]:
    """Weights of neighbours and of the node itself, layer by layer (Glorot), the same for every system."""
    rng = np.random.default_rng(seed)
    found = []
    for rows, columns in ((hidden, WIDTH), (CLASSES, hidden)):
        bound = (6 / (rows + columns)) ** 0.5
        for _ in range(2):
            found.append(torch.from_numpy(rng.uniform(-bound, bound, (rows, columns)).astype(np.float32)))
    return found


def set_weights(linears: Sequence[Any], biases: Sequence[Any], hidden: int, seed: int) -> None:
    """Gives linear maps the first weights, in the order of `first_weights`; biases are 0."""
    with torch.no_grad():
        for linear, weight in zip(linears, first_weights(hidden, seed), strict=True):
            linear.weight.copy_(weight)
        for bias in biases:
            bias.zero_()


def values_of(linears: Sequence[Any], biases: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Weights and biases as arrays, as `Judge.accuracy` takes them."""
    weights = [linear.weight.detach().numpy() for linear in linears]
    return weights, [bias.detach().numpy() for bias in biases]


def received_bytes() -> int:
    """Bytes this host's interface received so far, headers included."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == INTERFACE:
            return int(counts.split()[0])
    return 0


def processor_seconds() -> float:
    """Processor time of this process, all threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class Record:
    """One JSON line per epoch of one rank, written as it ends."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self.begin()

    def begin(self) -> None:
        """An epoch begins."""
        self._at = (time.perf_counter(), received_bytes(), processor_seconds())

    def end(self) -> dict[str, float]:
        """What the epoch took."""
        before = self._at
        return {
            "seconds": time.perf_counter() - before[0],
            "interface_bytes": received_bytes() - before[1],
            "processor_seconds": processor_seconds() - before[2],
        }

    def write(self, **values: Any) -> None:
        """Keeps the values of an epoch."""
        line = json.dumps({"rank": int(os.environ["RANK"]), **values})
        with self._path.open("a") as file:
            file.write(line + "\n")
            file.flush()
