"""What mini-batches fetch of other parts: remote rows of an epoch, drawn on the graph or expected."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from plait.analysis.growth import Batch, Growth, draw
from plait.graph import Graph

__all__ = ["Fetch", "drawn", "expected"]

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
_BATCHES = 8  # of each part drawn in one pass: an epoch, or a piece of a long one
_PASSES, _MOST_PASSES = 4, 100
_MOST_EDGES = 4_000_000  # read while drawing, beyond the least number of passes
_PRECISION = 0.0025  # of the rows of all parts: standard error over mean at which drawing ends


@dataclass(frozen=True)
class Asked:
    """The requests for neighbours of one epoch, where each part holds the edges of its own nodes."""

    nodes: float = 0.0  # whose neighbours are requested
    edges: float = 0.0  # in the answers
    questions: float = 0.0  # one for every batch, hop and owner
    hops: float = 0.0  # of batches that request any


@dataclass(frozen=True)
class Fetch:
    """An epoch of mini-batches whose seeds are a part's own: steps of every part, and remote rows by part."""

    steps: int
    nodes: float  # of all batches of the part that reads most
    rows: tuple[float, ...]  # fetched by each part
    sent: tuple[float, ...]  # of each part, by others
    rounds: float  # batches of any part that lack rows: each requests them once
    asked: Asked = Asked()

    @property
    def total(self) -> float:
        """Remote rows fetched by all parts."""
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
    drawing = _Drawing(graph, part, parts, fanouts, rng)
    while not drawing.is_precise:
        for p in range(parts):
            for cut in _cuts(own[p] if len(own[p]) else seeds, most, batch, rng):
                drawing.draw(p, cut)
        drawing.end(most)
    nodes, rows, sent, rounds, asked = drawing.means()
    return Fetch(steps, nodes, tuple(rows), tuple(sent), rounds * steps, asked)


class _Drawing:
    """Batches drawn so far, by passes: every pass has some batches of each part."""

    def __init__(
        self, graph: Graph, part: Ints, parts: int, fanouts: Sequence[int | None], rng: np.random.Generator
    ) -> None:
        self.graph, self.part, self.parts, self.fanouts, self.rng = graph, part, parts, fanouts, rng
        self._rows: list[Floats] = []  # of each pass: remote rows by reader and owner, of one epoch
        self._rounds: list[float] = []  # of each pass: the share of batches that lack rows, summed over parts
        self._asked: list[Floats] = []  # of each pass: the fields of `Asked`
        self._nodes: list[Floats] = []  # of each pass: nodes of the batches of each part, of one epoch
        self._begin()
        self._read = 0

    def _begin(self) -> None:
        self._owners = np.zeros((self.parts, self.parts))
        self._reached = np.zeros(self.parts)
        self._seeds = np.zeros(self.parts)
        self._batches = np.zeros(self.parts)
        self._lacking = np.zeros(self.parts)
        self._questions = np.zeros((self.parts, 4))

    def draw(self, p: int, cut: Ints) -> None:
        """One batch of a part's own seeds."""
        batch = draw(self.graph, np.unique(cut), self.fanouts, self.rng)
        owner = self.part[batch.nodes]
        owners = np.bincount(owner, minlength=self.parts).astype(float)
        owners[p] = 0.0
        self._questions[p] += _questions(batch, owner, p)
        self._owners[p] += owners
        self._reached[p] += len(batch.nodes)
        self._seeds[p] += len(cut)
        self._batches[p] += 1
        self._lacking[p] += owners.any()
        self._read += len(batch.source)

    def end(self, most: int) -> None:
        """The pass is over: an epoch has `most` seeds of every part."""
        share = (most / np.maximum(1, self._seeds))[:, None]
        self._rows.append(self._owners * share)
        self._nodes.append(self._reached * share[:, 0])
        self._asked.append((self._questions * share).sum(axis=0))
        self._rounds.append(float((self._lacking / np.maximum(1, self._batches)).sum()))
        self._begin()

    @property
    def is_precise(self) -> bool:
        """Whether the rows of an epoch are known precisely enough, or enough edges were read."""
        if len(self._rows) < _PASSES:
            return False
        totals = np.array([rows.sum() for rows in self._rows])
        error = totals.std(ddof=1) / math.sqrt(len(totals))
        return bool(error <= _PRECISION * totals.mean()) or self._is_enough

    @property
    def _is_enough(self) -> bool:
        return self._read > _MOST_EDGES or len(self._rows) >= _MOST_PASSES

    def means(self) -> tuple[float, Floats, Floats, float, Asked]:
        """Nodes of the largest part's batches, rows by reader and by owner, lacking batches, neighbours."""
        nodes = float(np.mean(self._nodes, axis=0).max())
        rows = np.mean(self._rows, axis=0)
        asked = Asked(*map(float, np.mean(self._asked, axis=0)))
        return nodes, rows.sum(axis=1), rows.sum(axis=0), float(np.mean(self._rounds)), asked


def _questions(batch: Batch, owner: Ints, own: int) -> tuple[int, int, int, int]:
    """What a batch of part `own` requests from others: the fields of `Asked`."""
    is_remote = owner != own
    ends = np.cumsum(batch.nodes_by_hop)[:-1]  # nodes of the last hop are not expanded
    frontiers = np.split(owner[: ends[-1]], ends[:-1])
    questions = [len(np.unique(frontier[frontier != own])) for frontier in frontiers]
    nodes = int(is_remote[: ends[-1]].sum())
    return nodes, int(is_remote[batch.target].sum()), sum(questions), sum(map(bool, questions))


def _cuts(own: Ints, most: int, batch: int, rng: np.random.Generator) -> list[Ints]:
    """The seeds of an epoch's batches, the last of which may be short; of a long epoch the first ones."""
    order = np.resize(rng.permutation(own), most)
    return [order[k : k + batch] for k in range(0, most, batch)][:_BATCHES]


def expected(growth: Growth, seeds: float, parts: int, quality: float = 1.0) -> Fetch:
    """Parts drawn at random, of which a partition leaves the share `quality`: all but one in P is remote."""
    batches = seeds / parts / max(1, growth.batch)
    steps = max(1, math.ceil(batches))
    each = batches * growth.nodes[-1] * (1.0 - 1.0 / parts) * min(1.0, quality)
    rounds = float(steps * parts) if parts > 1 else 0.0
    asked = _expected(growth, seeds, parts, quality)
    return Fetch(steps, batches * growth.nodes[-1], (each,) * parts, (each,) * parts, rounds, asked)


def _expected(growth: Growth, seeds: float, parts: int, quality: float) -> Asked:
    """Of nodes beyond the seeds, which are a part's own, the share that others hold."""
    remote = (1.0 - 1.0 / parts) * min(1.0, quality)
    batches, hops = seeds / max(1, growth.batch), len(growth.edges) - 1
    nodes = (growth.nodes[-2] - growth.nodes[0]) * remote if hops else 0.0
    asking = batches * hops * (parts > 1)
    return Asked(batches * nodes, batches * sum(growth.edges[1:]) * remote, asking * (parts - 1), asking)
