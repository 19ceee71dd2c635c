"""Products by head: rows of all heads, side by side, times a matrix of each head, and the gradients."""

from __future__ import annotations

import functools
from typing import Any

import torch

from plait.kernels import launch
from plait.kernels.block import Block
from plait.kernels.compiled import address_of
from plait.kernels.gemm import SERIAL_BELOW, block_height, transposed_chunks
from plait.kernels.heads import cpu

__all__ = ["project_heads", "project_heads_backward"]

_PIECE_ROWS = 192  # a multiple of a block's height; 256 columns of them are a fifth of a second-level cache
_STEP_ROWS = 128

_forward_block, _backward_block = Block(cpu.FORWARD), Block(cpu.BACKWARD)


@functools.cache
def _address(name: str, float_bits: int, height: int) -> int:
    build: Any = {"forward": cpu.forward, "backward": cpu.backward}[name]
    return address_of(
        f"heads-{name}-f{float_bits}-r{height}", lambda: build(float_bits, height), uses=("gemm",)
    )


def _row(tensor: torch.Tensor) -> int:
    return tensor.stride(0) * tensor.element_size()


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

    x [N, heads * inner], w [inner, heads * width], out [N, heads * width]; rows of all are contiguous.
    """
    size, inner = x.element_size(), w.shape[0]
    # a head's matrix in one piece: a tile of rows that lie 1 KB apart falls on a few sets of the first cache
    packed = w.view(inner, heads, -1).transpose(0, 1).contiguous()
    words = _forward_block.words()
    words[1], words[2], words[3] = x.shape[0], _PIECE_ROWS, heads
    words[4], words[5], words[6] = x.data_ptr(), _row(x), inner
    words[7], words[8] = packed.data_ptr(), w.shape[1] // heads
    words[9], words[10] = out.data_ptr(), _row(out)
    words[11] = 0 if bias is None else bias.data_ptr()
    words[12] = words[13] = words[14] = words[15] = words[16] = words[17] = 0
    if skip is not None and own is not None:
        words[12], words[13], words[14] = own.data_ptr(), _row(own), own.shape[1]
        words[15], words[16] = skip.data_ptr(), _row(skip)
        words[17] = 0 if skip_bias is None else skip_bias.data_ptr()
    work = x.shape[0] * w.shape[1] * (inner + (0 if skip is None else skip.shape[0]))
    threads = launch.num_threads() if work > SERIAL_BELOW else 1
    _forward_block.run(_address("forward", size * 8, block_height(inner)), words, threads)
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
    size, inner, width = x.element_size(), w.shape[0], columns // heads
    turned = w.t().contiguous()  # by head, [width, inner]
    own_inner = 0 if own is None else own.shape[1]
    chunks = transposed_chunks(rows, inner + own_inner + 1, columns)
    made = [torch.empty((chunks, k, columns), dtype=grad.dtype) for k in (inner, own_inner, 1)]
    words = _backward_block.words()
    words[1], words[2], words[3], words[4] = rows, chunks, _STEP_ROWS, heads
    words[5], words[6], words[7] = grad.data_ptr(), _row(grad), width
    words[8], words[9], words[10], words[11] = x.data_ptr(), _row(x), inner, turned.data_ptr()
    words[12], words[13] = to_x.data_ptr(), _row(to_x)
    words[14], words[15], words[16] = 0, 0, own_inner
    if own is not None:
        words[14], words[15] = own.data_ptr(), _row(own)
    ones = torch.ones(1, dtype=grad.dtype)
    words[17], words[18], words[20] = ones.data_ptr(), made[0].data_ptr(), made[2].data_ptr()
    words[19] = 0 if own is None else made[1].data_ptr()
    work = rows * columns * (2 * inner + own_inner)
    threads = min(launch.num_threads(), chunks) if work > SERIAL_BELOW else 1
    _backward_block.run(_address("backward", size * 8, block_height(width)), words, threads)
    to_w, to_skip, sums = (part[0] if chunks == 1 else part.sum(0) for part in made)
    by_head = to_w.view(heads, inner, width).transpose(0, 1).reshape(inner, columns)
    return by_head, None if own is None else to_skip, sums[0]
