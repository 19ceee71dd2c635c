"""Ways to run attention layers: which rows are gathered, where the scores come from, what backward keeps.

gat             project once and gather the projected rows (heads x out columns); scores from these rows
gat folded      the same with the attention vectors folded into W: scores come with the projection
recompute       gather the raw rows once for all heads, project each head after: wins where the input is
                narrower than a head's output; Transformer's raw rows are keys too, scored by x (Q Kᵀ)
leaky, dot      GATv2 and Transformer: the scores need the projected rows of both ends
... lean, ... targets first: how the backward pass works (ops/attention.py)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from plait.ops.attention import padded
from plait.ops.program import Program
from plait.plan.draft import Draft
from plait.plan.ways import Way

__all__ = ["Attention", "base_of", "unit_ways", "ways"]

_ORDERS = {
    "": "sources",
    " lean": "lean",
    " targets first": "targets",
    " targets first, lean": "targets, lean",
}
_TEXT = {
    "gat": "softmax(leaky(X W aₛ + (X W aₜ)ᵀ)) (X W), reuse",
    "gat folded": "softmax(leaky(X (W aₛ) + (X (W aₜ))ᵀ)) (X W), reuse",
    "recompute": "(softmax(leaky(X (W aₛ) + (X (W aₜ))ᵀ)) X) W, recompute",
    "leaky": "softmax(a · leaky(X Wₗ + X Wᵣ)) (X Wₗ)",
    "dot": "softmax((X Q) · (X K) / √width) (X V)",
    "dot recompute": "(softmax((X (Q Kᵀ)) · X / √width) X) V, recompute",
}


@dataclass(frozen=True)
class Attention:
    """One attention layer, in numbers. kind: gat, leaky (GATv2) or dot (Transformer)."""

    kind: str
    inner: int  # columns of x
    width: int  # columns of one head's output
    heads: int
    slope: float = 0.2
    outer: int | None = None  # columns of the targets' own rows; None: the targets are the sources
    is_single: bool = True  # gat: one weight for both ends, one node set: all ways are possible
    has_targets: bool = True  # gat: the targets' scores are computed from rows; else they are given
    is_near_far: bool = False  # leaky: one projection serves both ends
    has_edge: bool = False
    has_residual: bool = False
    has_bias: bool = False  # inside the layer's program
    has_projection_bias: bool = False
    has_skip: bool = False  # dot: own rows, projected, are added
    has_query_bias: bool = False  # dot recompute: added to every query
    has_value_bias: bool = False
    has_skip_bias: bool = False
    can_recompute: bool = True
    device: str = "cpu"

    @property
    def columns(self) -> int:
        """Columns of all heads together."""
        return self.heads * self.width

    @property
    def lanes(self) -> int:
        """Heads as the device's kernels lay them out."""
        return padded(self.heads) if self.device == "cpu" else self.heads


def ways(layer: Attention, wrt: Sequence[str] | None) -> list[Way]:
    """Every legal way to compute the layer on its device; `wrt`: the inputs that need gradients."""
    bases: dict[str, Callable[[Attention, str], Program]] = {layer.kind: _rows}
    if layer.kind == "gat":
        bases = {"gat": _gat, "gat folded": _gat_folded} if layer.is_single else {"gat folded": _gat_folded}
    # [W, W a] is a copy of W; its gradient is split, and that of W a is carried to W and added
    prepared = layer.inner * layer.columns * (2 if wrt is None else 7)
    found = [
        Way(
            base + suffix, _text(base, suffix), write(layer, order), _because(layer, base, suffix),
            prepared if write is _gat_folded else 0,
        )
        for base, write in bases.items()
        for suffix, order in _orders(layer, wrt).items()
    ]  # fmt: skip
    raw = {"gat": ("recompute", _gat_raw), "dot": ("dot recompute", _dot_raw)}.get(layer.kind)
    is_open = layer.can_recompute and layer.device == "cpu" and (layer.kind != "gat" or layer.is_single)
    if raw is None or not is_open:
        return found
    name, write_raw = raw
    for suffix, order in _orders(layer, wrt).items():
        # a pass over sources is not made for their own sake where x needs no gradient: it makes the edges'
        is_asked = order == "lean" or wrt is None or "X" in wrt or layer.kind == "gat"
        if not order.startswith("targets") and is_asked:
            because = _because(layer, name, suffix)
            found.append(Way(name + suffix, _text(name, suffix), write_raw(layer, order), because))
    return found


def _orders(layer: Attention, wrt: Sequence[str] | None) -> dict[str, str]:
    """The variants of the backward pass, by the suffix of a way's name."""
    if wrt is None:
        return {"": "sources"}
    wants_edge = "E" in wrt
    if layer.device != "cpu":
        return {" targets first, lean": "targets, lean"}
    return {s: o for s, o in _ORDERS.items() if o != "targets, lean" and not (wants_edge and o == "lean")}


def base_of(choice: str) -> str:
    """A way's name without the suffix for the backward pass."""
    return next((choice.removesuffix(s) for s in reversed(_ORDERS) if s and choice.endswith(s)), choice)


# Programs -------------------------------------------------------------------------------------------------


class _Writer(Draft):
    """A draft of an attention layer, with its inputs."""

    def __init__(self, layer: Attention, order: str):
        super().__init__("N" if layer.outer is None else "M")
        self.layer, self.order = layer, order
        self.x = self.input("X", self.sources, layer.inner)
        self.own = self.x if layer.outer is None else self.input("X1", "N", layer.outer)

    def attend(
        self,
        far: str,
        near: str,
        value: str,
        *,
        att: str | None = None,
        added: Mapping[str, str | None] = MappingProxyType({}),
        is_shared: bool = False,
    ) -> str:
        """The pass over the edges; a GPU's adds a bias, other rows are added to it in a step of their own."""
        layer = self.layer
        columns = layer.heads * self.width_of(value) if is_shared else self.width_of(value)
        inside = {"addend": added.get("addend"), "bias": added.get("bias")}
        is_fused = layer.device == "cpu" or not inside["addend"]
        # gat: one number per head; else rows like those of the nodes, which only a GPU's kernels take
        width = layer.lanes if layer.kind == "gat" else layer.columns
        edge = self.input("E", "E", width) if layer.has_edge else None
        reads = {"matrix": self.matrix(), "far": far, "near": near, "value": value, "edge": edge, "att": att}
        out = self.add(
            "attend", {**reads, **(inside if is_fused else {})}, ("N", columns),
            more=[("statistics", ("N", 4 * padded(layer.heads)))], kind=layer.kind, heads=layer.heads,
            slope=layer.slope, is_shared=is_shared, order=self.order,
        )  # fmt: skip
        if is_fused:
            return out
        summed = {"x0": out, "x1": inside["addend"], "bias": inside["bias"]}
        return self.add("combine", summed, ("N", columns), factors=(1.0, 1.0))

    def width_of(self, name: str) -> int:
        return int(self.shapes[name][1])

    def added(self) -> dict[str, str | None]:
        """The residual and the bias that belong to the layer's program."""
        layer = self.layer
        residual = None
        if layer.has_residual:
            inner = self.width_of(self.own)
            residual = self.gemm(self.own, self.input("R", inner, layer.columns))
        return {"addend": residual, "bias": self.input("c", 1, layer.columns) if layer.has_bias else None}

    def projected(self, x: str, name: str, columns: int) -> str:
        """x W + b, where the layer's projections have a bias."""
        bias = self.input(f"b{name}", 1, columns) if self.layer.has_projection_bias else None
        return self.gemm(x, self.input(f"W{name}", self.width_of(x), columns), bias)


def _gat(layer: Attention, order: str) -> Program:
    draft = _Writer(layer, order)
    z = draft.projected(draft.x, "", layer.columns)
    scores = draft.gemm(z, draft.input("a", layer.columns, 2 * layer.lanes))
    far, near = (draft.columns(scores, k * layer.lanes, layer.lanes) for k in range(2))
    return draft.program(draft.attend(far, near, z, added=draft.added()))


def _gat_folded(layer: Attention, order: str) -> Program:
    draft = _Writer(layer, order)
    columns, lanes = layer.columns, layer.lanes
    z = draft.projected(draft.x, "", columns + (2 if layer.is_single else 1) * lanes)
    if layer.is_single:
        near = draft.columns(z, columns + lanes, lanes)
    elif layer.has_targets:
        near = draft.gemm(draft.own, draft.input("U", draft.width_of(draft.own), lanes))
    else:
        near = draft.input("T", "N", lanes)
    value, far = draft.columns(z, 0, columns), draft.columns(z, columns, lanes)
    return draft.program(draft.attend(far, near, value, added=draft.added()))


def _gat_raw(layer: Attention, order: str) -> Program:
    draft = _Writer(layer, order)
    scores = draft.gemm(draft.x, draft.input("a", layer.inner, 2 * layer.lanes))
    far, near = (draft.columns(scores, k * layer.lanes, layer.lanes) for k in range(2))
    means = draft.attend(far, near, draft.x, is_shared=True)
    w = draft.input("W", layer.inner, layer.columns)
    bias = draft.input("c", 1, layer.columns) if layer.has_bias else None
    reads = {"x": means, "w": w, "bias": bias}
    if layer.has_residual:
        reads |= {"own": draft.own, "skip": draft.input("R", draft.width_of(draft.own), layer.columns)}
    return draft.program(draft.add("heads", reads, ("N", layer.columns), heads=layer.heads))


def _rows(layer: Attention, order: str) -> Program:
    """far and value columns of the sources, near (and skip) columns of the targets, side by side in one z."""
    draft, columns = _Writer(layer, order), layer.columns
    far = 1 if layer.kind == "leaky" else 2  # GATv2's far rows are its values
    own = 0 if layer.is_near_far and layer.outer is None else 2 if layer.has_skip else 1
    if layer.outer is None:
        z = t = draft.projected(draft.x, "", (far + own) * columns)
        first = far * columns if own else 0
    else:
        z, t, first = draft.projected(draft.x, "", far * columns), "", 0
        t = draft.projected(draft.own, "1", own * columns)
    added = draft.added()
    if layer.has_skip:
        added["addend"] = draft.columns(t, first + columns, columns)
    att = draft.input("a", 1, columns) if layer.kind == "leaky" else None
    out = draft.attend(
        draft.columns(z, 0, columns), draft.columns(t, first, columns),
        draft.columns(z, (far - 1) * columns, columns), att=att, added=added,
    )  # fmt: skip
    return draft.program(out)


def _dot_raw(layer: Attention, order: str) -> Program:
    """Input rows are keys and values of all heads; the terms of their biases are added once per target."""
    draft, queries = _Writer(layer, order), layer.heads * layer.inner
    bias = draft.input("q", 1, queries) if layer.has_query_bias else None
    query = draft.gemm(draft.own, draft.input("M", draft.width_of(draft.own), queries), bias)
    means = draft.attend(draft.x, query, draft.x, is_shared=True)
    reads: dict[str, str | None] = {"x": means, "w": draft.input("W", layer.inner, layer.columns)}
    if layer.has_value_bias:
        reads["bias"] = draft.input("v", 1, layer.columns)
    if layer.has_skip:
        reads |= {"own": draft.own, "skip": draft.input("S", draft.width_of(draft.own), layer.columns)}
        reads["skip_bias"] = draft.input("s", 1, layer.columns) if layer.has_skip_bias else None
    out = draft.add("heads", reads, ("N", layer.columns), heads=layer.heads, is_bare_without=True)
    return draft.program(out)


def unit_ways(width: int, device: str, wrt: Sequence[str] | None) -> list[Way]:
    """AGNN: the rows X are weighted by dot products of unit rows F with B, the same rows times a number."""
    because = "rows are divided by their lengths once per node, not once per edge"
    text = "softmax(β cos(X, X)) X"
    found = []
    layer = Attention("dot", width, width, 1, 0.0, device=device)
    for suffix, order in _orders(layer, wrt).items():
        draft = _Writer(layer, order)
        out = draft.attend(draft.input("F", "N", width), draft.input("B", "N", width), draft.x)
        found.append(
            Way(f"agnn{suffix}", text + ("," + suffix if suffix else ""), draft.program(out), because)
        )
    return found


# Words ----------------------------------------------------------------------------------------------------


def _text(base: str, suffix: str) -> str:
    return _TEXT[base] + ("," + suffix if suffix else "")


def _because(layer: Attention, base: str, suffix: str) -> str:
    reason = _reason(layer, base)
    if "lean" in suffix:
        return f"{reason}; the backward pass scores the edges again instead of keeping a number for each"
    if suffix:
        return f"{reason}; with few edges per target it is faster to begin the backward pass with the targets"
    return reason


def _reason(layer: Attention, base: str) -> str:
    if base == "dot recompute":
        wide = 2 * layer.columns
        return (
            f"input rows of {layer.inner} columns serve as keys and values of all heads, not {wide} columns"
        )
    if base == "recompute":
        return f"input rows of {layer.inner} columns serve all heads, not {layer.columns} projected ones"
    if base == "gat folded":
        return f"scores are made of {layer.inner} input columns (x W a), not {layer.columns} projected ones"
    if base == "gat":
        return f"scores are made of {layer.columns} projected columns, not {layer.inner} input ones"
    return "scores need the projected rows of both ends; nothing of size edges x width is kept"
