"""The work-depth tables of Besta and Hoefler (arXiv 2205.09702 v4), row by row, next to exact counts.

`work` and `depth` are the bounds as published, constants and O() left out. `executed_work` and
`executed_depth` count what plait carries out, from its programs (executed.py). Where the two differ by more
than a constant, `because` says why; docs/counting.md lists it.

n vertices, m edges, d largest degree, k width, L layers, K layers of an MLP, c vertices sampled, s, T powers.
"""

from __future__ import annotations

from dataclasses import dataclass

from plait.analysis.executed import executed
from plait.errors import InputError
from plait.ops.symbolic import Formula, parse, symbol

__all__ = ["GLOBAL", "LOCAL", "SCHEMES", "Bound", "Row", "find"]

n, m, k = (symbol(name) for name in "nmk")


@dataclass(frozen=True)
class Bound:
    """Work, depth, communication and synchronisations of one kernel."""

    work: Formula
    depth: Formula
    communication: Formula
    synchronisations: int = 1


@dataclass(frozen=True)
class Row:
    """One row of the tables: as published, and as executed."""

    model: str
    table: str  # "local", "global" or "training"
    kind: str  # C, A, MP of local models; L, P, R of global ones
    formula: str
    work: Formula
    depth: Formula
    because: str = ""
    psi_work: Formula | None = None
    psi_depth: Formula | None = None
    phi_work: Formula | None = None
    phi_depth: Formula | None = None
    is_equal: bool = True  # what is executed computes the same numbers, not an approximation of them

    @property
    def executed_work(self) -> Formula:
        return executed(self.model, self.table).work

    @property
    def executed_depth(self) -> Formula:
        return executed(self.model, self.table).depth

    @property
    def executed_by(self) -> str:
        """What carries out the executed count: plait's programs, and what torch does beside them."""
        return executed(self.model, self.table).by

    def kernels(self) -> dict[str, Bound]:
        """The four kernels of one layer of a local model (its Table 4 with this row's psi and phi)."""
        if self.psi_work is None or self.psi_depth is None or self.phi_work is None or self.phi_depth is None:
            raise InputError(f"{self.model}: only the local models are split into kernels; see LOCAL")
        nothing, one = Formula({}), parse("1")
        return {
            "scatter": Bound(one, one, m * k),
            "edge update": Bound(m * self.psi_work, self.psi_depth, nothing),
            "aggregate": Bound(m * k, parse("log d"), m * k),
            "vertex update": Bound(n * self.phi_work, self.phi_depth, nothing),
        }


# Local models: Tables 5 and 6 -------------------------------------------------------------------------------

_DEPTH = "L log d + L log k"
_PER_EDGE = "Lmk^2 + Lnk^2"
_SAME_MAP = "the linear maps act on single vertices: done once per vertex, not once per edge"


def _local(
    model: str,
    kind: str,
    formula: str,
    psi: tuple[str, str],
    phi: tuple[str, str],
    total: tuple[str, str],
    because: str = "",
) -> Row:
    return Row(
        model, "local", kind, formula, parse(total[0]), parse(total[1]), because,
        parse(psi[0]), parse(psi[1]), parse(phi[0]), parse(phi[1]),
    )  # fmt: skip


LOCAL: tuple[Row, ...] = (
    _local(
        "GCN", "C", "h_j / sqrt(d_i d_j)", ("k", "1"), ("k^2", "log k"), ("Lmk + Lnk^2", _DEPTH),
    ),
    _local(
        "GraphSAGE mean", "C", "h_j", ("1", "1"), ("k^2", "log k"), ("Lmk + Lnk^2", _DEPTH),
        "two weights are multiplied, of the mean and of the vertex itself: the bound's constant is 4",
    ),
    _local(
        "GIN", "C", "h_j", ("1", "1"), ("Kk^2", "K log k"), ("Lmk + LKnk^2", "L log d + LK log k"),
    ),
    _local(
        "CommNet", "C", "h_j", ("1", "1"), ("k^2", "log k"), ("Lmk + Lnk^2", _DEPTH),
    ),
    _local(
        "Vanilla attention", "A", "(h_i · h_j) h_j", ("k", "log k"), ("k^2", "log k"),
        ("Lmk + Lnk^2", _DEPTH),
    ),
    _local(
        "AGNN", "A", "w cos(h_i, h_j) h_j", ("k", "log k"), ("k^2", "log k"), ("Lmk + Lnk^2", _DEPTH),
        "lengths are computed once per vertex; the softmax over neighbours, not in the row, is counted",
    ),
    _local(
        "MoNet", "A", "exp(-1/2 (h_j - w)ᵀ W⁻¹ (h_j - w)) h_j", ("k^2", "log k"), ("k^2", "log k"),
        (_PER_EDGE, _DEPTH),
        "as the row writes it the Gaussian reads one vertex only: done once per vertex, not once per edge",
    ),
    _local(
        "GAT", "A", "softmax_i(LeakyReLU(aᵀ[W h_i, W h_j])) h_j", ("dk^2", "log k + log d"),
        ("k^2", "log k"), ("Lmdk^2 + Lnk^2", _DEPTH),
        "W h and both halves of the score are computed once per vertex, the softmax's sum once per row of "
        "the matrix; the published bound charges all of it to every edge",
    ),
    _local(
        "G-GCN", "MP", "σ(W1 h_i + W2 h_j) ⊙ h_j", ("k^2", "log k"), ("k^2", "log k"), (_PER_EDGE, _DEPTH),
        _SAME_MAP,
    ),
    _local(
        "GraphSAGE pool", "MP", "σ(W h_j + w)", ("k^2", "log k"), ("k^2", "log k"), (_PER_EDGE, _DEPTH),
        _SAME_MAP,
    ),
    _local(
        "EdgeConv-1", "MP", "W h_j", ("k^2", "log k"), ("1", "1"), (_PER_EDGE, _DEPTH),
        _SAME_MAP + "; the global table gives the same map the smaller bound; its phi has no weight, so the "
        "published Lnk² belongs to no kernel",
    ),
    _local(
        "EdgeConv-5", "MP", "σ(W1 (h_j - h_i) + W2 h_i)", ("k^2", "log k"), ("1", "1"), (_PER_EDGE, _DEPTH),
        _SAME_MAP + " (W1 h_j + (W2 - W1) h_i); false once a second layer of an MLP sits on the edge",
    ),
)  # fmt: skip

# Global models: Table 7 -------------------------------------------------------------------------------------

_POWERS = (
    "products with a matrix of width k from the right (A (A H)) instead of powers of A, which fill up: "
    "cheaper while s k < n log s"
)
_INVERSE = (
    "T steps of an iteration instead of an inverse: an approximation whose error shrinks with every step"
)


def _global(
    model: str, kind: str, formula: str, work: str, depth: str, because: str = "", is_equal: bool = True,
) -> Row:  # fmt: skip
    return Row(model, "global", kind, formula, parse(work), parse(depth), because, is_equal=is_equal)


GLOBAL: tuple[Row, ...] = (
    _global("GCN", "L", "Â H W", "Lmk + Lnk^2", "L log k + L log d"),
    _global("GraphSAGE mean", "L", "Ā H W", "Lmk + Lnk^2", "L log k + L log d"),
    _global(
        "GIN", "L", "MLP(((1 + ε) I + Â) H)", "Lmk + KLnk^2", "LK log k + LK log d",
        "the local table has L log d + LK log k for the same model, and is right: one aggregate per layer",
    ),
    _global("CommNet", "L", "A H W2 + H W1", "Lmk + Lnk^2", "L log k + L log d"),
    _global(
        "Dot product", "L", "(A ⊙ (H Hᵀ)) H W", "Lmk + Lnk^2", "L log k + L log d",
        "H Hᵀ is computed where A has an edge, never as a whole",
    ),
    _global("EdgeConv-1", "L", "A H W", "Lmk + Lnk^2", "L log k + L log d"),
    _global("SGC", "P", "Âˢ H W", "mn log s + nk^2", "log k + log s log d", _POWERS),
    _global("DeepWalk", "P", "(Σ Āˢ) H W", "mn log T + nk^2", "log k + log T log d", _POWERS),
    _global("ChebNet", "P", "(Σ θ_s Āˢ) H W", "mn log T + nk^2", "log k + log T log d", _POWERS),
    _global("DCNN, GDC", "P", "(Σ w_s Āˢ) H W", "mn log T + nk^2", "log k + log T log d", _POWERS),
    _global("Node2Vec", "P", "(I/p + (1 - 1/q) Ā + Ā²/q) H W", "mn + nk^2", "log k + log d", _POWERS),
    _global("LINE, SDNE", "P", "(Ā + θ Ā²) H W", "mn + nk^2", "log k + log d", _POWERS),
    _global("Auto-Regress", "R", "((1 + a) I - a Â)⁻¹ H W", "n^3 + nk^2", "log^2 n + log k", _INVERSE, False),
    _global("PPNP", "R", "α (I - (1 - α) Â)⁻¹ H W", "n^3 + nk^2", "log^2 n + log k", _INVERSE, False),
    _global("ARMA", "R", "b (I - a Â)⁻¹ H W", "n^3 + nk^2", "log^2 n + log k", _INVERSE, False),
    _global("ParWalks", "R", "b (I - a Â)⁻¹ H W", "n^3 + nk^2", "log^2 n + log k", _INVERSE, False),
)  # fmt: skip

# Training schemes, one iteration over all vertices: Table 2 -------------------------------------------------

_SAMPLED = (
    "bounds of sampling keep the whole graph's Lmk though at most c edges of a vertex are read, and count a "
    "vertex once for every path to it; the analysis counts distinct vertices measured on the graph"
)


def _scheme(model: str, work: str, depth: str, because: str) -> Row:
    return Row(model, "training", "", "", parse(work), parse(depth), because)


SCHEMES: tuple[Row, ...] = (
    _scheme("Full batch", "Lmk + Lnk^2", "L log k + L log d", ""),
    _scheme("GraphSAGE", "Lmk + Lnk^2 + c^L n k^2", "L log k + L log c", _SAMPLED),
    _scheme(
        "FastGCN", "Lmk + Lnk^2 + cLnk^2", "L log k + L log c",
        _SAMPLED + "; c vertices of a layer serve a whole batch, not one target each",
    ),
    _scheme(
        "Cluster-GCN", "W_pre + Lmk + Lnk^2", "D_pre + L log k + L log d",
        "edges between clusters are not read",
    ),
    _scheme(
        "GraphSAINT", "W_pre + Lmk + Lnk^2", "D_pre + L log k + L log d",
        "what is read is the sampled subgraphs; the bound is that of the whole graph",
    ),
)  # fmt: skip

_TABLES = {"local": LOCAL, "global": GLOBAL, "training": SCHEMES}


def find(model: str, table: str = "local") -> Row:
    """The row of a model, by its name in the table."""
    rows = _TABLES.get(table)
    if rows is None:
        raise InputError(f"table: {table!r}; known are {', '.join(_TABLES)}")
    for row in rows:
        if row.model.lower() == model.lower():
            return row
    raise InputError(f"model: {model!r} is not in the {table} table; {', '.join(r.model for r in rows)} are")
