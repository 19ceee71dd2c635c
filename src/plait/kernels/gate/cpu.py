"""Gated sums over edges on the CPU: act(near[i] + far[j]) * value[j], without a row per edge.

Forward goes over targets and, in training, also sums the gate's derivative: the gradient of the
target's part is then grad times that sum, so backward needs one more pass only, over sources. A row is summed
by one thread in edge order, so the bits do not depend on the number of threads.

kind: sigmoid (value gathered with far) or relu (no value: the message is the gate itself).
"""

from __future__ import annotations

import functools
from typing import Any

from plait.kernels.arguments import PATTERN, Arguments
from plait.kernels.vector import CodeGen, load_index_ir, row_intrinsic

__all__ = ["FORWARD", "SOURCES", "forward", "sources"]

_EDGES = f"{PATTERN} last_edge width"
FORWARD = Arguments(f"{_EDGES} near[] far[] value[] out[] slopes[] addend[] bias")
SOURCES = Arguments(f"{_EDGES} own[] value[] near[] grad[] far_out[] value_out[]")

_AHEAD = 8  # edges


def _gate(code: CodeGen, kind: str, z: Any) -> tuple[Any, Any]:
    """(act(z), its derivative)."""
    b = code.builder
    zero, one = code.constant(0.0), code.constant(1.0)
    if kind == "relu":
        is_shut = b.fcmp_ordered("<=", z, zero)
        # maximum, not select: NaN stays NaN, as in torch, whose gradient passes it too
        return code.extremum("max", z, zero), b.select(is_shut, zero, one)
    edge = {32: 87.0, 64: 708.0}[code.float_bits]
    bounded = code.extremum(
        "max", code.extremum("min", b.fsub(zero, z), code.constant(edge)), code.constant(-edge)
    )
    t = code.exp(bounded, {32: 6, 64: 13}[code.float_bits])  # good to 2 ulp
    s = b.fdiv(one, b.fadd(one, t))
    return s, b.fmul(s, b.fmul(s, t))  # 1 - s = s t, without the cancellation


def _forward_row(float_bits: int, index_bits: int, kind: str, mode: str) -> Any:
    """One target's row; mode: sum, both (and the derivative's sum) or slopes (that one alone).

    words: near far far_row value value_row indices start end last out slopes addend bias width.
    """

    def body(code: CodeGen, args: list[Any], count: Any) -> None:
        b, mask = code.builder, code.mask(count)
        near, far, far_row, value, value_row, indices, start, end, last, out, slopes, addend, bias = args
        index = load_index_ir(code, indices, index_bits)
        own, zero = code.load(near, mask), code.constant(0.0)
        has_value = kind == "sigmoid"
        gathered = [(far, far_row), *([(value, value_row)] if has_value else [])]

        def step(i: Any, sums: list[Any]) -> list[Any]:
            j = index(i)
            code.ask_ahead(gathered, index, i, last, _AHEAD)
            act, slope = _gate(code, kind, b.fadd(own, code.load(b.add(far, b.mul(j, far_row)), mask)))
            wanted = {"sum": [act], "both": [act, slope], "slopes": [slope]}[mode]
            if not has_value:
                return [b.fadd(total, term) for total, term in zip(sums, wanted, strict=True)]
            worth = code.load(b.add(value, b.mul(j, value_row)), mask)
            return [code.multiply_add(worth, term, total) for total, term in zip(sums, wanted, strict=True)]

        sums = code.loop(start, end, [zero] * (2 if mode == "both" else 1), step)
        if mode != "sum":
            code.store(sums[-1], slopes, mask)
        if mode == "slopes":
            return
        total = sums[0]
        total = code.either(code.is_given(addend), functools.partial(_plus, code, total, addend, mask), total)
        total = code.either(code.is_given(bias), functools.partial(_plus, code, total, bias, mask), total)
        code.store(total, out, mask)

    moving = dict.fromkeys((0, 1, 3, 9, 10, 11, 12), float_bits)
    return row_intrinsic(float_bits, 14, 0, moving, body, _lanes(float_bits))


def _plus(code: CodeGen, total: Any, address: Any, mask: Any) -> Any:
    return code.builder.fadd(total, code.load(address, mask))


def _source_row(float_bits: int, index_bits: int, kind: str) -> Any:
    """One source's row: far_out = value * sum of grad act', value_out = sum of grad act.

    words: own value near near_row grad grad_row indices start end last far_out value_out width.
    """

    def body(code: CodeGen, args: list[Any], count: Any) -> None:
        b, mask = code.builder, code.mask(count)
        own, value, near, near_row, grad, grad_row, indices, start, end, last, far_out, value_out = args
        index = load_index_ir(code, indices, index_bits)
        mine, zero = code.load(own, mask), code.constant(0.0)
        has_value = kind == "sigmoid"

        def step(i: Any, sums: list[Any]) -> list[Any]:
            j = index(i)
            code.ask_ahead([(near, near_row), (grad, grad_row)], index, i, last, _AHEAD)
            act, slope = _gate(code, kind, b.fadd(mine, code.load(b.add(near, b.mul(j, near_row)), mask)))
            g = code.load(b.add(grad, b.mul(j, grad_row)), mask)
            terms = [slope, act] if has_value else [slope]
            return [code.multiply_add(g, term, total) for total, term in zip(sums, terms, strict=True)]

        sums = code.loop(start, end, [zero] * (2 if has_value else 1), step)
        if has_value:
            code.store(b.fmul(code.load(value, mask), sums[0]), far_out, mask)
            code.store(sums[1], value_out, mask)
        else:
            code.store(sums[0], far_out, mask)

    moving = dict.fromkeys((0, 1, 2, 4, 10, 11), float_bits)
    return row_intrinsic(float_bits, 13, 0, moving, body, _lanes(float_bits))


def _lanes(float_bits: int) -> tuple[int, ...]:
    """Columns of a tile: four vector registers of 512 bits, two or one."""
    return 2048 // float_bits, 1024 // float_bits, 512 // float_bits


def forward(float_bits: int, index_bits: int, kind: str, mode: str) -> Any:
    """out[i] = sum of act(near[i] + far[j]) * value[j] + addend[i] + bias; slopes[i] with act'."""
    row = _forward_row(float_bits, index_bits, kind, mode)

    def each(a: Any, i: Any, start: Any, end: Any) -> None:
        plus = a.addend + i * a.addend_row if a.addend != 0 else 0
        to, slopes = a.out + i * a.out_row, a.slopes + i * a.slopes_row
        row(a.near + i * a.near_row, a.far, a.far_row, a.value, a.value_row, a.indices, start, end,
            a.last_edge, to, slopes, plus, a.bias, a.width)  # fmt: skip

    return FORWARD.row_kernel(index_bits, each)


def sources(float_bits: int, index_bits: int, kind: str) -> Any:
    """Gradients seen from the sources, on the transpose: of far and, where there is one, of value."""
    row = _source_row(float_bits, index_bits, kind)

    def each(a: Any, j: Any, start: Any, end: Any) -> None:
        row(a.own + j * a.own_row, a.value + j * a.value_row, a.near, a.near_row, a.grad, a.grad_row,
            a.indices, start, end, a.last_edge, a.far_out + j * a.far_out_row,
            a.value_out + j * a.value_out_row, a.width)  # fmt: skip

    return SOURCES.row_kernel(index_bits, each)
