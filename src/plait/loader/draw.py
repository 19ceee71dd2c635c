"""Counter-based random numbers: every draw is a hash of where it is used, so no state is carried or shared.

A stream is splitmix64 (Steele, Lea, Flood 2014) started at a state that is itself a hash of
(seed, epoch, batch, hop, node). Two threads that expand the same node therefore draw the same numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from plait.graph.compiled import inlined

__all__ = ["GOLDEN", "below", "draw", "mix", "node_key", "stream_key", "unit"]

GOLDEN = 0x9E3779B97F4A7C15
"""The difference of the keys of two nodes with neighbouring numbers, before they are mixed."""
_GOLDEN = np.uint64(GOLDEN)
_MASK = (1 << 64) - 1


@inlined
def mix(x: Any) -> Any:
    """The splitmix64 finaliser: a bijection of uint64 in which every input bit reaches every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@inlined
def node_key(key: Any, node: Any) -> Any:
    """The key of `node` under `key`."""
    return mix(key + (np.uint64(node) + np.uint64(1)) * _GOLDEN)


@inlined
def draw(key: Any, number: Any) -> Any:
    """The draw of that number (0, 1, ...) in the stream of `key`: uniform on all of uint64."""
    return mix(key + (np.uint64(number) + np.uint64(1)) * _GOLDEN)


@intrinsic  # type: ignore[untyped-decorator]
def _high_product(typing_context: Any, left: Any, right: Any) -> Any:
    """The upper 64 bits of a product of two uint64; numba does not expose the processor's instruction."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        wide = ir.IntType(128)
        product = builder.mul(*(builder.zext(arg, wide) for arg in args))
        return builder.trunc(builder.lshr(product, wide(64)), ir.IntType(64))

    return types.uint64(types.uint64, types.uint64), build


@inlined
def below(bits: Any, bound: Any) -> Any:
    """floor(bits * bound / 2**64) for 0 < bound < 2**63: uniform below `bound` up to bound / 2**64."""
    return np.int64(_high_product(bits, np.uint64(bound)))


@inlined
def unit(bits: Any) -> Any:
    """A float64 in (0, 1): never 0, so that its logarithm is finite."""
    return (np.float64(bits >> np.uint64(11)) + 0.5) * (1.0 / 9007199254740992.0)


def stream_key(*words: int) -> np.uint64:
    """The key of a tuple of whole numbers, such as (seed, epoch, batch, hop); order matters."""
    state = 0
    for word in words:
        state = _mix_int(state + ((word + 1) * GOLDEN & _MASK) & _MASK)
    return np.uint64(state)


def _mix_int(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK
    return x ^ (x >> 31)
