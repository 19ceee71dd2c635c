"""What mini-batches fetch of other parts: remote rows of an epoch, drawn on the graph or expected."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from plait.analysis.growth import Growth, expanded
from plait.graph import Graph

__all__ = ["Fetch", "drawn", "expected"]

Ints = NDArray[np.int64]
_BATCHES = 32  # drawn of each part: several epochs where they are short, else a piece of one


@dataclass(frozen=True)
class Fetch:
    """An epoch of mini-batches whose seeds are a part's own: steps of every part, and remote rows by part."""

    steps: int
    rows: tuple[float, ...]  # fetched by each part
    sent: tuple[float, ...]  # of each part, by others
    is_drawn: bool

    @property
    def total(self) -> float:
        return sum(self.rows)

    @property
    def busiest(self) -> float:
        """Rows of the part that fetches or sends most."""
        return max((*self.rows, *self.sent), default=0.0)


def drawn(
    graph: Graph,
    part: Ints,
    seeds: Ints,
    batch: int,
    fanouts: Sequence[int | None],
    rng: np.random.Generator,
) -> Fetch:
    """Batches of every part's own seeds, drawn; a part with fewer seeds repeats some, as the loader does."""
    parts = int(part.max(initial=0)) + 1
    own = [seeds[part[seeds] == p] for p in range(parts)]
    most = max(map(len, own))
    steps = max(1, math.ceil(most / batch))
    rows, sent = np.zeros(parts), np.zeros(parts)
    for p in range(parts):
        cuts = _cuts(own[p] if len(own[p]) else seeds, most, batch, rng)
        share = most / max(1, sum(map(len, cuts)))
        for cut in cuts:
            reached = expanded(graph, np.unique(cut), fanouts, rng)
            owners = np.bincount(part[reached], minlength=parts).astype(float)
            owners[p] = 0.0
            rows[p] += owners.sum() * share
            sent += owners * share
    return Fetch(steps, tuple(rows), tuple(sent), True)


def _cuts(own: Ints, most: int, batch: int, rng: np.random.Generator) -> list[Ints]:
    """The seeds of some batches, as epochs have them: the last of each may be short."""
    found: list[Ints] = []
    while len(found) < _BATCHES:
        order = np.resize(rng.permutation(own), most)
        found += [order[k : k + batch] for k in range(0, most, batch)]
    steps = math.ceil(most / batch)
    return found[: max(_BATCHES // steps, 1) * steps] if steps <= _BATCHES else found[:_BATCHES]


def expected(growth: Growth, seeds: float, parts: int, quality: float = 1.0) -> Fetch:
    """Parts drawn at random, of which a partition leaves the share `quality`: all but one in P is remote."""
    steps = max(1, math.ceil(seeds / parts / max(1, growth.batch)))
    each = seeds / parts / max(1, growth.batch) * growth.nodes[-1] * (1.0 - 1.0 / parts) * min(1.0, quality)
    return Fetch(steps, (each,) * parts, (each,) * parts, False)
