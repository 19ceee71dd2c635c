"""Neighbour lists as the searches want them: sets, equal ones stored once with a weight."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from plait.graph.compiled import compiled

__all__ = ["Rows", "WorkingRows", "invert", "working_rows"]

Ints = NDArray[Any]


class Rows(NamedTuple):
    """Row r holds columns[start[r] : start[r] + length[r]], ascending, and stands for weight[r] rows."""

    start: Ints
    length: Ints
    columns: Ints
    weight: Ints


class WorkingRows(NamedTuple):
    """The rows of a graph ready for merging, and the way back.

    A node with repeated edges is split into layers, each a set: layer i holds the neighbours met more than i
    times. `node` names the node of every layer, ascending; `row` the entry of `rows` that holds its set.
    """

    rows: Rows
    node: Ints
    row: Ints


def working_rows(indptr: Ints, indices: Ints, drop_repeats: bool = False) -> WorkingRows:
    """Rows of the CSR (indptr, indices), sorted inside; empty ones left out, equal ones merged."""
    indptr = indptr.astype(np.int64)
    columns = indices.astype(np.int32)
    node, start, length, columns = _layers(indptr, columns, drop_repeats)
    same_as = _equal_rows(start, length, columns)
    kept = np.flatnonzero(same_as == np.arange(same_as.size))
    number = np.zeros(same_as.size, np.int32)
    number[kept] = np.arange(kept.size, dtype=np.int32)
    row = number[same_as]
    new_start = np.zeros(kept.size + 1, np.int64)
    np.cumsum(length[kept], out=new_start[1:])
    packed = np.empty(int(new_start[-1]), np.int32)
    _pack(start[kept], length[kept], columns, packed)
    weight = np.bincount(row, minlength=kept.size).astype(np.int32)
    rows = Rows(new_start[:-1].copy(), length[kept].astype(np.int32), packed, weight)
    return WorkingRows(rows, node, row)


def invert(row_start: Ints, length: Ints, columns: Ints, num_columns: int) -> tuple[Ints, Ints]:
    """(start, lists): the rows of every column, ascending, column c at lists[start[c] : start[c + 1]]."""
    start = np.zeros(num_columns + 1, np.int64)
    np.cumsum(np.bincount(columns, minlength=num_columns), out=start[1:])
    lists = np.empty(columns.size, np.int32)
    _fill_lists(row_start, length, columns, start[:-1].copy(), lists)
    return start, lists


def _layers(indptr: Ints, columns: Ints, drop_repeats: bool) -> tuple[Ints, Ints, Ints, Ints]:
    """(node, start, length, columns) of every layer with an entry."""
    length = np.diff(indptr)
    is_repeat = np.zeros(columns.size, bool)
    if columns.size:
        is_repeat[1:] = columns[1:] == columns[:-1]
        is_repeat[indptr[:-1][length > 0]] = False
    if not is_repeat.any():
        node = np.flatnonzero(length).astype(np.int32)
        return node, indptr[node], length[node], columns
    edge_node = np.repeat(np.arange(length.size), length)
    position = np.arange(columns.size)
    layer = position - np.maximum.accumulate(np.where(is_repeat, 0, position))
    if drop_repeats:
        edge_node, columns, layer = edge_node[~is_repeat], columns[~is_repeat], layer[~is_repeat]
    order = np.lexsort((columns, layer, edge_node))
    edge_node, layer, columns = edge_node[order], layer[order], columns[order]
    is_first = np.ones(columns.size, bool)
    is_first[1:] = (edge_node[1:] != edge_node[:-1]) | (layer[1:] != layer[:-1])
    start = np.flatnonzero(is_first)
    return edge_node[start].astype(np.int32), start, np.diff(start, append=columns.size), columns


def _equal_rows(start: Ints, length: Ints, columns: Ints) -> Ints:
    """For every row the first row with the same columns."""
    code = np.empty(start.size, np.uint64)
    _hash_rows(start, length, columns, code)
    order = np.argsort(code, kind="stable")
    same_as = np.arange(start.size)
    _match_neighbours(order, code, start, length, columns, same_as)
    return same_as


@compiled
def _hash_rows(start: Ints, length: Ints, columns: Ints, code: Ints) -> None:
    for row in range(start.size):
        h = np.uint64(length[row])
        for j in range(start[row], start[row] + length[row]):
            h = (h ^ np.uint64(columns[j])) * np.uint64(0x9E3779B97F4A7C15)
            h ^= h >> np.uint64(29)
        code[row] = h


@compiled
def _is_equal(start: Ints, length: Ints, columns: Ints, one: int, other: int) -> bool:
    if length[one] != length[other]:
        return False
    for j in range(length[one]):  # noqa: SIM110  a compiled loop
        if columns[start[one] + j] != columns[start[other] + j]:
            return False
    return True


@compiled
def _match_neighbours(
    order: Ints, code: Ints, start: Ints, length: Ints, columns: Ints, same_as: Ints
) -> None:
    """Among rows of equal code, neighbours in the stable order, point each to the first truly equal."""
    run = 0
    for i in range(1, order.size):
        if code[order[i]] != code[order[run]]:
            run = i
            continue
        for j in range(run, i):
            if same_as[order[j]] == order[j] and _is_equal(start, length, columns, order[j], order[i]):
                same_as[order[i]] = order[j]
                break


@compiled
def _pack(start: Ints, length: Ints, columns: Ints, packed: Ints) -> None:
    at = 0
    for row in range(start.size):
        for j in range(start[row], start[row] + length[row]):
            packed[at] = columns[j]
            at += 1


@compiled
def _fill_lists(start: Ints, length: Ints, columns: Ints, position: Ints, lists: Ints) -> None:
    for row in range(start.size):
        for j in range(start[row], start[row] + length[row]):
            column = columns[j]
            lists[position[column]] = row
            position[column] += 1
