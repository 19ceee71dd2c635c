"""Plans of relational layers: project before or after aggregating, for all relations or where edges are.

aggregate        a row for each (target, relation), then one product with the weights below each other
transform        one product with the weights side by side, then one pass that picks the relation's columns
... pairs        the same with rows only for the pairs that have edges, and a product for each relation
bases            rows aggregated once for every basis, weighted by the relation's share of it
"""

from __future__ import annotations

from dataclasses import dataclass

from plait.cost.machine import MachineProfile
from plait.ops.work import Locality, Matrix
from plait.plan.fused import FusedCandidate, FusedPlan, choose_among
from plait.plan.passes import Steps

__all__ = ["RelationalProblem", "candidates", "choose"]

# Beside streaming one number an edge (weights picked by relation, sums by relation in float64) and beside a
# sparse product (dots): rough, from a few timings.
_WEIGHING, _DOTS = 12, 2.0


@dataclass(frozen=True)
class RelationalProblem:
    """One relational layer on one graph, in numbers."""

    layer: str
    matrix: Matrix  # all edges, whatever their relation
    relations: int
    target_pairs: int  # (target, relation) pairs with edges
    source_pairs: int
    inner: int
    width: int
    machine: MachineProfile
    is_mean: bool = True
    blocks: int = 1
    bases: int = 0
    has_root: bool = True
    is_rows: bool = False  # x names rows of the weights: they are the projected rows already
    is_training: bool = True
    wants_input_grad: bool = True
    float_bytes: int = 4
    threads: int | None = None
    memory_limit: int | None = None


@dataclass(frozen=True)
class _Thinned:
    """The locality of rows each of which became `times` rows that are read in turn."""

    base: Locality
    times: float

    def miss_rate(self, cache_rows: int) -> float:
        return self.base.miss_rate(int(cache_rows / max(1.0, self.times)))


class _Candidate:
    """Steps and bytes of one candidate."""

    def __init__(self, p: RelationalProblem):
        self.p = p
        self.steps = Steps(p.machine, p.float_bytes, p.threads)
        self.held = p.matrix.rows * p.width
        if p.has_root:
            self._root()

    def _root(self) -> None:
        p = self.p
        rows = p.matrix.rows
        self.steps.gemm("root", "fwd", rows, p.inner, p.width)
        self.held += rows * p.width
        if p.is_training:
            self.steps.gemm("root's weight gradient", "bwd", rows, p.inner, p.width, is_transposed=True)
            if p.wants_input_grad:
                self.steps.gemm("root's input gradient", "bwd", rows, p.width, p.inner)

    def product(self, title: str, rows: int, inner: int, cols: int, calls: int, wants_back: bool) -> None:
        """`calls` products over `rows` rows in all."""
        p, each = self.p, max(1, rows // calls)
        self.steps.gemm(title, "fwd", each, inner, cols, calls)
        if p.is_training:
            self.steps.gemm("weight gradient", "bwd", each, inner, cols, calls, is_transposed=True)
            if p.wants_input_grad or wants_back:
                self.steps.gemm("gradient through the weights", "bwd", each, cols, inner, calls)

    def sparse(self, title: str, matrix: Matrix, cols: int, wants_back: bool) -> None:
        self.steps.gather(title, "fwd", matrix, cols)
        if self.p.is_training and wants_back:
            self.steps.gather(f"{title}, transposed", "bwd", matrix.transposed(), cols)

    def made(self, name: str, text: str, because: str) -> FusedCandidate:
        total = self.held * (2 if self.p.is_training else 1) * self.p.float_bytes
        return FusedCandidate(name, text, tuple(self.steps.made), total, because)


def _matrix(p: RelationalProblem, rows: int, columns: int, edges: int, weighted: bool) -> Matrix:
    """The graph with its targets or sources taken apart by relation."""
    m = p.matrix
    near = _Thinned(m.locality, columns / max(1, m.columns))
    far = _Thinned(m.locality_transposed, rows / max(1, m.rows))
    return Matrix(rows, columns, edges, weighted, near, far, m.index_bytes)


def _aggregate(p: RelationalProblem) -> FusedCandidate:
    made, m = _Candidate(p), p.matrix
    rows = m.rows * p.relations
    made.sparse(
        "aggregate by relation", _matrix(p, rows, m.columns, m.edges, False), p.inner, p.wants_input_grad
    )
    made.held += rows * p.inner
    if p.blocks == 1:
        made.product("project all relations", m.rows, p.relations * p.inner, p.width, 1, False)
    else:
        _blocks(made, p, rows)
    return made.made(
        "aggregate", "[A₁X … AᵣX] [W₁ … Wᵣ]ᵀ", f"rows of {p.inner} columns are gathered, then one product"
    )


def _transform(p: RelationalProblem) -> FusedCandidate:
    made, m = _Candidate(p), p.matrix
    rows = m.columns * p.relations
    if p.blocks == 1:
        made.product("project for all relations", m.columns, p.inner, p.relations * p.width, 1, False)
    else:
        _blocks(made, p, rows)
    made.sparse("pick and sum", _matrix(p, m.rows, rows, m.edges, p.is_mean), p.width, True)
    made.held += rows * p.width
    return made.made(
        "transform", "[A₁ … Aᵣ] [XW₁ … XWᵣ]ᵀ", f"one product, then rows of {p.width} columns are gathered"
    )


def _rows(p: RelationalProblem) -> FusedCandidate:
    made, m = _Candidate(p), p.matrix
    rows = m.columns * p.relations
    made.steps.stream("rows of the weights", "fwd", m.columns, p.relations * p.width)
    made.sparse("pick and sum", _matrix(p, m.rows, rows, m.edges, p.is_mean), p.width, True)
    made.held += rows * p.width
    return made.made("rows", "[A₁ … Aᵣ] [W₁ … Wᵣ]ᵀ", "x names rows of the weights: nothing is projected")


def _blocks(made: _Candidate, p: RelationalProblem, rows: int) -> None:
    inner, width = p.inner // p.blocks, p.width // p.blocks
    made.product("project by block", rows * p.blocks, inner, width, p.relations * p.blocks, False)


def _pairs(p: RelationalProblem, is_aggregate: bool) -> FusedCandidate:
    made, m = _Candidate(p), p.matrix
    rows = p.target_pairs if is_aggregate else p.source_pairs
    collected = m.edges if is_aggregate else rows
    made.sparse(
        "collect by relation", _matrix(p, rows, m.columns, collected, False), p.inner, p.wants_input_grad
    )
    if p.blocks == 1:
        made.product("project each relation", rows, p.inner, p.width, p.relations, False)
    else:
        _blocks(made, p, rows)
    summed = rows if is_aggregate else m.edges
    made.sparse("sum by target", _matrix(p, m.rows, rows, summed, p.is_mean), p.width, True)
    made.held += rows * (p.inner + p.width)
    name = "aggregate pairs" if is_aggregate else "transform pairs"
    ends = "targets" if is_aggregate else "sources"
    text = "Σᵣ Sᵣ (AᵣX) Wᵣ" if is_aggregate else "Σᵣ Aᵣ (SᵣX) Wᵣ"
    return made.made(name, text, f"{rows} pairs of relation and {ends} have edges, of {p.relations * m.rows}")


def _bases(p: RelationalProblem) -> FusedCandidate:
    made, m = _Candidate(p), p.matrix
    weighted = _matrix(p, m.rows, m.columns, m.edges, True)
    for b in range(p.bases):
        made.steps.stream(f"weights for basis {b}", "fwd", m.edges, 1, _WEIGHING)
        made.sparse(f"aggregate for basis {b}", weighted, p.inner, p.wants_input_grad)
        if p.is_training:
            made.steps.stream(f"weights for basis {b}", "bwd", m.edges, 1, 2 * _WEIGHING)
            made.steps.gather(f"share gradient of basis {b}", "bwd", weighted, p.inner, _DOTS)
    made.product("project all bases", m.rows, p.bases * p.inner, p.width, 1, True)
    made.held += m.rows * p.bases * p.inner + m.edges * p.bases
    return made.made("bases", "[B₁X … BₖX] [V₁ … Vₖ]ᵀ", f"{p.bases} bases serve {p.relations} relations")


def candidates(p: RelationalProblem) -> list[FusedCandidate]:
    """Every legal way to compute the layer."""
    if p.is_rows:
        return [_rows(p)]
    found = [_aggregate(p), _transform(p), _pairs(p, True), _pairs(p, False)]
    return [*found, _bases(p)] if p.bases else found


def choose(p: RelationalProblem) -> FusedPlan:
    """The cheapest candidate that fits the memory limit, with the losers and their prices."""
    sizes = {"N": p.matrix.rows, "E": p.matrix.edges, "R": p.relations, "K1": p.inner, "K2": p.width}
    return choose_among(
        candidates(p), layer=p.layer, kind="relational", sizes=sizes, machine=p.machine,
        is_training=p.is_training, memory_limit=p.memory_limit,
    )  # fmt: skip
