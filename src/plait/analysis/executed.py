"""What plait executes for every row of the paper's tables: Programs, counted by the table of operations.

Each model is written as a Program (tests run them all and count what they do), and its work and depth are
those of its steps, in symbols. All widths are k, m edges with the loops a model adds, no biases. A few models
leave something to torch, as PyG's layers do: lengths of rows, a Gaussian of them, a difference of weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

from plait.analysis.statistics import Statistics
from plait.analysis.work import symbolic
from plait.ir import Diagonal, Sparse
from plait.ops.attention import padded
from plait.ops.program import Program
from plait.ops.symbolic import Formula, ceil_log2, parse, symbol
from plait.ops.work import Matrix
from plait.plan.draft import Draft
from plait.plan.program import differentiate

__all__ = ["BESIDE", "LAYERS", "REPEATED", "Beside", "Executed", "executed"]

Size = int | str
Layered = Callable[[Size, Size], Program]  # of the widths in and out
Repeated = Callable[[int, Size, Size], Program]  # of how many steps, and the widths


class _Layer(Draft):
    """A draft of one layer on rows X of this many columns."""

    def __init__(self, inner: Size, is_weighted: bool = False) -> None:
        super().__init__()
        self.x = self.input("X", "N", inner)
        self.a = self.constant(Sparse("A", "N", "N", is_weighted))

    def sums(self, x: str, **roles: str) -> str:
        """Neighbours' rows added up; `target`, `addend`, `addend_scale`: what joins the sums."""
        return self.add("spmm", {"matrix": self.a, "x": x, **roles}, self.shapes[x])

    def product(self, x: str, name: str, width: Size, **roles: str) -> str:
        return self.gemm(x, self.input(name, self.shapes[x][1], width), **roles)

    def number(self, name: str) -> str:
        """One number, the same for all rows."""
        return self.constant(Diagonal(name, "N"))


# One layer --------------------------------------------------------------------------------------------------


def _gcn(inner: Size, width: Size) -> Program:
    draft = _Layer(inner, is_weighted=True)
    return draft.program(draft.product(draft.sums(draft.x), "W", width))


def _sage(inner: Size, width: Size) -> Program:
    draft = _Layer(inner)
    mean = draft.product(draft.sums(draft.x, target=draft.number("p")), "W", width)
    return draft.program(draft.product(draft.x, "V", width, addend=mean))


def _sage_pool(inner: Size, width: Size) -> Program:
    draft = _Layer(inner)
    mapped = draft.product(draft.x, "P", inner, bias=draft.input("c", 1, inner))
    bent = draft.add("relu", {"x": mapped}, ("N", inner))
    most = draft.add("extremum", {"matrix": draft.a, "x": bent}, ("N", inner), reduce="max",
                     more=[("ties", ("N", inner))])  # fmt: skip
    return draft.program(draft.product(draft.x, "V", width, addend=draft.product(most, "W", width)))


def _commnet(inner: Size, width: Size) -> Program:
    draft = _Layer(inner)
    near = draft.product(draft.sums(draft.x), "W", width)
    return draft.program(draft.product(draft.x, "V", width, addend=near))


def _edgeconv_1(inner: Size, width: Size) -> Program:
    draft = _Layer(inner)
    return draft.program(draft.sums(draft.product(draft.x, "W", width)))


def _vanilla_attention(inner: Size, width: Size) -> Program:
    draft = _Layer(inner)
    ends = {"matrix": draft.a, "near": draft.x, "far": draft.x}
    dots = draft.add("edge_dots", ends, ("E", 1), heads=1)
    reads = {"matrix": draft.a, "weight": dots, "far": draft.x}
    return draft.program(draft.product(draft.add("edge_sums", reads, ("N", inner), heads=1), "W", width))


def _attend(draft: _Layer, kind: str, far: str, near: str, value: str) -> str:
    reads = {"matrix": draft.a, "far": far, "near": near, "value": value}
    return draft.add(
        "attend", reads, draft.shapes[value], more=[("statistics", ("N", 4 * padded(1)))], kind=kind, heads=1,
        slope=0.2 if kind == "gat" else 0.0, is_shared=False, order="sources",
    )  # fmt: skip


def _gat(inner: Size, width: Size) -> Program:
    draft = _Layer(inner)
    z = draft.product(draft.x, "W", width)
    far, near = draft.product(z, "s", 1), draft.product(z, "t", 1)
    return draft.program(_attend(draft, "gat", far, near, z))


def _agnn(inner: Size, width: Size) -> Program:
    """F: unit rows; B: the same times a number."""
    draft = _Layer(inner)
    unit, scaled = draft.input("F", "N", inner), draft.input("B", "N", inner)
    return draft.program(draft.product(_attend(draft, "dot", unit, scaled, draft.x), "W", width))


def _gated(inner: Size, width: Size) -> Program:
    draft = _Layer(inner)
    ends = {"near": draft.product(draft.x, "W1", inner), "far": draft.product(draft.x, "W2", inner)}
    gated = draft.add("gate", {"matrix": draft.a, **ends, "value": draft.x}, ("N", inner))
    return draft.program(draft.product(gated, "W", width))


def _edgeconv_5(inner: Size, width: Size) -> Program:
    """U: W2 - W1."""
    draft = _Layer(inner)
    ends = {"near": draft.product(draft.x, "U", width), "far": draft.product(draft.x, "W1", width)}
    return draft.program(draft.add("gate", {"matrix": draft.a, **ends}, ("N", width), act="relu"))


def _monet(inner: Size, width: Size) -> Program:
    """X: rows, each times its Gaussian."""
    draft = _Layer(inner)
    return draft.program(draft.product(draft.sums(draft.x), "W", width))


def _line(inner: Size, width: Size) -> Program:
    draft = _Layer(inner, is_weighted=True)
    once = draft.sums(draft.x)
    return draft.program(draft.product(draft.sums(once, target=draft.number("q1"), addend=once), "W", width))


LAYERS: Mapping[str, Layered] = {
    "GCN": _gcn,
    "GraphSAGE mean": _sage,
    "GraphSAGE pool": _sage_pool,
    "CommNet": _commnet,
    "EdgeConv-1": _edgeconv_1,
    "Vanilla attention": _vanilla_attention,
    "Dot product": _vanilla_attention,
    "AGNN": _agnn,
    "MoNet": _monet,
    "GAT": _gat,
    "G-GCN": _gated,
    "EdgeConv-5": _edgeconv_5,
    "LINE, SDNE": _line,
    "Node2Vec": lambda inner, width: _polynomial(2, inner, width),
}


@dataclass(frozen=True)
class Beside:
    """What torch computes of a layer's rows or weights before the program runs."""

    text: str
    work: Formula
    depth: Formula


_TREE = ceil_log2(symbol("k"))
BESIDE: Mapping[str, Beside] = {
    # squares, their sum, its root, which is at least a little, a quotient; times a number
    "AGNN": Beside("unit rows by torch", parse("4nk + 2n"), 5 + _TREE),
    # minus the mean, times the inverse, times that difference, summed; halved, exponential, times the row
    "MoNet": Beside("Gaussians of rows by torch", parse("2nk^2 + 4nk + 2n"), 6 + 2 * _TREE),
    "EdgeConv-5": Beside("W2 - W1 by torch", parse("k^2"), parse("1")),
}

# Several steps ----------------------------------------------------------------------------------------------


def _gin(layers: int, inner: Size, width: Size) -> Program:
    draft = _Layer(inner)
    value = draft.sums(draft.x, addend=draft.x, addend_scale=draft.number("e"))
    for k in range(layers):
        value = draft.add("relu", {"x": value}, draft.shapes[value]) if k else value
        value = draft.product(value, f"W{k}", width)
    return draft.program(value)


def _sgc(powers: int, inner: Size, width: Size) -> Program:
    draft = _Layer(inner, is_weighted=True)
    value = draft.x
    for _ in range(powers):
        value = draft.sums(value)
    return draft.program(draft.product(value, "W", width))


def _deepwalk(powers: int, inner: Size, width: Size) -> Program:
    draft = _Layer(inner, is_weighted=True)
    value = total = draft.x
    for _ in range(powers):
        value = draft.sums(value)
        total = draft.add("combine", {"x0": total, "x1": value}, ("N", inner), factors=(1.0, 1.0))
    return draft.program(draft.product(total, "W", width))


def _polynomial(powers: int, inner: Size, width: Size, first: int = 0) -> Program:
    """The sum of q_p Aᵖ X over the powers from `first` on, by Horner: one product for each."""
    draft = _Layer(inner, is_weighted=True)
    value = draft.add("scale_rows", {"scale": draft.number(f"q{powers}"), "x": draft.x}, ("N", inner))
    for power in reversed(range(powers)):
        joined = {"addend": draft.x, "addend_scale": draft.number(f"q{power}")} if power >= first else {}
        value = draft.sums(value, **joined)
    return draft.program(draft.product(value, "W", width))


def _iterated(steps: int, inner: Size, width: Size) -> Program:
    """v becomes a A v + b X: this many terms of the inverse's series."""
    draft = _Layer(inner, is_weighted=True)
    value = draft.x
    for _ in range(steps):
        value = draft.sums(value, target=draft.number("a"), addend=draft.x, addend_scale=draft.number("b"))
    return draft.program(draft.product(value, "W", width))


REPEATED: Mapping[str, tuple[str, Repeated]] = {
    "GIN": ("K", _gin),
    "SGC": ("s", _sgc),
    "DeepWalk": ("T", _deepwalk),
    "ChebNet": ("T", _polynomial),
    "DCNN, GDC": ("T", lambda powers, inner, width: _polynomial(powers, inner, width, 1)),
    **dict.fromkeys(("Auto-Regress", "PPNP", "ARMA", "ParWalks"), ("T", _iterated)),
}
"""By model: the symbol of how many steps it has, and its program."""

# Counts -----------------------------------------------------------------------------------------------------

_SIZES = {"N": 10**5, "E": 10**6, "k": 64}  # they decide which of two paths through a program is the longest
_PLANNED = "plait's programs"


@dataclass(frozen=True)
class Executed:
    """Operations, the longest chain of them, and what executes them."""

    work: Formula
    depth: Formula
    by: str = _PLANNED


@cache
def executed(model: str, table: str) -> Executed:
    """The counts of a row, from the programs above; m edges have one weight each where a row has weights."""
    if table == "training":
        return _full_batch(_PLANNED if model in ("Full batch", "GraphSAGE", "Cluster-GCN") else _DRAWN)
    if model in REPEATED:
        found = _repeated(*REPEATED[model])
    elif (model, table) == ("GraphSAGE mean", "global"):  # one weight, of the mean alone
        found = _counted(_gcn("k", "k"))
    else:
        found = _counted(LAYERS[model]("k", "k"))
    if model in BESIDE:
        rows = BESIDE[model]
        found = Executed(found.work + rows.work, found.depth + rows.depth, f"{_PLANNED}; {rows.text}")
    layers = symbol("L") if table == "local" or model in _LAYERED else 1
    return Executed(found.work * layers, found.depth * layers, found.by)


_DRAWN = "plait's programs on what the analysis draws: plait has no such sampler"
_LAYERED = ("GCN", "GraphSAGE mean", "GIN", "CommNet", "Dot product", "EdgeConv-1")


def _counted(program: Program) -> Executed:
    weighted = any(isinstance(leaf, Sparse) and leaf.is_weighted for leaf in program.constants.values())
    return Executed(*symbolic(program, {"A": _pattern(weighted)}, _SIZES))


@cache
def _pattern(is_weighted: bool) -> Matrix:
    locality = Statistics(_SIZES["N"], _SIZES["E"]).locality(False)
    return Matrix(_SIZES["N"], _SIZES["N"], _SIZES["E"], is_weighted, locality, locality)


def _repeated(name: str, write: Repeated) -> Executed:
    """Every further step costs the same: the counts are linear in how many there are."""
    one, two = (_counted(write(steps, "k", "k")) for steps in (1, 2))
    more = symbol(name) - 1
    return Executed(one.work + (two.work - one.work) * more, one.depth + (two.depth - one.depth) * more)


def _full_batch(by: str) -> Executed:
    """Both passes of a GCN; the gradient of the first layer's features is not needed."""
    forward = _gcn("k", "k")
    ahead, first, inner, back = (
        _counted(program)
        for program in (forward, *(differentiate(forward, wrt) for wrt in (("W",), ("X", "W"), ("X",))))
    )
    layers = symbol("L")
    work = ahead.work * layers + inner.work * (layers - 1) + first.work
    return Executed(work, ahead.depth * layers + back.depth * (layers - 1) + first.depth, by)
