"""Passes of attention kernels over single rows as LLVM vectors, and what all their tiles are built from."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from plait.kernels.vector import I32, I64, CodeGen, lane, load_index_ir, tile_intrinsic

__all__ = [
    "BLOCK", "FLAT", "ROWS_AHEAD", "ask", "ask_row", "bend", "block", "by_chunks", "chunk_lanes", "clear",
    "each", "finish", "greater", "later_edge", "nth", "over_heads", "place_of", "row_dots", "scale_row",
    "shuffle", "stack_floats", "tile",
]  # fmt: skip

BLOCK = 64  # edges: their rows of 64 float32 fill half of a first-level cache
FLAT = 16  # lanes of a pass over a block's scores
# Rows ahead of the one in hand whose own operands are prefetched: parts of a projected row lie apart, which
# the machine's own guesses do not follow (the pass over the sources of a road network took twice as long)
ROWS_AHEAD = 8
_AHEAD = 16  # edges; past the row's end lie the edges of the rows that come next
_LINES_AHEAD = 8  # cache lines of a row that are prefetched


def chunk_lanes(float_bits: int) -> int:
    """Numbers of a row that are taken at once."""
    return 512 // float_bits


def tile(float_bits: int, lanes: int, words: int, scalars: int = 0) -> Callable[[Callable[..., None]], Any]:
    """Makes a numba function of the code that a function of (code generator, *arguments) writes."""

    def made(body: Callable[..., None]) -> Any:
        return tile_intrinsic(float_bits, words, scalars, lambda base, args: body(base.of(lanes), *args))

    return made


def over_heads(scalars: int = 0) -> Callable[[Callable[..., None]], Callable[[int, int], Any]]:
    """Makes a builder of (float bits, heads) of a function that writes code for all heads, as `tile` does.

    Its arguments are words, the last `scalars` of them floats.
    """

    def made(body: Callable[..., None]) -> Callable[[int, int], Any]:
        words = len(inspect.signature(body).parameters) - 1 - scalars
        return functools.wraps(body)(lambda float_bits, lanes: tile(float_bits, lanes, words, scalars)(body))

    return made


def over_chunks(scalars: int = 0) -> Callable[[Callable[..., None]], Callable[[int], Any]]:
    """The same for a row in vectors of as many numbers as are taken at once: a builder of float bits."""

    def made(body: Callable[..., None]) -> Callable[[int], Any]:
        build = over_heads(scalars)(body)
        return functools.wraps(body)(lambda float_bits: build(float_bits, chunk_lanes(float_bits)))

    return made


def each(code: CodeGen, count: Any, step: Callable[[Any], None]) -> None:
    """for k in range(count): step(k)."""

    def body(k: Any, none: list[Any]) -> list[Any]:
        step(k)
        return none

    code.loop(code.word(0), count, [], body)


def shuffle(code: CodeGen, a: Any, b: Any, lanes: list[int]) -> Any:
    """These lanes of a and b."""
    return code.builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))


def by_chunks(
    code: CodeGen, width: Any, carried: list[Any], body: Callable[[Any, Any, list[Any]], list[Any]]
) -> list[Any]:
    """carried = body(byte offset, mask, carried) for every vector of a row; the rest is masked."""
    b, size = code.builder, code.float_bits // 8
    whole = b.sdiv(width, code.word(code.lanes))
    step = code.lanes * size
    carried = code.loop(code.word(0), whole, carried, lambda c, v: body(b.mul(c, code.word(step)), None, v))
    done = b.mul(whole, code.word(code.lanes))
    rest = b.sub(width, done)
    has_rest = b.select(b.icmp_signed(">", rest, code.word(0)), code.word(1), code.word(0))
    mask = code.mask(rest)
    return code.loop(
        code.word(0), has_rest, carried, lambda c, v: body(b.mul(done, code.word(size)), mask, v)
    )


def _each_chunk(code: CodeGen, width: Any, step: Callable[[Any, Any], None]) -> None:
    def body(offset: Any, mask: Any, none: list[Any]) -> list[Any]:
        step(offset, mask)
        return none

    by_chunks(code, width, [], body)


def _with(code: CodeGen, op: Any, value: Any, others: tuple[Any, ...], offset: Any, mask: Any) -> Any:
    """value op (each of the other rows whose address is given)."""
    for other in others:
        more = partial(lambda v, o: op(v, code.load(code.builder.add(o, offset), mask)), value, other)
        value = code.either(code.is_given(other), more, value)
    return value


@over_chunks()
def clear(code: CodeGen, row: Any, width: Any) -> None:
    """(row, width): row = 0."""
    zero = code.constant(0.0)
    _each_chunk(code, width, lambda offset, mask: code.store(zero, code.builder.add(row, offset), mask))


@over_chunks()
def ask(code: CodeGen, address: Any, count: Any) -> None:
    """(address, bytes): prefetches these bytes, the first cache lines of them."""
    _ask_lines(code, address, count)


def _ask_lines(code: CodeGen, address: Any, count: Any) -> None:
    """Prefetch `count` bytes from an address on, at most LINES_AHEAD cache lines."""
    b = code.builder
    lines = b.sdiv(b.add(count, code.word(63)), code.word(64))
    most = code.word(_LINES_AHEAD)
    lines = b.select(b.icmp_signed("<", lines, most), lines, most)
    each(code, lines, lambda line: code.prefetch(b.add(address, b.mul(line, code.word(64))), 1))


@over_chunks(1)
def scale_row(code: CodeGen, row: Any, width: Any, factor: Any) -> None:
    """(row, width, factor): row *= factor."""
    b = code.builder

    def chunk(offset: Any, mask: Any) -> None:
        to = b.add(row, offset)
        code.store(b.fmul(code.load(to, mask), code.splat(factor)), to, mask)

    _each_chunk(code, width, chunk)


@over_chunks(1)
def finish(code: CodeGen, row: Any, width: Any, addend: Any, bias: Any, factor: Any) -> None:
    """(row, width, addend, bias, factor): row = factor * row + addend + bias; addresses may be 0."""
    b = code.builder

    def chunk(offset: Any, mask: Any) -> None:
        to = b.add(row, offset)
        value = b.fmul(code.load(to, mask), code.splat(factor))
        code.store(_with(code, b.fadd, value, (addend, bias), offset, mask), to, mask)

    _each_chunk(code, width, chunk)


@over_chunks()
def row_dots(code: CodeGen, out: Any, grad: Any, row: Any, addend: Any, bias: Any, width: Any) -> None:
    """(out, grad, row, addend, bias, width): out = grad . (row - addend - bias), one number."""
    b = code.builder

    def chunk(offset: Any, mask: Any, total: list[Any]) -> list[Any]:
        value = _with(code, b.fsub, code.load(b.add(row, offset), mask), (addend, bias), offset, mask)
        return [code.multiply_add(code.load(b.add(grad, offset), mask), value, total[0])]

    (total,) = by_chunks(code, width, [code.constant(0.0)], chunk)
    size = code.lanes
    while size > 1:
        size //= 2
        low = shuffle(code, total, total, list(range(size)))
        total = b.fadd(low, shuffle(code, total, total, list(range(size, 2 * size))))
    value = b.extract_element(total, ir.Constant(I32, 0))
    b.store(value, b.inttoptr(out, code.scalar.as_pointer()))


@over_chunks()
def bend(
    code: CodeGen, out: Any, steps: Any, near: Any, att: Any, sums: Any, width: Any, is_added: Any,
) -> None:  # fmt: skip
    """(out, steps, near, att, sums, width, is_added): out (+)= att * steps; sums += near * steps."""
    b = code.builder

    def chunk(offset: Any, mask: Any) -> None:
        def row(base: Any) -> Any:
            return code.load(b.add(base, offset), mask)

        s = row(steps)
        before = code.either(code.is_given(is_added), lambda: row(out), code.constant(0.0))
        code.store(code.multiply_add(row(att), s, before), b.add(out, offset), mask)
        code.store(code.multiply_add(row(near), s, row(sums)), b.add(sums, offset), mask)

    _each_chunk(code, width, chunk)


def stack_floats(float_bits: int, count: int) -> Any:
    """A numba function: the address of `count` floats on the stack, others in every call; not for loops."""
    kind = lane(float_bits)

    @intrinsic  # type: ignore[untyped-decorator]
    def reserve(typing_context: Any) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
            array = cgutils.alloca_once(builder, ir.ArrayType(kind, count))
            array.align = 64
            return builder.ptrtoint(array, I64)

        return types.int64(), generate

    return reserve


def block(float_bits: int, lanes: int) -> Any:
    """stack_floats of a block's numbers, [edge][head], with room for passes that end behind the last edge."""
    return stack_floats(float_bits, (BLOCK + 4) * lanes + FLAT)


def nth(code: CodeGen, base: Any, number: Any, step: int) -> Any:
    """Where entry `number` of an array of `step` bytes each lies."""
    return code.builder.add(base, code.builder.mul(number, code.word(step)))


def place_of(code: CodeGen, order: Any, k: Any, index_bits: int) -> Any:
    """Where the values of edge k lie: k itself, or order[k] where an order is given."""
    return code.either(code.is_given(order), lambda: load_index_ir(code, order, index_bits)(k), k)


def ask_row(code: CodeGen, base: Any, stride: Any, row_bytes: Any, j: Any) -> None:
    """Prefetch the first cache lines of row j; a row of `row_bytes` may be shorter."""
    _ask_lines(code, code.builder.add(base, code.builder.mul(j, stride)), row_bytes)


def later_edge(code: CodeGen, k: Any, last: Any) -> Any:
    """The edge whose row is prefetched while k is processed."""
    b = code.builder
    ahead = b.add(k, code.word(_AHEAD))
    return b.select(b.icmp_signed("<", ahead, last), ahead, last)


def greater(code: CodeGen, a: Any, c: Any) -> Any:
    """The greater of two, lane by lane."""
    return code.builder.select(code.builder.fcmp_ordered(">", a, c), a, c)
