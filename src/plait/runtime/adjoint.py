"""Linear maps under autograd: the gradient goes back by the adjoint, whose own gradient is the map again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from plait.runtime.twice import is_vmapped

__all__ = ["Map", "leaf_turned_by", "mapped"]

Map = Callable[[Tensor], Tensor]
"""A linear map of rows in numbers; of rows that vmap hands over, in torch's own operations."""


class _Mapped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forwards: Map, backwards: Map) -> Tensor:
        ctx.maps = (backwards, forwards)
        return forwards(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return mapped(grad, *ctx.maps), None, None


def mapped(x: Tensor, forwards: Map, backwards: Map) -> Tensor:
    """forwards(x); `backwards` is the adjoint. Differentiable in x to any order."""
    if is_vmapped(x) or not (x.requires_grad and torch.is_grad_enabled()):
        return forwards(x)
    result: Tensor = _Mapped.apply(x, forwards, backwards)  # type: ignore[no-untyped-call]
    return result


def leaf_turned_by(node: Any) -> Tensor | None:
    """The leaf whose transpose `.t()` a node of torch's graph is; None for every other node.

    By its name: a node to compare with could not be made where this is imported under `no_grad`.
    """
    if type(node).__name__ != "TBackward0":
        return None
    leaf: Tensor | None = getattr(node.next_functions[0][0], "variable", None)
    return leaf
