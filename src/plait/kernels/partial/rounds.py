"""A schedule as launches of short rows: what a device with thousands of threads runs instead of tiles.

Every partial sum gets a row of its own; rows of many operands are cut into pieces and a sum of pieces. Steps
that read each other's sums are a component: a small one is summed by one program that walks its levels, as a
tile is on a CPU; rows that stand alone, and the levels of large components, are spread over the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from plait.graph.compiled import compiled

__all__ = ["Launch", "Rounds", "rounds"]

Ints = NDArray[Any]

_MOST = 64
"""Most operands of a row: they are added one after the other, and everything waits for the last row. Of 16,
32 and 64 on an H200, 64 was best for CSR on tu_collab (1.1x over 32) and within 5% on two other graphs, but
for width 16 on web_cnr2000 (1.26x slower than 16); the form was 3 to 14% slower than with the best one."""
_WINDOW = 512
"""Rows that are sorted by length among themselves; further apart they seldom share operands."""
_GROUP = 128
"""Rows of a program's components; on tu_collab 32 to 256 ran within 6% of each other."""
_LEAST_LARGE, _MOST_LARGE, _SHARE_LARGE = 256, 2048, 1 / 256
"""A component of more steps, or of a larger share of them, is spread: one program would walk it while the
rest of the device idles. With up to 2048 steps grouped or all spread, H200, tu_collab took 0.36 or 0.43 ms at
width 64 and the same at 256, web_cnr2000 1.35 or 0.60 at 64. The bounds between are a guess, not measured."""


class Launch(NamedTuple):
    """What runs at the same time: the rows [first, last), or the groups [first, last)."""

    is_grouped: bool
    first: int
    last: int


@dataclass(frozen=True, eq=False)
class Rounds:
    """Rows to sum, launch after launch.

    Row r adds the `length[r]` operands from begin[r] on and goes to output to[r], or to row -1 - to[r] of the
    buffer where that is negative. Operand j below num_sources is input j, above it row j - num_sources of the
    buffer. The first operands are the schedule's own, in its order: a value per operand (an edge weight) is
    found at the same place. Group g is the rounds [groups[g], groups[g + 1]), one after the other; round k is
    the rows [starts[k], starts[k + 1]), which are independent.
    """

    num_sources: int
    num_buffer: int
    launches: tuple[Launch, ...]
    groups: Ints  # int32
    starts: Ints  # int32
    begin: Ints  # int64
    length: Ints  # int32
    to: Ints  # int32
    operands: Ints  # int32


class _Rows(NamedTuple):
    """Rows in the order of the steps they are of."""

    begin: Ints
    length: Ints
    to: Ints
    level: Ints
    step: Ints
    operands: Ints
    component: Ints  # of every step: its first step
    num_buffer: int


def rounds(
    start: Ints,
    operands: Ints,
    node: Ints,
    buffer: Ints,
    num_sources: int,
    num_columns: int,
    *,
    most: int = _MOST,
    large: int | None = None,
    group: int = _GROUP,
) -> Rounds:
    """The steps of a schedule (graph/hag/schedule.py) as launches; num_columns counts its joint rows.

    A row has at most `most` operands; components of more than `large` steps are spread.
    """
    if large is None:
        large = min(max(_LEAST_LARGE, int(_SHARE_LARGE * node.size)), _MOST_LARGE)
    rows = _short_rows((start, operands, node, buffer), num_sources, num_columns, most)
    size = np.bincount(rows.component, minlength=node.size)[rows.component]
    is_grouped = ((size > 1) & (size <= large))[rows.step]
    number = np.where(is_grouped, _group_of_row(rows, is_grouped, group), 0)
    key = _Key(is_grouped, number, rows.level)
    order = _even_order(key, rows.length)
    launches, groups, starts = _launches(_Key(*(part[order] for part in key)))
    return Rounds(
        num_sources,
        rows.num_buffer,
        launches,
        groups,
        starts,
        rows.begin[order],
        rows.length[order],
        rows.to[order],
        rows.operands,
    )


class _Key(NamedTuple):
    """What rows are ordered by, first things first."""

    is_grouped: Ints
    group: Ints
    level: Ints

    def changes(self, *parts: Ints) -> Ints:
        """Where one of the parts differs from the row before; the first row differs."""
        differs = np.ones(self.level.size, bool)
        if differs.size:
            differs[1:] = np.any([part[1:] != part[:-1] for part in parts], axis=0)
        return np.flatnonzero(differs)


def _group_of_row(rows: _Rows, is_grouped: Ints, group: int) -> Ints:
    """Components in their order, this many to a group that it has `group` rows or a component's last."""
    component = rows.component[rows.step]
    counts = np.bincount(component[is_grouped], minlength=rows.component.size)
    return ((np.cumsum(counts) - counts) // group)[component]


def _even_order(key: _Key, length: Ints) -> Ints:
    """Rows by key; by length within a round, and within windows of spread rows."""
    order = np.lexsort((key.level, key.group, key.is_grouped))
    key = _Key(*(part[order] for part in key))
    firsts = key.changes(*key)
    place = np.arange(order.size) - np.repeat(firsts, np.diff(np.append(firsts, order.size)))
    window = np.where(key.is_grouped, 0, place // _WINDOW)
    return order[np.lexsort((-length[order], window, key.level, key.group, key.is_grouped))]


def _launches(key: _Key) -> tuple[tuple[Launch, ...], Ints, Ints]:
    """(launches, rounds of every group, rows of every round)."""
    starts = key.changes(*key)
    firsts = key.changes(key.is_grouped, key.group)
    groups = np.searchsorted(starts, firsts)
    # one launch for every level of spread rows, one for all groups
    cuts = key.changes(key.is_grouped, np.where(key.is_grouped, 0, key.level))
    cuts = np.append(cuts, key.level.size)
    launches = []
    for first, last in zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True):
        is_grouped = bool(key.is_grouped[first])
        between = np.searchsorted(firsts, (first, last)).tolist() if is_grouped else (first, last)
        launches.append(Launch(is_grouped, *between))
    return (
        tuple(launches),
        np.append(groups, starts.size).astype(np.int32),
        np.append(starts, key.level.size).astype(np.int32),
    )


def _short_rows(steps: tuple[Ints, ...], num_sources: int, num_columns: int, most: int) -> _Rows:
    """Every step as rows of at most `most` operands, each with its level."""
    start, operands, node = steps[:3]
    pieces = -(-np.diff(start) // most)
    more = int((2 * pieces + 64)[pieces > 1].sum())  # pieces, their sums, and sums of those
    begin, renamed = np.zeros(node.size + more, np.int64), np.zeros(operands.size + more, np.int32)
    length, to, level, step = np.zeros((4, node.size + more), np.int32)
    component = np.arange(node.size, dtype=np.int32)
    count, end, num_buffer = _cut(
        *steps, num_sources, num_columns, most, begin, length, to, level, step, renamed, component
    )
    return _Rows(
        begin[:count],
        length[:count],
        to[:count],
        level[:count],
        step[:count],
        renamed[:end],
        component,
        num_buffer,
    )


@compiled
def _cut(
    start: Any, operands: Any, node: Any, buffer: Any, num_sources: int, num_columns: int, most: int,
    begin: Any, length: Any, to: Any, level: Any, step_of: Any, renamed: Any, component: Any,
) -> tuple[int, int, int]:  # fmt: skip
    """(rows, operands, rows of the buffer); a slot's operands are those of its last writer."""
    held = np.zeros(num_columns - num_sources, np.int32)  # the buffer row that a joint row is now
    level_of = np.zeros(to.size, np.int32)  # of a buffer row: the level after the one that sums it
    writer = np.zeros(to.size, np.int32)
    count, end, num_buffer = 0, operands.size, 0
    for step in range(node.size):
        for e in range(start[step], start[step + 1]):
            j = operands[e]
            if j >= num_sources:
                j = num_sources + held[j - num_sources]
                other = writer[j - num_sources]
                while component[other] != other:
                    component[other] = component[component[other]]
                    other = component[other]
                own = step
                while component[own] != own:
                    component[own] = component[component[own]]
                    own = component[own]
                component[max(own, other)] = min(own, other)  # the first step of both leads them
            renamed[e] = j
        first, last = start[step], start[step + 1]
        while True:
            pieces = max(1, (last - first + most - 1) // most)
            is_last = pieces == 1
            next_first = end
            for p in range(pieces):  # even pieces: 33 operands are 17 and 16, not 32 and 1
                begin[count] = first + (last - first) * p // pieces
                length[count] = first + (last - first) * (p + 1) // pieces - begin[count]
                step_of[count] = step
                for e in range(begin[count], begin[count] + length[count]):
                    r = renamed[e] - num_sources
                    if r >= 0:
                        level[count] = max(level[count], level_of[r])
                if is_last and node[step] >= 0:
                    to[count] = node[step]
                else:
                    to[count] = -1 - num_buffer
                    level_of[num_buffer], writer[num_buffer] = level[count] + 1, step
                    if is_last:
                        held[buffer[step] - num_sources] = num_buffer
                    else:
                        renamed[end] = num_sources + num_buffer
                        end += 1
                    num_buffer += 1
                count += 1
            if is_last:
                break
            first, last = next_first, end
    for step in range(node.size):  # the leader of a step comes before it and knows its own by now
        component[step] = component[component[step]]
    return count, end, num_buffer
