"""Holds the rows a loss reads; the other rows are computed from the same inputs when they are needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from plait.errors import InputError
from plait.runtime.deferred import Deferred, Source
from plait.runtime.identity import counts_writes

__all__ = ["Kept", "Wanted", "WantedRows", "check_unchanged", "state_of"]


class WantedRows:
    """The numbers of the rows held, in order, each once, of a matrix with `count` rows."""

    def __init__(self, numbers: Tensor, count: int):
        self.numbers = numbers
        self.mask = torch.zeros(count, dtype=torch.bool).index_fill(0, numbers, True)
        self.place = torch.full((count,), -1).index_copy(0, numbers, torch.arange(len(numbers)))

    def is_all_of(self, index: Tensor) -> bool:
        """Whether this mask or these numbers select the rows held, in their order."""
        known = self.mask if index.dtype == torch.bool else self.numbers
        return index.dtype == known.dtype and torch.equal(index, known)


class _AsItWas(torch.autograd.Function):
    """A copy's value; the gradient is that of the tensor it was copied from."""

    @staticmethod
    def forward(ctx: Any, now: Tensor, then: Tensor) -> Tensor:
        return then.view_as(then)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def state_of(value: Tensor | None) -> tuple[int, int] | None:
    """What changes when a tensor is written to, as far as torch counts."""
    return None if value is None else (value.data_ptr(), value._version if counts_writes(value) else 0)


def check_unchanged(value: Tensor | None, seen: tuple[int, int] | None) -> None:
    """InputError where the rows that were not computed cannot be computed any more."""
    if state_of(value) != seen:
        raise InputError(
            "rows: other rows than these were asked for after an input of the layer was changed in "
            "place; ask for them before, or compile without rows="
        )


def _is_trained(value: Tensor) -> bool:
    """Whether it is a leaf that needs gradients, or a view of one, as layers turn their weights."""
    owner = value._base if value._base is not None else value
    return owner.is_leaf and owner.requires_grad


class Kept:
    """An input as it is now, for later: a copy of what optimisers change, a watch on what is large.

    Tensors with a row for every node, of which there are `count`, are not copied. Where one was changed in
    place since, the rows that were not computed from it are lost: that is an error, never silently wrong
    values.
    """

    def __init__(self, value: Tensor, count: int = -1):
        self.value = value
        is_copied = (
            value.dim() == 0 or value.shape[0] != count or not counts_writes(value) or _is_trained(value)
        )
        self.copy = value.detach().clone() if is_copied else None
        self.seen = None if is_copied else state_of(value)

    def again(self) -> Tensor:
        """The input as it was, its gradient going to what it is now."""
        if self.copy is not None:
            return _AsItWas.apply(self.value, self.copy) if self.value.requires_grad else self.copy  # type: ignore[no-untyped-call]
        check_unchanged(self.value, self.seen)
        return self.value


class _KeptMatrix:
    """A deferred matrix as it is now, for later."""

    def __init__(self, matrix: Deferred):
        self.matrix, self.source = matrix, matrix.source

    def again(self) -> Tensor:
        """All rows as they were; the gradient is the matrix's own, so that its hooks see it."""
        matrix = self.matrix
        if matrix.is_held():
            matrix.complete("a function of it")
            return matrix
        if not torch.is_grad_enabled() or not matrix.is_as_made():
            return self.source.whole()  # what was written to it came after this use of it
        with torch.no_grad():
            then = self.source.whole()  # .data may have been written to uncounted
        return _AsItWas.apply(matrix, then)  # type: ignore[no-any-return, no-untyped-call]


class Wanted(Source):
    """Some rows of a layer's result, or of functions of it that treat rows alone; `make` gives all rows."""

    rows: WantedRows

    def __init__(
        self,
        held: Tensor,
        rows: WantedRows,
        make: Callable[[], Tensor],
        inputs: tuple[Tensor, ...],
        watch: Callable[[str], None] | None,
    ):
        super().__init__()
        self.held, self.rows, self.inputs, self.watch, self._make = held, rows, inputs, watch, make

    @classmethod
    def of_layer(
        cls,
        held: Tensor,
        rows: WantedRows,
        compute: Callable[[dict[str, Tensor | None]], Tensor],
        inputs: dict[str, Tensor],
        watch: Callable[[str], None] | None = None,
    ) -> Wanted:
        """The rows of a layer that computes all of them from these inputs, by name."""
        count = len(rows.place)
        kept = {name: Kept(value, count) for name, value in inputs.items()}
        return cls(
            held, rows, lambda: compute({name: value.again() for name, value in kept.items()}),
            tuple(value for value in inputs.values() if value.requires_grad), watch,
        )  # fmt: skip

    def whole(self) -> Tensor:
        """All rows, computed now, in the types of those held: no row is held of what autocast casts."""
        with torch.autocast(self.held.device.type, enabled=False):
            return self._make()

    def then(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], held: Tensor
    ) -> Wanted:
        """The rows of a function of this matrix and perhaps others of its kind."""
        count = len(self.rows.place)
        inputs: list[Tensor] = []

        def kept(value: Any) -> Any:
            if isinstance(value, Deferred):
                inputs.extend(value.source.inputs)
                return _KeptMatrix(value)
            if isinstance(value, Tensor):
                if value.requires_grad:
                    inputs.append(value)
                return Kept(value, count)
            if type(value) in (tuple, list):
                return type(value)(map(kept, value))
            return value

        places = [kept(value) for value in args]
        named = {name: kept(value) for name, value in kwargs.items()}

        def make() -> Tensor:
            out: Tensor = func(*map(_again, places), **{name: _again(value) for name, value in named.items()})
            return out

        return Wanted(held, self.rows, make, tuple(inputs), self.watch)

    def spread(self, grad: Tensor) -> Tensor:
        """The gradient of all rows: the others were not used."""
        return grad.new_zeros((len(self.rows.place), grad.shape[1])).index_copy(0, self.rows.numbers, grad)


def _again(value: Any) -> Any:
    if isinstance(value, Kept | _KeptMatrix):
        return value.again()
    if type(value) in (tuple, list):
        return type(value)(map(_again, value))
    return value
