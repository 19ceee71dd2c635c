"""Products by head, one head after the other."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["project_heads", "project_heads_backward"]

Array = np.ndarray[Any, Any]


def project_heads(x: Array, w: Array, heads: int) -> Array:
    """[N, heads * width] from x [N, heads * inner] and w [inner, heads * width]."""
    parts = zip(np.split(x, heads, 1), np.split(w, heads, 1), strict=True)
    return np.concatenate([own @ weight for own, weight in parts], 1)


def project_heads_backward(grad: Array, x: Array, w: Array, heads: int) -> tuple[Array, Array]:
    """The gradients of x and of w."""
    parts = [np.split(values, heads, 1) for values in (grad, x, w)]
    to_x = [g @ weight.T for g, weight in zip(parts[0], parts[2], strict=True)]
    to_w = [own.T @ g for own, g in zip(parts[1], parts[0], strict=True)]
    return np.concatenate(to_x, 1), np.concatenate(to_w, 1)
