"""Attention in pieces, each a program of a few steps: between them a layer runs operations of torch.

The far rows are the input X, the near rows X1; the features or weights of edges are E.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from plait.ops.program import Program
from plait.plan.draft import Draft
from plait.plan.ways import Way

__all__ = ["DotSoftmax", "Dots", "Leaky", "Piece", "Product", "Softmax", "Sums", "ways"]

_OF_EDGES: dict[str, Any] = {"of_edges": True, "is_shared": True}  # rows per edge serve all heads


@dataclass(frozen=True)
class Product:
    """X W + b once per node."""

    rows: str  # "N": of the targets, "M": of the sources
    inner: int
    columns: int
    has_bias: bool = False

    name, text, because = "project", "X W", "all edges of a node read the same product"

    def program(self) -> Program:
        """The piece as a program."""
        draft = Draft()
        x, w = draft.input("X", self.rows, self.inner), draft.input("W", self.inner, self.columns)
        return draft.program(draft.gemm(x, w, draft.input("b", 1, self.columns) if self.has_bias else None))


@dataclass(frozen=True)
class Dots:
    """X1ᵢ · Xⱼ per edge and head."""

    heads: int
    lanes: int
    columns: int  # of either row, all heads together

    name, text = "edge dots", "(X1ᵢ · Xⱼ) by head"
    because = "one number per edge and head is kept, no row per edge"

    def program(self) -> Program:
        """The piece as a program."""
        draft = Draft("M")
        return draft.program(_dots(draft, self))


@dataclass(frozen=True)
class DotSoftmax(Dots):
    """softmax(X1ᵢ · Xⱼ + Yᵢ · E): the features of an edge are one row for all heads."""

    edge_width: int | None = None  # of the edge features; None: there are none

    name = "dot softmax"

    @property
    def text(self) -> str:  # type: ignore[override]
        """The formula of the piece."""
        return f"softmax(X1ᵢ · Xⱼ{'' if self.edge_width is None else ' + Yᵢ · E'})"

    def program(self) -> Program:
        """The piece as a program."""
        draft = Draft("M")
        scores, shape = _dots(draft, self), ("E", self.lanes)
        if self.edge_width is not None:
            near = draft.input("Y", "N", self.heads * self.edge_width)
            reads = {"matrix": "A", "near": near, "far": draft.input("E", "E", self.edge_width)}
            own = draft.add("edge_dots", reads, shape, heads=self.heads, **_OF_EDGES)
            scores = draft.add("combine", {"x0": scores, "x1": own}, shape, factors=(1.0, 1.0))
        return draft.program(draft.add("edge_softmax", {"matrix": "A", "scores": scores}, shape))


def _dots(draft: Draft, piece: Dots) -> str:
    near, far = draft.input("X1", "N", piece.columns), draft.input("X", "M", piece.columns)
    reads = {"matrix": draft.matrix(), "near": near, "far": far}
    return draft.add("edge_dots", reads, ("E", piece.lanes), heads=piece.heads)


@dataclass(frozen=True)
class Sums:
    """Σⱼ E Xⱼ by head: E is one number per edge and head."""

    heads: int
    lanes: int
    columns: int  # of the result, all heads together
    of_edges: bool = False  # X are the features of the edges, one row for all heads

    @property
    def text(self) -> str:
        """The formula of the piece."""
        return "Σ E ∘ (rows of edges) by head" if self.of_edges else "Σ E Xⱼ by head"

    name, because = "edge sums", "no row per edge is ever written"

    def program(self) -> Program:
        """The piece as a program."""
        draft = Draft("M")
        weight = draft.input("E", "E", self.lanes)
        width = self.columns // self.heads if self.of_edges else self.columns
        far = draft.input("X", "E" if self.of_edges else "M", width)
        reads = {"matrix": draft.matrix(), "weight": weight, "far": far}
        options: dict[str, Any] = _OF_EDGES if self.of_edges else {}
        return draft.program(draft.add("edge_sums", reads, ("N", self.columns), heads=self.heads, **options))


@dataclass(frozen=True)
class Softmax:
    """The softmax of numbers of edges over the edges of each target."""

    lanes: int

    name, text = "edge softmax", "softmax(X) over the edges of each target"
    because = "one pass over one number per edge and head"

    def program(self) -> Program:
        """The piece as a program."""
        draft = Draft("M")
        reads = {"matrix": draft.matrix(), "scores": draft.input("X", "E", self.lanes)}
        return draft.program(draft.add("edge_softmax", reads, ("E", self.lanes)))


@dataclass(frozen=True)
class Leaky:
    """softmax(leaky(X1ᵢ U + c + Xⱼ + E W) a): rows per edge are made in blocks and again for gradients."""

    lanes: int
    columns: int
    slope: float
    edge_width: int | None = None  # of the edge features; None: there are none
    inner: int | None = None  # columns that the targets' rows are projected from; None: they come as they are
    has_bias: bool = False

    name = "leaky scores"
    because = "one number per edge and head is kept; rows per edge are computed again for gradients"

    @property
    def text(self) -> str:
        """The formula of the piece."""
        near = "X1ᵢ" if self.inner is None else "X1ᵢ U"
        return f"softmax(leaky({near} + Xⱼ{'' if self.edge_width is None else ' + E W'}) a)"

    def program(self) -> Program:
        """The piece as a program."""
        draft = Draft("M")
        reads: dict[str, str | None] = {
            "matrix": draft.matrix(), "near": self._near(draft),
            "far": draft.input("X", "M", self.columns), "spread": draft.input("a", self.columns, self.lanes),
        }  # fmt: skip
        if self.edge_width is not None:
            reads["attr"] = draft.input("E", "E", self.edge_width)
            reads["w"] = draft.input("W", self.edge_width, self.columns)
        scores = draft.add("leaky_scores", reads, ("E", self.lanes), slope=self.slope)
        weights = draft.add("edge_softmax", {"matrix": "A", "scores": scores}, ("E", self.lanes))
        return draft.program(weights)

    def _near(self, draft: Draft) -> str:
        """The rows of the targets."""
        if self.inner is None:
            return draft.input("X1", "N", self.columns)
        bias = draft.input("c", 1, self.columns) if self.has_bias else None
        return draft.gemm(
            draft.input("X1", "N", self.inner), draft.input("U", self.inner, self.columns), bias
        )


Piece = Product | Dots | DotSoftmax | Sums | Softmax | Leaky


def ways(piece: Piece) -> list[Way]:
    """The one way to compute a piece."""
    return [Way(piece.name, piece.text, piece.program(), piece.because)]
