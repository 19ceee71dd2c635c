"""Schedules of partial sums on the CPU: the steps of a tile in order, its sums in scratch rows of its own.

A tile is claimed from an atomic counter and walked once for every block of columns (128, 64, 32 or 16 lanes,
then a masked rest): a sum is then a row of vector registers, and a tile's sums stay in the nearest caches.
Where an operand lies (input, shared row, scratch) and where the result goes are selects, not branches (see
graph/hag/schedule.py for what a loop per kind cost). Which thread takes which tile never changes a bit: a
step adds its operands in their order.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from llvmlite import ir
from numba import cfunc, njit, types
from numba.extending import intrinsic

from plait.kernels.arguments import Arguments
from plait.kernels.vector import CodeGen, fetch_add, load_index, next_piece, tile_intrinsic, tiles

__all__ = ["PARTIAL", "Variant", "kernel"]

PARTIAL = Arguments(
    "pieces first_tile tiles start subtracted operands node buffer x[] shared[] scratch scratch_bytes "
    "thread_counter out[] width source target addend[] addend_scale bias num_sources first_slot last_operand "
    "is_streamed ties[] ones shared_counts slot_counts"
)
# What a step reads, in this order: not what a tile does; `count` is the number of columns left.
_TILE = ("team", "pieces", "first_tile", "tiles", "scratch_bytes", "thread_counter", "width")
_STEP = ["step", "count", *(name for name in PARTIAL.names if name not in _TILE)]
# Rows this wide wait for memory, narrower ones do not: prefetching 8 operands ahead gained 1.16x at 64 lanes
# of float32 and 1.11x at 256 on tu_collab (one thread); 24 ahead was no better.
_PREFETCH_BYTES = 256
_AHEAD = 8


class Variant(NamedTuple):
    """What is compiled apart: element size, inputs scaled, rows shared between tiles, operands subtracted,
    and whether operands are added or the largest or smallest is taken."""

    float_bits: int
    is_scaled: bool
    has_shared: bool
    is_signed: bool
    reduce: str = "sum"
    is_counted: bool = False  # how many neighbours attain the extremum

    @property
    def name(self) -> str:
        flags = "".join(letter for letter, is_on in zip("xsm", self[1:4], strict=True) if is_on)
        reduce = "" if self.reduce == "sum" else f"-{self.reduce}{'-ties' if self.is_counted else ''}"
        return f"partial{reduce}-f{self.float_bits}{'-' + flags if flags else ''}"


class _Step:
    """Writes the code of one step over one block of columns."""

    def __init__(self, base: CodeGen, variant: Variant, lanes: int, is_masked: bool, args: list[Any]):
        self.code = base.of(lanes)
        self.variant = variant
        self.words = dict(zip(_STEP, args, strict=True))
        self.mask = self.code.mask(self.words["count"]) if is_masked else None
        self.row_bytes = self.code.word(lanes * variant.float_bits // 8)

    def __getitem__(self, name: str) -> Any:
        return self.words[name]

    def integer(self, array: str, i: Any, bits: int) -> Any:
        b = self.code.builder
        value = b.load(b.gep(b.inttoptr(self[array], ir.IntType(bits).as_pointer()), [i]))
        return value if bits == 64 else b.sext(value, ir.IntType(64))

    def scalar(self, array: str, i: Any) -> Any:
        b = self.code.builder
        return b.load(b.gep(b.inttoptr(self[array], self.code.scalar.as_pointer()), [i]))

    def row(self, r: Any) -> Any:
        """The address of row r of the joint numbering; the bases are shifted by their first row."""
        b = self.code.builder
        base, stride = self["scratch"], self.row_bytes
        if self.variant.has_shared:
            is_shared = b.icmp_signed("<", r, self["first_slot"])
            base = b.select(is_shared, self["shared"], base)
            stride = b.select(is_shared, self["shared_row"], stride)
        is_input = b.icmp_signed("<", r, self["num_sources"])
        base = b.select(is_input, self["x"], base)
        stride = b.select(is_input, self["x_row"], stride)
        return b.add(base, b.mul(r, stride))

    def operand(self, i: Any) -> Any:
        """The row of operand i, scaled where it is an input and inputs are."""
        b, code = self.code.builder, self.code
        r = self.integer("operands", i, 32)
        row_bytes = code.lanes * self.variant.float_bits // 8
        if row_bytes >= _PREFETCH_BYTES:
            ahead, last = b.add(i, code.word(_AHEAD)), self["last_operand"]
            ahead = b.select(b.icmp_signed("<", ahead, last), ahead, last)
            code.prefetch(self.row(self.integer("operands", ahead, 32)), row_bytes)
        value = code.load(self.row(r), self.mask)
        if not self.variant.is_scaled:
            return value
        is_input = b.icmp_signed("<", r, self["num_sources"])
        scale = self.scalar("source", b.select(is_input, r, code.word(0)))
        one = ir.Constant(code.scalar, 1.0)
        return b.fmul(value, code.splat(b.select(is_input, scale, one)))

    def total(self) -> Any:
        b, code, step = self.code.builder, self.code, self["step"]
        start = self.integer("start", step, 64)
        end = self.integer("start", b.add(step, code.word(1)), 64)
        if self.variant.reduce != "sum":
            return self.extremum(start, end)
        middle = self.integer("subtracted", step, 64) if self.variant.is_signed else end
        zero = code.constant(0.0)
        (total,) = code.loop(start, middle, [zero], lambda i, t: [b.fadd(t[0], self.operand(i))])
        if self.variant.is_signed:
            (total,) = code.loop(middle, end, [total], lambda i, t: [b.fsub(t[0], self.operand(i))])
        return total

    def extremum(self, start: Any, end: Any) -> Any:
        """The largest or smallest operand; zeros where there is none, as in PyG."""
        b, code, reduce = self.code.builder, self.code, self.variant.reduce
        worst = code.constant(float("-inf") if reduce == "max" else float("inf"))
        (best,) = code.loop(start, end, [worst], lambda i, t: [code.extremum(reduce, t[0], self.operand(i))])
        return b.select(b.icmp_signed("<", start, end), best, code.constant(0.0))

    def counts(self, r: Any) -> Any:
        """The address of the counts of row r: ones for an input, otherwise next to the partial extremum."""
        b = self.code.builder
        offset = self["slot_counts"]
        if self.variant.has_shared:
            is_shared = b.icmp_signed("<", r, self["first_slot"])
            offset = b.select(is_shared, self["shared_counts"], offset)
        is_input = b.icmp_signed("<", r, self["num_sources"])
        return b.select(is_input, self["ones"], b.add(self.row(r), offset))

    def counted(self) -> tuple[Any, Any]:
        """The extremum of the operands and how many neighbours attain it; NaN is never attained."""
        b, code, step, reduce = self.code.builder, self.code, self["step"], self.variant.reduce
        start = self.integer("start", step, 64)
        end = self.integer("start", b.add(step, code.word(1)), 64)
        zero = code.constant(0.0)

        def take(i: Any, carried: list[Any]) -> list[Any]:
            best, attained = carried
            value = self.operand(i)
            more = code.load(self.counts(self.integer("operands", i, 32)), self.mask)
            is_better = b.fcmp_ordered(">" if reduce == "max" else "<", value, best)
            is_equal = b.fcmp_ordered("==", value, best)
            kept = b.select(is_better, zero, attained)
            added = b.select(b.or_(is_better, is_equal), more, zero)
            return [code.extremum(reduce, best, value), b.fadd(kept, added)]

        worst = code.constant(float("-inf") if reduce == "max" else float("inf"))
        best, attained = code.loop(start, end, [worst, zero], take)
        return b.select(b.icmp_signed("<", start, end), best, zero), attained

    def write_counted(self) -> None:
        b, code, step = self.code.builder, self.code, self["step"]
        node, row = self.integer("node", step, 32), self.integer("buffer", step, 32)
        is_output = b.icmp_signed(">=", node, code.word(0))
        best, attained = self.counted()
        zero, one = code.constant(0.0), code.constant(1.0)
        # torch counts the zero-filled output as one more tie where the extremum is zero; never below one
        ties = b.fadd(attained, b.select(b.fcmp_ordered("==", best, zero), one, zero))
        ties = b.select(b.fcmp_ordered("==", ties, zero), one, ties)
        out = b.add(self["out"], b.mul(node, self["out_row"]))
        counts = b.add(self["ties"], b.mul(node, self["ties_row"]))
        code.store(best, b.select(is_output, out, self.row(row)), self.mask)
        code.store(
            b.select(is_output, ties, attained), b.select(is_output, counts, self.counts(row)), self.mask
        )

    def write(self) -> None:
        if self.variant.is_counted:
            self.write_counted()
            return
        b, code, step = self.code.builder, self.code, self["step"]
        node, row = self.integer("node", step, 32), self.integer("buffer", step, 32)
        is_output = b.icmp_signed(">=", node, code.word(0))
        total = self.total()
        if self.variant.is_signed:  # the only schedules with steps that are an output and are read again
            with b.if_then(b.icmp_signed(">=", row, code.word(0))):
                code.store(total, self.row(row), self.mask)
        node = b.select(is_output, node, code.word(0))
        place = b.add(self["out"], b.mul(node, self["out_row"]))
        place = b.select(is_output, place, self.row(row))
        one = ir.Constant(code.scalar, 1.0)
        target = code.either(code.is_given(self["target"]), lambda: self.scalar("target", node), one)
        total = b.fmul(total, code.splat(b.select(is_output, target, one)))
        total = self.finished(total, node, is_output)
        if self.mask is not None:
            code.store(total, place, self.mask)
            return
        is_streamed = b.and_(is_output, b.icmp_signed("!=", self["is_streamed"], code.word(0)))
        with b.if_else(is_streamed) as (past_caches, into_caches):
            with past_caches:
                _stream(code, total, place)
            with into_caches:
                code.store(total, place)

    def finished(self, total: Any, node: Any, is_output: Any) -> Any:
        """The total with the added term and the bias, where it is an output and they are given."""
        b, code = self.code.builder, self.code
        one = ir.Constant(code.scalar, 1.0)

        def added() -> Any:
            scale = code.either(
                code.is_given(self["addend_scale"]), lambda: self.scalar("addend_scale", node), one
            )
            where = b.add(self["addend"], b.mul(node, self["addend_row"]))
            return code.multiply_add(code.splat(scale), code.load(where, self.mask), total)

        total = code.either(b.and_(is_output, code.is_given(self["addend"])), added, total)
        return code.either(
            b.and_(is_output, code.is_given(self["bias"])),
            lambda: b.fadd(total, code.load(self["bias"], self.mask)),
            total,
        )


def _stream(code: CodeGen, value: Any, address: Any) -> None:
    """Write without reading the line first; the address is a multiple of 64."""
    b = code.builder
    store = b.store(value, b.inttoptr(address, code.vector.as_pointer()), align=64)
    store.set_metadata("nontemporal", b.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))


@intrinsic  # type: ignore[untyped-decorator]  # numba carries no types
def _settle(typing_context: Any) -> Any:
    """Streamed rows are seen by other threads from here on."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


def _steps(variant: Variant, lanes: int, is_masked: bool) -> Any:
    """A numba function: the steps [begin, end) of a tile over one block of `lanes` columns."""

    def body(base: CodeGen, args: list[Any]) -> None:
        _Step(base, variant, lanes, is_masked, args).write()

    step = tile_intrinsic(variant.float_bits, len(_STEP), 0, body)
    row_bytes = lanes * variant.float_bits // 8
    o_bytes = variant.float_bits // 8

    read = PARTIAL.reader()

    @njit
    def run(arguments, scratch, c, begin, end):  # type: ignore[no-untyped-def]
        a = read(arguments)
        o = c * o_bytes
        x, out, shared = a.x + o, a.out + o, a.shared + o - a.num_sources * a.shared_row
        addend = a.addend + o if a.addend != 0 else 0
        bias = a.bias + o if a.bias != 0 else 0
        ties = a.ties + o if a.ties != 0 else 0
        slots = scratch - a.first_slot * row_bytes
        for s in range(begin, end):
            step(
                s, a.width - c, a.start, a.subtracted, a.operands, a.node, a.buffer, x, a.x_row, shared,
                a.shared_row, slots, out, a.out_row, a.source, a.target, addend, a.addend_row, a.addend_scale,
                bias, a.num_sources, a.first_slot, a.last_operand, a.is_streamed, ties, a.ties_row, a.ones,
                a.shared_counts, a.slot_counts,
            )  # fmt: skip

    return run


@functools.cache
def kernel(variant: Variant) -> Any:
    """The compiled kernel of one phase of a schedule."""
    wide, half, quarter, narrow, _ = tiles(variant.float_bits)
    steps_wide = _steps(variant, wide, False)
    steps_half = _steps(variant, half, False)
    steps_quarter = _steps(variant, quarter, False)
    steps_narrow = _steps(variant, narrow, False)
    steps_rest = _steps(variant, narrow, True)
    bound = load_index(64)

    read = PARTIAL.reader()

    @cfunc(types.void(types.CPointer(types.int64)))
    def run(arguments):  # type: ignore[no-untyped-def]
        a = read(arguments)
        scratch = a.scratch + fetch_add(a.thread_counter) * a.scratch_bytes
        while True:
            piece = next_piece(a.team, a.pieces)
            if piece >= a.pieces:
                _settle()
                break
            begin, end = bound(a.tiles, a.first_tile + piece), bound(a.tiles, a.first_tile + piece + 1)
            c = 0
            while c < a.width:
                rest = a.width - c
                if rest >= wide:
                    steps_wide(arguments, scratch, c, begin, end)
                    c += wide
                elif rest >= half:
                    steps_half(arguments, scratch, c, begin, end)
                    c += half
                elif rest >= quarter:
                    steps_quarter(arguments, scratch, c, begin, end)
                    c += quarter
                elif rest >= narrow:
                    steps_narrow(arguments, scratch, c, begin, end)
                    c += narrow
                else:
                    steps_rest(arguments, scratch, c, begin, end)
                    c += narrow

    return run
