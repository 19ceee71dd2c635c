"""Is a search worth its time? A small search in a few blocks of similar rows tells, well under a second."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from plait.graph.compiled import compiled
from plait.graph.csr import require_graph
from plait.graph.hag import fast
from plait.graph.hag.rows import Rows

if TYPE_CHECKING:
    from plait.graph.csr import Graph

__all__ = ["Forecast", "forecast"]

Ints = NDArray[Any]

_WORTH = 1.2
"""Least expected traffic ratio worth a search; the break-evens measured lie between 1.1 and 1.7."""
_BLOCKS, _BLOCK_ENTRIES = 8, 1 << 14
_MISSED = 1.5
"""Exact searches save more traffic than blocks show: 1.2 to 1.9 times on nine real graphs, median 1.5."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """Whether to search, the traffic ratio to expect (1.0: nothing to gain), and why."""

    worth_trying: bool
    expected_traffic_ratio: float
    reason: str


def forecast(graph: Graph) -> Forecast:
    """What a search would save, from a few blocks of rows that MinHash finds similar; deterministic."""
    num_outputs = int(np.count_nonzero(np.diff(require_graph(graph, "hag.forecast").indptr)))
    if graph.num_edges < 3 * max(num_outputs, 1):  # no graph this sparse has saved 5% of its traffic yet
        degree = graph.num_edges / max(num_outputs, 1)
        return Forecast(False, 1.0, f"{degree:.1f} neighbours per node are too few to share")
    graph.require_int32("hag.forecast")
    rows = _rows(graph)
    pieces = fast.cut(rows, seed=0, block_entries=_BLOCK_ENTRIES)
    num_blocks = pieces.block.size - 1
    chosen = np.unique(np.linspace(0, num_blocks - 1, min(_BLOCKS, num_blocks)).round().astype(np.int64))
    before, after = _search_blocks(rows, pieces, chosen, graph.num_sources)
    ratio = before / max(after, 1)
    expected = 1.0 + _MISSED * (ratio - 1.0)
    where = f"{chosen.size} of {num_blocks:,} blocks of similar rows"
    if expected < _WORTH:
        reason = f"rows have little in common: shared sums give {where} only {ratio:.2f}x less traffic"
        return Forecast(False, expected, reason)
    reason = f"shared sums give {where} {ratio:.2f}x less traffic; expect about {expected:.2f}x"
    return Forecast(True, expected, reason)


def _rows(graph: Graph) -> Rows:
    """The neighbour lists as sets."""
    indptr, columns = graph.indptr.astype(np.int64), graph.indices.astype(np.int32)  # a copy: blocks write
    length = np.diff(indptr).astype(np.int32)
    _drop_repeats(indptr, columns, length)
    return Rows(indptr[:-1], length, columns, np.ones(length.size, np.int32))


@compiled
def _drop_repeats(indptr: Ints, columns: Ints, length: Ints) -> None:
    for row in range(length.size):
        at = indptr[row]
        for i in range(indptr[row], indptr[row + 1]):
            if i == indptr[row] or columns[i] != columns[at - 1]:
                columns[at] = columns[i]
                at += 1
        length[row] = at - indptr[row]


def _search_blocks(rows: Rows, pieces: fast.Pieces, chosen: Ints, num_sources: int) -> tuple[int, int]:
    """Rows read and written by the chosen blocks before and after a search."""
    depth, mark = np.zeros(num_sources, np.int32), np.zeros(num_sources, np.int32)
    before = after = 0
    for block in chosen:
        members = pieces.order[pieces.block[block] : pieces.block[block + 1]]
        outputs = int(np.count_nonzero(pieces.length[members]))
        before += int(pieces.length[members].sum()) + outputs
        after += _traffic(fast.search_block(rows, pieces, int(block), depth, mark)) + outputs
    return before, after


def _traffic(found: fast.Found) -> int:
    """Rows read and written by a block's pieces and merges, merges read once inlined; outputs not counted."""
    rows, left, right, _ = found.merged
    num_columns = found.column.size + left.size
    inside = np.repeat(rows.start - np.cumsum(rows.length) + rows.length, rows.length)
    used = rows.columns[inside + np.arange(inside.size)]
    uses = np.bincount(np.concatenate((used, left, right)), minlength=num_columns)[found.column.size :]
    reads = int(found.kept.sum()) + used.size + 2 * left.size
    return reads + left.size - 2 * int(np.count_nonzero(uses == 1))
