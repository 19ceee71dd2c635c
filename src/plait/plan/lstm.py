"""Ways to run SAGE with an LSTM over every node's neighbours: shared prefixes once, or padded lists.

prefixes  every distinct prefix of the neighbour lists is run once
padded    all lists padded to one length and run separately, as PyG does: priced only, PyG runs it
"""

from __future__ import annotations

from dataclasses import dataclass

from plait.ops.program import Program
from plait.plan.draft import Draft
from plait.plan.ways import Way

__all__ = ["Lists", "Shape", "ways"]


@dataclass(frozen=True)
class Lists:
    """The neighbour lists in numbers: distinct prefixes, padded elements, elements of the longest list."""

    steps: int
    padded: int
    length: int

    @property
    def sizes(self) -> dict[str, int]:
        """The values of P, L and D in the programs."""
        return {"P": self.steps, "L": self.padded, "D": self.length}


@dataclass(frozen=True)
class Shape:
    """Widths of a layer: its input, what the LSTM reads and keeps, its output."""

    inner: int
    units: int
    width: int
    projected: int | None = None  # columns after a projection and ReLU of the sources; None: there is none
    root: int | None = None  # columns of the targets' own rows; None: they are not added
    has_gate_bias: bool = True
    has_bias: bool = True
    has_projection_bias: bool = True
    is_pair: bool = False  # the targets' rows are a matrix of their own


def ways(shape: Shape, lists: Lists, is_training: bool) -> list[Way]:
    """Shared prefixes, and padded lists."""
    saved = lists.padded / max(1, lists.steps)
    return [
        Way(
            "prefixes",
            f"lstm over {lists.steps:,} distinct prefixes ({lists.padded:,} padded elements)",
            _program(shape, is_training, ""),
            f"neighbour lists share prefixes, {saved:.2f}x fewer steps",
        ),
        Way(
            "padded",
            f"lstm over {lists.padded:,} padded elements (PyG)",
            _program(shape, is_training, "padded"),
            "lists share too little",
        ),
    ]


def _program(shape: Shape, is_training: bool, kind: str) -> Program:
    draft = Draft("M" if shape.is_pair else "N")
    given = draft.input("X", draft.sources, shape.inner)
    x, inner = given, shape.inner
    if shape.projected is not None:
        bias = draft.input("p", 1, shape.projected) if shape.has_projection_bias else None
        made = draft.gemm(x, draft.input("P", inner, shape.projected), bias)
        x, inner = draft.add("relu", {"x": made}, draft.shapes[made]), shape.projected
    rows = "P"
    if kind:  # a row for every element of every list: the edges' rows are gathered first
        rows = "L"
        x = draft.add("spmm", {"matrix": draft.matrix(), "x": x}, (rows, inner))
    gates = 4 * shape.units
    bias = draft.input("g", 1, gates) if shape.has_gate_bias else None
    z = draft.gemm(x, draft.input("G", inner, gates), bias)
    reads = {
        "lists": draft.object("lists", rows, "D"),
        "x": z,
        "w": draft.input("H", shape.units, gates),
        "bias": bias,
    }
    more = [("gates", (rows, gates)), ("cell", (rows, shape.units))] if is_training else []
    h = draft.add("sequence", reads, ("N", shape.units), more=more, kind=kind)
    own = None
    if shape.root is not None:
        root = draft.input("R", "N", shape.root) if shape.is_pair else given
        own = draft.gemm(root, draft.input("V", shape.root, shape.width))
    last = draft.input("b", 1, shape.width) if shape.has_bias else None
    return draft.program(draft.gemm(h, draft.input("W", shape.units, shape.width), last, own))
