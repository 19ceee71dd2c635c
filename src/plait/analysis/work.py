"""Exact work, depth and bytes of Programs: what every step computes and the longest chain of dependences.

Flops are multiplications, additions, comparisons and divisions as the kernels carry them out; work adds the
numbers that are only copied. Depth is that of an ideal machine: a sum is a balanced tree, everything else
is independent; the steps of a program form a DAG whose longest path is its depth. The counts come as
numbers for one graph and as formulas in n, m, d and the widths, from the same lines of code.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from plait.ops.chain import unchained
from plait.ops.operation import Pattern, operation
from plait.ops.program import Program, Shape, Step
from plait.ops.symbolic import Formula, symbol
from plait.ops.work import Matrix, Sizes, size_of
from plait.plan.plan import LayerPlan, PricedStep

__all__ = ["KERNELS", "Phase", "count", "of_layer", "symbolic"]

KERNELS = ("scatter", "edge update", "aggregate", "vertex update")


@dataclass(frozen=True)
class Phase:
    """The cost of one pass (forward, backward or once); `formulas` has flops and depth."""

    flops: int
    copies: int
    depth: int
    bytes_least: float
    bytes_gathered: float
    seconds: float
    kernels: Mapping[str, int]  # flops by kind of kernel
    gathers: tuple[int, ...] = ()  # columns of every product with the graph: what an exchange would carry
    gather_seconds: float = 0.0
    formulas: Mapping[str, Formula] = field(default_factory=dict)
    values: Mapping[str, int] = field(default_factory=dict)  # of the formulas' symbols, for this graph
    is_exact: bool = True

    @property
    def work(self) -> int:
        """Operations of the work-depth model: flops, and numbers copied."""
        return self.flops + self.copies

    @property
    def parallelism(self) -> float:
        """W / D: how many processors could be kept busy on average."""
        return self.work / max(1, self.depth)

    def brent(self, processors: int) -> float:
        """Brent's bound on the time steps of p processors: W / p + D."""
        return self.work / processors + self.depth

    @property
    def intensity(self) -> float:
        """Flops per byte that must move."""
        return self.flops / self.bytes_least if self.bytes_least else 0.0

    def to_dict(self) -> dict[str, Any]:
        """The pass as plain data."""
        return {
            "flops": self.flops,
            "bytes": self.bytes_least,
            "bytes_gathered": self.bytes_gathered,
            "work": self.work,
            "depth": self.depth,
            "parallelism": self.parallelism,
            "intensity": self.intensity,
            "seconds": self.seconds,
            "kernels": dict(self.kernels),
            "formulas": {name: str(formula) for name, formula in self.formulas.items()},
            "is_exact": self.is_exact,
        }


def of_layer(plan: LayerPlan) -> dict[str, Phase]:
    """The passes of a planned layer, those it has: "once", "forward" and (in training) "backward"."""
    ahead, behind = plan.steps[: plan.num_forward], plan.steps[plan.num_forward :]
    phases = {"once": count(plan.hoisted, plan, plan.hoisted_steps)} if plan.hoisted.steps else {}
    phases["forward"] = count(plan.forward, plan, ahead)
    if plan.backward is not None:
        phases["backward"] = count(plan.backward, plan, behind)
    return phases


def count(program: Program, plan: LayerPlan, priced: Iterable[PricedStep]) -> Phase:
    """The exact counts of a program; bytes and seconds are those of its prices."""
    numbers = _Numbers(program, plan.matrices, plan.backward is not None, plan.sizes)
    formulas = _Formulas(program, plan.matrices, plan.backward is not None)
    steps = [part for step in program.steps for part in unchained(step)]
    kernels = dict.fromkeys(KERNELS, 0)
    copies, gathers = 0, []
    for step in steps:
        for kernel, amount in operation(step.op).flops(step, numbers).items():
            kernels[kernel] += amount
        copies += _copies(step, numbers)
        if step.get("matrix") is not None and (columns := _gathered(step, numbers)):
            gathers.append(columns)
    depth, depth_formula = _critical_path(program, steps, numbers, formulas)
    prices = [step.price for step in priced]
    return Phase(
        flops=sum(kernels.values()),
        copies=copies,
        depth=depth,
        bytes_least=sum(price.work.bytes_least for price in prices),
        bytes_gathered=sum(price.work.bytes_gathered for price in prices),
        seconds=sum(price.seconds for price in prices),
        kernels=kernels,
        gathers=tuple(gathers),
        gather_seconds=sum(_gather_seconds(step) for step in priced),
        formulas={"flops": _flops(steps, formulas), "depth": depth_formula},
        values=formulas.values(numbers),
        is_exact=not any(_is_estimated(step, plan) for step in steps),
    )


def symbolic(program: Program, matrices: Mapping[str, Matrix], sizes: Sizes) -> tuple[Formula, Formula]:
    """Flops and depth of a program as formulas; `sizes` decide which of two paths is the longest."""
    formulas = _Formulas(program, matrices, False)
    steps = [part for step in program.steps for part in unchained(step)]
    numbers = _Numbers(program, matrices, False, sizes)
    return _flops(steps, formulas), _critical_path(program, steps, numbers, formulas)[1]


def _flops(steps: Iterable[Step], formulas: _Formulas) -> Formula:
    amounts = (amount for step in steps for amount in operation(step.op).flops(step, formulas).values())
    return sum(amounts, Formula({}))


def _gathered(step: Step, numbers: _Numbers) -> int:
    """Columns of the rows that a pass over the graph reads at the other end of an edge, or sends there.

    0 where it reads a row's own edges only: a softmax, rows counted by their edges, shares of a target.
    """
    if step.op in _OF_OWN_EDGES:
        return 0
    if step.op in _BOTH_ENDS_BACK:  # one pass over targets: gradients of the sources are sent there
        roles: tuple[str, ...] = ("far",)
    elif step.get("shares") is not None:
        roles = ("shares",)
    elif step.is_transposed and step.get("grad") is not None:
        # gradients of the targets, and their rows where those are read again
        roles = ("grad",) if step.option("kind") in ("gat", None) else ("grad", "near")
    else:
        roles = ("x", "far", "value")
    ends = {step.get(role) for role in roles} - {None}
    return sum(numbers.size(str(name))[1] for name in ends)


_OF_OWN_EDGES = ("edge_softmax", "edge_softmax_back", "per_edge", "aggregate_shares")
_BOTH_ENDS_BACK = ("messages_back", "attained_back", "aggregate_messages_back", "leaky_scores_back")


def _is_estimated(step: Step, plan: LayerPlan) -> bool:
    """Whether a count rests on an estimate.

    How many non-zeros a hoisted product of sparse features has is one of the planner's; what an extremum
    does about ties depends on the degrees (runtime/executor.py) and is counted as if it counted them all.
    Operations outside `_CHECKED`, and scores that are not GAT's, were not checked against a counted run.
    """
    hoisted = {step.out for step in plan.hoisted.steps}
    is_guessed = any(name in plan.sparse_values and name in hoisted for _, name in step.reads)
    is_unchecked = step.op not in _CHECKED or step.option("kind", "gat") != "gat"
    return is_guessed or is_unchecked or (step.op.startswith("extremum") and plan.backward is not None)


# checked against programs run on numbers that count (tests/analysis/counting.py, carried.py)
_CHECKED = frozenset({
    "spmm", "gemm", "gemm_transposed", "scale", "scale_rows", "combine", "stack", "concat", "rows_of",
    "columns_of", "relu", "relu_backward", "colsum", "dot", "extremum", "extremum_share", "extremum_gather",
    "columns", "join", "edge_dots", "edge_sums", "gate", "attend", "attend_dots", "attend_again",
    "attend_sources", "attend_targets",
})  # fmt: skip


def _gather_seconds(step: PricedStep) -> float:
    """The part of a step's price that a product with the graph takes."""
    if step.step.op == "chain":
        return step.price.gather_seconds
    return step.price.seconds if step.step.get("matrix") is not None else 0.0


# Sizes, as numbers and as symbols ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _View:
    """The sizes of a program's values."""

    program: Program
    matrices: Mapping[str, Matrix]
    is_training: bool

    def shape(self, name: str) -> Shape:
        """The inner products of a chain have the shape of its result."""
        shapes = self.program.shapes
        return shapes[name] if name in shapes else shapes[name.partition("|")[0]]

    def keeps(self, name: str) -> bool:
        """Ties are counted for the gradient."""
        return self.is_training


@dataclass(frozen=True)
class _Numbers(_View):
    sizes: Sizes

    def size(self, name: str) -> tuple[int, int]:
        rows, cols = self.shape(name)
        return size_of(rows, self.sizes), size_of(cols, self.sizes)

    def pattern(self, name: str, is_transposed: bool) -> Pattern | None:
        matrix = self.matrices.get(name)
        if matrix is None:
            return None
        turned = matrix.transposed() if is_transposed else matrix
        return Pattern(turned.rows, turned.edges, fullest_row(turned), turned.is_weighted)


@dataclass(frozen=True)
class _Formulas(_View):
    """n, m, d and the widths: K1 and K2 a layer's, H1, ... those inside; m and d without added loops."""

    def size(self, name: str) -> tuple[Formula, Formula]:
        rows, cols = self.shape(name)
        return _symbolic(rows), _symbolic(cols)

    def pattern(self, name: str, is_transposed: bool) -> Pattern | None:
        matrix = self.matrices.get(name)
        if matrix is None:
            return None
        entries, row, column = self._names(name)
        edges, degree = symbol(entries), symbol(column if is_transposed else row)
        if matrix.loops:
            edges, degree = edges + symbol("n"), degree + 1
        return Pattern(symbol("n"), edges, degree, matrix.is_weighted)

    def _names(self, name: str) -> tuple[str, str, str]:
        """The symbols of a matrix: entries, those of its longest row and column; numbered from the second."""
        is_graph = name in self.program.constants
        distinct: list[tuple[int, int]] = []
        for other, matrix in self.matrices.items():
            facts = (matrix.rows, matrix.edges - matrix.loops)
            if (other in self.program.constants) == is_graph and facts not in distinct:
                distinct.append(facts)
        own = self.matrices[name]
        place = distinct.index((own.rows, own.edges - own.loops))
        names = ("m", "d", "d_out") if is_graph else ("nnz", "nnz_row", "nnz_column")
        more = "" if place == 0 else str(place + 1)
        return names[0] + more, names[1] + more, names[2] + more

    def values(self, numbers: _Numbers) -> dict[str, int]:
        found = {_SYMBOLS.get(name, name): value for name, value in numbers.sizes.items()}
        for name, matrix in self.matrices.items():
            entries, row, column = self._names(name)
            loops = int(matrix.loops > 0)
            found[entries] = matrix.edges - matrix.loops
            found[row] = fullest_row(matrix) - loops
            found[column] = fullest_row(matrix.transposed()) - loops
        return found


_SYMBOLS = {"N": "n"}


def _symbolic(size: str | int) -> Formula:
    if isinstance(size, int) or size.isdigit():
        return Formula({}) + int(size)
    parts = [symbol(_SYMBOLS.get(part, part)) for part in size.split("+") if not part.isdigit()]
    return sum(parts, Formula({}) + sum(int(part) for part in size.split("+") if part.isdigit()))


def fullest_row(matrix: Matrix) -> int:
    """The most entries of a row; all its columns where they were not counted (sparse features)."""
    counted = getattr(matrix.locality, "degree_max", None)
    return matrix.columns if counted is None else int(counted) + int(matrix.loops > 0)


# Steps ------------------------------------------------------------------------------------------------------


def _copies(step: Step, numbers: _Numbers) -> int:
    rows, cols = numbers.size(step.out) if step.op in ("stack", "concat") else (0, 0)
    return rows * cols


# Depth ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Path:
    """A chain of dependent operations: how many, and the formula of that very chain."""

    length: int = 0
    formula: Formula = field(default_factory=lambda: Formula({}))

    def then(self, length: int, formula: Formula | int) -> _Path:
        return _Path(self.length + length, self.formula + formula)


def _longest(paths: Iterable[_Path]) -> _Path:
    return max(paths, key=lambda path: path.length, default=_Path())


def _critical_path(
    program: Program, steps: list[Step], numbers: _Numbers, formulas: _Formulas
) -> tuple[int, Formula]:
    """The longest path through the steps to an output."""
    ready: dict[str, _Path] = {}

    def of(*names: str | None) -> _Path:
        return _longest(ready.get(name, _Path()) for name in names if name is not None)

    for step in steps:
        inside = operation(step.op).depth
        own, own_formula = inside(step, numbers), inside(step, formulas)
        early = [of(name) for role, name in step.reads if role not in _LATE]
        end = (_combined(step, early) if step.op == "combine" else _longest(early)).then(own, own_formula)
        if step.op == "extremum":
            for name in step.more:
                # a tie is known once the extremum is: one comparison, and a tree that counts
                ready[name] = end.then(1 + own, 1 + own_formula)
        addend, scale, bias = (step.get(role) for role in _LATE)
        if addend is not None:
            scaled = of(addend, scale).then(int(scale is not None), int(scale is not None))
            end = _longest((end, scaled)).then(1, 1)
        if bias is not None:
            end = _longest((end, of(bias))).then(1, 1)
        ready[step.out] = end
    path = of(*(name for name in program.outputs if name))
    return path.length, path.formula


def _combined(step: Step, terms: list[_Path]) -> _Path:
    """The terms of a sum, multiplied where they have a factor, added as a balanced tree in their order."""
    level = [t.then(int(f != 1.0), int(f != 1.0)) for f, t in zip(step.factors, terms, strict=True)]
    while len(level) > 1:
        pairs = [_longest(level[k : k + 2]).then(1, 1) for k in range(0, len(level) - 1, 2)]
        level = pairs + level[len(pairs) * 2 :]
    return level[0]


_LATE = ("addend", "addend_scale", "bias")  # what joins a step's result after its sums
