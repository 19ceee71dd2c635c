"""Schedules of partial sums: a 0/1 matrix times a dense one, shared neighbours summed once."""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING

import numpy as np
import torch

from plait.kernels import launch
from plait.kernels.compiled import address_of
from plait.kernels.operands import float_bits, read_flat, read_rows, write_rows
from plait.kernels.partial import cpu
from plait.kernels.vector import tiles

if TYPE_CHECKING:
    from plait.graph.hag import Schedule

__all__ = ["Sums", "partial_sums"]

# operands times columns under which waking a second thread does not pay (as in kernels/spmm)
_SERIAL_BELOW = 1 << 19

# Outputs this large leave the caches before anyone reads them; written past the caches they need not be read
# first (tu_collab: 1.06x at width 64, 1.27x at 256).
_STREAMED_FROM = 32 << 20


class Sums:
    """A schedule ready for kernels: contiguous arrays and their addresses."""

    def __init__(self, schedule: Schedule):
        self.num_rows = schedule.num_nodes
        self.num_columns = schedule.num_sources
        self.num_shared = schedule.num_shared
        self.num_slots = schedule.num_slots
        steps = schedule.tiles[schedule.phases]
        # (first tile, end, rows read and written) of every phase
        self.phases = [
            (int(first), int(last), int(cost))
            for first, last, cost in zip(
                schedule.phases[:-1], schedule.phases[1:], np.diff(schedule.start[steps] + steps), strict=True
            )
        ]
        self.num_steps = schedule.num_steps
        self.num_operands = int(schedule.operands.size)
        self.is_signed = schedule.subtracted is not None
        subtracted = schedule.subtracted if schedule.subtracted is not None else np.zeros(1)
        self.arrays = tuple(
            np.ascontiguousarray(array, dtype)
            for array, dtype in (
                (schedule.tiles, np.int64),
                (schedule.start, np.int64),
                (subtracted, np.int64),
                (schedule.operands, np.int32),
                (schedule.node, np.int32),
                (schedule.buffer, np.int32),
            )
        )
        self.addresses = tuple(array.ctypes.data for array in self.arrays)

    @property
    def bytes(self) -> int:
        """Memory of the arrays."""
        return sum(array.nbytes for array in self.arrays)


@functools.cache
def _address(variant: cpu.Variant) -> int:
    return address_of(variant.name, lambda: cpu.kernel(variant))


_local = threading.local()


def _scratch(count: int, size: int, threads: int) -> tuple[torch.Tensor, int]:
    """This thread's scratch rows for `threads` kernel threads, and the bytes of each one's share."""
    lanes = tiles(size * 8)[0]
    share = -(-max(1, count) * lanes * size // 4096) * 4096 + 64  # shares apart by a line: no common sets
    held: torch.Tensor | None = getattr(_local, "scratch", None)
    if held is None or held.numel() < share * threads + 64:
        held = _local.scratch = torch.empty(share * threads + 64, dtype=torch.uint8)
    return held, share


@functools.cache
def _ones(dtype: torch.dtype) -> torch.Tensor:
    return torch.ones(tiles(dtype.itemsize * 8)[0], dtype=dtype)


def partial_sums(
    sums: Sums,
    x: torch.Tensor,
    out: torch.Tensor,
    *,
    reduce: str = "sum",
    source: torch.Tensor | None = None,
    target: torch.Tensor | None = None,
    addend: torch.Tensor | None = None,
    addend_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    ties: torch.Tensor | None = None,
    shared: torch.Tensor | None = None,
) -> torch.Tensor:
    """out[i] = target[i] * sum of source[j] * x[j] over the neighbours j of i
    + addend_scale[i] * addend[i] + bias; addend may be `out` itself. With reduce "max" or "min" the largest
    or smallest x[j] instead of the sum, zeros without neighbours; such schedules may cover a neighbour twice.
    Where they do not, `ties` counts how many attain it, as kernels/spmm: extremum does.

    `shared` is memory for the rows that all tiles see, [num_shared, width] or more (twice as many rows where
    ties are counted); allocated when not given. On a GPU see kernels/partial/gpu.py.
    """
    if x.is_cuda:
        from plait.kernels.partial import gpu  # here: it needs triton, which a CPU build of torch lacks

        return gpu.partial_sums(
            sums, x, out, reduce=reduce, source=source, target=target, addend=addend,
            addend_scale=addend_scale, bias=bias, ties=ties,
        )  # fmt: skip
    bits, dtype, size, width = float_bits("x", x), x.dtype, x.element_size(), x.shape[-1]
    variant = cpu.Variant(
        bits, source is not None, sums.num_shared > 0, sums.is_signed, reduce, ties is not None
    )
    address = _address(variant)
    threads = launch.num_threads()
    both = 1 if ties is None else 2
    scratch, share = _scratch(both * sums.num_slots, size, threads)
    if shared is None:
        shared = torch.empty((both * sums.num_shared, width), dtype=dtype)
    claimed = np.zeros(1, np.int64)
    at = cpu.PARTIAL
    words = at.words()
    words[at.tiles : at.x] = [*sums.addresses]
    rows, columns = sums.num_rows, sums.num_columns
    x = read_rows(words, at.x, "x", x, dtype, columns, width, True)
    write_rows(words, at.shared, "shared", shared, dtype, max(both * sums.num_shared, shared.shape[0]), width)
    words[at.scratch], words[at.scratch_bytes] = -(-scratch.data_ptr() // 64) * 64, share
    words[at.thread_counter] = claimed.ctypes.data
    write_rows(words, at.out, "out", out, dtype, rows, width)
    words[at.width] = width
    source = read_flat(words, at.source, "source", source, dtype, columns)
    target = read_flat(words, at.target, "target", target, dtype, rows)
    addend = read_rows(words, at.addend, "addend", addend, dtype, rows, width)
    addend_scale = read_flat(words, at.addend_scale, "addend_scale", addend_scale, dtype, rows)
    bias = read_flat(words, at.bias, "bias", bias, dtype, width)
    words[at.num_sources], words[at.first_slot] = columns, columns + sums.num_shared
    words[at.last_operand] = max(0, sums.num_operands - 1)
    words[at.is_streamed] = int(
        out.nbytes >= _STREAMED_FROM and words[at.out] % 64 == 0 and words[at.out_row] % 64 == 0
    )
    write_rows(words, at.ties, "ties", ties, dtype, rows, width)
    words[at.ones] = _ones(dtype).data_ptr()
    words[at.shared_counts] = sums.num_shared * words[at.shared_row]
    words[at.slot_counts] = sums.num_slots * tiles(size * 8)[0] * size
    for first, last, cost in sums.phases:
        words[at.pieces], words[at.first_tile] = last - first, first
        claimed[0] = 0
        # levels of shared sums are often short, and each parallel one ends with a barrier
        at.run(address, words, threads if cost * width > _SERIAL_BELOW and last - first > 1 else 1)
    return out
