"""Messages relu(near[i] + far[j]) @ w + bias under a maximum or minimum, in tiles of edges in cache."""

from __future__ import annotations

import functools
import threading
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from plait.errors import InputError
from plait.graph.compiled import compiled
from plait.kernels import launch
from plait.kernels.compiled import stored
from plait.kernels.operands import (
    Words,
    float_bits,
    read_flat,
    read_numbers,
    read_rows,
    write_flat,
    write_rows,
)
from plait.kernels.rectified import cpu
from plait.kernels.spmm import Pattern

__all__ = ["attain", "mark_bytes", "source_gradients", "target_gradients"]

_TILE_BYTES = 1 << 17  # of the rows of a tile before and after the product
_LEAST_EDGES, _MOST_EDGES = 16, 256
_SERIAL_BELOW = 1 << 20  # multiply-adds under which waking a second thread does not pay
_SUM_BYTES = 8 << 20  # of all partial gradients of w
_MOST_CHUNKS = 32
_EDGES_PER_CHUNK = 4096
_USES = ("gemm", "spmm")


_attain_address = stored("rectified", cpu.attain, _USES)
_join_address = stored("rectified-join", cpu.join, _USES)
_targets_address = stored("rectified-targets", cpu.targets, _USES)
_sources_address = stored("rectified-sources", cpu.sources, _USES)


def mark_bytes(width: int) -> int:
    """Bytes of an edge's marks: one bit per column, in whole words of 64."""
    return -(-width // 64) * 8


@dataclass(frozen=True)
class _Tiles:
    """Edges in tiles of whole rows; a row with more edges than a tile holds is cut.

    table[t]: first row, last row, first edge, number of the part (-1: whole rows); the entry after the last
    tile says where its edges end. cuts[k]: a row that is cut, its first tile, the tile after its last.
    """

    table: np.ndarray[Any, Any]
    cuts: np.ndarray[Any, Any]

    @functools.cached_property
    def count(self) -> int:
        return len(self.table) - 1

    @functools.cached_property
    def parts(self) -> int:
        return int((self.cuts[:, 2] - self.cuts[:, 1]).sum())

    @functools.cached_property
    def longest(self) -> int:
        """Edges of the tile that has most of them."""
        return int(np.diff(self.table[:, 2]).max(initial=0))

    @functools.cached_property
    def addresses(self) -> tuple[int, int]:
        return self.table.ctypes.data, self.cuts.ctypes.data

    @classmethod
    def of(cls, indptr: np.ndarray[Any, Any], most: int) -> _Tiles:
        """Tiles of at most this many edges and rows."""
        rows = len(indptr) - 1
        edges = int(indptr[-1])
        # two tiles in a row hold more than `most` edges or rows, unless one ends before a row that is cut
        room = 4 * ((edges + rows) // most + 1) + 2
        table, cuts = np.empty((room, 4), np.int64), np.empty((edges // most + 1, 3), np.int64)
        tiles, many = _cut(indptr, most, table, cuts)
        return cls(table[: tiles + 1].copy(), cuts[:many].copy())


@compiled
def _cut(indptr: Any, most: int, table: Any, cuts: Any) -> tuple[int, int]:
    """(tiles, rows that are cut); see _Tiles."""
    rows, row, tiles, many, part = indptr.size - 1, 0, 0, 0, 0
    while row < rows:
        begin = indptr[row]
        last = row
        while last < rows and last - row < most and indptr[last + 1] - begin <= most:
            last += 1
        if last > row:
            table[tiles, 0], table[tiles, 1], table[tiles, 2], table[tiles, 3] = row, last, begin, -1
            tiles += 1
            row = last
            continue
        first = tiles
        for edge in range(begin, indptr[row + 1], most):
            table[tiles, 0], table[tiles, 1], table[tiles, 2], table[tiles, 3] = row, row + 1, edge, part
            tiles += 1
            part += 1
        cuts[many, 0], cuts[many, 1], cuts[many, 2] = row, first, tiles
        many += 1
        row += 1
    table[tiles, 0], table[tiles, 1], table[tiles, 2], table[tiles, 3] = rows, rows, indptr[rows], -1
    return tiles, many


_tiles: weakref.WeakKeyDictionary[Pattern, dict[int, _Tiles]] = weakref.WeakKeyDictionary()


def _tiles_of(pattern: Pattern, inner: int, width: int, size: int) -> _Tiles:
    fitting = _TILE_BYTES // max(1, (inner + width) * size)
    most = max(_LEAST_EDGES, min(_MOST_EDGES, fitting)) // 8 * 8
    known = _tiles.setdefault(pattern, {})
    if most not in known:
        known[most] = _Tiles.of(pattern.indptr, most)
    return known[most]


class _Scratch(threading.local):
    """Memory of one calling thread for the tiles of its team."""

    memory = torch.empty(0, dtype=torch.uint8)


_own = _Scratch()


def _scratch(count: int) -> int:
    if _own.memory.numel() < count + 64:
        _own.memory = torch.empty(count + 64, dtype=torch.uint8)
    return -(-_own.memory.data_ptr() // 64) * 64


def _threads(work: int) -> int:
    return launch.num_threads() if work > _SERIAL_BELOW else 1


def _check(w: torch.Tensor, inner: int) -> None:
    if w.dim() != 2 or w.shape[0] != inner:
        raise InputError(f"w: has shape {list(w.shape)}, wanted {inner} rows as near and far have columns")


def attain(
    pattern: Pattern,
    reduce: str,
    near: torch.Tensor,
    far: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    ties: torch.Tensor | None = None,
    marks: torch.Tensor | None = None,
) -> torch.Tensor:
    """out[i] = the max (min) over row i's edges of relu(near[i] + far[j]) @ w + bias, 0 where it has none.

    ties and marks (both or none): how many edges share a gradient, as in kernels/spmm, and which attained it,
    a bit per column in words of 64.
    """
    bits, dtype, inner = float_bits("far", far), far.dtype, far.shape[-1]
    _check(w, inner)
    width, has_marks, size = w.shape[1], marks is not None, dtype.itemsize
    tiles = _tiles_of(pattern, inner, width, size)
    at = cpu.ATTAIN
    words = at.words()
    words[at.tiles], words[at.table] = tiles.count, tiles.addresses[0]
    words[at.indptr], words[at.indices] = pattern.csr
    words[at.inner], words[at.width], words[at.last_edge] = inner, width, max(0, pattern.num_edges - 1)
    near = read_rows(words, at.near, "near", near, dtype, pattern.num_rows, inner)
    far = read_rows(words, at.far, "far", far, dtype, pattern.num_columns, inner, True)
    w = read_rows(words, at.w, "w", w, dtype, inner, width)
    bias = read_flat(words, at.bias, "bias", bias, dtype, width)
    _place_results(words, at, pattern, out, ties, marks, width)
    parts = torch.empty((2, tiles.parts, width), dtype=dtype)
    words[at.parts], words[at.part_ties] = parts.data_ptr(), parts[1:].data_ptr()
    threads = min(_threads(pattern.num_edges * inner * width), max(1, tiles.count))
    share = -(-tiles.longest * (inner + width) * size // 64) * 64
    words[at.scratch], words[at.scratch_bytes] = _scratch(threads * share), share
    words[at.slots], words[at.slot_counter] = at.address(words, at.slot_counter), 0
    at.run(_attain_address(bits, pattern.index_bits, reduce, has_marks), words, threads)
    if len(tiles.cuts):
        _join(pattern, reduce, tiles, parts, out, ties, marks, _threads(parts.numel()))
    return out


def _place_results(
    words: Words,
    at: Any,
    pattern: Pattern,
    out: torch.Tensor,
    ties: torch.Tensor | None,
    marks: torch.Tensor | None,
    width: int,
) -> None:
    if (ties is None) is not (marks is None):
        raise InputError("ties and marks: give both, or none where no gradient is asked for")
    write_rows(words, at.out, "out", out, out.dtype, pattern.num_rows, width)
    write_rows(words, at.ties, "ties", ties, out.dtype, pattern.num_rows, width)
    write_rows(words, at.marks, "marks", marks, torch.uint8, pattern.num_edges, mark_bytes(width))


def _join(
    pattern: Pattern,
    reduce: str,
    tiles: _Tiles,
    parts: torch.Tensor,
    out: torch.Tensor,
    ties: torch.Tensor | None,
    marks: torch.Tensor | None,
    threads: int,
) -> None:
    """The rows that are cut, from their parts."""
    width, at = out.shape[1], cpu.JOIN
    words = at.words()
    words[at.rows], (words[at.table], words[at.cuts]) = len(tiles.cuts), tiles.addresses
    _place_results(words, at, pattern, out, ties, marks, width)
    words[at.parts], words[at.part_ties], words[at.width] = parts.data_ptr(), parts[1:].data_ptr(), width
    at.run(_join_address(float_bits("out", out), reduce, marks is not None), words, threads)


def _place_back(
    words: Words,
    at: Any,
    rows: tuple[int, int],
    near: torch.Tensor,
    far: torch.Tensor,
    turned: torch.Tensor,
    share: torch.Tensor,
    marks: torch.Tensor,
) -> list[torch.Tensor]:
    """Place what both gradients read, of this many targets and sources; hold what is returned."""
    dtype, (width, inner) = far.dtype, turned.shape
    words[at.inner], words[at.mark_words] = inner, mark_bytes(width) // 8
    edges = marks.shape[0]
    return [
        read_rows(words, at.near, "near", near, dtype, rows[0], inner),
        read_rows(words, at.far, "far", far, dtype, rows[1], inner, True),
        read_rows(words, at.turned, "turned", turned.contiguous(), dtype, width, inner),
        read_rows(words, at.share, "share", share, dtype, rows[0], width),
        read_rows(words, at.marks, "marks", marks, torch.uint8, edges, mark_bytes(width)),
    ]


def target_gradients(
    pattern: Pattern,
    near: torch.Tensor,
    far: torch.Tensor,
    turned: torch.Tensor,
    share: torch.Tensor,
    marks: torch.Tensor,
    out: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out: the gradient of near; returns those of w, transposed, and of the bias.

    turned = w.T; share: the gradient of the result, divided among the edges that share it.
    """
    width, inner = turned.shape
    dtype, size, at = far.dtype, far.element_size(), cpu.TARGETS
    words = at.words()
    held = _place_back(words, at, (pattern.num_rows, pattern.num_columns), near, far, turned, share, marks)
    write_rows(words, at.out, "out", out, dtype, pattern.num_rows, inner)
    words[at.width], words[at.last_edge] = width, max(0, pattern.num_edges - 1)
    words[at.indptr], words[at.indices] = pattern.csr
    by_memory = max(1, _SUM_BYTES // max(1, width * inner * size))
    chunks = min(max(1, pattern.num_edges // _EDGES_PER_CHUNK), by_memory, _MOST_CHUNKS)
    bounds, words[at.bounds] = pattern.even_bounds(chunks, max(1, width // 4))
    chunks = words[at.chunks] = len(bounds) - 1
    line = 64 // size
    part = torch.empty((chunks, -(-width * inner // line) * line), dtype=dtype)
    part_bias = torch.empty((chunks, -(-width // line) * line), dtype=dtype)
    write_flat(words, at.part, "part", part, dtype, part.numel())
    write_flat(words, at.part_bias, "part_bias", part_bias, dtype, part_bias.numel())
    work = pattern.num_rows * width * inner
    at.run(_targets_address(float_bits("far", far), pattern.index_bits), words, _threads(work))
    del held
    total = part[0] if chunks == 1 else part.sum(0)
    return total[: width * inner].view(width, inner), part_bias.sum(0)[:width]


def source_gradients(
    transpose: Pattern,
    order: np.ndarray[Any, Any],
    near: torch.Tensor,
    far: torch.Tensor,
    turned: torch.Tensor,
    share: torch.Tensor,
    marks: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:
    """out: the gradient of far; order[t]: the edge, by target, that is edge t of the transpose."""
    at = cpu.SOURCES
    words = at.over(transpose.addresses)
    rows = transpose.num_columns, transpose.num_rows
    held = _place_back(words, at, rows, near, far, turned, share, marks)
    read_numbers(words, at.order, "order", order, transpose.index_bits, transpose.num_edges)
    write_rows(words, at.out, "out", out, far.dtype, transpose.num_rows, turned.shape[1])
    words[at.last_edge] = max(0, transpose.num_edges - 1)
    work = transpose.num_rows * turned.numel()
    at.run(_sources_address(float_bits("far", far), transpose.index_bits), words, _threads(work))
    del held
    return out
