"""What is declared of an operation, and the table of all operations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from plait.errors import PlanError
from plait.ops.program import Program, Shape, Step
from plait.ops.work import Amount, ChainRequest, Matrix, Request, Sizes, size_of

__all__ = ["TABLE", "Operation", "Pattern", "Reverse", "Setting", "View", "operation", "register"]


@dataclass(frozen=True)
class Pattern:
    """A sparse matrix, in numbers or symbols; degree is that of its longest row."""

    rows: Amount
    edges: Amount
    degree: Amount
    is_weighted: bool


class View(Protocol):
    """The sizes of a program's values, as numbers or as formulas."""

    def size(self, name: str) -> tuple[Amount, Amount]:
        """Rows and columns of a value."""

    def pattern(self, name: str, is_transposed: bool) -> Pattern | None:
        """The pattern of a sparse value; None for a dense one."""

    def keeps(self, name: str) -> bool:
        """Whether anything reads a result that a step may leave out."""
        ...


@dataclass(frozen=True)
class Setting:
    """A program on one graph, as prices see it: sizes in numbers, what is known of every sparse operand."""

    program: Program
    sizes: Sizes
    matrix: Callable[[str, bool], Matrix]  # of a constant, by name and whether it is transposed
    sparse: Mapping[str, Matrix]  # values that are kept sparse

    def size(self, name: str) -> tuple[int, int]:
        """Rows and columns of a value."""
        rows, cols = self.program.shapes[name]
        return size_of(rows, self.sizes), size_of(cols, self.sizes)


class Reverse(Protocol):
    """Collects a backward program, as gradient rules see it (plan/differentiate.py)."""

    forward: Program
    needed: set[str]

    def share(self, name: str | None, value: str, scale: str | None = None, factor: float = 1.0) -> None:
        """Adds `factor * scale * value` to the gradient of `name`."""

    def product(self, name: str, op: str, reads: list[tuple[str, str | None]], **extra: object) -> None:
        """Adds a product to the gradient of `name`."""

    def add(
        self, op: str, of: str, reads: Iterable[tuple[str, str | None]], shaped: Shape, **extra: object
    ) -> str:
        """Adds a step for the gradient of `of`; returns the name of its result."""

    def fresh(self, of: str, shaped: Shape) -> str:
        """A name for what a step makes besides its result."""
        ...

    def part(self, name: str, start: int, value: str) -> None:
        """The columns of `name` from `start` on have this gradient."""
        ...


@dataclass(frozen=True)
class Operation:
    """One row of the table.

    Roles ending in "?" may be left out, those ending in "*" are numbered from 0. Work is counted by kind, in
    the words of the literature: "edge update", "aggregate", "vertex update".
    """

    name: str
    roles: tuple[str, ...]
    flops: Callable[[Step, View], Mapping[str, Amount]]
    depth: Callable[[Step, View], Amount]
    request: Callable[[Step, Setting], Request | ChainRequest | None]
    """What the price depends on; None where no data moves."""
    gradient: Callable[[Reverse, Step, str], None] | None = None
    overwrites: str = ""
    """The role whose buffer may become the result, where nothing reads it afterwards."""
    may_hoist: bool = False
    is_view: bool = False
    reference: str = ""
    """The module with a plain loop that computes the same."""
    says: str = ""
    """What a step of it does, in the words of a printed plan."""

    def __post_init__(self) -> None:
        if self.overwrites and not any(role.rstrip("?*") == self.overwrites for role in self.roles):
            raise PlanError(
                f"operation {self.name}: it overwrites {self.overwrites!r}, which it does not read"
            )

    def check(self, step: Step) -> None:
        """Raises PlanError if the step has a role that the operation does not know, or lacks one."""
        known = {role.rstrip("?*"): role for role in self.roles}
        given = {role if role in known else role.rstrip("0123456789") for role, _ in step.reads}
        missing = [name for name, role in known.items() if role == name and name not in given]
        unknown = sorted(given - set(known))
        if missing or unknown:
            what = f"lacks {missing[0]!r}" if missing else f"has an operand {unknown[0]!r}"
            raise PlanError(f"step {step.op} -> {step.out} {what}; its roles are {', '.join(self.roles)}")


TABLE: dict[str, Operation] = {}


def register(*rows: Operation) -> None:
    """Adds operations to the table; PlanError if one of that name is there already."""
    for row in rows:
        if row.name in TABLE:
            raise PlanError(f"operation {row.name!r} is in the table already; use its row, or another name")
        TABLE[row.name] = row


def operation(name: str) -> Operation:
    """The row of an operation."""
    found = TABLE.get(name)
    if found is None:
        raise PlanError(f"operation {name!r} is not in the table; known are {', '.join(sorted(TABLE))}")
    return found
