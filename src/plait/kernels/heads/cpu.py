"""Products by head on the CPU: a block of rows goes through the products of all heads while it is in cache.

Head by head, each of a few dozen columns, the rows of all heads would be read and written once a head.
"""

from __future__ import annotations

import functools
from typing import Any

from numba import cfunc, types

from plait.kernels.gemm.cpu import accumulate_rows, multiply_rows
from plait.kernels.vector import next_piece, next_rows

__all__ = ["BACKWARD", "FORWARD", "backward", "forward"]

FORWARD = [
    *("counter", "rows", "piece_rows", "heads", "x", "x_row", "inner", "w", "width"),
    *("out", "out_row", "bias", "own", "own_row", "own_inner", "skip", "skip_row", "skip_bias"),
]
BACKWARD = [
    *("counter", "rows", "chunks", "step", "heads", "grad", "grad_row", "width", "x", "x_row", "inner"),
    *("wt", "to_x", "to_x_row", "own", "own_row", "own_inner", "ones", "to_w", "to_skip", "to_bias"),
]


@functools.cache
def forward(float_bits: int, height: int) -> Any:
    """out[:, h] = x[:, h] @ w[h] + bias, to which own @ skip + skip_bias is added where it is given."""
    multiply = multiply_rows(float_bits, height)
    size = float_bits // 8

    @cfunc(types.void(types.CPointer(types.int64)))
    def run(a):  # type: ignore[no-untyped-def]
        counter, n, piece_rows, heads, x, xs, inner = a[0], a[1], a[2], a[3], a[4], a[5], a[6]
        w, width, out, os, bias = a[7], a[8], a[9], a[10], a[11]
        own, own_row, own_inner, skip, skip_row, skip_bias = a[12], a[13], a[14], a[15], a[16], a[17]
        while True:
            first = next_rows(counter, n, piece_rows)
            if first >= n:
                break
            count = min(piece_rows, n - first)
            to = out + first * os
            if skip != 0:
                mine = own + first * own_row
                multiply(
                    mine, own_row, count, own_inner, skip, skip_row, heads * width, to, os, 0, 0, skip_bias
                )
            for h in range(heads):
                o = h * width * size
                plus = to + o if skip != 0 else 0
                q = bias + o if bias != 0 else 0
                at = x + first * xs + h * inner * size
                multiply(at, xs, count, inner, w + o * inner, width * size, width, to + o, os, plus, os, q)

    return run


@functools.cache
def backward(float_bits: int, height: int) -> Any:
    """to_x[:, h] = grad[:, h] @ wt[h]; sums by chunk: x[:, h].T @ grad[:, h], own.T @ grad, grad."""
    multiply, accumulate = multiply_rows(float_bits, height), accumulate_rows(float_bits, 4)
    size = float_bits // 8

    @cfunc(types.void(types.CPointer(types.int64)))
    def run(a):  # type: ignore[no-untyped-def]
        counter, n, chunks, step, heads, grad, gs, width = a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7]
        x, xs, inner, wt, to_x, ts = a[8], a[9], a[10], a[11], a[12], a[13]
        own, own_row, own_inner, ones, to_w, to_skip, to_bias = (
            a[14],
            a[15],
            a[16],
            a[17],
            a[18],
            a[19],
            a[20],
        )
        per, columns = (n + chunks - 1) // chunks, heads * width
        while True:
            chunk = next_piece(counter, chunks)
            if chunk >= chunks:
                break
            first = min(n, chunk * per)
            last = min(n, first + per)
            is_first = 1
            while first < last or is_first == 1:
                count = min(step, last - first)
                g = grad + first * gs
                for h in range(heads):
                    o, i, block = h * width * size, h * inner * size, inner * width * size
                    multiply(g + o, gs, count, width, wt + h * block, inner * size, inner,
                             to_x + first * ts + i, ts, 0, 0, 0)  # fmt: skip
                    accumulate(x + first * xs + i, xs, inner, g + o, gs, width, count,
                               to_w + (chunk * heads + h) * block, is_first)  # fmt: skip
                if to_skip != 0:
                    accumulate(own + first * own_row, own_row, own_inner, g, gs, columns, count,
                               to_skip + chunk * own_inner * columns * size, is_first)  # fmt: skip
                if to_bias != 0:
                    accumulate(ones, 0, 1, g, gs, columns, count, to_bias + chunk * columns * size, is_first)
                is_first = 0
                first += count

    return run
