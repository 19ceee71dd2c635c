"""Float rows in half the bytes: rounded once to float16 or bfloat16, float32 again where they are used.

Narrow rows are arrays of uint16 that hold the bits; numpy has no bfloat16.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from plait.errors import InputError
from plait.features.rows import Row, Rows, place, row_of
from plait.graph.compiled import compiled

__all__ = ["BITS", "PRECISIONS", "NarrowRows", "check_precision", "narrowed", "narrowed_features", "widened"]

Array = NDArray[Any]

PRECISIONS = ("float16", "bfloat16")
BITS = np.dtype(np.uint16)  # what a narrow number is kept in

_BLOCK_ROWS = 1 << 14
_LEAST_NORMAL = 2.0**-14  # of float16; smaller numbers have fewer bits still
# A float16 moved up to the place of a float32's exponent is too small by this, subnormal ones too.
_SCALE = 2.0**112


def check_precision(name: str, given: str | None) -> None:
    """InputError where `given`, the argument called `name`, is none of the narrow types and not None."""
    if given is not None and given not in PRECISIONS:
        raise InputError(f"{name}={given!r} is unknown; choose float16 or bfloat16, or leave it out")


def narrowed(rows: Array, precision: str) -> Array:
    """The bits of float32 rows, rounded to nearest; InputError where float16 cannot hold a finite number."""
    if rows.dtype != np.float32:
        raise InputError(
            f"rows of type {rows.dtype} are not rounded to {precision}: whole numbers would change; "
            "give float32 features, or leave the precision out"
        )
    if precision == "bfloat16":
        return _to_bfloat16(rows)
    with np.errstate(over="ignore"):
        half = rows.astype(np.float16)
    if bool((np.isinf(half) & np.isfinite(rows)).any()):
        largest = float(np.abs(rows[np.isfinite(rows)]).max())
        raise InputError(
            f"features reach {largest:.6g}, float16 only 65504; choose bfloat16, or scale the features"
        )
    return half.view(BITS)


def narrowed_features(rows: Array, precision: str) -> Array:
    """As `narrowed`, a block at a time; features too small to keep float16's eleven bits are refused too."""
    out = np.empty(rows.shape, BITS)
    largest = 0.0
    for begin in range(0, rows.shape[0], _BLOCK_ROWS):
        block = np.asarray(rows[begin : begin + _BLOCK_ROWS])
        out[begin : begin + _BLOCK_ROWS] = narrowed(block, precision)
        largest = max(largest, float(np.nan_to_num(np.abs(block)).max(initial=0.0)))
    if precision == "float16" and 0 < largest < _LEAST_NORMAL:
        raise InputError(
            f"no feature is larger than {largest:.3g}, and float16 loses bits below {_LEAST_NORMAL:.3g}; "
            "choose bfloat16, or scale the features"
        )
    return out


def widened(bits: Array, precision: str, out: Array | None = None) -> Array:
    """The float32 numbers of narrow rows, in `out` where it is given; without the interpreter lock."""
    if out is None:
        out = np.empty(bits.shape, np.float32)
    if not (bits.flags.c_contiguous and out.flags.c_contiguous):
        out[...] = widened(np.ascontiguousarray(bits), precision)
        return out
    flat, wide = bits.reshape(-1), out.reshape(-1)
    if precision == "bfloat16":
        _from_bfloat16(flat, wide.view(np.uint32))
    else:
        _from_float16(flat, wide.view(np.uint32))
    return out


class NarrowRows:
    """The rows of a source of float32 rows, rounded."""

    def __init__(self, rows: Rows, precision: str) -> None:
        self._rows, self.precision = rows, precision
        self.num_rows = rows.num_rows

    @property
    def row(self) -> Row | None:
        """That of the source, narrow."""
        known = row_of(self._rows)
        return None if known is None else (known[0], BITS)

    def take(self, ids: Array) -> Array:
        """A fresh array whose row i is row ids[i]."""
        return narrowed(self._rows.take(ids), self.precision)

    def place(self, ids: Array, at: Array, out: Array) -> None:
        """out[at] = the rows of `ids`."""
        place(self.take(ids), np.arange(ids.size), at, out)


def _to_bfloat16(rows: Array) -> Array:
    """Upper halves, ties to even; what is not a number stays none."""
    words = np.ascontiguousarray(rows).view(np.uint32)
    odd = (words >> np.uint32(16)) & np.uint32(1)
    upper = ((words + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(BITS)
    upper[np.isnan(rows)] = 0x7FC0
    return upper


@compiled
def _from_bfloat16(bits: Any, words: Any) -> None:
    for i in range(bits.size):
        words[i] = np.uint32(bits[i]) << np.uint32(16)


@intrinsic  # type: ignore[untyped-decorator]
def _scaled(typing_context: Any, word: Any) -> Any:
    """The bits of the float32 with the bits `word`, times 2**112; numba has no word for the same bits."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        number = builder.bitcast(args[0], ir.FloatType())
        return builder.bitcast(builder.fmul(number, ir.FloatType()(_SCALE)), ir.IntType(32))

    return types.uint32(types.uint32), build


@compiled
def _from_float16(bits: Any, words: Any) -> None:
    """Exponent and fraction moved up and scaled, then the sign."""
    for i in range(bits.size):
        half = np.uint32(bits[i])
        small = _scaled((half & np.uint32(0x7FFF)) << np.uint32(13))
        # infinities and what is not a number came out as 2**16 and more: their exponent is all ones
        special = np.uint32(0x7F800000) if half & np.uint32(0x7C00) == np.uint32(0x7C00) else np.uint32(0)
        words[i] = small | ((half & np.uint32(0x8000)) << np.uint32(16)) | special
