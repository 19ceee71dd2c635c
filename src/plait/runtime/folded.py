"""A matrix whose rows are equal on twins, held as one row per class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plait.errors import InputError
from plait.graph.twins import Twins
from plait.kernels.spmm import Pattern, spmm
from plait.runtime import pooled
from plait.runtime.adjoint import mapped
from plait.runtime.deferred import Deferred, Source, found_in
from plait.runtime.twice import is_vmapped

__all__ = ["Classes", "Folded", "unfolded"]


class Classes:
    """Twins ready to be spread: the pattern that gives every node its row, and its transpose."""

    def __init__(self, twins: Twins):
        self.twins = twins
        self.representatives = torch.from_numpy(twins.representatives)
        self.place = torch.from_numpy(np.asarray(twins.members, np.int64))
        n = twins.num_nodes
        one_each = np.arange(n + 1).astype(twins.members.dtype)
        self._spread = Pattern(one_each, twins.members, twins.num_classes)
        self._collect = Pattern(*twins.by_class(), n)
        self.groups: list[tuple[Tensor, int, pooled.Groups]] = []

    def is_all_of(self, index: Tensor) -> bool:
        """No user would index one row per class in the order of the classes, so this is False."""
        return False

    def spread(self, x: Tensor) -> Tensor:
        """A row for every node: that of its class."""
        return x.index_select(0, self.place) if is_vmapped(x) else _product(self._spread, x)

    def collect(self, x: Tensor) -> Tensor:
        """A row for every class: the sum over its nodes."""
        if is_vmapped(x):
            return x.new_zeros((self.twins.num_classes, *x.shape[1:])).index_add(0, self.place, x)
        return _product(self._collect, x)


def _product(pattern: Pattern, x: Tensor) -> Tensor:
    x = _readable(x)
    return spmm(pattern, x, x.new_empty((pattern.num_rows, x.shape[1])))


def _readable(x: Tensor) -> Tensor:
    """The same matrix with every entry in memory, row by row; gradients may be sparse, negated or empty."""
    if x.layout != torch.strided:
        x = x.to_dense()
    if x._is_zerotensor() or x.is_neg():
        return torch.zeros(x.shape, dtype=x.dtype) if x._is_zerotensor() else x.resolve_neg()
    return x if x.stride(-1) == 1 and x.stride(0) >= x.shape[1] else x.contiguous()


class Folded(Source):
    """One row per class of twins."""

    rows: Classes

    def __init__(self, held: Tensor, classes: Classes, watch: Callable[[str], None] | None = None):
        super().__init__()
        self.held, self.rows, self.watch = held, classes, watch
        self.inputs = (held,) if held.requires_grad else ()

    def whole(self) -> Tensor:
        """P @ held: a row for every node; the gradient sums over a class."""
        return mapped(self.held, self.rows.spread, self.rows.collect)

    def then(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], held: Tensor
    ) -> Folded | None:
        """A function of equal rows has equal rows. None for another type: gradients are not summed in it."""
        return None if held.dtype != self.held.dtype else Folded(held, self.rows, self.watch)

    def special(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Sums and means over groups of nodes."""
        answer = None
        if func is torch.segment_reduce and args and isinstance(args[0], Deferred):
            answer = pooled.segment_reduce(self.held, self.rows, *args[1:], **kwargs)
        elif func is Tensor.scatter_add_ and len(args) == 4 and type(args[0]) is Tensor:
            answer = pooled.scatter_add(args[0], args[1], args[2], self.held, self.rows)
        return NotImplemented if answer is None else answer

    def spread(self, grad: Tensor) -> Tensor:
        """Not known: what each row of a class adds to the gradient was never computed."""
        raise InputError(
            "the gradient with respect to a matrix that was used by classes of twins is not known; "
            "ask for it (register_hook, retain_grad) right after the matrix is computed, "
            'or compile with forms=["csr"]'
        )


def unfolded(value: Any) -> Any:
    """The value itself, every folded matrix in it completed: what leaves a model is a plain tensor."""
    for matrix in found_in(value):
        if isinstance(matrix.source, Folded):
            matrix.complete("the model's result")
    return value
