"""Vector code for numba kernels: the pieces of LLVM IR that the row loops are built from.

numba compiles the loops over rows; what happens inside a row (a tile of columns held in vector registers
while the neighbours go by) is written here as LLVM vectors, because a loop over columns is not kept in
registers across the loop over edges otherwise. LLVM splits a <64 x float> over whatever registers
the machine has, so one description serves AVX-512, AVX2 and NEON. Addresses travel as int64 words.
"""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

__all__ = [
    "I32", "I64", "LINE", "CodeGen", "fetch_add", "group_reader", "lane", "load_index", "load_index_ir",
    "load_scalar", "next_piece", "next_rows", "one_tile", "row_intrinsic", "thread_rank", "tile_intrinsic",
    "tiles", "tuple_reader",
]  # fmt: skip

LINE = 64  # bytes; counters of different threads lie so far apart

I8, I32, I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_FLOATS = {32: ir.FloatType(), 64: ir.DoubleType()}
_NUMPY = {32: types.float32, 64: types.float64}


def tiles(float_bits: int) -> tuple[int, ...]:
    """Column tiles from wide to narrow, in lanes; the last one is loaded under a mask."""
    return (128, 64, 32, 16, 16) if float_bits == 32 else (64, 32, 16, 8, 8)


def lane(float_bits: int) -> ir.Type:
    return _FLOATS[float_bits]


def load_index(index_bits: int) -> Any:
    """A numba function: the index at position i of the array at an address, as int64."""
    kind = ir.IntType(index_bits)

    @intrinsic  # type: ignore[untyped-decorator]  # numba carries no types
    def load(typing_context: Any, address: Any, i: Any) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
            where = builder.gep(builder.inttoptr(args[0], kind.as_pointer()), [args[1]])
            value = builder.load(where)
            return value if index_bits == 64 else builder.sext(value, I64)

        return types.int64(types.int64, types.int64), generate

    return load


@intrinsic  # type: ignore[untyped-decorator]  # numba carries no types
def fetch_add(typing_context: Any, counter: Any) -> Any:
    """What the counter at this address held; it holds one more now, and no other thread got the same."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        where = builder.inttoptr(args[0], I64.as_pointer())
        return builder.atomic_rmw("add", where, ir.Constant(I64, 1), "monotonic")

    return types.int64(types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]  # numba carries no types
def _rank(typing_context: Any, function: Any) -> Any:
    """What the C function at this address says: this thread's number in its team."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(I32, [])
        return builder.sext(builder.call(builder.inttoptr(args[0], kind.as_pointer()), []), I64)

    return types.int64(types.int64), generate


_word = load_index(64)


@njit(inline="never")  # type: ignore[untyped-decorator]
def thread_rank(team: Any) -> Any:
    """This thread's number in its team; 0 for all where nothing numbers them."""
    function = _word(team, 1)
    return 0 if function == 0 else _rank(function)


@njit(inline="never")  # type: ignore[untyped-decorator]
def next_piece(team: Any, pieces: Any) -> Any:
    """The next piece of work for this thread, `pieces` when all are taken; see kernels/arguments.py.

    A thread takes the pieces of its own part in order, then what is left of the others'. In the next kernel
    it takes the same part again: rows it wrote, or read, are in its own caches still. With one counter for
    all, half the rows of every step came out of the other core's cache.
    """
    threads, rank = _word(team, 0), thread_rank(team)
    for k in range(threads):
        part = (rank + k) % threads
        first, last = part * pieces // threads, (part + 1) * pieces // threads
        piece = first + fetch_add(team + LINE * (part + 1))
        if piece < last:
            return piece
    return pieces


@njit(inline="never")  # type: ignore[untyped-decorator]
def next_rows(team: Any, rows: Any, height: Any) -> Any:
    """The first of the next `height` rows for this thread; `rows` or more when all are taken."""
    return next_piece(team, (rows + height - 1) // height) * height


def tuple_reader(names: tuple[str, ...]) -> Any:
    """A numba function of a block of words: its first ones as a tuple with these names."""
    fields, load = _named_words(names)

    @intrinsic  # type: ignore[untyped-decorator]  # numba carries no types
    def read(typing_context: Any, block: Any) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
            return load(context, builder, args[0], ir.Constant(I64, 0))

        return fields(types.CPointer(types.int64)), generate

    return read


def group_reader(names: tuple[str, ...], first: int) -> Any:
    """A numba function of a block and k: the k-th run of this many words behind `first`, with these names."""
    fields, load = _named_words(names)

    @intrinsic  # type: ignore[untyped-decorator]
    def read(typing_context: Any, block: Any, k: Any) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
            start = builder.mul(args[1], ir.Constant(I64, len(names)))
            return load(context, builder, args[0], builder.add(start, ir.Constant(I64, first)))

        return fields(types.CPointer(types.int64), types.int64), generate

    return read


def _named_words(names: tuple[str, ...]) -> tuple[Any, Callable[..., Any]]:
    """(numba's type of a named tuple of words, what writes the code that loads it)."""
    fields = types.NamedUniTuple(types.int64, len(names), namedtuple("Words", names))

    def load(context: Any, builder: ir.IRBuilder, block: Any, start: Any) -> Any:
        places = [builder.add(start, ir.Constant(I64, k)) for k in range(len(names))]
        return context.make_tuple(builder, fields, [builder.load(builder.gep(block, [at])) for at in places])

    return fields, load


def load_scalar(float_bits: int) -> Any:
    """A numba function: element i of the float array at an address, or 1 where the address is 0."""
    kind, numba_kind = _FLOATS[float_bits], _NUMPY[float_bits]

    @intrinsic  # type: ignore[untyped-decorator]  # numba carries no types
    def load(typing_context: Any, address: Any, i: Any) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
            code = CodeGen(builder, float_bits, 1)
            one = ir.Constant(kind, 1.0)

            def present() -> Any:
                return builder.load(builder.gep(builder.inttoptr(args[0], kind.as_pointer()), [args[1]]))

            return code.either(code.is_given(args[0]), present, one)

        return numba_kind(types.int64, types.int64), generate

    return load


def tile_intrinsic(
    float_bits: int, words: int, scalars: int, body: Callable[[CodeGen, list[Any]], None]
) -> Any:
    """A numba function of `words` int64 and then `scalars` float arguments whose code `body` writes."""
    signature = types.void(*[types.int64] * words, *[_NUMPY[float_bits]] * scalars)
    names = ", ".join(f"a{i}" for i in range(words + scalars))

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        body(CodeGen(builder, float_bits, 1), list(args))
        return context.get_dummy_value()

    # numba reads the argument count off the Python signature, so it has to be spelled out
    scope: dict[str, Any] = {"signature": signature, "generate": generate}
    exec(f"def tile(typing_context, {names}):\n    return signature, generate", scope)
    return intrinsic(scope["tile"])


def row_intrinsic(
    float_bits: int,
    words: int,
    scalars: int,
    moving: Mapping[int, int],
    body: Callable[[CodeGen, list[Any], Any], None],
    lanes: Sequence[int] | None = None,
) -> Any:
    """A numba function that walks the columns of a row in tiles, from wide to narrow, the rest under a mask.

    Its last word is the number of columns. `moving` are the words that go along with them: addresses, and the
    bits that a column takes there; one that is 0 stays 0. `body` writes the code of one tile of `code.lanes`
    columns from the other arguments, and from how many of these columns there are (None: all of them).
    `lanes` (those of `tiles` else) are powers of two, each half of the one before.
    """
    widths = tiles(float_bits)[:-1] if lanes is None else lanes

    def row(code: CodeGen, args: list[Any]) -> None:
        b, width, given = code.builder, args[words - 1], [*args[: words - 1], *args[words:]]

        def tile(column: Any, lanes: int, count: Any = None) -> None:
            moved = list(given)
            for k, bits in moving.items():
                there = b.add(given[k], b.lshr(b.mul(column, code.word(bits)), code.word(3)))
                moved[k] = b.select(code.is_given(given[k]), there, code.word(0))
            body(code.of(lanes), moved, count)

        def wide(k: Any, carried: list[Any]) -> list[Any]:
            tile(b.mul(k, code.word(widths[0])), widths[0])
            return carried

        code.loop(code.word(0), b.sdiv(width, code.word(widths[0])), [], wide)
        for narrower in widths[1:]:  # each is there once or not at all
            with b.if_then(code.is_given(b.and_(width, code.word(narrower)))):
                tile(b.and_(width, code.word(-2 * narrower)), narrower)
        rest = b.and_(width, code.word(widths[-1] - 1))
        with b.if_then(code.is_given(rest)):
            tile(b.sub(width, rest), widths[-1], rest)

    return tile_intrinsic(float_bits, words, scalars, row)


def one_tile(
    float_bits: int,
    words: int,
    scalars: int,
    body: Callable[[CodeGen, list[Any], Any], None],
    lanes: int,
    is_masked: bool,
) -> Any:
    """As `row_intrinsic`, for rows of `lanes` columns, or of fewer if they are masked: there is no ladder."""

    def row(code: CodeGen, args: list[Any]) -> None:
        given = [*args[: words - 1], *args[words:]]
        body(code.of(lanes), given, args[words - 1] if is_masked else None)

    return tile_intrinsic(float_bits, words, scalars, row)


class CodeGen:
    """An LLVM builder with the few moves the row loops need."""

    def __init__(self, builder: ir.IRBuilder, float_bits: int, lanes: int):
        self.builder = builder
        self.float_bits = float_bits
        self.lanes = lanes
        self.scalar = _FLOATS[float_bits]
        self.vector = ir.VectorType(self.scalar, lanes)

    def of(self, lanes: int) -> CodeGen:
        return CodeGen(self.builder, self.float_bits, lanes)

    def word(self, value: int) -> ir.Constant:
        return ir.Constant(I64, value)

    def is_given(self, address: Any) -> Any:
        return self.builder.icmp_signed("!=", address, self.word(0))

    def constant(self, value: float) -> ir.Constant:
        return ir.Constant(self.vector, [value] * self.lanes)

    def splat(self, value: Any) -> Any:
        return self.splat_of(value, self.vector)

    def splat_of(self, value: Any, vector: ir.VectorType) -> Any:
        """A number in all lanes of a vector of another type than rows have."""
        undefined = ir.Constant(vector, ir.Undefined)
        first = self.builder.insert_element(undefined, value, ir.Constant(I32, 0))
        zeros = ir.Constant(ir.VectorType(I32, self.lanes), [0] * self.lanes)
        return self.builder.shuffle_vector(first, undefined, zeros)

    def multiply_add(self, a: Any, b: Any, c: Any) -> Any:
        """a*b + c, contracted to one instruction where the machine has it; NaN and infinity are kept."""
        return self.builder.fadd(self.builder.fmul(a, b, flags=("contract",)), c, flags=("contract",))

    def exp(self, z: Any, degree: int) -> Any:
        """e^z within +-87 (float64: +-708): 2^n times a Taylor polynomial of the rest, ln 2 / 2 at most."""
        b, bits = self.builder, self.float_bits
        magic, bias, shift = {32: (12582912.0, 127, 23), 64: (6755399441055744.0, 1023, 52)}[bits]
        # ln 2 in two parts, the first with trailing zeros, so that n times it is exact
        high = {32: 0.693359375, 64: 0.6931471803691238}[bits]
        low = math.log(2) - high if bits == 32 else 1.9082149292705877e-10
        whole = ir.VectorType(ir.IntType(bits), self.lanes)
        shifted = self.multiply_add(z, self.constant(math.log2(math.e)), self.constant(magic))
        n = b.fsub(shifted, self.constant(magic))
        r = self.multiply_add(n, self.constant(-high), z)
        r = self.multiply_add(n, self.constant(-low), r)
        result = self.constant(1.0 / math.factorial(degree))
        for k in range(degree - 1, -1, -1):
            result = self.multiply_add(result, r, self.constant(1.0 / math.factorial(k)))
        exponent = b.add(b.bitcast(shifted, whole), ir.Constant(whole, [bias] * self.lanes))
        power = b.bitcast(b.shl(exponent, ir.Constant(whole, [shift] * self.lanes)), self.vector)
        return b.fmul(result, power)

    def mask(self, count: Any) -> Any:
        """Lanes below `count`; None, which stands for no mask, for None."""
        if count is None:
            return None
        numbers = ir.Constant(ir.VectorType(I64, self.lanes), list(range(self.lanes)))
        return self.builder.icmp_signed("<", numbers, self.splat_of(count, numbers.type))

    def load(self, address: Any, mask: Any = None) -> Any:
        where = self.builder.inttoptr(address, self.vector.as_pointer())
        if mask is None:
            return self.builder.load(where, align=self.float_bits // 8)
        kind = ir.FunctionType(self.vector, [where.type, I32, mask.type, self.vector])
        function = self.builder.module.declare_intrinsic(
            f"llvm.masked.load.v{self.lanes}f{self.float_bits}.p0", fnty=kind
        )
        align = ir.Constant(I32, self.float_bits // 8)
        return self.builder.call(function, [where, align, mask, self.constant(0.0)])

    def store(self, value: Any, address: Any, mask: Any = None) -> None:
        where = self.builder.inttoptr(address, self.vector.as_pointer())
        if mask is None:
            self.builder.store(value, where, align=self.float_bits // 8)
            return
        kind = ir.FunctionType(ir.VoidType(), [self.vector, where.type, I32, mask.type])
        function = self.builder.module.declare_intrinsic(
            f"llvm.masked.store.v{self.lanes}f{self.float_bits}.p0", fnty=kind
        )
        self.builder.call(function, [value, where, ir.Constant(I32, self.float_bits // 8), mask])

    def extremum(self, name: str, a: Any, b: Any) -> Any:
        """Element-wise max or min that keeps NaN, as torch does.

        Compared and chosen by hand: `llvm.maximum` also tells -0 from 0 and takes three times as long.
        """
        is_better = self.builder.fcmp_ordered(">" if name == "max" else "<", b, a)
        return self.builder.select(self.builder.or_(is_better, self.is_nan(b)), b, a)

    def is_nan(self, a: Any) -> Any:
        return self.builder.fcmp_unordered("uno", a, a)

    def prefetch(self, address: Any, bytes_ahead: int, level: int = 3, is_written: bool = False) -> None:
        """Ask for the bytes from an address on, to read or write; level 3: all caches, 2: not the first."""
        pointer = I8.as_pointer()
        function = self.builder.module.declare_intrinsic(
            "llvm.prefetch.p0", fnty=ir.FunctionType(ir.VoidType(), [pointer, I32, I32, I32])
        )
        for offset in range(0, bytes_ahead, 64):
            where = self.builder.inttoptr(self.builder.add(address, self.word(offset)), pointer)
            self.builder.call(function, [where] + [ir.Constant(I32, k) for k in (int(is_written), level, 1)])

    def ask_ahead(self, rows: list[tuple[Any, Any]], index: Any, i: Any, last: Any, ahead: int) -> None:
        """Ask for the (start, stride) rows of the edge `ahead` places on, beyond the row's own end too."""
        b = self.builder
        later = b.add(i, self.word(ahead))
        j = index(b.select(b.icmp_signed("<", later, last), later, last))
        for start, stride in rows:
            self.prefetch(b.add(start, b.mul(j, stride)), self.lanes * self.float_bits // 8)

    def either(self, condition: Any, value: Callable[[], Any], otherwise: Any) -> Any:
        """`value()` where the condition holds, `otherwise` (already computed) where not."""
        before = self.builder.block
        yes, after = self.builder.append_basic_block("yes"), self.builder.append_basic_block("after")
        self.builder.cbranch(condition, yes, after)
        self.builder.position_at_end(yes)
        result = value()
        came_from = self.builder.block
        self.builder.branch(after)
        self.builder.position_at_end(after)
        merged = self.builder.phi(result.type)
        merged.add_incoming(result, came_from)
        merged.add_incoming(otherwise, before)
        return merged

    def loop(
        self,
        start: Any,
        end: Any,
        carried: list[Any],
        body: Callable[[Any, list[Any]], list[Any]],
        is_short: bool = False,
    ) -> list[Any]:
        """for i in range(start, end): carried = body(i, carried); returns the last carried values.

        LLVM unrolls loops by up to 8 and branches on what is left over: a waste where it `is_short`.
        """
        before = self.builder.block
        head, inside, done = (self.builder.append_basic_block(name) for name in ("head", "inside", "done"))
        self.builder.branch(head)
        self.builder.position_at_end(head)
        i = self.builder.phi(I64)
        i.add_incoming(start, before)
        slots = [self.builder.phi(value.type) for value in carried]
        for slot, value in zip(slots, carried, strict=True):
            slot.add_incoming(value, before)
        self.builder.cbranch(self.builder.icmp_signed("<", i, end), inside, done)
        self.builder.position_at_end(inside)
        updated = body(i, list(slots))
        i.add_incoming(self.builder.add(i, self.word(1)), self.builder.block)
        for slot, value in zip(slots, updated, strict=True):
            slot.add_incoming(value, self.builder.block)
        back = self.builder.branch(head)
        if is_short:
            back.set_metadata("llvm.loop", self._as_it_is())
        self.builder.position_at_end(done)
        return list(slots)

    def _as_it_is(self) -> Any:
        """What tells LLVM not to unroll a loop: a node that names itself first, as every loop's does."""
        module = self.builder.module
        wish = module.add_metadata(["llvm.loop.unroll.disable"])
        loop = module.add_metadata([wish])
        loop.operands = (loop, wish)
        return loop


def load_index_ir(code: CodeGen, indices: Any, index_bits: int) -> Any:
    """i -> indices[i] as an int64 IR value, for code already inside a tile."""
    pointer = code.builder.inttoptr(indices, ir.IntType(index_bits).as_pointer())

    def index(i: Any) -> Any:
        value = code.builder.load(code.builder.gep(pointer, [i]))
        return value if index_bits == 64 else code.builder.sext(value, I64)

    return index
