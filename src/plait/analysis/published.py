"""The work-depth tables of Besta and Hoefler (arXiv 2205.09702 v4), row by row, next to exact counts.

`work` and `depth` are the bounds as published, constants and O() left out. `executed_work` and
`executed_depth` count what an implementation that computes nothing twice carries out (plait's programs, where
it lowers the model): all widths k, m edges with the loops a model adds, no biases. Where the two differ by
more than a constant, `because` says why; docs/analysis.md lists it.

n vertices, m edges, d largest degree, k width, L layers, K layers of an MLP, c vertices sampled, s, T powers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from plait.errors import InputError
from plait.ops.symbolic import Formula, ceil_log2, parse, symbol

__all__ = ["GLOBAL", "KERNELS", "LOCAL", "SCHEMES", "Bound", "Row", "find", "generic_depth", "generic_work"]

n, m, d, k, L, K, T, s = (symbol(name) for name in "nmdkLKTs")
# what the steps of an ideal machine take: a sum of d neighbours, weighted or not, and a product with W
_SUM, _PRODUCT = ceil_log2(d), 1 + ceil_log2(k)
_WEIGHTED = 1 + _SUM


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
    executed_work: Formula
    executed_depth: Formula
    because: str = ""
    psi_work: Formula | None = None
    psi_depth: Formula | None = None
    phi_work: Formula | None = None
    phi_depth: Formula | None = None
    is_equal: bool = True  # what is executed computes the same numbers, not an approximation of them

    @property
    def executed_by(self) -> str:
        """What the executed count is one of: plait's programs, or why plait does not run the row."""
        return _NOT_RUN.get((self.table, self.model), "plait's programs")

    @property
    def is_run(self) -> bool:
        """Whether plait runs the model as the row has it, so that its executed count is one of a run."""
        return (self.table, self.model) not in _NOT_RUN

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


_NO_SOFTMAX = "not run: a sum weighted by dot products without a softmax, which no layer of PyG computes"
_NOT_RUN: Mapping[tuple[str, str], str] = {
    ("local", "Vanilla attention"): _NO_SOFTMAX,
    ("global", "Dot product"): _NO_SOFTMAX,
    ("local", "AGNN"): "not run: PyG's AGNNConv has no weight, the row has; counted with the layer's softmax",
    ("local", "MoNet"): "not run: PyG's GMMConv takes its Gaussian of edge attributes, the row of h_j",
    (
        "local",
        "G-GCN",
    ): "not run: PyG's ResGatedGraphConv multiplies h_j by a weight inside the gate and adds "
    "another of h_i, the row has one weight behind the sum",
    ("local", "EdgeConv-5"): "not run: as a learned message PyG's EdgeConv multiplies on edges; counted with "
    "the map split over the ends",
    ("training", "FastGCN"): "not run: plait has no sampler of layers; counted from what would be drawn",
    ("training", "GraphSAINT"): "not run: plait has no sampler of walks; counted from walks on the graph",
}

# Table 4, before psi, the sum and phi are known: W and D of each are symbols. The depth of Aggregate is
# printed as D_plus log d, where the text gives log d for the whole tree: Row.kernels follows the text.
KERNELS: Mapping[str, tuple[str, str, str]] = {
    "scatter": ("1", "1", "mk"),
    "edge update": ("m W_psi", "D_psi", "1"),
    "aggregate": ("n W_plus", "D_plus log d", "mk"),
    "vertex update": ("n W_phi", "D_phi", "1"),
}


def generic_work(
    layers: int, m: float, n: float, psi: float, plus: float, phi: float, **more: float
) -> float:
    """W_pre + L (m W_psi + n W_plus + n W_phi) + W_post; `attention` adds m W_a for a learnt coefficient."""
    once = more.get("pre", 0.0) + more.get("post", 0.0)
    return once + layers * (m * (psi + more.get("attention", 0.0)) + n * (plus + phi))


def generic_depth(layers: int, psi: float, plus: float, phi: float, **more: float) -> float:
    """D_pre + L (D_psi + D_plus + D_phi) + D_post; `attention` adds D_a for a learnt coefficient."""
    once = more.get("pre", 0.0) + more.get("post", 0.0)
    return once + layers * (psi + plus + phi + more.get("attention", 0.0))


# Local models: Tables 5 and 6 -------------------------------------------------------------------------------

_DEPTH = "L log d + L log k"
_PER_EDGE = "Lmk^2 + Lnk^2"
_SAME_MAP = "the linear maps act on single vertices: done once a vertex, not once an edge"


def _local(
    model: str,
    kind: str,
    formula: str,
    psi: tuple[str, str],
    phi: tuple[str, str],
    total: tuple[str, str],
    executed: tuple[Formula, Formula],
    because: str = "",
) -> Row:
    return Row(
        model, "local", kind, formula, parse(total[0]), parse(total[1]), *executed, because,
        parse(psi[0]), parse(psi[1]), parse(phi[0]), parse(phi[1]),
    )  # fmt: skip


LOCAL: tuple[Row, ...] = (
    _local(
        "GCN", "C", "h_j / sqrt(d_i d_j)", ("k", "1"), ("k^2", "log k"), ("Lmk + Lnk^2", _DEPTH),
        (L * (2 * m * k + 2 * n * k**2), L * (_WEIGHTED + _PRODUCT)),
    ),
    _local(
        "GraphSAGE mean", "C", "h_j", ("1", "1"), ("k^2", "log k"), ("Lmk + Lnk^2", _DEPTH),
        (L * (m * k + 2 * n * k + 4 * n * k**2), L * (_SUM + 2 + _PRODUCT)),
        "two weights are multiplied, of the mean and of the vertex itself: the bound's constant is 4",
    ),
    _local(
        "GIN", "C", "h_j", ("1", "1"), ("Kk^2", "K log k"), ("Lmk + LKnk^2", "L log d + LK log k"),
        (
            L * (m * k + 2 * n * k + 2 * K * n * k**2 + (K - 1) * n * k),
            L * (_SUM + 1 + K * _PRODUCT + K - 1),
        ),
    ),
    _local(
        "CommNet", "C", "h_j", ("1", "1"), ("k^2", "log k"), ("Lmk + Lnk^2", _DEPTH),
        (L * (m * k + n * k + 4 * n * k**2), L * (_SUM + _PRODUCT + 1)),
    ),
    _local(
        "Vanilla attention", "A", "(h_i · h_j) h_j", ("k", "log k"), ("k^2", "log k"),
        ("Lmk + Lnk^2", _DEPTH),
        (L * (4 * m * k + 2 * n * k**2), L * (_PRODUCT + _WEIGHTED + _PRODUCT)),
    ),
    _local(
        "AGNN", "A", "w cos(h_i, h_j) h_j", ("k", "log k"), ("k^2", "log k"), ("Lmk + Lnk^2", _DEPTH),
        (
            L * (4 * m * k + 5 * m + 3 * n * k + n + 2 * n * k**2),
            L * (_PRODUCT + 2 + _PRODUCT + 1 + 2 * _SUM + 2 + _WEIGHTED + 1 + _PRODUCT),
        ),
        "norms are taken once a vertex; the softmax over neighbours, which the row leaves out, is counted",
    ),
    _local(
        "MoNet", "A", "exp(-1/2 (h_j - w)ᵀ W⁻¹ (h_j - w)) h_j", ("k^2", "log k"), ("k^2", "log k"),
        (_PER_EDGE, _DEPTH),
        (
            L * (2 * m * k + 4 * n * k**2 + 3 * n * k + 2 * n),
            L * (1 + 2 * _PRODUCT + 2 + _WEIGHTED + _PRODUCT),
        ),
        "as the row writes it the Gaussian reads one vertex only: done once a vertex, not once an edge",
    ),
    _local(
        "GAT", "A", "softmax_i(LeakyReLU(aᵀ[W h_i, W h_j])) h_j", ("dk^2", "log k + log d"),
        ("k^2", "log k"), ("Lmdk^2 + Lnk^2", _DEPTH),
        (
            L * (2 * n * k**2 + 4 * n * k + 7 * m + 2 * m * k + n * k + n),
            L * (2 * _PRODUCT + 3 + 2 * _SUM + 2 + _WEIGHTED + 1),
        ),
        "W h and both halves of the score are computed once a vertex, the softmax's sum once a row; "
        "the row charges all of it to every edge",
    ),
    _local(
        "G-GCN", "MP", "σ(W1 h_i + W2 h_j) ⊙ h_j", ("k^2", "log k"), ("k^2", "log k"), (_PER_EDGE, _DEPTH),
        (L * (4 * m * k + 6 * n * k**2), L * (_PRODUCT + 2 + _WEIGHTED + _PRODUCT)),
        _SAME_MAP,
    ),
    _local(
        "GraphSAGE pool", "MP", "σ(W h_j + w)", ("k^2", "log k"), ("k^2", "log k"), (_PER_EDGE, _DEPTH),
        (L * (m * k + 3 * n * k + 6 * n * k**2), L * (_PRODUCT + 2 + _SUM + _PRODUCT + 1)),
        _SAME_MAP,
    ),
    _local(
        "EdgeConv-1", "MP", "W h_j", ("k^2", "log k"), ("1", "1"), (_PER_EDGE, _DEPTH),
        (L * (m * k + 2 * n * k**2), L * (_PRODUCT + _SUM)),
        _SAME_MAP + "; the global table gives the same map the smaller bound; its phi has no weight, so the "
        "published Lnk² belongs to no kernel",
    ),
    _local(
        "EdgeConv-5", "MP", "σ(W1 (h_j - h_i) + W2 h_i)", ("k^2", "log k"), ("1", "1"), (_PER_EDGE, _DEPTH),
        (L * (3 * m * k + 4 * n * k**2 + k**2), L * (1 + _PRODUCT + 2 + _SUM)),
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
    model: str, kind: str, formula: str, work: str, depth: str, executed: tuple[Formula, Formula],
    because: str = "", is_equal: bool = True,
) -> Row:  # fmt: skip
    return Row(
        model, "global", kind, formula, parse(work), parse(depth), *executed, because, is_equal=is_equal
    )


def _as_local(model: str) -> tuple[Formula, Formula]:
    row = next(row for row in LOCAL if row.model == model)
    return row.executed_work, row.executed_depth


# Horner: one more product, and the next power's scaled term added to it
_TERM_WORK, _TERM_DEPTH = 2 * m * k + 2 * n * k, _WEIGHTED + 1
_LAST = (2 * n * k**2, _PRODUCT)

GLOBAL: tuple[Row, ...] = (
    _global("GCN", "L", "Â H W", "Lmk + Lnk^2", "L log k + L log d", _as_local("GCN")),
    _global(
        "GraphSAGE mean", "L", "Ā H W", "Lmk + Lnk^2", "L log k + L log d",
        (L * (2 * m * k + 2 * n * k**2), L * (_WEIGHTED + _PRODUCT)),
    ),
    _global(
        "GIN", "L", "MLP(((1 + ε) I + Â) H)", "Lmk + KLnk^2", "LK log k + LK log d", _as_local("GIN"),
        "the local table has L log d + LK log k for the same model, and is right: one aggregate a layer",
    ),
    _global(
        "CommNet", "L", "A H W2 + H W1", "Lmk + Lnk^2", "L log k + L log d", _as_local("CommNet")
    ),
    _global(
        "Dot product", "L", "(A ⊙ (H Hᵀ)) H W", "Lmk + Lnk^2", "L log k + L log d",
        _as_local("Vanilla attention"), "H Hᵀ is computed where A has an edge, never as a whole",
    ),
    _global(
        "EdgeConv-1", "L", "A H W", "Lmk + Lnk^2", "L log k + L log d", _as_local("EdgeConv-1")
    ),
    _global(
        "SGC", "P", "Âˢ H W", "mn log s + nk^2", "log k + log s log d",
        (2 * s * m * k + _LAST[0], s * _WEIGHTED + _LAST[1]), _POWERS,
    ),
    _global(
        "DeepWalk", "P", "(Σ Āˢ) H W", "mn log T + nk^2", "log k + log T log d",
        (T * (2 * m * k + n * k) + _LAST[0], T * _WEIGHTED + 1 + _LAST[1]), _POWERS,
    ),
    _global(
        "ChebNet", "P", "(Σ θ_s Āˢ) H W", "mn log T + nk^2", "log k + log T log d",
        (T * _TERM_WORK + n * k + _LAST[0], 1 + T * _TERM_DEPTH + _LAST[1]), _POWERS,
    ),
    _global(
        "DCNN, GDC", "P", "(Σ w_s Āˢ) H W", "mn log T + nk^2", "log k + log T log d",
        (T * _TERM_WORK - n * k + _LAST[0], T * _TERM_DEPTH + _LAST[1]), _POWERS,
    ),
    _global(
        "Node2Vec", "P", "(I/p + (1 - 1/q) Ā + Ā²/q) H W", "mn + nk^2", "log k + log d",
        (2 * _TERM_WORK + n * k + _LAST[0], 1 + 2 * _TERM_DEPTH + _LAST[1]), _POWERS,
    ),
    _global(
        "LINE, SDNE", "P", "(Ā + θ Ā²) H W", "mn + nk^2", "log k + log d",
        (4 * m * k + 2 * n * k + _LAST[0], 2 * _WEIGHTED + 2 + _LAST[1]), _POWERS,
    ),
    _global(
        "Auto-Regress", "R", "((1 + a) I - a Â)⁻¹ H W", "n^3 + nk^2", "log^2 n + log k",
        (T * (2 * m * k + 3 * n * k) + _LAST[0], T * (_WEIGHTED + 2) + _LAST[1]), _INVERSE, False,
    ),
    _global(
        "PPNP", "R", "α (I - (1 - α) Â)⁻¹ H W", "n^3 + nk^2", "log^2 n + log k",
        (T * (2 * m * k + 3 * n * k) + _LAST[0], T * (_WEIGHTED + 2) + _LAST[1]), _INVERSE, False,
    ),
    _global(
        "ARMA", "R", "b (I - a Â)⁻¹ H W", "n^3 + nk^2", "log^2 n + log k",
        (T * (2 * m * k + 3 * n * k) + _LAST[0], T * (_WEIGHTED + 2) + _LAST[1]), _INVERSE, False,
    ),
    _global(
        "ParWalks", "R", "b (I - a Â)⁻¹ H W", "n^3 + nk^2", "log^2 n + log k",
        (T * (2 * m * k + 3 * n * k) + _LAST[0], T * (_WEIGHTED + 2) + _LAST[1]), _INVERSE, False,
    ),
)  # fmt: skip

# Training schemes, one iteration over all vertices: Table 2 -------------------------------------------------

# forward L (2mk + 2nk²), backward L (2mk + 4nk²); the gradient of the first layer's features is not needed
_FULL = (L * (4 * m * k + 6 * n * k**2) - 2 * m * k - 2 * n * k**2, L * (3 * _WEIGHTED + 3 * _PRODUCT))
_SAMPLED = (
    "bounds of sampling keep the whole graph's Lmk though at most c edges of a vertex are read, and count a "
    "vertex once for every path to it; the analysis counts distinct vertices measured on the graph"
)


def _scheme(model: str, work: str, depth: str, because: str) -> Row:
    return Row(model, "training", "", "", parse(work), parse(depth), *_FULL, because)


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
