"""The fewest rows any policy can fetch for the batches of a host: optimal replacement, counted exactly.

A row that one batch used and a later one will use again can be kept in between, in one of the buffer's slots.
Keeping it saves one fetch, whichever row it is, so the most fetches are saved by the most such intervals of
which no more than the slots overlap. Dropping the interval that ends last whenever there are too many is
optimal (Belady's rule; for intervals Faigle and Nawijn's), and only the ends of intervals matter for it.

Rows of batches in preparation, on their way or made and waiting for their use, serve later ones at no slot's
cost: a slot is needed from the moment that the batch is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.hosts.graphs import seeds_of
from benchmarks.hosts.systems import Setting
from numpy.typing import NDArray

__all__ = ["Bound", "bounds", "fewest_rows", "requests_of", "table"]

Array = NDArray[Any]


@dataclass(frozen=True)
class Bound:
    """Rows per batch of a stream: asked for, fetched without a buffer, and at best with one of `slots`."""

    ahead: int
    slots: int
    asked: float
    without: float
    best: float


def requests_of(work: Path, setting: Setting, host: int) -> tuple[list[Array], int]:
    """The remote rows of every batch of a host, and how many nodes its halo has."""
    from plait.distributed import NeighborLoader, init

    folder = work / f"{setting.graph}-{setting.hosts}"
    with init(folder / "plait") as session:
        seeds = np.concatenate(seeds_of(str(folder), "plait"))
        hops = list(reversed(setting.fanout))
        loader = NeighborLoader(session, hops, seeds, setting.batch, shuffle=True, seed=setting.seed)
        begin, end = session.parts.bounds[host], session.parts.bounds[host + 1]
        found = []
        for epoch in range(setting.epochs):
            for job in loader._jobs(epoch):
                number = job.number * session.parts.num_parts + host
                nodes = loader._sampled([job.index[host]], epoch, [number])[0].n_id
                found.append(np.asarray(nodes[(nodes < begin) | (nodes >= end)]))
        return found, int(session.parts.halo(host).size)


def next_batches(batches: Sequence[Array]) -> list[Array]:
    """For every row of every batch the batch that asks for it next; the number of batches where none does."""
    upcoming = np.full(1 + max(int(rows.max(initial=0)) for rows in batches), len(batches))
    found = []
    for number in reversed(range(len(batches))):
        found.append(upcoming[batches[number]])
        upcoming[batches[number]] = number
    return found[::-1]


def fewest_rows(batches: Sequence[Array], slots: int, ahead: int = 0) -> Array:
    """Rows fetched for every batch by a policy that knows all of them and wastes nothing.

    The rows of `ahead` batches before the one being made are still there, and cost no slot.
    """
    count = len(batches)
    ends = np.zeros(count, np.int64)  # how many of the kept rows are needed next by each batch
    fetched = np.array([rows.size for rows in batches])
    upcoming = next_batches(batches)
    for number in range(count):
        fetched[number] -= ends[number]
        ends[number] = 0
        if number < ahead:
            continue  # no batch is used yet
        wanted = upcoming[number - ahead]
        ends += np.bincount(wanted[(wanted > number) & (wanted < count)], minlength=count)
        over = int(ends.sum()) - slots
        for last in range(count - 1, number, -1):
            if over <= 0:
                break
            dropped = min(over, int(ends[last]))
            ends[last] -= dropped
            over -= dropped
    for number, wanted in enumerate(upcoming):
        soon = wanted[wanted <= min(number + ahead, count - 1)]
        fetched -= np.bincount(soon, minlength=count)
    return fetched


def bounds(batches: Sequence[Array], slots: Sequence[int], aheads: Sequence[int], first: int) -> list[Bound]:
    """Every pair of them; batches before `first` fill the buffer and are not counted."""
    found = []
    asked = float(np.mean([rows.size for rows in batches[first:]]))
    for ahead in aheads:
        without = float(fewest_rows(batches, 0, ahead)[first:].mean())
        for size in slots:
            best = float(fewest_rows(batches, size, ahead)[first:].mean())
            found.append(Bound(ahead, size, asked, without, best))
    return found


def table(found: Sequence[Bound], halo: int) -> str:
    """A Markdown table."""
    heads = ["batches under way", "slots", "of the halo", "asked for", "without a buffer", "at best", "ratio"]
    rows = [heads, ["---"] * len(heads)]
    for one in found:
        counts = [f"{n:,.0f}" for n in (one.asked, one.without, one.best)]
        share, ratio = one.slots / halo, one.best / one.without
        rows.append([str(one.ahead + 1), f"{one.slots:,}", f"{share:.0%}", *counts, f"{ratio:.3f}"])
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)
