"""A chain of products on blocks of rows in cache: gather, multiply by weights, add up weight gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from plait.kernels import launch
from plait.kernels.block import Block
from plait.kernels.chain import cpu
from plait.kernels.compiled import address_of
from plait.kernels.spmm import Pattern

__all__ = ["MOST_PRODUCTS", "MOST_SUMS", "Gather", "Pair", "Product", "chain", "ones"]

MOST_PRODUCTS, MOST_SUMS = cpu.MOST_PRODUCTS, cpu.MOST_SUMS

# multiply-adds (some 20 us of one core) under which waking a second thread does not pay
_SERIAL_BELOW = 1 << 20
# bytes of the block's rows and those beside them: they stay in the second-level cache of a core
_BLOCK_BYTES = 128 << 10
_LEAST_ROWS, _MOST_ROWS = 16, 128
_ROWS_PER_CHUNK = 1024
_MOST_CHUNKS = 64
_SUM_BYTES = 8 << 20


@dataclass(frozen=True)
class Gather:
    """block[i] = target[i] * sum_e(edge[e] * source[j] * x[j]) + addend_scale[i] * addend[i]."""

    pattern: Pattern
    x: torch.Tensor
    edge: torch.Tensor | None = None
    source: torch.Tensor | None = None
    target: torch.Tensor | None = None
    addend: torch.Tensor | None = None
    addend_scale: torch.Tensor | None = None
    kept: torch.Tensor | None = None  # where the block's rows are wanted afterwards

    @property
    def mode(self) -> str:
        return "edge" if self.edge is not None else "source" if self.source is not None else "plain"


Take = Callable[[int, int, torch.dtype], torch.Tensor]
Product = tuple["torch.Tensor | None", torch.Tensor]
Pair = tuple["torch.Tensor | None", "torch.Tensor | None"]


@functools.cache
def _one(dtype: torch.dtype) -> torch.Tensor:
    return torch.ones((1, 1), dtype=dtype)


def ones(like: torch.Tensor) -> torch.Tensor:
    """A column of ones beside any number of rows: one number, read with stride zero."""
    return _one(like.dtype).expand(1, 1).as_strided((1, 1), (0, 1))


@functools.cache
def _address(float_bits: int, index_bits: int, mode: str) -> int:
    return address_of(
        f"chain-{mode}-f{float_bits}-i{index_bits}", lambda: cpu.kernel(float_bits, index_bits, mode),
        uses=("spmm", "gemm"),
    )  # fmt: skip


_block = Block([*cpu.WORDS, "slot_counter"])
_SLOT = len(cpu.WORDS)
_PRODUCT, _SUM = cpu.WORDS.index("rows0"), cpu.WORDS.index("left0")


def chain(
    gather: Gather | None,
    products: Sequence[Product],
    sums: Sequence[Pair],
    take: Take,
    *,
    num_rows: int,
    out: torch.Tensor | None = None,
    plus: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """out = sum_k(rows_k @ w_k) + plus + bias, and left.T @ right of every pair; None: the gathered block.

    One pass over the rows: the block is gathered, multiplied and added up while it is in cache. `plus` may be
    `out` itself. `take` lends memory (rows, columns, dtype). Returns the sums, in order.
    """
    like = (
        gather.x
        if gather is not None
        else next(t for pair in (*products, *sums) for t in pair if t is not None)
    )
    size, dtype = like.element_size(), like.dtype
    width = gather.x.shape[1] if gather is not None else 0
    block_rows = _block_rows(width, products, sums, out, size)
    bounds, bounds_address = _bounds(gather, num_rows, _chunks(num_rows, sums, width, size))
    words = _block.words()
    # held until the kernel has run: a buffer nobody holds is lent again
    scratch = None
    if gather is not None and gather.kept is None:
        scratch = take(launch.num_threads() * block_rows, width, dtype)
    work = _fill_block(words, gather, scratch, num_rows, size)
    words[2], words[3], words[4] = len(bounds) - 1, bounds_address, block_rows
    work += _fill_products(words, products, out, plus, bias, width, num_rows, size)
    made = []
    for k, pair in enumerate(sums):
        made.append(_fill_sum(words, k, pair, len(bounds) - 1, width, dtype, size, take))
        work += num_rows * made[-1].shape[1] * made[-1].shape[2]
    words[26] = len(sums)
    words[_SLOT] = 0
    threads = min(launch.num_threads(), len(bounds) - 1) if work > _SERIAL_BELOW else 1
    mode = "rows" if gather is None else gather.mode
    index_bits = 32 if gather is None else gather.pattern.index_bits
    _block.run(_address(size * 8, index_bits, mode), words, threads)
    return [part[0] if part.shape[0] == 1 else part.sum(0) for part in made]


def _block_rows(
    width: int, products: Sequence[Product], sums: Sequence[Pair], out: torch.Tensor | None, size: int
) -> int:
    """Rows that go through the chain together; a multiple of a product's block height."""
    beside = {id(t): t.shape[1] for t in (out, *(rows for rows, _ in products)) if t is not None}
    beside |= {id(t): t.shape[1] for pair in sums for t in pair if t is not None}
    fitting = _BLOCK_BYTES // max(1, (width + sum(beside.values())) * size)
    return int(max(_LEAST_ROWS, min(_MOST_ROWS, fitting)) // 8 * 8)


def _chunks(num_rows: int, sums: Sequence[Pair], width: int, size: int) -> int:
    """Chunks of rows, by the shapes alone: with sums each needs its own partial ones."""
    if not sums:
        return max(1, num_rows // 192)
    held = sum(
        (width if left is None else left.shape[1]) * (width if right is None else right.shape[1]) * size
        for left, right in sums
    )
    return int(min(max(1, num_rows // _ROWS_PER_CHUNK), max(1, _SUM_BYTES // max(1, held)), _MOST_CHUNKS))


def _bounds(gather: Gather | None, num_rows: int, chunks: int) -> tuple[np.ndarray[Any, Any], int]:
    if gather is None:
        return _even_bounds(num_rows, chunks)
    return gather.pattern.even_bounds(chunks)


@functools.lru_cache(maxsize=256)
def _even_bounds(num_rows: int, chunks: int) -> tuple[np.ndarray[Any, Any], int]:
    bounds = np.linspace(0, num_rows, chunks + 1).astype(np.int64)
    return bounds, bounds.ctypes.data


def _fill_block(
    words: Any, gather: Gather | None, scratch: torch.Tensor | None, num_rows: int, size: int
) -> int:
    """The words of the gathered block; returns the additions it takes."""
    words[1] = _block.address(words, _SLOT)
    for k in range(5, 19):
        words[k] = 0
    if gather is None:
        return 0
    pattern, x, addend, kept = gather.pattern, gather.x, gather.addend, gather.kept
    width = x.shape[1]
    _, _, words[5], words[6] = pattern.addresses
    words[7], words[8] = x.data_ptr(), x.stride(0) * size
    factor = gather.edge if gather.edge is not None else gather.source
    words[9] = 0 if factor is None else factor.data_ptr()
    words[10] = 0 if gather.target is None else gather.target.data_ptr()
    if addend is not None:
        words[11], words[12] = addend.data_ptr(), addend.stride(0) * size
    words[13] = 0 if gather.addend_scale is None else gather.addend_scale.data_ptr()
    words[14] = max(0, pattern.num_edges - 1)
    words[15] = width
    if kept is not None:
        words[17], words[18] = kept.data_ptr(), kept.stride(0) * size
    if scratch is not None:
        words[16] = scratch.data_ptr()
    return (pattern.num_edges + num_rows) * width


def _fill_products(
    words: Any,
    products: Sequence[Product],
    out: torch.Tensor | None,
    plus: torch.Tensor | None,
    bias: torch.Tensor | None,
    block_width: int,
    num_rows: int,
    size: int,
) -> int:
    """The words of the products; returns their multiply-adds."""
    words[25] = len(products)
    if out is None:
        return 0
    words[19], words[20], words[21] = out.data_ptr(), out.stride(0) * size, out.shape[1]
    words[22] = 0 if plus is None else plus.data_ptr()
    words[23] = 0 if plus is None else plus.stride(0) * size
    words[24] = 0 if bias is None else bias.data_ptr()
    work = 0
    for k, (rows, w) in enumerate(products):
        at = _PRODUCT + k * len(cpu.PRODUCT_WORDS)
        words[at] = 0 if rows is None else rows.data_ptr()
        words[at + 1] = 0 if rows is None else rows.stride(0) * size
        words[at + 2] = block_width if rows is None else rows.shape[1]
        words[at + 3], words[at + 4] = w.data_ptr(), w.stride(0) * size
        work += num_rows * w.shape[0] * w.shape[1]
    return work


def _fill_sum(
    words: Any, k: int, pair: Pair, chunks: int, width: int, dtype: torch.dtype, size: int, take: Take
) -> torch.Tensor:
    """The words of one sum; returns its partial sums [chunks, height, width]."""
    left, right = pair
    height, across = (width if side is None else side.shape[1] for side in (left, right))
    # the partial sums of one chunk are the answer: fresh memory, which the caller keeps
    part = torch.empty((1, height, across), dtype=dtype)
    if chunks > 1:
        part = take(chunks * height, across, dtype).view(chunks, height, across)
    at = _SUM + k * len(cpu.SUM_WORDS)
    for side, where in ((left, at), (right, at + 3)):
        words[where] = 0 if side is None else side.data_ptr()
        words[where + 1] = 0 if side is None else side.stride(0) * size
    words[at + 2], words[at + 5] = height, across
    words[at + 6] = part.data_ptr()
    return part
