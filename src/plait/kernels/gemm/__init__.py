"""Dense products of many rows: out = x @ w + addend + bias, and the weight gradient left.T @ right."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from plait.errors import InputError
from plait.kernels import launch
from plait.kernels.compiled import stored
from plait.kernels.gemm import cpu
from plait.kernels.operands import float_bits, read_flat, read_rows, write_flat, write_rows
from plait.kernels.turned import read_turned

__all__ = [
    "SERIAL_BELOW", "block_height", "column_sums", "gemm", "gemm_transposed", "transposed_chunks",
    "weight_gradient",
]  # fmt: skip

# a multiple of every block height; small enough to balance, large enough to amortise the claim
_PIECE_ROWS = 192
# multiply-adds (3 to 7 us of one core) under which a second thread does not pay: between two steps of a loop
# OpenMP's threads spin, and such a one starts within 1.3 us
SERIAL_BELOW = 1 << 18
_FEW_CHUNKS, _CHUNK_WORK = 4, 1 << 19  # parts of a weight gradient of few rows, the least work of each
_NARROW_BYTES = 64  # of a row in the narrowest tile, which takes as long with fewer columns
_FEW_SUMMED = 1 << 20  # numbers of which torch adds up the columns faster
# partial sums up to this size are added up by the last thread: starting torch's threads takes longer
_ADDED_BYTES = 1 << 20
# rows of both operands per pass: 64 columns of float32 of each fit the first-level cache
_TRANSPOSED_STEP = 128


_address = stored("gemm", cpu.kernel)
_transposed_address = stored("gemm_tn", cpu.transposed_kernel)


def gemm(
    x: torch.Tensor,
    w: torch.Tensor,
    out: torch.Tensor,
    *,
    addend: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    is_turned: bool = False,
) -> torch.Tensor:
    """out[N, M] = x[N, K] @ w[K, M] + addend[N, M] + bias[M]; addend may be `out` itself (accumulate).

    float32 or float64, one dtype for all. `is_turned`: w is handed in as [M, K], as PyG's weights are stored.
    """
    (rows, inner), (height, width) = x.shape, reversed(w.shape) if is_turned else w.shape
    if inner != height:
        raise InputError(f"x has {inner} columns, w {height} rows; check the widths of x and the layer")
    dtype = x.dtype
    address = _address(float_bits("x", x), block_height(inner, width * dtype.itemsize))
    at = cpu.GEMM
    words = at.words()
    words[at.rows], words[at.inner], words[at.width], words[at.piece_rows] = rows, inner, width, _PIECE_ROWS
    x = read_rows(words, at.x, "x", x, dtype, rows, inner)
    read_w = read_turned if is_turned else read_rows
    w = read_w(words, at.w, "w", w, dtype, inner, width)
    write_rows(words, at.out, "out", out, dtype, rows, width)
    words[at.addend] = words[at.addend_row] = words[at.bias] = 0
    if addend is not None:
        addend = read_rows(words, at.addend, "addend", addend, dtype, rows, width)
    if bias is not None:
        bias = read_flat(words, at.bias, "bias", bias, dtype, width)
    lanes = max(width, _NARROW_BYTES // dtype.itemsize)
    threads = launch.num_threads() if rows * lanes * inner > SERIAL_BELOW else 1
    at.run(address, words, threads)
    return out


def block_height(inner: int, width_bytes: int) -> int:
    """Rows of a block held in registers: taller ones reuse the weight tile more, shorter ones keep more of a
    short inner loop in flight. A row of one register has little of that: six rows took 0.86 of the time of
    four at 8 columns; eight took 0.79, but twice as long with AVX2, which has half the registers."""
    return 4 if inner < 128 and width_bytes > _NARROW_BYTES else 6


def transposed_chunks(rows: int, height: int, width: int) -> int:
    """Partial sums of a weight gradient: by the shape alone, so that threads do not change the bits."""
    by_rows = max(1, rows // 1024)
    by_memory = max(1, (8 << 20) // max(1, height * width * 4))
    return int(min(by_rows, by_memory, 32))


def _few_chunks(work: int) -> int:
    """Chunks of a product of few rows, by its multiply-adds: enough of them for a second thread."""
    return min(_FEW_CHUNKS, work // _CHUNK_WORK)


def weight_gradient(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """left.T @ right; vector lanes run over the wider operand."""
    if left.shape[1] > right.shape[1]:
        return gemm_transposed(right, left).t()
    return gemm_transposed(left, right)


def gemm_transposed(
    left: torch.Tensor,
    right: torch.Tensor,
    take: Callable[[int, int, torch.dtype], torch.Tensor] | None = None,
) -> torch.Tensor:
    """left[N, A].T @ right[N, B] -> [A, B]; vector lanes run over B, so hand in the wider operand right.

    `take` lends memory for the partial sums (rows, columns, dtype); fresh memory is used without it.
    """
    rows, height = left.shape
    width = right.shape[1]
    chunks = max(transposed_chunks(rows, height, width), _few_chunks(rows * height * width))
    made = torch.empty(height, width, dtype=left.dtype)
    partial = made if chunks == 1 else _partial(chunks * height, width, left.dtype, take)
    address, dtype = _transposed_address(float_bits("left", left), 4), left.dtype
    at = cpu.TRANSPOSED
    words = at.words()
    words[at.rows], words[at.height], words[at.width], words[at.chunks], words[at.step] = (
        rows,
        height,
        width,
        chunks,
        _TRANSPOSED_STEP,
    )
    left = read_rows(words, at.left, "left", left, dtype, rows, height)
    right = read_rows(words, at.right, "right", right, dtype, rows, width)
    write_flat(words, at.out, "partial", partial, dtype, chunks * height * width)
    is_added = chunks > 1 and partial.nbytes <= _ADDED_BYTES
    words[at.total] = made.data_ptr() if is_added else 0
    words[at.done], words[at.done_counter] = at.address(words, at.done_counter), 0
    threads = min(launch.num_threads(), chunks) if rows * height * width > SERIAL_BELOW else 1
    at.run(address, words, threads)
    return made if is_added or chunks == 1 else torch.sum(partial.view(chunks, height, width), 0, out=made)


def _partial(
    rows: int, width: int, dtype: torch.dtype, take: Callable[[int, int, torch.dtype], torch.Tensor] | None
) -> torch.Tensor:
    return torch.empty(rows, width, dtype=dtype) if take is None else take(rows, width, dtype)


@functools.cache
def _one(dtype: torch.dtype) -> torch.Tensor:
    return torch.ones((1, 1), dtype=dtype)


def column_sums(x: torch.Tensor) -> torch.Tensor:
    """The sum of the rows of x, the gradient of a bias, in an order that threads do not change."""
    if x.numel() <= _FEW_SUMMED:  # 8 us for 20 of 4,096 x 32; threads share out its columns alone
        return x.sum(0)
    return gemm_transposed(_one(x.dtype).expand(x.shape[0], 1), x).reshape(-1)
