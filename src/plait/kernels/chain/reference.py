"""What a chain computes: whole matrices, one after the other."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["chain"]

Array = np.ndarray[Any, Any]


def chain(
    block: Array | None,
    products: list[tuple[Array | None, Array]],
    sums: list[tuple[Array | None, Array | None]],
    plus: Array | None = None,
    bias: Array | None = None,
) -> tuple[Array | None, list[Array]]:
    """(sum_k(rows_k @ w_k) + plus + bias, [left.T @ right of every pair]); None names the block."""

    def rows(given: Array | None) -> Array:
        chosen = block if given is None else given
        assert chosen is not None
        return chosen

    out = None
    for given, w in products:
        out = rows(given) @ w + (0 if out is None else out)
    if out is not None:
        out = out + (0 if plus is None else plus) + (0 if bias is None else bias)
    return out, [rows(left).T @ rows(right) for left, right in sums]
