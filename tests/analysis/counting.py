"""Programs carried out on numbers that count: how many operations made them, and how deep they lie.

Every operation is a plain loop. Work is counted with sums that start at zero, as the kernels start them;
depth is that of balanced trees, which is a count of its own: two runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from plait.analysis.work import unchained
from plait.ir.evaluate import evaluate
from plait.ops.program import Program, Step
from plait.ops.work import Matrix

__all__ = ["Counted", "Counter", "run"]


class Counter:
    """Counts the operations of all numbers that belong to it."""

    def __init__(self, sums_by_tree: bool) -> None:
        self.flops = 0
        self.sums_by_tree = sums_by_tree

    def sum(self, terms: Sequence[Counted]) -> Counted:
        if self.sums_by_tree:
            level = list(terms) or [Counted(0.0, self)]
            while len(level) > 1:
                pairs = [level[i] + level[i + 1] for i in range(0, len(level) - 1, 2)]
                level = pairs + ([level[-1]] if len(level) % 2 else [])
            return level[0]
        total = Counted(0.0, self)
        for term in terms:
            total = total + term
        return total


class Counted:
    """A number that knows the longest chain of operations behind it."""

    def __init__(self, value: float, counter: Counter, depth: int = 0) -> None:
        self.value, self.counter, self.depth = value, counter, depth

    def _made(self, value: float, other: Counted) -> Counted:
        self.counter.flops += 1
        return Counted(value, self.counter, 1 + max(self.depth, other.depth))

    def __add__(self, other: Counted) -> Counted:
        return self._made(self.value + other.value, other)

    def __mul__(self, other: Counted) -> Counted:
        return self._made(self.value * other.value, other)

    def relu(self) -> Counted:
        return self._made(max(0.0, self.value), self)

    def where_positive(self, other: Counted) -> Counted:
        return self._made(self.value if other.value > 0 else 0.0, other)


Rows = list[list[Counted]]


def run(
    program: Program,
    given: Mapping[str, Any],
    leaves: Mapping[str, Any],
    matrices: Mapping[str, Matrix],
    counter: Counter,
) -> dict[str, Any]:
    """Every value of a program as rows of counted numbers; inputs lie at depth 0.

    `matrices` says of a constant whether it has loops and weights, and which values are kept as non-zeros.
    """
    env = {name: _rows(value, counter) for name, value in given.items()}
    leaves = {**leaves, "ones": np.ones(len(leaves["A"]))}
    constants = {name: evaluate(expr, leaves) for name, expr in program.constants.items()}
    sparse = frozenset(matrices) - frozenset(constants)
    edges = {name: _edges(leaves["A"], matrix) for name, matrix in matrices.items()}
    for step in program.steps:
        for part in unchained(step):
            env[part.out] = _step(part, env, constants, counter, sparse, edges)
    return env


def _edges(graph: Any, matrix: Matrix) -> tuple[Any, bool]:
    """(how many edges run between two nodes, whether they have weights) of a constant."""
    between = (graph != 0).astype(int) if matrix.is_weighted and graph.min() < 0 else graph.astype(int)
    return between + (np.eye(len(graph), dtype=int) if matrix.loops else 0), matrix.is_weighted


def _rows(value: Any, counter: Counter) -> Rows:
    if isinstance(value, list):
        return value
    return [[Counted(float(v), counter) for v in row] for row in np.atleast_2d(np.asarray(value, float))]


def _step(
    step: Step, env: dict[str, Rows], constants: Any, counter: Counter, sparse: frozenset[str], edges: Any
) -> Rows:
    get = env.__getitem__

    def number(value: float) -> Counted:
        return Counted(value, counter)

    def product(left: Rows, right: Rows, is_sparse: bool) -> Rows:
        return [
            [
                counter.sum(
                    [row[i] * right[i][c] for i in range(len(right)) if row[i].value or not is_sparse]
                )
                for c in range(len(right[0]))
            ]
            for row in left
        ]

    match step.op:
        case "spmm":
            out = _spmm(step, env, constants, counter, edges)
        case "gemm":
            weight = get(step["w"])
            out = product(
                get(step["x"]), _turned(weight) if step.is_transposed else weight, step["x"] in sparse
            )
        case "gemm_transposed":
            return product(_turned(get(step["left"])), get(step["right"]), step["left"] in sparse)
        case "scale_rows":
            scale = np.diag(constants[step["scale"]])
            return [[number(scale[i]) * v for v in row] for i, row in enumerate(get(step["x"]))]
        case "scale":
            (scalar,) = get(step["scalar"])[0]
            return [[scalar * v for v in row] for row in get(step["x"])]
        case "combine":
            terms = [get(name) for role, name in step.reads if role != "bias"]
            out = []
            for i in range(len(terms[0])):
                row = []
                for c in range(len(terms[0][0])):
                    parts = [
                        t[i][c] if f == 1.0 else number(f) * t[i][c]
                        for f, t in zip(step.factors, terms, strict=True)
                    ]
                    row.append(parts[0] if len(parts) == 1 else _sum_without_zero(parts, counter))
                out.append(row)
        case "stack":
            return [row for _, name in step.reads for row in get(name)]
        case "concat":
            blocks = zip(*(get(name) for _, name in step.reads), strict=True)
            return [[v for row in rows for v in row] for rows in blocks]
        case "rows_of":
            parts = [get(name) for role, name in step.reads if role.startswith("part")]
            at = sum(len(part) for part in parts[: int(step.factors[0])])
            return get(step["x"])[at : at + len(parts[int(step.factors[0])])]
        case "columns_of":
            parts = [get(name) for role, name in step.reads if role.startswith("of")]
            at = sum(len(part[0]) for part in parts[: int(step.factors[0])])
            width = len(parts[int(step.factors[0])][0])
            return [row[at : at + width] for row in get(step["x"])]
        case "relu":
            return [[v.relu() for v in row] for row in get(step["x"])]
        case "relu_backward":
            return [
                [v.where_positive(m) for v, m in zip(row, made, strict=True)]
                for row, made in zip(get(step["x"]), get(step["made"]), strict=True)
            ]
        case "colsum":
            return [[counter.sum(list(column)) for column in zip(*get(step["x"]), strict=True)]]
        case "dot":
            pairs = zip(get(step["left"]), get(step["right"]), strict=True)
            return [[counter.sum([a * b for l, r in pairs for a, b in zip(l, r, strict=True)])]]
        case _:
            raise AssertionError(f"the counter does not know {step.op}")
    return _with_additions(step, out, env, constants, counter)


def _turned(rows: Rows) -> Rows:
    return [list(column) for column in zip(*rows, strict=True)]


def _sum_without_zero(parts: list[Counted], counter: Counter) -> Counted:
    if counter.sums_by_tree:
        return counter.sum(parts)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _spmm(step: Step, env: dict[str, Rows], constants: Any, counter: Counter, edges: Any) -> Rows:
    """Edge by edge; edges between the same two nodes share the weight of their entry."""
    matrix, (between, is_weighted) = constants[step["matrix"]], edges[step["matrix"]]
    if step.is_transposed:
        matrix, between = matrix.T, between.T
    source = np.diag(constants[step["source"]]) if step.get("source") else None
    target = np.diag(constants[step["target"]]) if step.get("target") else None
    x, out = env[step["x"]], []
    for i, counts in enumerate(between):
        row = []
        for c in range(len(x[0])):
            terms = []
            for j in np.repeat(np.arange(len(counts)), counts):
                value = x[j][c]
                if is_weighted:
                    value = Counted(matrix[i, j] / counts[j], counter) * value
                elif source is not None:
                    value = Counted(source[j], counter) * value
                terms.append(value)
            total = counter.sum(terms)
            row.append(total if target is None else Counted(target[i], counter) * total)
        out.append(row)
    return out


def _with_additions(step: Step, out: Rows, env: dict[str, Rows], constants: Any, counter: Counter) -> Rows:
    addend, scale, bias = step.get("addend"), step.get("addend_scale"), step.get("bias")
    if addend is not None:
        terms = env[addend]
        if scale is not None and scale in env:
            (factor,) = env[scale][0]
            terms = [[factor * v for v in row] for row in terms]
        elif scale is not None:
            by_row = np.diag(constants[scale])
            terms = [[Counted(by_row[i], counter) * v for v in row] for i, row in enumerate(terms)]
        out = [[a + b for a, b in zip(*rows, strict=True)] for rows in zip(out, terms, strict=True)]
    if bias is not None:
        (row_bias,) = env[bias]
        out = [[a + b for a, b in zip(row, row_bias, strict=True)] for row in out]
    return out
