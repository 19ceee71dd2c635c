"""Ways to run relational layers: project before or after aggregating, for all relations or where edges are.

aggregate        a row for each (target, relation), then one product with the weights below each other
transform        one product with the weights side by side, then one pass that picks the relation's columns
... pairs        the same with rows only for pairs that have edges, and one product per relation
bases            rows aggregated once for every basis, weighted by the relation's share of it
rows             x names rows of the weights: they are the projected rows already

Sizes: NR and MR are targets and sources times relations, P and Q the pairs of a target or a source and a
relation that have edges.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from plait.ir import Diagonal, Sparse
from plait.ops.program import Program
from plait.ops.work import Locality, Matrix
from plait.plan.draft import Draft
from plait.plan.ways import Way

__all__ = ["RelationalLayer", "cost", "ways"]

_TEXT = {
    "aggregate": "[A₁X … AᵣX] [W₁ … Wᵣ]ᵀ",
    "transform": "[A₁ … Aᵣ] [XW₁ … XWᵣ]ᵀ",
    "aggregate pairs": "Σᵣ Sᵣ (AᵣX) Wᵣ",
    "transform pairs": "Σᵣ Aᵣ (SᵣX) Wᵣ",
    "bases": "[B₁X … BₖX] [V₁ … Vₖ]ᵀ",
    "rows": "[A₁ … Aᵣ] [W₁ … Wᵣ]ᵀ",
}
_SHAPES = {  # shapes of the matrices other than A, by name; those with a bar are weighted, for means
    "A by target": ("NR", "M"), "A by source": ("N", "MR"),
    "A to pairs": ("P", "M"), "pairs to targets": ("N", "P"),
    "sources to pairs": ("Q", "M"), "A from pairs": ("N", "Q"),
}  # fmt: skip
_PICKING = {"pairs to targets": "P", "sources to pairs": "Q"}  # with one entry per pair, not per edge


@dataclass(frozen=True)
class RelationalLayer:
    """Such a layer in numbers."""

    inner: int
    width: int
    relations: int
    is_mean: bool = True
    blocks: int = 1
    bases: int = 0
    outer: int | None = None  # columns of the targets' own rows; None: the sources' rows are theirs
    has_root: bool = True
    has_bias: bool = True
    is_rows: bool = False  # x names rows of the weights


@dataclass(frozen=True)
class _Thinned:
    """The locality of rows each of which was split into `times` rows that are read one after another."""

    base: Locality
    times: float

    def miss_rate(self, cache_rows: int) -> float:
        return self.base.miss_rate(int(cache_rows / max(1.0, self.times)))


def cost(name: str, whole: Matrix, sizes: Mapping[str, int]) -> Matrix:
    """What the cost model knows of a matrix other than A: A with targets or sources split by relation."""
    known = name.replace("Ā", "A")
    counts = {"N": whole.rows, "M": whole.columns, **sizes}
    rows, columns = (counts[size] for size in _SHAPES[known])
    near = _Thinned(whole.locality, columns / max(1, whole.columns))
    far = _Thinned(whole.locality_transposed, rows / max(1, whole.rows))
    edges = sizes[_PICKING[known]] if known in _PICKING else whole.edges
    return Matrix(rows, columns, edges, known != name, near, far, whole.index_bytes)


def ways(of: RelationalLayer, sizes: Mapping[str, int]) -> list[Way]:
    """Every legal way to compute the layer, on a graph of these sizes."""
    because = {
        "aggregate": f"rows of {of.inner} columns are gathered, then one product",
        "transform": f"one product, then rows of {of.width} columns are gathered",
        "aggregate pairs": f"{sizes['P']} pairs of relation and target have edges, of {sizes['NR']}",
        "transform pairs": f"{sizes['Q']} pairs of relation and source have edges, of {sizes['MR']}",
        "bases": f"{of.bases} bases serve {of.relations} relations",
        "rows": "x holds row numbers, which pick rows of the weights: nothing is multiplied",
    }
    names = ["rows"] if of.is_rows else ["aggregate", "transform", "aggregate pairs", "transform pairs"]
    if of.bases and not of.is_rows:
        names.append("bases")
    return [Way(name, _TEXT[name], _Writer(of).program(name), because[name]) for name in names]


class _Writer:
    """The program of one way."""

    def __init__(self, of: RelationalLayer):
        self.of = of
        self.draft = Draft("N" if of.outer is None else "M")
        width = of.relations * of.width if of.is_rows else of.inner
        self.x = self.draft.input("X", self.draft.sources, width)

    def program(self, choice: str) -> Program:
        base, bias = self._own()
        write = {
            "aggregate": self._aggregate, "transform": self._transform, "bases": self._bases,
            "rows": self._rows,
        }.get(choice)  # fmt: skip
        out = self._pairs(choice == "aggregate pairs", base, bias) if write is None else write(base, bias)
        return self.draft.program(out)

    def _own(self) -> tuple[str | None, str | None]:
        """(what the targets' own rows add, the bias that is still to be added)."""
        of, draft = self.of, self.draft
        bias = draft.input("b", 1, of.width) if of.has_bias else None
        if not of.has_root:
            return None, bias
        if of.is_rows:
            return draft.input("B", "N", of.width), bias
        x = self.x if of.outer is None else draft.input("X1", "N", of.outer)
        root = draft.input("R", of.inner if of.outer is None else of.outer, of.width)
        return draft.gemm(x, root, bias), None

    def _matrix(self, name: str) -> str:
        is_weighted = self.of.is_mean and name in ("A by source", "A from pairs")
        shape = (_SHAPES[name][0], _SHAPES[name][1].replace("M", self.draft.sources))
        name = name.replace("A", "Ā") if is_weighted else name
        return self.draft.constant(Sparse(name, *shape, is_weighted))

    def _spmm(
        self, matrix: str, x: str, means: str = "", addend: str | None = None, bias: str | None = None
    ) -> str:
        """matrix x + addend + bias; `means`: the diagonal that makes means of the rows' sums."""
        rows = _SHAPES[matrix][0]
        target = self.draft.constant(Diagonal(means, rows)) if means and self.of.is_mean else None
        reads = {"matrix": self._matrix(matrix), "x": x, "target": target, "addend": addend, "bias": bias}
        return self.draft.add("spmm", reads, (rows, self.draft.shapes[x][1]))

    def _relate(
        self, x: str, layout: str, shape: tuple[str, int], groups: str = "",
        addend: str | None = None, bias: str | None = None,
    ) -> str:  # fmt: skip
        """Every relation's rows or columns by its weights."""
        of, draft = self.of, self.draft
        w = draft.input("W", of.relations * of.inner, of.width // of.blocks)
        constant = draft.constant(Sparse(groups, shape[0], of.relations)) if groups else None
        return draft.add(
            "relate", {"x": x, "w": w, "groups": constant, "addend": addend, "bias": bias}, shape,
            layout=layout, relations=of.relations, blocks=of.blocks, inner=of.inner // of.blocks,
            width=of.width // of.blocks,
        )  # fmt: skip

    def _aggregate(self, base: str | None, bias: str | None) -> str:
        of, draft = self.of, self.draft
        rows = self._spmm("A by target", self.x, "means")
        rows = draft.reshape(rows, ("N", of.relations * of.inner))
        if of.blocks > 1:
            return self._relate(rows, "inner", ("N", of.width), "", base, bias)
        return draft.gemm(rows, draft.input("W", of.relations * of.inner, of.width), bias, base)

    def _transform(self, base: str | None, bias: str | None) -> str:
        of, draft = self.of, self.draft
        total = of.relations * of.width
        if of.blocks > 1:
            rows = self._relate(self.x, "outer", (draft.sources, total))
        else:
            rows = draft.gemm(self.x, draft.input("T", of.inner, total))
        return self._spmm("A by source", draft.reshape(rows, (f"{draft.sources}R", of.width)), "", base, bias)

    def _pairs(self, is_aggregate: bool, base: str | None, bias: str | None) -> str:
        size, groups = ("P", "target pairs") if is_aggregate else ("Q", "source pairs")
        collect, means = ("A to pairs", "means of pairs") if is_aggregate else ("sources to pairs", "")
        rows = self._relate(self._spmm(collect, self.x, means), "rows", (size, self.of.width), groups)
        return self._spmm("pairs to targets" if is_aggregate else "A from pairs", rows, "", base, bias)

    def _bases(self, base: str | None, bias: str | None) -> str:
        of, draft = self.of, self.draft
        reads = {
            "matrix": draft.matrix(), "x": self.x, "comp": draft.input("K", of.relations, of.bases),
            "relations": draft.constant(Sparse("relations", "E", of.relations)),
        }  # fmt: skip
        total = of.bases * of.inner
        mixed = draft.add("basis_sums", reads, ("N", total), bases=of.bases, is_mean=of.is_mean)
        return draft.gemm(mixed, draft.input("V", total, of.width), bias, base)

    def _rows(self, base: str | None, bias: str | None) -> str:
        rows = self.draft.reshape(self.x, (f"{self.draft.sources}R", self.of.width))
        return self._spmm("A by source", rows, "", base, bias)
