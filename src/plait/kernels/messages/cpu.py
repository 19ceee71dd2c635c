"""Sums of known messages on the CPU, and their gradients: made in registers, added up, never written.

Rows of nodes and edges hold one or two sections of `width` columns side by side (reference.py: FORMS); a
column of a message reads that column of every section. A row is summed by one thread in edge order.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from plait.kernels.arguments import PATTERN, Arguments
from plait.kernels.messages.reference import FORMS
from plait.kernels.spmm.cpu import PREFETCH_LANES, ask_ahead
from plait.kernels.vector import CodeGen, load_index_ir, row_intrinsic

__all__ = ["SOURCES", "SUMS", "TARGETS", "sources", "sums", "targets"]

# numbers: the temperature and eps, two floats
_READS = f"{PATTERN} last_edge width numbers near[] far[] edge[]"
SUMS = Arguments(f"{_READS} out[]")
TARGETS = Arguments(f"{_READS} grad[] out[] edge_out[]")
SOURCES = Arguments(f"{_READS} order grad[] out[]")

_EDGE = {32: 87.0, 64: 708.0}  # how far from zero an exponent may be
_TERMS = {32: 9, 64: 18}  # of the series of log1p: those left out are below half a unit in the last place


def _lanes(float_bits: int, form: str) -> tuple[int, ...]:
    """Tiles of columns: those whose sums and rows stay in registers."""
    widths = (64, 32, 16) if form == "film" else (32, 16)
    return widths if float_bits == 32 else tuple(width // 2 for width in widths)


def _power(code: CodeGen, z: Any) -> Any:
    """e^z, of z as far from zero as a float reaches; NaN stays."""
    bound = code.constant(_EDGE[code.float_bits])
    least = code.constant(-_EDGE[code.float_bits])
    bounded = code.extremum("max", code.extremum("min", z, bound), least)
    return code.exp(bounded, {32: 6, 64: 13}[code.float_bits])  # good to 2 ulp


def _logistic(code: CodeGen, z: Any) -> Any:
    b, one = code.builder, code.constant(1.0)
    return b.fdiv(one, b.fadd(one, _power(code, b.fsub(code.constant(0.0), z))))


def _softplus(code: CodeGen, z: Any) -> Any:
    """max(z, 0) + log1p(u), u = e^-|z|; log1p(u) = 2 artanh(u / (2 + u)), of a third at most."""
    b, zero, two = code.builder, code.constant(0.0), code.constant(2.0)
    negative = code.extremum("min", z, b.fsub(zero, z))
    u = _power(code, negative)
    s = b.fdiv(u, b.fadd(two, u))
    square, series = b.fmul(s, s), code.constant(0.0)
    for k in range(_TERMS[code.float_bits] - 1, -1, -1):
        series = code.multiply_add(series, square, code.constant(1.0 / (2 * k + 1)))
    return b.fadd(_relu(code, z), b.fmul(two, b.fmul(s, series)))


def _relu(code: CodeGen, z: Any) -> Any:
    """max(z, 0) that keeps NaN."""
    b, zero = code.builder, code.constant(0.0)
    return b.select(b.fcmp_ordered("<=", z, zero), zero, z)


def _passed(code: CodeGen, z: Any, x: Any) -> Any:
    """x where a ReLU of z passes it on."""
    b, zero = code.builder, code.constant(0.0)
    return b.select(b.fcmp_ordered("<=", z, zero), zero, x)


class _Edge:
    """A message of one edge in registers: the sections of its rows, and what it is made with."""

    def __init__(self, code: CodeGen, form: str, near: Sequence[Any], far: Sequence[Any], numbers: Any):
        self.code, self.form, self.near, self.far, self.numbers = code, form, near, far, numbers

    def made(self) -> list[Any]:
        """The sections of the message."""
        code, b, (t, eps) = self.code, self.code.builder, self.numbers
        if self.form == "film":
            return [_relu(code, code.multiply_add(self.near[1], self.far[0], self.near[0]))]
        if self.form == "crystal":
            z0, z1 = (b.fadd(n, f) for n, f in zip(self.near, self.far, strict=True))
            return [b.fmul(_logistic(code, z0), _softplus(code, z1))]
        if self.form == "gated":
            return [b.fmul(_logistic(code, b.fadd(self.near[0], self.far[0])), self.far[1])]
        m = b.fadd(_relu(code, self.far[0]), eps)
        power = _power(code, b.fsub(b.fmul(t, m), self.near[0]))
        return [power, b.fmul(power, m)]

    def slopes(self, grad: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The gradients of near's and of far's sections; those of an edge's are far's."""
        code, b, (t, eps) = self.code, self.code.builder, self.numbers
        one = code.constant(1.0)
        if self.form == "film":
            (n0, n1), (f0,) = self.near, self.far
            d = _passed(code, code.multiply_add(n1, f0, n0), grad[0])
            return [d, b.fmul(d, f0)], [b.fmul(d, n1)]
        if self.form == "crystal":
            z0, z1 = (b.fadd(n, f) for n, f in zip(self.near, self.far, strict=True))
            s = _logistic(code, z0)
            g = b.fmul(grad[0], s)
            d0 = b.fmul(b.fmul(g, b.fsub(one, s)), _softplus(code, z1))
            d1 = b.fmul(g, _logistic(code, z1))
            return [d0, d1], [d0, d1]
        if self.form == "gated":
            s = _logistic(code, b.fadd(self.near[0], self.far[0]))
            g = b.fmul(grad[0], s)
            d = b.fmul(b.fmul(g, b.fsub(one, s)), self.far[1])
            return [d], [d, g]
        z = self.far[0]
        m = b.fadd(_relu(code, z), eps)
        power = _power(code, b.fsub(b.fmul(t, m), self.near[0]))
        # of powers: t; of messages times them: 1 + t m
        inner = code.multiply_add(grad[0], t, b.fmul(grad[1], code.multiply_add(t, m, one)))
        d = _passed(code, z, b.fmul(power, inner))
        return [d], [d]


class _Reader:
    """Rows of sections side by side, read on one tile of columns."""

    def __init__(self, code: CodeGen, mask: Any, across: Any, numbers: Any):
        self.code, self.mask, self.across = code, mask, across
        self.numbers = [self._number(numbers, k) for k in range(2)]

    def _number(self, numbers: Any, k: int) -> Any:
        b = self.code.builder
        where = b.inttoptr(numbers, self.code.scalar.as_pointer())
        return self.code.splat(b.load(b.gep(where, [self.code.word(k)])))

    def row(self, address: Any, sections: int) -> list[Any]:
        """The sections of the row at an address."""
        b = self.code.builder
        places = [b.add(address, b.mul(self.across, self.code.word(k))) for k in range(sections)]
        return [self.code.load(place, self.mask) for place in places]

    def nth(self, rows: Any, stride: Any, k: Any, sections: int) -> list[Any]:
        """The sections of row k."""
        b = self.code.builder
        return self.row(b.add(rows, b.mul(k, stride)), sections)

    def with_edge(self, far: list[Any], edge: Any, stride: Any, e: Any) -> list[Any]:
        """The sections of the source's row and of the edge's own added up."""
        own = self.nth(edge, stride, e, len(far))
        return [self.code.builder.fadd(p, q) for p, q in zip(far, own, strict=True)]

    def store(self, values: Sequence[Any], address: Any) -> None:
        """Write the sections of a row."""
        b = self.code.builder
        for k, value in enumerate(values):
            self.code.store(value, b.add(address, b.mul(self.across, self.code.word(k))), self.mask)


def _ask(code: CodeGen, index: Any, e: Any, last: Any, rows: list[tuple[Any, Any]]) -> None:
    if code.lanes >= PREFETCH_LANES[code.float_bits]:
        ask_ahead(code, index, e, last, rows)


def _plus(code: CodeGen, totals: list[Any], terms: Sequence[Any]) -> list[Any]:
    return [code.builder.fadd(total, term) for total, term in zip(totals, terms, strict=True)]


def _sum_row(float_bits: int, index_bits: int, form: str, has_edges: bool) -> Any:
    """words: near far far_stride edge edge_stride indices start end out across numbers last width."""
    of_near, of_far, _, of_out = FORMS[form]

    def body(code: CodeGen, args: list[Any], count: Any) -> None:
        near, far, far_stride, edge, edge_stride, indices, start, end, out, across, numbers, last = args
        read, index = (
            _Reader(code, code.mask(count), across, numbers), load_index_ir(code, indices, index_bits),
        )  # fmt: skip
        own = read.row(near, of_near)

        def step(e: Any, totals: list[Any]) -> list[Any]:
            _ask(code, index, e, last, [(far, far_stride)])
            rows = read.nth(far, far_stride, index(e), of_far)
            rows = read.with_edge(rows, edge, edge_stride, e) if has_edges else rows
            return _plus(code, totals, _Edge(code, form, own, rows, read.numbers).made())

        read.store(code.loop(start, end, [code.constant(0.0)] * of_out, step), out)

    moving = dict.fromkeys((0, 1, 3, 8), float_bits)
    return row_intrinsic(float_bits, 13, 0, moving, body, _lanes(float_bits, form))


def _target_row(float_bits: int, index_bits: int, form: str, has_edges: bool) -> Any:
    """words: near far far_stride edge edge_stride indices start end grad out edge_out edge_out_stride across
    numbers last width; out and edge_out may be 0."""
    of_near, of_far, _, of_out = FORMS[form]

    def body(code: CodeGen, args: list[Any], count: Any) -> None:
        near, far, far_stride, edge, edge_stride, indices, start, end, grad, out = args[:10]
        edge_out, edge_out_stride, across, numbers, last = args[10:]
        b, read = code.builder, _Reader(code, code.mask(count), across, numbers)
        index = load_index_ir(code, indices, index_bits)
        own, given = read.row(near, of_near), read.row(grad, of_out)

        def step(e: Any, totals: list[Any]) -> list[Any]:
            _ask(code, index, e, last, [(far, far_stride)])
            rows = read.nth(far, far_stride, index(e), of_far)
            rows = read.with_edge(rows, edge, edge_stride, e) if has_edges else rows
            to_near, to_far = _Edge(code, form, own, rows, read.numbers).slopes(given)
            if has_edges:
                with b.if_then(code.is_given(edge_out)):
                    read.store(to_far, b.add(edge_out, b.mul(e, edge_out_stride)))
            return _plus(code, totals, to_near)

        totals = code.loop(start, end, [code.constant(0.0)] * of_near, step)
        with b.if_then(code.is_given(out)):
            read.store(totals, out)

    moving = dict.fromkeys((0, 1, 3, 8, 9, 10), float_bits)
    return row_intrinsic(float_bits, 16, 0, moving, body, _lanes(float_bits, form))


def _source_row(float_bits: int, index_bits: int, form: str, has_edges: bool) -> Any:
    """words: far near near_stride edge edge_stride order indices start end grad grad_stride out across
    numbers last width."""
    of_near, of_far, _, of_out = FORMS[form]

    def body(code: CodeGen, args: list[Any], count: Any) -> None:
        far, near, near_stride, edge, edge_stride, order, indices, start, end, grad, grad_stride = args[:11]
        out, across, numbers, last = args[11:]
        read, index = (
            _Reader(code, code.mask(count), across, numbers), load_index_ir(code, indices, index_bits),
        )  # fmt: skip
        place, own = load_index_ir(code, order, index_bits), read.row(far, of_far)

        def step(e: Any, totals: list[Any]) -> list[Any]:
            _ask(code, index, e, last, [(near, near_stride), (grad, grad_stride)])
            i = index(e)
            rows = read.with_edge(own, edge, edge_stride, place(e)) if has_edges else own
            near_rows, given = (
                read.nth(near, near_stride, i, of_near), read.nth(grad, grad_stride, i, of_out),
            )  # fmt: skip
            _, to_far = _Edge(code, form, near_rows, rows, read.numbers).slopes(given)
            return _plus(code, totals, to_far)

        read.store(code.loop(start, end, [code.constant(0.0)] * of_far, step), out)

    moving = dict.fromkeys((0, 1, 3, 9, 11), float_bits)
    return row_intrinsic(float_bits, 16, 0, moving, body, _lanes(float_bits, form))


@functools.cache
def sums(float_bits: int, index_bits: int, form: str, has_edges: bool) -> Any:
    """out[i] = the sum of the messages of row i's edges."""
    row, size = _sum_row(float_bits, index_bits, form, has_edges), float_bits // 8

    def each(a: Any, i: Any, start: Any, end: Any) -> None:
        row(a.near + i * a.near_row, a.far, a.far_row, a.edge, a.edge_row, a.indices, start, end,
            a.out + i * a.out_row, a.width * size, a.numbers, a.last_edge, a.width)  # fmt: skip

    return SUMS.row_kernel(index_bits, each)


@functools.cache
def targets(float_bits: int, index_bits: int, form: str, has_edges: bool) -> Any:
    """The gradients of the targets' rows and of the edges', where they are asked for."""
    row, size = _target_row(float_bits, index_bits, form, has_edges), float_bits // 8

    def each(a: Any, i: Any, start: Any, end: Any) -> None:
        row(a.near + i * a.near_row, a.far, a.far_row, a.edge, a.edge_row, a.indices, start, end,
            a.grad + i * a.grad_row, a.out + i * a.out_row, a.edge_out, a.edge_out_row, a.width * size,
            a.numbers, a.last_edge, a.width)  # fmt: skip

    return TARGETS.row_kernel(index_bits, each)


@functools.cache
def sources(float_bits: int, index_bits: int, form: str, has_edges: bool) -> Any:
    """The gradients of the sources' rows, on the transpose."""
    row, size = _source_row(float_bits, index_bits, form, has_edges), float_bits // 8

    def each(a: Any, j: Any, start: Any, end: Any) -> None:
        row(a.far + j * a.far_row, a.near, a.near_row, a.edge, a.edge_row, a.order, a.indices, start, end,
            a.grad, a.grad_row, a.out + j * a.out_row, a.width * size, a.numbers, a.last_edge,
            a.width)  # fmt: skip

    return SOURCES.row_kernel(index_bits, each)
