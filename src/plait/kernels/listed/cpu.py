"""The passes over a list of edges: one thread makes the entries, each thread sums columns of its own."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from llvmlite import ir
from numba import cfunc, types

from plait.graph.build import kernel
from plait.kernels.vector import CodeGen, load_index_ir, load_scalar, next_piece, tile_intrinsic

__all__ = ["WORDS", "entries", "sum_kernel"]

# Order of the words in the argument block of a sum; kernels/listed/__init__.py fills them.
WORDS = [
    "counter", "pieces", "columns", "width", "x", "x_stride", "out", "out_stride", "rows", "source", "target",
    "value", "entries", "own", "identity",
]  # fmt: skip

REMAINING, ADD = 1, 3  # places in LOOPS
SYMMETRIC, MEAN = 1, 2  # places in SCALES


@kernel
def entries(
    source: Any, target: Any, weight: Any, num_targets: int, num_sources: int, loops: int, fill: float,
    scale: int, kept_source: Any, kept_target: Any, value: Any, own: Any, scales: Any,
) -> int:  # fmt: skip
    """How many entries were written; -1 where an end is out of range.

    Empty arrays stand for what is not there: weights, values, the diagonal `own`, the scalings.
    """
    for e in range(source.size):
        if not (0 <= source[e] < num_sources and 0 <= target[e] < num_targets):
            return -1
    one = value.dtype.type(1)
    own[:] = fill
    scales[:] = 0
    count = 0
    for e in range(source.size):
        u = source[e]
        v = target[e]
        w = weight[e] if weight.size else one
        if own.size and u == v:
            if loops == REMAINING:
                own[v] = w
            elif loops == ADD:
                own[v] += w
            continue
        kept_source[count] = u
        kept_target[count] = v
        if value.size:
            value[count] = w
        if scale == SYMMETRIC:
            scales[v] += w
        elif scale == MEAN:
            scales[v] += one
        count += 1
    for v in range(scales.size):
        if scale == SYMMETRIC:
            degree = scales[v] + own[v] if own.size else scales[v]
            scales[v] = one / np.sqrt(degree) if degree != 0 else value.dtype.type(0)
        else:
            scales[v] = one / max(scales[v] + one if own.size else scales[v], one)
    if scale == SYMMETRIC:
        for k in range(count):
            value[k] *= scales[kept_target[k]] * scales[kept_source[k]]
        for v in range(own.size):
            own[v] *= scales[v] * scales[v]
    elif scale == MEAN:
        for k in range(count):
            value[k] *= scales[kept_target[k]]
        for v in range(own.size):
            own[v] *= scales[v]
    return count


def _tile(float_bits: int, lanes: int, is_weighted: bool, is_masked: bool) -> Any:
    """Writes one tile of columns of all rows: the diagonal's part, then the entries in the list's order."""

    def body(base: CodeGen, args: list[Any]) -> None:
        code = base.of(lanes)
        b = code.builder
        x, x_stride, out, out_stride, rows, source, target, value, entries, own, count, identity = args
        mask = code.mask(count) if is_masked else None
        sources, targets = load_index_ir(code, source, 32), load_index_ir(code, target, 32)

        def start(i: Any, carried: list[Any]) -> list[Any]:
            diagonal = code.either(
                code.is_given(own), lambda: b.fadd(_number(code, own, i), identity), identity
            )
            row = b.fmul(code.splat(diagonal), code.load(b.add(x, b.mul(i, x_stride)), mask))
            code.store(row, b.add(out, b.mul(i, out_stride)), mask)
            return carried

        def clear(i: Any, carried: list[Any]) -> list[Any]:
            code.store(code.constant(0.0), b.add(out, b.mul(i, out_stride)), mask)
            return carried

        def add(e: Any, carried: list[Any]) -> list[Any]:
            row = code.load(b.add(x, b.mul(sources(e), x_stride)), mask)
            place = b.add(out, b.mul(targets(e), out_stride))
            total = code.load(place, mask)
            if is_weighted:
                total = code.multiply_add(code.splat(_number(code, value, e)), row, total)
            else:
                total = b.fadd(total, row)
            code.store(total, place, mask)
            return carried

        has_diagonal = b.or_(
            code.is_given(own), b.fcmp_ordered("!=", identity, ir.Constant(code.scalar, 0.0))
        )
        none = code.word(0)
        code.loop(none, b.select(has_diagonal, rows, none), [], start)
        code.loop(none, b.select(has_diagonal, none, rows), [], clear)
        code.loop(none, entries, [], add)

    return tile_intrinsic(float_bits, 11, 1, body)


def _number(code: CodeGen, address: Any, i: Any) -> Any:
    b = code.builder
    return b.load(b.gep(b.inttoptr(address, code.scalar.as_pointer()), [i]))


@functools.cache
def sum_kernel(float_bits: int, is_weighted: bool) -> Any:
    """out = (matrix + identity) @ x as a compiled kernel; each piece of columns is one thread's."""
    wide, half, quarter, narrow = (lanes * 32 // float_bits for lanes in (64, 32, 16, 8))
    tile_wide, tile_half, tile_quarter, tile_narrow = (
        _tile(float_bits, lanes, is_weighted, False) for lanes in (wide, half, quarter, narrow)
    )
    tile_rest = _tile(float_bits, narrow, is_weighted, True)
    scalar, size = load_scalar(float_bits), float_bits // 8

    @cfunc(types.void(types.CPointer(types.int64)))
    def run(a):  # type: ignore[no-untyped-def]
        team, pieces, columns, width = a[0], a[1], a[2], a[3]
        x, xs, out, os, rows = a[4], a[5], a[6], a[7], a[8]
        source, target, value, count, own = a[9], a[10], a[11], a[12], a[13]
        identity = scalar(a[14], 0)
        while True:
            piece = next_piece(team, pieces)
            if piece >= pieces:
                break
            c, last = piece * columns, min(width, (piece + 1) * columns)
            while c < last:
                o, rest = c * size, last - c
                if rest >= wide:
                    tile_wide(x + o, xs, out + o, os, rows, source, target, value, count, own, 0, identity)
                    c += wide
                elif rest >= half:
                    tile_half(x + o, xs, out + o, os, rows, source, target, value, count, own, 0, identity)
                    c += half
                elif rest >= quarter:
                    tile_quarter(x + o, xs, out + o, os, rows, source, target, value, count, own, 0, identity)
                    c += quarter
                elif rest >= narrow:
                    tile_narrow(x + o, xs, out + o, os, rows, source, target, value, count, own, 0, identity)
                    c += narrow
                else:
                    tile_rest(x + o, xs, out + o, os, rows, source, target, value, count, own, rest, identity)
                    c += narrow

    return run
