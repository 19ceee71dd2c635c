"""Sums over edges in the order they are listed: for graphs that come once, nothing is sorted.

Threads share out the columns, and each walks the whole list: no two write to the same place, and the order of
a sum is that of the list whoever computes it.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from plait.errors import InputError
from plait.kernels import launch
from plait.kernels.compiled import address_of
from plait.kernels.listed import cpu
from plait.kernels.operands import float_bits, read_flat, read_rows, write_flat, write_rows

__all__ = ["LOOPS", "SCALES", "Entries", "entries", "listed_sum"]

LOOPS = ("none", "remaining", "replace", "add")
"""What happens to the edges v -> v."""
SCALES = ("none", "symmetric", "mean")
"""How the matrix is normalised."""

_SERIAL_BELOW = 1 << 18  # multiply-adds (some 40 us of one core) under which no second thread is woken
_LEAST_COLUMNS = 8


class Entries(NamedTuple):
    """A sparse matrix as a list: value[e] at (target[e], source[e]) and own[i] at (i, i).

    No `value` stands for ones, no `own` for zeros.
    """

    source: Tensor  # int32, as target is
    target: Tensor
    value: Tensor | None
    own: Tensor | None

    @property
    def turned(self) -> Entries:
        """The transpose."""
        return Entries(self.target, self.source, self.value, self.own)


def entries(
    edge_index: Tensor,
    weight: Tensor | None,
    shape: tuple[int, int],
    like: Tensor,
    loops: str = "none",
    fill: float = 1.0,
    scale: str = "none",
) -> Entries | None:
    """p @ (A + l) @ q of edges [2, E] between `shape` = (targets, sources), in numbers like those of `like`.

    A has the weights, ones for None. l takes the place of the edges v -> v as `loops` says: `fill`; with
    "remaining" the weight of a node's last loop where it has one; with "add" the weights of its loops more.
    "symmetric": p = q = 1 / sqrt(row sums of A + l), 0 where they are 0. "mean": p = 1 / the number of
    entries in the row, at least 1. None where an end of an edge is out of range.
    """
    if shape[0] != shape[1] and (loops != "none" or scale == "symmetric"):
        raise InputError(f"shape: {shape}; with loops or a symmetric scale targets and sources are the same")
    dtype, bits, count, (rows, columns) = like.dtype, float_bits("x", like), edge_index.shape[1], shape
    has_own, has_value = loops != "none", weight is not None or scale != "none"
    kept_source, kept_target = torch.empty(2, count, dtype=torch.int32)
    value = torch.empty(count, dtype=dtype) if has_value else None
    own = torch.empty(rows, dtype=dtype) if has_own else None
    scales = torch.empty(rows, dtype=dtype) if scale != "none" else None
    at = cpu.ENTRIES
    words = at.words()
    words[at.edges], words[at.num_targets], words[at.num_sources], words[at.loops] = (
        count,
        rows,
        columns,
        LOOPS.index(loops),
    )
    held = [
        read_flat(words, at.source, "edge_index", edge_index[0], torch.int64, count),
        read_flat(words, at.target, "edge_index", edge_index[1], torch.int64, count),
        read_flat(
            words, at.weight, "edge_weight", None if weight is None else weight.to(dtype), dtype, count
        ),
        read_flat(words, at.fill, "fill", _number(fill, dtype), dtype, 1),
    ]
    write_flat(words, at.value, "value", value, dtype, count)
    write_flat(words, at.kept_source, "source", kept_source, torch.int32, count)
    write_flat(words, at.kept_target, "target", kept_target, torch.int32, count)
    write_flat(words, at.own, "own", own, dtype, rows)
    write_flat(words, at.scales, "scales", scales, dtype, rows)
    at.run(_entries_address(bits, weight is not None, has_own, SCALES.index(scale)), words, 1)
    del held
    kept = words[at.kept]
    if kept < 0:
        return None
    if kept < count:
        kept_source, kept_target = kept_source[:kept], kept_target[:kept]
        value = None if value is None else value[:kept]
    return Entries(kept_source, kept_target, value, own)


def listed_sum(matrix: Entries, num_rows: int, num_columns: int, x: Tensor, identity: float = 0.0) -> Tensor:
    """The matrix, plus a multiple of the identity, times x.

    out[i] = (own[i] + identity) * x[i] + the sum over its entries e in row i of value[e] * x[j].
    """
    source, target, value, own = matrix
    dtype, bits, count, width = x.dtype, float_bits("x", x), source.shape[0], x.shape[-1]
    at, out = cpu.SUM, torch.empty(num_rows, width, dtype=dtype)
    words = at.words()
    held = [
        read_rows(words, at.x, "x", x, dtype, num_columns, width),
        read_flat(words, at.source, "source", source, torch.int32, count),
        read_flat(words, at.target, "target", target, torch.int32, count),
        read_flat(words, at.value, "value", value, dtype, count),
        read_flat(words, at.own, "own", own, dtype, num_rows),
        read_flat(words, at.identity, "identity", _number(identity, dtype), dtype, 1),
    ]
    write_rows(words, at.out, "out", out, dtype, num_rows, width)
    threads = launch.num_threads() if (count + num_rows) * width > _SERIAL_BELOW else 1
    piece = width if threads == 1 else max(_LEAST_COLUMNS, -(-width // threads) // 8 * 8)
    words[at.pieces], words[at.columns], words[at.width] = -(-width // piece) if width else 0, piece, width
    words[at.rows], words[at.entries] = num_rows, count
    at.run(_sum_address(bits, value is not None), words, threads)
    del held
    return out


@functools.cache
def _entries_address(bits: int, is_weighted: bool, has_own: bool, scale: int) -> int:
    name = f"entries-f{bits}-{SCALES[scale]}{'-weighted' * is_weighted}{'-own' * has_own}"
    return address_of(name, lambda: cpu.entries_kernel(bits, is_weighted, has_own, scale))


@functools.cache
def _sum_address(bits: int, is_weighted: bool) -> int:
    name = f"listed-f{bits}{'-weighted' * is_weighted}"
    return address_of(name, lambda: cpu.sum_kernel(bits, is_weighted))


@functools.lru_cache(maxsize=64)
def _number(value: float, dtype: torch.dtype) -> Tensor:
    return torch.tensor([value], dtype=dtype)
