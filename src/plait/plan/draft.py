"""Programs written step by step, for layers that are more than a matrix expression."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from plait.ir import Diagonal, Expr, Sparse
from plait.ops.operation import operation
from plait.ops.program import Program, Shape, Step

__all__ = ["Draft"]


class Draft:
    """Steps in the order of the calls; every method returns the name of the value its step computes.

    Numbers of rows are "N" (targets), "M" (sources) and "E" (edges), so that a program serves graphs of any
    size; numbers of columns are numbers.
    """

    def __init__(self, sources: str = "N") -> None:
        self.sources = sources  # "N" where sources and targets are the same nodes, else "M"
        self.steps: list[Step] = []
        self.shapes: dict[str, Shape] = {}
        self.inputs: list[str] = []
        self.constants: dict[str, Expr] = {}
        self._views: dict[tuple[str, int, int], str] = {}

    def input(self, name: str, rows: str | int, columns: str | int) -> str:
        """A tensor argument of the call; a vector is a matrix of one row."""
        if name not in self.inputs:
            self.inputs.append(name)
        self.shapes[name] = (rows, columns)
        return name

    def object(self, name: str, rows: str | int, columns: str | int) -> str:
        """An argument of the call that is not a tensor; work and prices depend on its size."""
        self.shapes[name] = (rows, columns)
        return name

    def matrix(self) -> str:
        """The adjacency matrix, [targets, sources]."""
        self.constants.setdefault("A", Sparse("A", "N", self.sources))
        return "A"

    def constant(self, leaf: Sparse | Diagonal) -> str:
        """A matrix that comes with the graph, by its name."""
        self.constants.setdefault(leaf.name, leaf)
        return leaf.name

    def diagonal(self, name: str) -> str:
        """A number for every target, the same in every call."""
        self.constants.setdefault(name, Diagonal(name, "N"))
        return name

    def add(
        self,
        op: str,
        reads: Mapping[str, str | None],
        shape: Shape,
        *,
        more: Iterable[tuple[str, Shape]] = (),
        reduce: str = "sum",
        factors: tuple[float, ...] = (),
        **options: Any,
    ) -> str:
        """A step of this operation; `more`: what it makes besides its result, by a suffix of its name."""
        out = f"v{len(self.steps)}"
        made = {f"{out}|{suffix}": shaped for suffix, shaped in more}
        given = tuple((role, name) for role, name in reads.items() if name is not None)
        step = Step(
            op, out, given, factors=factors, reduce=reduce, more=tuple(made), options=tuple(options.items())
        )  # fmt: skip
        operation(op).check(step)
        self.steps.append(step)
        self.shapes |= {out: shape, **made}
        return out

    def columns(self, x: str, start: int, width: int) -> str:
        """Some columns of a value; asking for the same columns twice gives the same value."""
        found = self._views.get((x, start, width))
        if found is None:
            rows, whole = self.shapes[x]
            if (start, width) == (0, whole):
                return x
            found = self.add("columns", {"x": x}, (rows, width), start=start, width=width)
            self._views[x, start, width] = found
        return found

    def gemm(self, x: str, w: str, bias: str | None = None, addend: str | None = None) -> str:
        """x w + addend + bias."""
        shape = (self.shapes[x][0], self.shapes[w][1])
        return self.add("gemm", {"x": x, "w": w, "addend": addend, "bias": bias}, shape)

    def reshape(self, x: str, shape: Shape) -> str:
        """The same numbers in rows of another width."""
        return self.add("reshape", {"x": x}, shape, width=shape[1])

    def join(self, parts: Sequence[str]) -> str:
        """Values side by side, each written in place."""
        if len(parts) == 1:
            return parts[0]
        widths = [int(self.shapes[name][1]) for name in parts]
        starts = tuple(accumulate(widths, initial=0))[:-1]
        reads = {f"part{k}": name for k, name in enumerate(parts)}
        return self.add("join", reads, (self.shapes[parts[0]][0], sum(widths)), starts=starts)

    def program(self, out: str) -> Program:
        """The program so far, with the value of this name as its result."""
        return Program(tuple(self.steps), (out,), self.shapes, self.constants, tuple(self.inputs))
