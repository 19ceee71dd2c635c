"""Programs: kernel calls by name, over named values.

A step names its operands by role. Values are names: inputs keep the leaf's name, intermediates are v0, v1,
... and gradients are d<number>_<name>. Constant matrices and scalings are expressions themselves
(`constants`), computed once per graph by the runtime.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from plait.errors import PlanError
from plait.ir import Expr
from plait.ir.expr import Size

__all__ = ["Program", "Shape", "Step"]

Shape = tuple[Size, Size]


@dataclass(frozen=True, slots=True)
class Step:
    """One kernel call: `out` from the operands in `reads` (role -> name)."""

    op: str
    out: str
    reads: tuple[tuple[str, str], ...]
    is_transposed: bool = False  # the matrix (spmm) or the weight (gemm) is used transposed
    factors: tuple[float, ...] = ()  # coefficients of `combine`
    reduce: str = "sum"
    more: tuple[str, ...] = ()  # what it makes besides `out`
    options: tuple[tuple[str, Any], ...] = ()  # further options of the operation, by name

    def get(self, role: str) -> str | None:
        """The operand in this role; None if there is none."""
        for name, operand in self.reads:
            if name == role:
                return operand
        return None

    def option(self, name: str, default: Any = None) -> Any:
        """The option of this name."""
        for own, value in self.options:
            if own == name:
                return value
        return default

    def __getitem__(self, role: str) -> str:
        operand = self.get(role)
        if operand is None:
            raise PlanError(f"step {self.op} -> {self.out} has no operand {role!r}")
        return operand


@dataclass(frozen=True)
class Program:
    """Steps in order; `shapes` of every value, `constants` by name, and the values that are its results."""

    steps: tuple[Step, ...]
    outputs: tuple[str, ...]
    shapes: Mapping[str, Shape]
    constants: Mapping[str, Expr]
    inputs: tuple[str, ...] = ()

    @cached_property
    def joined(self) -> Mapping[str, tuple[str, int, int]]:
        """Value -> (the join it is a part of, its first column there, columns of the whole)."""
        made = {name for step in self.steps for name in (step.out, *step.more)}
        found: dict[str, tuple[str, int, int]] = {}
        for step in self.steps:
            if step.op != "join":
                continue
            width = self.shapes[step.out][1]
            for (_, name), start in zip(step.reads, step.option("starts"), strict=True):
                if name in made and isinstance(width, int):
                    found.setdefault(name, (step.out, start, width))
        return found
