"""Products by head: rows of all heads, side by side, times a matrix of each head, and the gradients."""

from __future__ import annotations

import torch

from plait.kernels import launch
from plait.kernels.compiled import stored
from plait.kernels.gemm import SERIAL_BELOW, block_height, transposed_chunks
from plait.kernels.heads import cpu
from plait.kernels.operands import float_bits, read_flat, read_rows, write_flat, write_rows

__all__ = ["project_heads", "project_heads_backward"]

_PIECE_ROWS = 192  # a multiple of a block's height; 256 columns of them are a fifth of a second-level cache
_STEP_ROWS = 128


_forward_address = stored("heads", cpu.forward, uses=("gemm",))
_backward_address = stored("heads-back", cpu.backward, uses=("gemm",))


def project_heads(
    x: torch.Tensor,
    w: torch.Tensor,
    out: torch.Tensor,
    heads: int,
    *,
    bias: torch.Tensor | None = None,
    own: torch.Tensor | None = None,
    skip: torch.Tensor | None = None,
    skip_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """out[N, h] = x[N, h] @ w[:, h] + bias[h], by head; plus own @ skip + skip_bias where skip is given.

    x [N, heads * inner], w [inner, heads * width], out [N, heads * width].
    """
    rows, (inner, columns), dtype = x.shape[0], w.shape, x.dtype
    address = _forward_address(float_bits("x", x), block_height(inner, columns // heads * dtype.itemsize))
    # a head's matrix in one piece: a tile of rows that lie 1 KB apart falls on a few sets of the first cache
    packed = w.reshape(inner, heads, columns // heads).transpose(0, 1).contiguous()
    at = cpu.FORWARD
    words = at.words()
    words[at.rows], words[at.piece_rows], words[at.heads], words[at.inner], words[at.width] = (
        rows,
        _PIECE_ROWS,
        heads,
        inner,
        columns // heads,
    )
    x = read_rows(words, at.x, "x", x, dtype, rows, heads * inner)
    read_flat(words, at.w, "w", packed, dtype, inner * columns)
    write_rows(words, at.out, "out", out, dtype, rows, columns)
    bias = read_flat(words, at.bias, "bias", bias, dtype, columns)
    words[at.own] = words[at.own_row] = words[at.own_inner] = words[at.skip] = words[at.skip_row] = words[
        at.skip_bias
    ] = 0
    own_inner = 0
    if skip is not None and own is not None:
        own_inner = words[at.own_inner] = own.shape[1]
        own = read_rows(words, at.own, "own", own, dtype, rows, own_inner)
        skip = read_rows(words, at.skip, "skip", skip, dtype, own_inner, columns)
        skip_bias = read_flat(words, at.skip_bias, "skip_bias", skip_bias, dtype, columns)
    threads = launch.num_threads() if rows * columns * (inner + own_inner) > SERIAL_BELOW else 1
    at.run(address, words, threads)
    return out


def project_heads_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor,
    to_x: torch.Tensor,
    heads: int,
    *,
    own: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """(gradient of w, of skip where own rows are given, the sum of the rows of grad); to_x gets that of x.

    One pass over the rows of grad [N, heads * width]; the sums do not depend on the number of threads.
    """
    rows, columns = grad.shape
    inner, width, dtype = w.shape[0], columns // heads, grad.dtype
    address = _backward_address(float_bits("grad", grad), block_height(width, inner * dtype.itemsize))
    turned = w.t().contiguous()  # by head, [width, inner]
    own_inner = 0 if own is None else own.shape[1]
    chunks = transposed_chunks(rows, inner + own_inner + 1, columns)
    made = [torch.empty((chunks, k, columns), dtype=dtype) for k in (inner, own_inner, 1)]
    at = cpu.BACKWARD
    words = at.words()
    words[at.rows], words[at.chunks], words[at.step], words[at.heads] = rows, chunks, _STEP_ROWS, heads
    words[at.width], words[at.inner], words[at.own_inner] = width, inner, own_inner
    grad = read_rows(words, at.grad, "grad", grad, dtype, rows, columns)
    x = read_rows(words, at.x, "x", x, dtype, rows, heads * inner)
    read_flat(words, at.wt, "w", turned, dtype, inner * columns)
    write_rows(words, at.to_x, "to_x", to_x, dtype, rows, heads * inner)
    own = read_rows(words, at.own, "own", own, dtype, rows, own_inner)
    ones = read_flat(words, at.ones, "ones", torch.ones(1, dtype=dtype), dtype, 1)
    for place, part in zip((at.to_w, at.to_skip, at.to_bias), made, strict=True):
        write_flat(words, place, "sums", part, dtype, part.numel())
    work = rows * columns * (2 * inner + own_inner)
    threads = min(launch.num_threads(), chunks) if work > SERIAL_BELOW else 1
    at.run(address, words, threads)
    del ones
    to_w, to_skip, sums = (part[0] if chunks == 1 else part.sum(0) for part in made)
    by_head = to_w.view(heads, inner, width).transpose(0, 1).reshape(inner, columns)
    return by_head, None if own is None else to_skip, sums[0]
