"""Ways to run layers with special messages: projections per node, messages in blocks of edges.

messages  a function of both ends and the edge, computed in blocks, summed, and computed again for gradients
softmax   the largest score of each target first, then sums of powers and of messages times them
sums      nothing of the function depends on the edge: projected rows of neighbours are summed
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from plait.ops.program import Program
from plait.plan.draft import Draft
from plait.plan.ways import Way

__all__ = ["End", "Messages", "ways"]


@dataclass(frozen=True)
class End:
    """The rows that messages read from one end of an edge, or from the edge itself."""

    width: int
    inner: int | None = None  # columns they are projected from; None: they are not projected
    has_bias: bool = False


@dataclass(frozen=True)
class Messages:
    """The sizes of a layer of messages.

    The sources' rows are X W + b, the targets' Y U + c (of X where there is no Y), the edges' E V + d; the
    function's parameters are P0, P1 and so on. The targets' Y S + s is added to the sums.
    """

    kind: str
    columns: int  # of the result
    far: End
    near: End | None = None
    attr: End | None = None
    skip: End | None = None
    parameters: tuple[tuple[int, int], ...] = ()
    products: tuple[tuple[int, int], ...] = ()  # (inner, columns) of what is multiplied for every edge
    is_mean: bool = False
    is_pair: bool = False  # the targets' rows are a matrix of their own
    relations: int = 1  # nodes are pairs (node, relation); the projected rows of a node hold all of its pairs
    form: tuple[str, float] | None = None  # name and number of a function that kernels know


def ways(layer: Messages, text: str, because: str) -> list[Way]:
    """The one way to run such a layer."""
    return [Way(layer.kind, text, _program(layer), because)]


def _program(layer: Messages) -> Program:
    draft = Draft("M" if layer.is_pair else "N")
    far = _far(draft, layer)
    if layer.kind == "sums":
        reads = {"matrix": draft.matrix(), "x": far, "target": _scale(draft, layer)}
        return draft.program(draft.add("spmm", reads, ("N", layer.columns)))
    near = None if layer.near is None else _own(draft, layer, layer.near, "U", "c")
    attr = None if layer.attr is None else _rows(draft, "E", "E", layer.attr, "V", "d")
    reads = {"matrix": draft.matrix(), "function": None, "near": near, "far": far, "attr": attr}
    reads |= {f"p{k}": draft.input(f"P{k}", *size) for k, size in enumerate(layer.parameters)}
    if layer.kind == "softmax":
        return draft.program(_softmax(draft, layer, reads))
    reads["function"] = draft.object("message", "E", layer.columns)
    named: dict[str, Any] = {} if layer.form is None else {"form": layer.form}
    out = draft.add("messages", reads, ("N", layer.columns), products=layer.products, **named)
    scale = _scale(draft, layer)
    if scale is not None:
        out = draft.add("scale_rows", {"scale": scale, "x": out}, ("N", layer.columns))
    return draft.program(out if layer.skip is None else _own(draft, layer, layer.skip, "S", "s", out))


def _softmax(draft: Draft, layer: Messages, reads: dict[str, str | None]) -> str:
    """[sums of exponentials | sums of messages times them]; the largest score cancels and has no gradient."""
    width = layer.columns // 2
    scores = reads | {"function": draft.object("score", "E", width)}
    names = ("score", "softmax")
    named: list[dict[str, Any]] = [{} if layer.form is None else {"form": (n, layer.form[1])} for n in names]
    top = draft.add("messages", scores, ("N", width), reduce="max", is_fixed=True, **named[0])
    powers = reads | {"function": draft.object("message", "E", layer.columns), "near": top}
    return draft.add("messages", powers, ("N", layer.columns), fixed=("near",), **named[1])


def _scale(draft: Draft, layer: Messages) -> str | None:
    return draft.diagonal("t") if layer.is_mean else None


def _far(draft: Draft, layer: Messages) -> str:
    if layer.relations == 1:
        return _rows(draft, "X", draft.sources, layer.far, "W", "b")
    whole = _rows(draft, "X", "S", layer.far, "W", "b")
    width = layer.far.width // layer.relations
    return draft.reshape(whole, (draft.sources, width))


def _own(draft: Draft, layer: Messages, end: End, w: str, bias: str, addend: str | None = None) -> str:
    """Rows of the targets."""
    is_source = not layer.is_pair and end.inner is not None
    return _rows(draft, "X" if is_source else "Y", "N", end, w, bias, addend)


def _rows(draft: Draft, name: str, rows: str, end: End, w: str, bias: str, addend: str | None = None) -> str:
    if end.inner is None:
        return draft.input(name, rows, end.width)
    x = draft.input(name, rows, end.inner)
    b = draft.input(bias, 1, end.width) if end.has_bias else None
    return draft.gemm(x, draft.input(w, end.inner, end.width), b, addend)
