"""Models by name, planned from statistics alone: no tensor, no graph and no torch.

Models that PyG has are planned as plait would run them. Those that only the paper has in that form (vanilla
attention, AGNN with a weight, MoNet, G-GCN, EdgeConv-5) are planned from the programs of executed.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from plait.analysis import executed
from plait.analysis.layers import Layer, layers_of
from plait.analysis.statistics import Statistics
from plait.cost.machine import MachineProfile
from plait.errors import InputError, unknown
from plait.ir import Add, Aggregate, Dense, Diagonal, Expr, Map, MatMul, Scale, Sparse, leaves, total
from plait.ir.build import chebyshev, number, polynomial, propagation
from plait.ops.work import Matrix
from plait.plan import attention
from plait.plan.plan import LayerPlan, Plan
from plait.plan.search import Problem, search
from plait.plan.ways import Way, choose

__all__ = ["HEADS", "HIDDEN", "NAMES", "assumed", "layers_by_name"]

HEADS = 4
HIDDEN = 64  # columns of a width that nobody gave
_POWERS = 2  # of polynomial models
_WEIGHTS = ("W", "b", "V", "M", "q", "v", "a", "c", "W1", "W2", "U")  # of layers that are programs
_STEPS = 10  # of iterations that stand for an inverse

X = Dense("X", "N", "K1")
B = Dense("b", 1, "K2", "learnable")
A = Sparse("A", "N", "N")
# loops of ones go inside the pattern, as PyG's GCN has them
SYMMETRIC = MatMul(MatMul(Diagonal("p", "N"), Add((A, Diagonal("i", "N")))), Diagonal("q", "N"))
NORMALISED = Sparse("S", "N", "N", is_weighted=True)  # the same as one weighted matrix
MEAN = propagation(left=True)


def _w(name: str, rows: str = "K1", cols: str = "K2") -> Dense:
    return Dense(name, rows, cols, "learnable")


def _powers(matrix: Expr, count: int) -> list[Expr]:
    found: list[Expr] = [X]
    for _ in range(count):
        found.append(MatMul(matrix, found[-1]))
    return found


def _walks(first: int, count: int) -> Expr:
    """A weighted sum of powers of the mean, by Horner: one product per power."""
    value: Expr = Scale(number(0.5), X)
    for power in range(count - 1, -1, -1):
        product = MatMul(MEAN, value)
        value = total(product, Scale(number(0.5), X)) if power >= first else product
    return value


def _iterated() -> tuple[Expr, ...]:
    value: Expr = X
    for _ in range(_STEPS):
        value = total(Scale(number(0.9), MatMul(NORMALISED, value)), Scale(number(0.1), X))
    return (value,)


def _linear(expr: Expr) -> tuple[Expr, ...]:
    return (total(MatMul(expr, _w("W")), B),)


def _gin() -> tuple[Expr, ...]:
    inner = total(MatMul(total(A @ X, Scale(number(1.1), X)), _w("W")), B)
    return (total(MatMul(Map("relu", inner), _w("W1", "K2", "K2")), Dense("b1", 1, "K2", "learnable")),)


def _pooled() -> tuple[Expr, ...]:
    message = Map("relu", total(MatMul(X, _w("P", "K1", "K1")), Dense("c", 1, "K1", "learnable")))
    return (total(MatMul(Aggregate("max", A, message), _w("W")), MatMul(X, _w("V")), B),)


# name -> the equal expressions of one layer
_EXPRESSIONS: dict[str, Callable[[], tuple[Expr, ...]]] = {
    "gcn": lambda: _linear(MatMul(SYMMETRIC, X)),
    "sage": lambda: (total(MatMul(MatMul(MEAN, X), _w("W")), B, MatMul(X, _w("V"))),),
    "sage-pool": _pooled,
    "gin": _gin,
    "commnet": lambda: (total(MatMul(A @ X, _w("W")), MatMul(X, _w("V"))),),
    "edgeconv-1": lambda: (MatMul(A, MatMul(X, _w("W"))),),
    "sgc": lambda: _linear(_powers(SYMMETRIC, _POWERS)[-1]),
    "tag": lambda: tuple(
        total(form, B) for form in polynomial(SYMMETRIC, X, [_w(f"W{k}") for k in range(_POWERS + 1)])
    ),
    "chebnet": lambda: tuple(
        total(form, B)
        for form in chebyshev(propagation(left=True, right=True), X, [_w(f"W{k}") for k in range(3)])
    ),
    "deepwalk": lambda: _linear(Add(tuple(_powers(MEAN, _POWERS)))),
    "dcnn": lambda: _linear(_walks(1, _POWERS)),
    "node2vec": lambda: _linear(_walks(0, 2)),
    "line": lambda: _linear(_walks(1, 2)),
}
# the inverse as an iteration on X W: two layers and one matrix, since all associations of ten steps are many
_ITERATED = ("auto-regress", "ppnp", "arma", "parwalks")
_ATTENTION = {"gat": "gat", "gatv2": "leaky", "transformer": "dot"}
_WRITTEN = {
    "g-gcn": "G-GCN", "vanilla-attention": "Vanilla attention", "agnn": "AGNN", "monet": "MoNet",
    "edgeconv-5": "EdgeConv-5",
}  # fmt: skip
NAMES = (*_EXPRESSIONS, *_ITERATED, *_ATTENTION, *_WRITTEN)


@dataclass(frozen=True)
class _Place:
    """Where a layer stands: what it is planned for."""

    name: str
    inner: int
    width: int
    is_first: bool
    is_training: bool
    statistics: Statistics
    machine: MachineProfile
    threads: int | None

    def matrix(self, expr: Expr) -> Matrix:
        """The cost model's description of a constant."""
        names = set(leaves(expr))
        has_loops = "S" in names or (bool(names & {"l", "i"}) and not isinstance(expr, Sparse))
        return self.pattern(has_loops, bool(names - {"A", "i"}))

    def pattern(self, has_loops: bool, is_weighted: bool) -> Matrix:
        found, nodes = self.statistics, self.statistics.nodes
        loops = nodes if has_loops else 0
        localities = (found.locality(False), found.locality(True))
        index_bytes = 4 if max(nodes, found.edges) < 2**31 else 8
        return Matrix(nodes, nodes, found.edges + loops, is_weighted, *localities, index_bytes, loops)


def assumed(widths: Sequence[int]) -> str:
    """A note on widths that nobody gave."""
    return f"layers {' -> '.join(map(str, widths))} columns wide are assumed"


def layers_by_name(
    model: str,
    widths: Sequence[int],
    statistics: Statistics,
    machine: MachineProfile,
    *,
    is_training: bool = True,
    heads: int = HEADS,
    threads: int | None = None,
) -> list[Layer]:
    """A model of len(widths) - 1 layers, analysed; the first one's features never change."""
    if model not in NAMES:
        raise InputError(unknown("model", model, NAMES))
    if len(widths) < 2 or any(isinstance(w, bool) or not isinstance(w, int) or w < 1 for w in widths):
        raise InputError(f"widths: {list(widths)}; give the features, the hidden and the output widths")
    found: list[Layer] = []
    for k, (inner, width) in enumerate(itertools.pairwise(widths)):
        place = _Place(f"layer {k} {model}", inner, width, k == 0, is_training, statistics, machine, threads)
        plans: Any = tuple(_plans(model, place, heads))
        made = layers_of(Plan(plans))
        found += made if model not in _WRITTEN else [_with_rows(made[0], _WRITTEN[model], place)]
    return found


def _plans(model: str, place: _Place, heads: int) -> list[LayerPlan]:
    if model in _EXPRESSIONS:
        return [search(_problem(_EXPRESSIONS[model](), place))]
    if model in _ITERATED:
        behind = replace(place, name=f"{place.name}, iteration", inner=place.width, is_first=False)
        first: tuple[Expr, ...] = (total(MatMul(X, _w("W")), B),)
        return [search(_problem(first, place)), search(_problem(_iterated(), behind))]
    return [_passes(model, place, heads if place.width % heads == 0 else 1)]


def _problem(forms: tuple[Expr, ...], place: _Place) -> Problem:
    learnt = tuple(n for n, leaf in leaves(forms[0]).items() if getattr(leaf, "role", "") == "learnable")
    return Problem(
        forms=forms,
        sizes={"N": place.statistics.nodes, "K1": place.inner, "K2": place.width},
        matrices=place.matrix,
        machine=place.machine,
        wrt=(() if place.is_first else ("X",)) + learnt if place.is_training else None,
        constant=frozenset({"X"}) if place.is_first else frozenset(),
        threads=place.threads,
        layer=place.name,
    )


def _passes(model: str, place: _Place, heads: int) -> LayerPlan:
    # attention sees a node itself too
    matrix = place.pattern(model in ("gat", "gatv2"), model in _ATTENTION)
    own = () if place.is_first else ("X",)
    wrt = (*own, *_WEIGHTS) if place.is_training else None
    if model in _WRITTEN:
        # what torch makes of the rows needs gradients where the rows do
        wrt = None if wrt is None else (*wrt, *(("F", "B") if own else ()))
        program = executed.LAYERS[_WRITTEN[model]](place.inner, place.width)
        ways = [Way(model, model, program, "the form the paper's table has")]
    else:
        kind, width = _ATTENTION[model], place.width // heads
        ways = attention.ways(attention.Attention(kind, place.inner, width, heads, has_bias=True), wrt)
    nodes = place.statistics.nodes
    problem = Problem(
        forms=(), sizes={"N": nodes, "M": nodes, "E": matrix.edges}, matrices=lambda expr: matrix,
        machine=place.machine, wrt=wrt, threads=place.threads, layer=place.name,
    )  # fmt: skip
    return choose(problem, ways)


def _with_rows(layer: Layer, model: str, place: _Place) -> Layer:
    """The layer with what torch makes of its rows or weights first; gradients of that are left out."""
    if model not in executed.BESIDE:
        return layer
    rows, ahead = executed.BESIDE[model], layer.forward
    values = {"n": place.statistics.nodes, "k": place.inner}
    kernels = {**ahead.kernels, "vertex update": ahead.kernels["vertex update"] + rows.work(**values)}
    more = {"flops": rows.work, "depth": rows.depth}
    ahead = replace(
        ahead, flops=sum(kernels.values()), depth=ahead.depth + rows.depth(**values), kernels=kernels,
        formulas={name: ahead.formulas[name] + formula for name, formula in more.items()},
        values={**ahead.values, **values},
    )  # fmt: skip
    note = f"{rows.text}: counted forward, not in the seconds"
    return replace(layer, phases={**layer.phases, "forward": ahead}, note=note)
