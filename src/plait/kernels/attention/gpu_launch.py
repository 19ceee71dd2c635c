"""How attention's kernels are launched on a GPU: tiles by pass, what kernels are compiled for, arguments."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton

from plait.errors import InputError
from plait.kernels.attention import Scores
from plait.kernels.csr.gpu import Items, Rows
from plait.kernels.spmm.gpu import add_parts, stride_of

__all__ = [
    "COUNTS", "AttentionTiles", "add_up", "draws_of", "head_columns", "kind_of", "shape_of",
    "tiles_of", "unit_of", "wide_rows",
]  # fmt: skip

_WORD, _LONG = (1 << 32) - 1, (1 << 64) - 1
COUNTS = ("num_pieces", "num_items", "threshold")
"""Numbers that differ from one call to the next: kernels are not compiled again for them."""


@dataclass(frozen=True)
class AttentionTiles:
    """How a launch is cut: see kernels/spmm/gpu: Tiles; `lanes` columns of a head lie side by side."""

    short: int
    most: int
    slots: int
    lanes: int
    warps: int


@functools.cache
def tiles_of(pass_name: str, kind: str, heads: int, columns: int, element_size: int) -> AttentionTiles:
    """The tiles of a pass (forward, targets, sources) for this many heads of this many columns.

    From 629 settings of ten shapes on an H200, an R-MAT graph and a mesh. A thread has two or four vectors of
    a head's columns and 8 numbers of all rows, 16 where a pass holds few tiles. There are as many slots as
    give every thread rows of its own: where threads share the chunks of one, each edge's score crosses
    warps, and a step of 1 x 64 or 4 x 64 takes more than twice as long.
    """
    is_half, is_targets = element_size < 4, pass_name == "targets"
    row, vector = triton.next_power_of_2(columns), 16 // element_size
    least = 16 if heads == 1 or (is_half and is_targets) else 8
    lanes = max(least, row // 4, min(32, row // 2) if heads > 1 and (is_targets or not is_half) else 0)
    warps, per_thread = (1, 32) if is_half and not is_targets else (2, 8)
    if warps == 2 and (is_half or is_targets or (kind == "gat" and pass_name == "forward")):
        per_thread = 16
    if kind == "gat" and is_targets and heads >= 8 and columns <= 16 and not is_half:
        # 0.6 of the time of two warps, which exchange their sums by head
        return AttentionTiles(short=64, most=1024, slots=4, lanes=8, warps=1)
    padded_heads = triton.next_power_of_2(heads)
    busy = padded_heads * max(1, min(lanes, row) // vector)  # threads of one row
    slots = max(32 * warps // busy, 32 * warps * per_thread // (padded_heads * row))
    warps = warps if padded_heads * row <= 1024 else 4
    return AttentionTiles(short=64, most=1024, slots=max(1, min(16, slots)), lanes=lanes, warps=warps)


def shape_of(tiles: AttentionTiles, heads: int, columns: int) -> dict[str, Any]:
    lanes = min(tiles.lanes, triton.next_power_of_2(columns))
    padded_heads, chunks = triton.next_power_of_2(heads), triton.next_power_of_2(-(-columns // lanes))
    return {
        "SLOTS": tiles.slots, "CHUNKS": chunks, "HEADS": padded_heads, "LANES": lanes,
        "EVEN": padded_heads == heads and chunks * lanes == columns, "heads": heads, "columns": columns,
    }  # fmt: skip


def unit_of(*tensors: torch.Tensor | None) -> int:
    """What the strides of these are multiples of, up to 16: rows are then read in vectors.

    Triton detects whether a number is a multiple of 16. Rows of 128 columns next to 8 scores are 136
    apart, and read number by number the forward pass of GAT took twice as long.
    """
    bits = 16
    for tensor in tensors:
        bits |= stride_of(tensor)
    return bits & -bits


def _word(number: int) -> int:
    """The low 32 bits as a signed number: Triton would compile again for a wider type."""
    return ((number & _WORD) ^ (1 << 31)) - (1 << 31)


def draws_of(scores: Scores) -> tuple[torch.Tensor | None, int]:
    """(the seed, the threshold) of the dropout."""
    drop = scores.dropout
    if drop is None:
        return None, 0
    seed = drop.seed
    if not isinstance(seed, torch.Tensor):
        seed = torch.tensor([((seed & _LONG) ^ (1 << 63)) - (1 << 63)], device=scores.far.device)
    return seed, _word(drop.threshold)


def kind_of(scores: Scores) -> dict[str, Any]:
    """What a kernel is compiled for. The numbers are among it: Triton passes floats as float32."""
    dropout = scores.dropout
    scale = 1.0 if dropout is None else dropout.scale
    return {"KIND": scores.kind, "SLOPE": scores.slope, "DROPS": dropout is not None, "SCALE": scale}


def wide_rows(scores: Scores) -> tuple[torch.Tensor | None, ...]:
    """The scores' rows, where they are read like values and not a number for each head."""
    return () if scores.kind == "gat" else (scores.far, scores.near)


def head_columns(scores: Scores, value: torch.Tensor, heads: int) -> int:
    """The columns of a head."""
    if scores.kind not in ("gat", "leaky", "dot"):
        raise InputError(f"scores: unknown kind {scores.kind!r}; known are gat, leaky, dot")
    if scores.is_shared or scores.near is None:
        raise InputError("scores: a GPU needs near, and a far row for every head; expand the shared row")
    if value.shape[1] % heads:
        raise InputError(f"value has {value.shape[1]} columns; pass a multiple of heads = {heads}")
    return value.shape[1] // heads


def add_up(items: Items, rows: Rows, parts: torch.Tensor | None, out: torch.Tensor | None) -> None:
    if parts is not None and out is not None:
        add_parts(items, rows.indptr, parts, out)
