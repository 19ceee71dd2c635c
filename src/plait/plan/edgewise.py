"""Ways to run learned maps of edges (EdgeConv): which part of the map is done per node, which per edge.

linear           the whole map is linear: it commutes with the reduction, edges only pick projected rows
rectified        first layer per node, ReLU and sum in one pass over edges, the last layer per node
rectified again  the same, but the signs of ReLU are not kept: backward has a pass over targets too
blocks           first layer per node, the rest in blocks of edges; a last linear layer after a sum per node
marked           blocks of a map ending in a linear layer, under an extremum: bits mark the edges attaining it
tiles            the same for ReLU and a linear layer, all in one pass; gradients visit only the marked edges
"""

from __future__ import annotations

from dataclasses import dataclass

from plait.ops.program import Program
from plait.plan.draft import Draft
from plait.plan.ways import Way

__all__ = ["EdgeMap", "ways"]


@dataclass(frozen=True)
class EdgeMap:
    """The parts of a learned map of [x_i, x_j - x_i], as numbers."""

    kind: str  # linear, rectified or blocks
    reduce: str
    inner: int
    outer: int | None  # columns of the targets' rows; None: they are the sources'
    width: int  # columns after the map's first layer
    by_edge: tuple[tuple[int, int], ...] = ()  # (in, out) of the linear maps done per edge
    parameters: tuple[tuple[int, int], ...] = ()  # sizes of what the map reads per edge, except a last V, c
    last: int | None = None  # columns after a linear layer that follows the sum
    has_bias: bool = True
    has_last_bias: bool = True
    can_mark: bool = False  # the map ends in a linear layer per edge, under an extremum
    act: str = ""  # what is between the first layer and that one, where a kernel knows it
    is_everywhere: bool = True  # every target has an edge

    @property
    def counts_bias(self) -> bool:
        """Whether the last bias is added to a target as often as the column T says; else once everywhere."""
        return (
            self.last is not None and self.has_last_bias and (self.reduce == "sum" or not self.is_everywhere)
        )

    @property
    def columns(self) -> int:
        """Of what is reduced."""
        return self.by_edge[-1][1] if self.by_edge else self.width


_TEXT = {
    "linear": "reduce(X W₂) + X (W₁ - W₂)",
    "rectified": "(Σ relu(X (W₁ - W₂) + X W₂)) V",
    "rectified again": "(Σ relu(X (W₁ - W₂) + X W₂)) V, recomputed",
    "blocks": "reduce(f(X (W₁ - W₂) + X W₂))",
    "marked": "reduce(f(X (W₁ - W₂) + X W₂) V), marks kept",
    "tiles": "reduce(relu(X (W₁ - W₂) + X W₂) V), in tiles",
}
_BECAUSE = {
    "linear": "a linear map commutes with the reduction: no edge is projected",
    "rectified": "the first layer splits into both ends, the last commutes with the sum",
    "rectified again": "nothing besides the projected rows is kept",
    "blocks": "the first layer splits into both ends; edges go in blocks that stay in cache",
    "marked": "keeping one bit per edge and column saves a product per edge in the backward pass",
    "tiles": "edges are multiplied and reduced in cache; few attain the extremum and have a gradient",
}


def ways(map_: EdgeMap, is_training: bool) -> list[Way]:
    """Every legal way to run the map."""
    names = [map_.kind]
    if is_training and map_.kind == "rectified":
        names.append("rectified again")
    if map_.can_mark and map_.act:
        names.append("tiles")
    elif map_.can_mark and is_training:
        names.append("marked")
    return [Way(name, _TEXT[name], _program(map_, name, is_training), _BECAUSE[name]) for name in names]


def _program(map_: EdgeMap, name: str, is_training: bool) -> Program:
    draft = Draft("N" if map_.outer is None else "M")
    if name == "linear":
        return draft.program(_linear(draft, map_))
    near, far = _ends(draft, map_)
    if name in ("rectified", "rectified again"):
        more = [("slopes", ("N", map_.width))] if is_training and name == "rectified" else []
        reads = {"matrix": draft.matrix(), "near": near, "far": far}
        out = draft.add("gate", reads, ("N", map_.width), more=more, act="relu")
    else:
        out = _tiles(draft, map_, near, far, is_training) if name == "tiles" else _blocks(
            draft, map_, near, far, name == "marked", is_training
        )  # fmt: skip
    if map_.reduce == "mean":
        out = draft.add("scale_rows", {"scale": draft.diagonal("t"), "x": out}, draft.shapes[out])
    return draft.program(out if map_.last is None else _last(draft, map_, out, map_.last))


def _first(draft: Draft, map_: EdgeMap) -> tuple[str, str]:
    """(targets' rows, bias) of the first layer's part that reads the target."""
    if map_.outer is None:
        return "X", draft.input("b", 1, map_.width) if map_.has_bias else ""
    return draft.input("X1", "N", map_.outer), draft.input("b", 1, map_.width) if map_.has_bias else ""


def _ends(draft: Draft, map_: EdgeMap) -> tuple[str, str]:
    """(near, far): the first layer of both ends, [far | near] from one product where they are one matrix."""
    width, x = map_.width, draft.input("X", draft.sources, map_.inner)
    if map_.outer is None:
        bias = draft.input("b", 1, 2 * width) if map_.has_bias else None
        z = draft.gemm(x, draft.input("W", map_.inner, 2 * width), bias)
        return draft.columns(z, width, width), draft.columns(z, 0, width)
    own, bias = _first(draft, map_)
    near = draft.gemm(own, draft.input("N", map_.outer, width), bias or None)
    return near, draft.gemm(x, draft.input("F", map_.inner, width))


def _linear(draft: Draft, map_: EdgeMap) -> str:
    width, shape = map_.width, ("N", map_.width)
    x = draft.input("X", draft.sources, map_.inner)
    rows = draft.gemm(x, draft.input("F", map_.inner, width))
    target, bias = _first(draft, map_)
    own = draft.gemm(target, draft.input("N", map_.outer or map_.inner, width), bias or None)
    own = _per_edge(draft, map_, own)
    reads: dict[str, str | None] = {"matrix": draft.matrix(), "x": rows}
    if map_.reduce in ("sum", "mean"):
        reads |= {"target": draft.diagonal("t") if map_.reduce == "mean" else None, "addend": own}
        return draft.add("spmm", reads, shape)
    # a projected row of 0 is not a message of 0, which would tie with PyG's fill value
    most = draft.add(
        "extremum", reads, shape, more=[("ties", shape)], reduce=map_.reduce, counts_zero=False
    )  # fmt: skip
    return draft.add("combine", {"x0": most, "x1": own}, shape, factors=(1.0, 1.0))


def _per_edge(draft: Draft, map_: EdgeMap, x: str) -> str:
    """The part common to all messages of a target, as often as the reduction counts it."""
    if map_.reduce != "sum" and map_.is_everywhere:
        return x
    reads = {"matrix": draft.matrix(), "x": x}
    return draft.add("per_edge", reads, ("N", draft.shapes[x][1]), is_once=map_.reduce != "sum")


def _blocks(draft: Draft, map_: EdgeMap, near: str, far: str, is_marked: bool, is_training: bool) -> str:
    function = draft.object("map" if is_marked or not map_.can_mark else "whole map", "E", map_.width)
    reads: dict[str, str | None] = {
        "matrix": draft.matrix(), "function": function, "near": near, "far": far,
    }  # fmt: skip
    parameters = [draft.input(f"P{k}", *size) for k, size in enumerate(map_.parameters)]
    if map_.can_mark and not is_marked:
        parameters.append(draft.input("V", *map_.by_edge[-1]))
        parameters += [draft.input("c", 1, map_.columns)] if map_.has_last_bias else []
    reads |= {f"p{k}": name for k, name in enumerate(parameters)}
    widest = max(map_.width, *(columns for _, columns in map_.by_edge), 0)
    shape = ("N", map_.columns)
    is_sum = map_.reduce in ("sum", "mean")
    more = [] if is_sum or not is_training else [("ties", shape)]
    if is_marked:
        reads |= _product(draft, map_)
        more.append(("marks", ("E", -(-map_.columns // 32))))  # one bit each
    return draft.add(
        "attained" if is_marked else "messages", reads, shape, more=more,
        reduce="sum" if is_sum else map_.reduce, is_paired=True, widest=widest, products=map_.by_edge,
    )  # fmt: skip


def _tiles(draft: Draft, map_: EdgeMap, near: str, far: str, is_training: bool) -> str:
    shape = ("N", map_.columns)
    more = [("ties", shape), ("marks", ("E", 2 * -(-map_.columns // 64)))] if is_training else []
    reads = {"matrix": draft.matrix(), "near": near, "far": far, **_product(draft, map_)}
    return draft.add(
        "attained", reads, shape, more=more, reduce=map_.reduce, is_paired=True, act=map_.act,
        products=map_.by_edge,
    )  # fmt: skip


def _product(draft: Draft, map_: EdgeMap) -> dict[str, str | None]:
    """The last linear layer as an operand of the step that makes the messages."""
    inner, outer = map_.by_edge[-1]
    bias = draft.input("c", 1, outer) if map_.has_last_bias else None
    return {"w": draft.input("V", inner, outer), "bias": bias}


def _last(draft: Draft, map_: EdgeMap, x: str, columns: int) -> str:
    """The linear layer after the sum: its bias is in every message."""
    w = draft.input("V", map_.columns, columns)
    if not map_.has_last_bias:
        return draft.gemm(x, w)
    bias = draft.input("c", 1, columns)
    if not map_.counts_bias:
        return draft.gemm(x, w, bias)
    # as a product with the column of counts, which can be chained with the other product
    return draft.gemm(x, w, addend=draft.gemm(draft.input("T", "N", 1), bias))
