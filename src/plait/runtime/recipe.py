"""What a layer's expression is given, found out once: the features, and parameters as they are stored.

A layer reads its weights from its modules and turns them for every call. While it is the same layer with the
same parameters, the next call is given the same: nothing has to be read, turned and recognised again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from plait.ir import Expr
from plait.runtime.chain import turned

__all__ = ["Recipe", "recipe_of"]


_NONE: Mapping[str, Tensor] = {}


@dataclass(frozen=True, slots=True)
class Recipe:
    """The inputs of an expression by name: x, parameters, transposes of parameters, and numbers."""

    forms: tuple[Expr, ...]
    names: tuple[str, ...]
    sources: tuple[Tensor | None, ...]  # the parameter of each, None for x and for numbers
    are_turned: tuple[bool, ...]
    stored: tuple[str, ...]  # the names of the parameters as they are stored
    numbers: frozenset[str] = frozenset()  # inputs without dimensions that are read anew at every call
    parameters: tuple[Tensor, ...] = ()  # those among the sources
    tapes: dict[Any, Any] = field(default_factory=dict, compare=False)  # of runtime/listed.py

    def values(self, x: Tensor, numbers: Mapping[str, Tensor] = _NONE) -> list[Tensor]:
        """The inputs, parameters as they are stored."""
        made = [x if source is None else source for source in self.sources]
        for name in self.numbers:
            made[self.names.index(name)] = numbers[name]
        return made

    def given(self, values: Sequence[Tensor]) -> dict[str, Tensor]:
        """The inputs as the expression reads them."""
        read = zip(self.names, values, self.are_turned, strict=True)
        return {name: value.t() if is_turned else value for name, value, is_turned in read}


def recipe_of(
    forms: tuple[Expr, ...],
    inputs: Mapping[str, Tensor | None],
    x: Tensor,
    parameters: Sequence[Tensor],
    numbers: Collection[str] = (),
) -> Recipe | None:
    """The recipe of these inputs; None where one of them is made anew at every call, or is another number."""
    names, sources, are_turned = [], [], []
    own = {id(parameter): parameter for parameter in parameters}
    for name, value in inputs.items():
        if value is None:
            continue
        source = None if value is x or name in numbers else own.get(id(value), _turned_from(value, own))
        is_known = source is not None or value is x
        if is_known == (name in numbers) or (value.dim() == 0) != (name in numbers):
            return None
        names.append(name)
        sources.append(source)
        are_turned.append(source is not None and source is not value)
    stored = [turned(name) if turn else name for name, turn in zip(names, are_turned, strict=True)]
    used = tuple([source for source in sources if source is not None])
    return Recipe(
        forms, tuple(names), tuple(sources), tuple(are_turned), tuple(stored), frozenset(numbers), used
    )


def _turned_from(value: Tensor, own: Mapping[int, Tensor]) -> Tensor | None:
    """The parameter that a matrix is the transpose of; none for a row, which lies the same both ways."""
    base = own.get(id(value._base))
    if base is None or base.dim() != 2 or value.dim() != 2 or value.stride(1) == 1:
        return None
    is_turned = (
        value.shape == base.shape[::-1]
        and value.stride() == base.stride()[::-1]
        and value.data_ptr() == base.data_ptr()
    )
    return base if is_turned else None
