"""Merging for very large graphs and hubs: the exact search inside blocks of similar rows.

Rows are cut into pieces of bounded length, sorted by MinHash so that similar ones are neighbours, and put in
blocks. Inside a block only columns that enough of its rows hold can merge; the others are set aside, which
leaves little to do where rows are dissimilar. Equal merges of different blocks become one. Another pass with
another hash meets what the first one parted. Blocks run on several threads and are joined in order, so the
result does not depend on the number of threads.
"""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from plait.graph.compiled import compiled
from plait.graph.hag.merge import UNLIMITED, Limits, Merged, merge_pairs
from plait.graph.hag.rows import Rows

__all__ = ["Found", "Pieces", "cut", "merge_components", "merge_similar", "search_block", "similar_order"]

Ints = NDArray[Any]

_PIECE = 256
"""Longest piece of a row; counting costs its square."""
_BLOCK_ENTRIES = 1 << 16
"""Entries of a block; its counters stay in the second-level cache."""
_PASSES = 2
_MAX_THREADS = 8
_NO_LIMITS = Limits()


class Pieces(NamedTuple):
    """Piece p: length[p] columns from start[p] on, of row[p]; block b: order[block[b] : block[b + 1]]."""

    start: Ints
    length: Ints
    row: Ints
    order: Ints
    block: Ints


class Found(NamedTuple):
    """What one block found, in its own numbering: first the columns named by `column`, then its merges."""

    members: Ints
    kept: Ints
    column: Ints
    merged: Merged


def merge_similar(rows: Rows, num_sources: int, limits: Limits) -> Merged:
    """As merge_pairs, but merges that only dissimilar rows share are missed; `rows` changes in place.

    The capacity is not kept here, because no block knows how good the merges of the others are: the caller
    drops those with fewest readers.
    """
    book = _Book(num_sources)
    is_complete = True
    for turn in range(_PASSES):
        pieces = cut(rows, turn, _BLOCK_ENTRIES)
        is_complete &= _merge_blocks(rows, pieces, book, limits)
    return book.merged(rows, is_complete)


def merge_components(rows: Rows, num_sources: int, limits: Limits) -> Merged:
    """The merges of merge_pairs, found component by component where no capacity ties them together.

    Rows of different components share no column, so each may be searched alone and on its own thread. The
    merges are the same, only their numbers differ.
    """
    if limits.capacity >= rows.columns.size:  # a merge takes a row entry away, so there can be no more
        pieces = _components(rows, num_sources)
        sizes = np.add.reduceat(pieces.length[pieces.order], pieces.block[:-1]) if rows.start.size else [0]
        if max(sizes) <= rows.columns.size // 2:
            book = _Book(num_sources)
            is_complete = _merge_blocks(rows, pieces, book, limits)
            return book.merged(rows, is_complete)
    return merge_pairs(rows, num_sources, limits)


class _Book:
    """Every merge made so far, each pair once: column num_sources + j joins left[j] and right[j]."""

    def __init__(self, num_sources: int) -> None:
        self.num_sources = num_sources
        self.size = 0
        self.left, self.right = np.zeros(1024, np.int32), np.zeros(1024, np.int32)
        self.depth = np.zeros(num_sources + 1024, np.int32)
        self.table = np.full(4096, -1, np.int32)

    def merged(self, rows: Rows, is_complete: bool) -> Merged:
        """All merges, with the rows as they are after them."""
        return Merged(rows, self.left[: self.size].copy(), self.right[: self.size].copy(), is_complete)

    def enter(self, found: Found) -> Ints:
        """Enter the merges of a block; the number of each of its columns, old and new."""
        left, right = found.merged.left, found.merged.right
        needed = self.size + left.size
        if needed > self.left.size:
            self.left, self.right = np.resize(self.left, 2 * needed), np.resize(self.right, 2 * needed)
            self.depth = np.resize(self.depth, self.num_sources + 2 * needed)
        if 2 * needed > self.table.size:
            self.table = np.full(1 << (4 * needed).bit_length(), -1, np.int32)
            _rehash(self.left, self.right, self.size, self.table)
        column = np.concatenate((found.column, np.zeros(left.size, np.int32)))
        self.size = _enter(
            left, right, column, self.left, self.right, self.depth, self.table, self.size, self.num_sources
        )
        return column


def _components(rows: Rows, num_sources: int) -> Pieces:
    """Whole rows as pieces, whole components in a block; a block ends with the component that fills it."""
    link = np.arange(num_sources, dtype=np.int32)
    part = np.empty(rows.start.size, np.int32)
    _join_columns(rows.start, rows.length, rows.columns, link, part)
    # counting costs the square of a row's length and saves its length: short rows first, should time end
    entries = np.maximum(np.bincount(part, rows.length), 1)
    mean_length = np.bincount(part, rows.length.astype(np.float64) ** 2) / entries
    order = np.lexsort((part, mean_length[part]))
    block = np.zeros(order.size + 1, np.int64)
    num_blocks = _bound_blocks(order, rows.length, _BLOCK_ENTRIES, block, part)
    return Pieces(rows.start, rows.length, np.arange(order.size), order, block[: num_blocks + 1])


def cut(rows: Rows, seed: int, block_entries: int) -> Pieces:
    """The rows in pieces, similar ones in the same block where possible."""
    num_pieces = np.maximum(-(-rows.length.astype(np.int64) // _PIECE), 1)
    row = np.repeat(np.arange(rows.start.size), num_pieces)
    offset = (np.arange(row.size) - np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)) * _PIECE
    start = rows.start[row] + offset
    length = np.minimum(rows.length[row] - offset, _PIECE).astype(np.int32)
    order = similar_order(start, length, rows.columns, seed)
    block = np.zeros(row.size + 1, np.int64)
    num_blocks = _bound_blocks(order, length, block_entries, block, np.arange(row.size))
    return Pieces(start, length, row, order, block[: num_blocks + 1])


def similar_order(start: Ints, length: Ints, columns: Ints, seed: int) -> Ints:
    """Rows sorted by MinHash: rows that share much of what they hold tend to be neighbours."""
    code = np.empty(start.size, np.uint64)
    _sign(start, length, columns, np.uint64(seed), code)
    return np.argsort(code, kind="stable")


def _merge_blocks(rows: Rows, pieces: Pieces, book: _Book, limits: Limits) -> bool:
    """Search every block and write its pieces back; False when time ran out on the way."""
    num_blocks = pieces.block.size - 1
    depth = book.depth[: book.num_sources + book.size].copy()
    own = threading.local()

    def search(block: int) -> Found | None:
        if time.perf_counter() > limits.deadline:
            return None
        if not hasattr(own, "mark"):
            own.mark = np.zeros(depth.size, np.int32)
        return search_block(rows, pieces, block, depth, own.mark, limits)

    length = pieces.length.copy()
    is_complete = True
    with ThreadPoolExecutor(max(1, min(os.cpu_count() or 1, _MAX_THREADS, num_blocks))) as pool:
        for found in pool.map(search, range(num_blocks)):
            is_complete &= found is not None and found.merged.is_complete
            if found is not None:
                column = book.enter(found)
                inner = found.merged.rows
                at = pieces.start[found.members] + found.kept
                _write_back(at, rows.columns, inner.start, inner.length, inner.columns, column)
                length[found.members] = found.kept + inner.length
    _close_gaps(pieces.row, pieces.start, length, rows.start, rows.length, rows.columns)
    return is_complete


def search_block(
    rows: Rows, pieces: Pieces, block: int, depth: Ints, mark: Ints, limits: Limits = _NO_LIMITS
) -> Found:
    """The merges inside one block; a piece keeps in front the columns that cannot merge."""
    members = pieces.order[pieces.block[block] : pieces.block[block + 1]]
    weight = rows.weight[pieces.row[members]]
    total = int(pieces.length[members].sum())
    kept, length = np.zeros(members.size, np.int32), np.zeros(members.size, np.int32)
    start, columns, local = (
        np.zeros(members.size, np.int64),
        np.empty(total, np.int32),
        np.empty(total, np.int32),
    )
    num_local, used = _gather(
        pieces.start[members], pieces.length[members], rows.columns, weight, limits.min_count,
        mark, local, kept, start, length, columns,
    )  # fmt: skip
    local = local[:num_local].copy()
    inner = Rows(start, length, columns[:used].copy(), weight)
    merged = merge_pairs(inner, num_local, limits._replace(capacity=UNLIMITED), depth[local])
    return Found(members, kept, local, merged)


@compiled
def _mix(h: Any) -> Any:
    h = (h ^ (h >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    h = (h ^ (h >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return h ^ (h >> np.uint64(33))


@compiled
def _sign(start: Ints, length: Ints, columns: Ints, seed: Any, code: Ints) -> None:
    """Two MinHashes of every piece, one above the other: sorting by them brings similar pieces together."""
    low = np.uint64(0xFFFFFFFF)
    for p in range(start.size):
        first, second = low, low
        for i in range(start[p], start[p] + length[p]):
            h = _mix(np.uint64(columns[i]) + (seed + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))
            first = min(first, h >> np.uint64(32))
            second = min(second, h & low)
        code[p] = (first << np.uint64(32)) | second


@compiled
def _join_columns(start: Ints, length: Ints, columns: Ints, link: Ints, part: Ints) -> None:
    """The component of every row: the smallest column that its columns are linked to. No row is empty."""
    for turn in range(2):
        for row in range(start.size):
            root = -1
            for i in range(start[row], start[row] + length[row]):
                other = columns[i]
                while link[other] != other:
                    link[other] = link[link[other]]
                    other = link[other]
                if root < 0:
                    root = other
                elif root < other:
                    link[other] = root
                elif other < root:
                    link[root] = other
                    root = other
                if turn == 1:
                    break
            part[row] = root


@compiled
def _bound_blocks(order: Ints, length: Ints, limit: int, block: Ints, part: Ints) -> int:
    """Cut `order` into blocks of about `limit` entries, never between two pieces of the same part."""
    num_blocks, entries = 0, 0
    for i in range(order.size):
        is_new = i > 0 and part[order[i]] != part[order[i - 1]]
        if is_new and entries > 0 and entries + length[order[i]] > limit:
            num_blocks += 1
            block[num_blocks] = i
            entries = 0
        entries += length[order[i]]
    if order.size > 0:
        num_blocks += 1
        block[num_blocks] = order.size
    return num_blocks


@compiled
def _gather(
    piece_start: Ints, piece_length: Ints, row_columns: Ints, weight: Ints, min_count: int, mark: Ints,
    local: Ints, kept: Ints, start: Ints, length: Ints, columns: Ints,
) -> tuple[int, int]:  # fmt: skip
    """Split every piece: what `min_count` rows hold goes to `columns` in block numbers, the rest in front."""
    num_touched = 0
    for p in range(piece_start.size):
        for i in range(piece_start[p], piece_start[p] + piece_length[p]):
            column = row_columns[i]
            if mark[column] == 0:
                local[num_touched] = column
                num_touched += 1
            mark[column] += weight[p]
    num_local = 0
    for t in range(num_touched):
        column = local[t]
        if mark[column] >= min_count:
            local[num_local] = column
            num_local += 1
        else:
            mark[column] = 0
    local[:num_local] = np.sort(local[:num_local])  # ascending, so that sorted pieces stay sorted
    for t in range(num_local):
        mark[local[t]] = t + 1
    at = 0
    for p in range(piece_start.size):
        start[p] = at
        for i in range(piece_start[p], piece_start[p] + piece_length[p]):
            column = row_columns[i]
            if mark[column] > 0:
                columns[at] = mark[column] - 1
                at += 1
            else:
                row_columns[piece_start[p] + kept[p]] = column
                kept[p] += 1
        length[p] = at - start[p]
    for t in range(num_local):
        mark[local[t]] = 0
    return num_local, at


@compiled
def _slot(left: Ints, right: Ints, a: int, b: int, table: Ints) -> int:
    """Where the pair (a, b) stands in the table of merge numbers, or where it would."""
    at = np.int64(_mix((np.uint64(a) << np.uint64(32)) | np.uint64(b)) & np.uint64(table.size - 1))
    while table[at] >= 0 and (left[table[at]] != a or right[table[at]] != b):
        at = (at + 1) & (table.size - 1)
    return at  # type: ignore[return-value]


@compiled
def _rehash(left: Ints, right: Ints, size: int, table: Ints) -> None:
    for j in range(size):
        table[_slot(left, right, left[j], right[j], table)] = j


@compiled
def _enter(
    new_left: Ints, new_right: Ints, column: Ints, left: Ints, right: Ints, depth: Ints, table: Ints,
    size: int, num_sources: int,
) -> int:  # fmt: skip
    """Give every new merge its number, an old one where the pair is known; the size of the book."""
    num_old = column.size - new_left.size
    for k in range(new_left.size):
        a, b = column[new_left[k]], column[new_right[k]]
        if a > b:
            a, b = b, a
        at = _slot(left, right, a, b, table)
        if table[at] < 0:
            table[at] = size
            left[size], right[size] = a, b
            depth[num_sources + size] = max(depth[a], depth[b]) + 1
            size += 1
        column[num_old + k] = num_sources + table[at]
    return size


@compiled
def _write_back(at: Ints, row_columns: Ints, start: Ints, length: Ints, columns: Ints, column: Ints) -> None:
    for p in range(at.size):
        for i in range(length[p]):
            row_columns[at[p] + i] = column[columns[start[p] + i]]


@compiled
def _close_gaps(
    piece_row: Ints, piece_start: Ints, piece_length: Ints, start: Ints, length: Ints, columns: Ints
) -> None:
    """Move the pieces of every row together, and sort the row."""
    length[:] = 0
    for p in range(piece_row.size):
        row = piece_row[p]
        at = start[row] + length[row]
        for i in range(piece_length[p]):
            columns[at + i] = columns[piece_start[p] + i]
        length[row] += piece_length[p]
    for row in range(start.size):
        columns[start[row] : start[row] + length[row]] = np.sort(
            columns[start[row] : start[row] + length[row]]
        )
