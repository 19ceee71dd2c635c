"""The passes over a list of edges: one thread makes the entries, each thread sums columns of its own."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from llvmlite import ir
from numba import cfunc, types
from numba.extending import intrinsic

from plait.kernels.arguments import Arguments
from plait.kernels.vector import CodeGen, load_index_ir, load_scalar, next_piece, row_intrinsic

__all__ = ["ENTRIES", "SUM", "entries_kernel", "sum_kernel"]

ENTRIES = Arguments(
    "edges num_targets num_sources loops source target weight value kept_source kept_target own scales fill "
    "indptr kept"
)
SUM = Arguments("pieces columns width x[] out[] rows source target value entries own identity bias")

REMAINING, ADD = 1, 3  # places in LOOPS
SYMMETRIC, MEAN = 1, 2  # places in SCALES


def _array_at(kind: Any) -> Any:
    """A numba function: the elements at an address, to be indexed; an array would drag in numba's runtime."""

    @intrinsic  # type: ignore[untyped-decorator]  # numba carries no types
    def pointer(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.int64), generate

    return pointer


def _inverse_root(kind: Any) -> Any:
    """A numba function: 1 / sqrt(x) in machine instructions, without a call of the C library."""

    @intrinsic  # type: ignore[untyped-decorator]  # numba carries no types
    def inverse(typing_context: Any, x: Any) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
            root = builder.call(builder.module.declare_intrinsic("llvm.sqrt", [args[0].type]), [args[0]])
            return builder.fdiv(ir.Constant(root.type, 1.0), root)

        return kind(kind), generate

    return inverse


@functools.cache
def entries_kernel(float_bits: int, is_weighted: bool, has_own: bool, scale: int, is_grouped: bool) -> Any:
    """Makes the entries as a compiled kernel; `kept` gets how many, -1 where an end is out of range.

    What is compiled apart (weights, a diagonal, the normalisation, entries by rows) would be asked at every
    edge otherwise.
    """
    number = types.float32 if float_bits == 32 else types.float64
    numbers, places, indices = _array_at(number), _array_at(types.int64), _array_at(types.int32)
    inverse_root = _inverse_root(number)
    has_value, one, none = is_weighted or scale != 0, number(1), number(0)
    is_summed = (is_weighted and scale == SYMMETRIC) or (scale != 0 and not is_grouped)  # else counted
    read, at_kept = ENTRIES.reader(), ENTRIES.kept

    @cfunc(types.void(types.CPointer(types.int64)), error_model="numpy")  # nothing is raised
    def run(arguments):  # type: ignore[no-untyped-def]
        a = read(arguments)
        num_targets, num_sources = a.num_targets, a.num_sources
        source, target, weight, value = (
            places(a.source),
            places(a.target),
            numbers(a.weight),
            numbers(a.value),
        )
        kept_source, kept_target, indptr = indices(a.kept_source), indices(a.kept_target), indices(a.indptr)
        own, scales, fill = numbers(a.own), numbers(a.scales), numbers(a.fill)[0]
        misfits = 0
        for e in range(a.edges):  # no early end: a loop that looks at all is one of vectors
            u, v = source[e], target[e]
            misfits |= (u | v | (num_sources - 1 - u) | (num_targets - 1 - v)) < 0
        if misfits:
            arguments[at_kept] = -1
            return
        for v in range(num_targets):
            if has_own:
                own[v] = fill
            if scale != 0:
                scales[v] = none
        if is_grouped:
            for v in range(num_targets + 1):
                indptr[v] = 0
        kept = 0
        for e in range(a.edges):
            u, v = source[e], target[e]
            if has_own and u == v:
                if a.loops == REMAINING:
                    own[v] = weight[e] if is_weighted else one
                elif a.loops == ADD:
                    own[v] += weight[e] if is_weighted else one
                continue
            if is_grouped:
                indptr[v + 1] += 1
            else:
                kept_source[kept], kept_target[kept] = np.int32(u), np.int32(v)
                if is_weighted:
                    value[kept] = weight[e]
            if is_summed:
                scales[v] += weight[e] if is_weighted and scale == SYMMETRIC else one
            kept += 1
        arguments[at_kept] = kept
        if is_grouped:  # where each row begins; the next pass moves it to where the row ends
            first = np.int32(0)
            for v in range(num_targets):
                count = indptr[v + 1]
                if scale != 0 and not is_summed:
                    scales[v] = number(count)
                indptr[v + 1] = first
                first += count
        if scale == SYMMETRIC:
            for v in range(num_targets):
                degree = scales[v] + own[v] if has_own else scales[v]
                scales[v] = inverse_root(degree) if degree != none else none
                if has_own:
                    own[v] *= scales[v] * scales[v]
        elif scale == MEAN:
            for v in range(num_targets):
                number_in = scales[v] + one if has_own else scales[v]
                scales[v] = one / number_in if number_in > one else one
                if has_own:
                    own[v] *= scales[v]
        if is_grouped:
            for e in range(a.edges):
                u, v = source[e], target[e]
                if has_own and u == v:
                    continue
                k = indptr[v + 1]
                indptr[v + 1] = k + np.int32(1)
                kept_source[k], kept_target[k] = np.int32(u), np.int32(v)
                if scale == SYMMETRIC:
                    factor = scales[v] * scales[u]
                    value[k] = weight[e] * factor if is_weighted else factor
                elif scale == MEAN:
                    value[k] = weight[e] * scales[v] if is_weighted else scales[v]
                elif is_weighted:
                    value[k] = weight[e]
        elif has_value and scale != 0:
            for k in range(kept):
                factor = scales[kept_target[k]]
                if scale == SYMMETRIC:
                    factor *= scales[kept_source[k]]
                value[k] = value[k] * factor if is_weighted else factor

    return run


def _columns(float_bits: int, is_weighted: bool) -> Any:
    """Writes some columns of all rows: bias and diagonal, then the entries in the list's order."""

    def body(code: CodeGen, args: list[Any], count: Any) -> None:
        b = code.builder
        x, x_stride, out, out_stride, rows, source, target, value, entries, own, bias, identity = args
        mask = code.mask(count)
        sources, targets = load_index_ir(code, source, 32), load_index_ir(code, target, 32)

        first = code.either(code.is_given(bias), lambda: code.load(bias, mask), code.constant(0.0))

        def start(i: Any, carried: list[Any]) -> list[Any]:
            diagonal = code.either(
                code.is_given(own), lambda: b.fadd(_number(code, own, i), identity), identity
            )
            row = code.load(b.add(x, b.mul(i, x_stride)), mask)
            row = code.multiply_add(code.splat(diagonal), row, first)
            code.store(row, b.add(out, b.mul(i, out_stride)), mask)
            return carried

        def clear(i: Any, carried: list[Any]) -> list[Any]:
            code.store(first, b.add(out, b.mul(i, out_stride)), mask)
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

    lanes = [lanes * 32 // float_bits for lanes in (64, 32, 16, 8)]
    return row_intrinsic(float_bits, 12, 1, dict.fromkeys((0, 2, 10), float_bits), body, lanes)


def _number(code: CodeGen, address: Any, i: Any) -> Any:
    b = code.builder
    return b.load(b.gep(b.inttoptr(address, code.scalar.as_pointer()), [i]))


@functools.cache
def sum_kernel(float_bits: int, is_weighted: bool) -> Any:
    """out = (matrix + identity) @ x + bias as a compiled kernel; each piece of columns is one thread's."""
    write = _columns(float_bits, is_weighted)
    scalar, size = load_scalar(float_bits), float_bits // 8
    read = SUM.reader()

    @cfunc(types.void(types.CPointer(types.int64)))
    def run(arguments):  # type: ignore[no-untyped-def]
        a = read(arguments)
        identity = scalar(a.identity, 0)
        while True:
            piece = next_piece(a.team, a.pieces)
            if piece >= a.pieces:
                break
            c, last = piece * a.columns, min(a.width, (piece + 1) * a.columns)
            write(
                a.x + c * size, a.x_row, a.out + c * size, a.out_row, a.rows, a.source, a.target, a.value,
                a.entries, a.own, a.bias + c * size if a.bias else 0, last - c, identity,
            )  # fmt: skip

    return run
