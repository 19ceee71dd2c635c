"""Products by head on the CPU: a block of rows goes through the products of all heads while it is in cache.

Head by head, each of a few dozen columns, the rows of all heads would be read and written once per head.
"""

from __future__ import annotations

from typing import Any

from numba import cfunc, types

from plait.kernels.arguments import Arguments
from plait.kernels.gemm.cpu import accumulate_rows, multiply_rows
from plait.kernels.vector import next_piece, next_rows

__all__ = ["BACKWARD", "FORWARD", "backward", "forward"]

FORWARD = Arguments("rows piece_rows heads x[] inner w width out[] bias own[] own_inner skip[] skip_bias")
BACKWARD = Arguments(
    "rows chunks step heads grad[] width x[] inner wt to_x[] own[] own_inner ones to_w to_skip to_bias"
)


def forward(float_bits: int, height: int) -> Any:
    """out[:, h] = x[:, h] @ w[h] + bias, to which own @ skip + skip_bias is added where it is given."""
    multiply = multiply_rows(float_bits, height)
    size = float_bits // 8
    read = FORWARD.reader()

    @cfunc(types.void(types.CPointer(types.int64)))
    def run(arguments):  # type: ignore[no-untyped-def]
        a = read(arguments)
        while True:
            first = next_rows(a.team, a.rows, a.piece_rows)
            if first >= a.rows:
                break
            count = min(a.piece_rows, a.rows - first)
            to = a.out + first * a.out_row
            if a.skip != 0:
                mine = a.own + first * a.own_row
                multiply(
                    mine, a.own_row, count, a.own_inner, a.skip, a.skip_row, a.heads * a.width, to,
                    a.out_row, 0, 0, a.skip_bias,
                )  # fmt: skip
            for h in range(a.heads):
                o = h * a.width * size
                plus = to + o if a.skip != 0 else 0
                q = a.bias + o if a.bias != 0 else 0
                at = a.x + first * a.x_row + h * a.inner * size
                multiply(
                    at, a.x_row, count, a.inner, a.w + o * a.inner, a.width * size, a.width, to + o,
                    a.out_row, plus, a.out_row, q,
                )  # fmt: skip

    return run


def backward(float_bits: int, height: int) -> Any:
    """to_x[:, h] = grad[:, h] @ wt[h]; sums by chunk: x[:, h].T @ grad[:, h], own.T @ grad, grad."""
    multiply, accumulate = multiply_rows(float_bits, height), accumulate_rows(float_bits, 4)
    size = float_bits // 8
    read = BACKWARD.reader()

    @cfunc(types.void(types.CPointer(types.int64)))
    def run(arguments):  # type: ignore[no-untyped-def]
        a = read(arguments)
        per, columns = (a.rows + a.chunks - 1) // a.chunks, a.heads * a.width
        while True:
            chunk = next_piece(a.team, a.chunks)
            if chunk >= a.chunks:
                break
            first = min(a.rows, chunk * per)
            last = min(a.rows, first + per)
            is_first = 1
            while first < last or is_first == 1:
                count = min(a.step, last - first)
                g = a.grad + first * a.grad_row
                for h in range(a.heads):
                    o, i, block = h * a.width * size, h * a.inner * size, a.inner * a.width * size
                    multiply(g + o, a.grad_row, count, a.width, a.wt + h * block, a.inner * size, a.inner,
                             a.to_x + first * a.to_x_row + i, a.to_x_row, 0, 0, 0)  # fmt: skip
                    accumulate(a.x + first * a.x_row + i, a.x_row, a.inner, g + o, a.grad_row, a.width, count,
                               a.to_w + (chunk * a.heads + h) * block, is_first)  # fmt: skip
                if a.to_skip != 0:
                    accumulate(
                        a.own + first * a.own_row, a.own_row, a.own_inner, g, a.grad_row, columns, count,
                        a.to_skip + chunk * a.own_inner * columns * size, is_first,
                    )  # fmt: skip
                if a.to_bias != 0:
                    accumulate(
                        a.ones, 0, 1, g, a.grad_row, columns, count, a.to_bias + chunk * columns * size,
                        is_first,
                    )  # fmt: skip
                is_first = 0
                first += count

    return run
