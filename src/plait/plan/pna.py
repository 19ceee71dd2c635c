"""Ways to run layers with several aggregators and degree scalers (PNAConv).

after   one product with the weights of all scalers, whose results are then scaled
before  one product of scaled copies of the aggregates with the weights: less to write where outputs are wide

A message is the neighbour's part shifted by the target's part: mean, max and min shift by it, a sum by degree
times it, variance and deviation not at all. Messages with edge features, or of more than one layer, are made
in blocks of edges in either way; nothing shifts out of messages of several layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from plait.ops.program import Program
from plait.plan.draft import Draft
from plait.plan.ways import Way

__all__ = ["SHIFTED", "Towers", "ways"]

SHIFTED = ("mean", "max", "min")  # aggregators that shift as their messages do
_TEXT = {"after": "Σₖ Sₖ (X Dₖ + agg(X V) Wₖ) + X C", "before": "X C + [Sₖ (agg(X V) + X U) …] W"}


@dataclass(frozen=True)
class Towers:
    """The sizes of such a layer; width and outer are those of one tower."""

    width: int  # columns of x that a tower reads, and of its messages
    outer: int  # columns of a tower's output
    towers: int
    names: tuple[str, ...]
    kept: tuple[str, ...]  # the names, and what the kernel keeps besides them
    sections: int  # rows that the backward pass gathers for an edge
    scalers: int
    is_divided: bool  # every tower reads its own columns of x
    has_last: bool  # one more linear map over all towers' outputs
    edge_width: int = 0  # features of an edge
    message_layers: int = 1

    @property
    def columns(self) -> int:
        """Columns of a node's messages, all towers."""
        return self.towers * self.width

    @property
    def is_in_blocks(self) -> bool:
        """Whether messages are computed per edge."""
        return self.edge_width > 0 or self.message_layers > 1

    @property
    def has_shift(self) -> bool:
        """Whether some aggregate shifts by the target's part."""
        return self.message_layers == 1 and any(name in SHIFTED for name in self.names)

    @property
    def has_summed_shift(self) -> bool:
        """Whether some aggregate shifts by degree times the target's part."""
        return self.message_layers == 1 and "sum" in self.names


def ways(towers: Towers, is_training: bool) -> list[Way]:
    """Whether the scalers are applied before or after the product."""
    because = f"{len(towers.names)} aggregators share one gather" + (
        ", messages are made in blocks of edges" if towers.is_in_blocks else ""
    )
    why = {
        "after": f"{because}; the targets' part is folded into the weights",
        "before": f"{because}; copies of the aggregates are narrower than the outputs",
    }
    return [
        Way(name, text, _Writer(towers, is_training).program(name == "before"), why[name])
        for name, text in _TEXT.items()
    ]


class _Writer:
    """The program of one way."""

    def __init__(self, towers: Towers, is_training: bool):
        self.of, self.is_training, self.draft = towers, is_training, Draft()
        whole = towers.columns if towers.is_divided else towers.width
        self.x = self.draft.input("X", "N", whole)

    def program(self, is_before: bool) -> Program:
        of, draft = self.of, self.draft
        found = self._aggregates(self._by_tower("V"))
        kept, used = len(of.kept) * of.width, len(of.names) * of.width
        outs = []
        for t in range(of.towers):
            own = draft.columns(found, t * kept, used)
            outs.append(self._before(t, own) if is_before else self._after(t, own))
        out = draft.join(outs)
        if of.has_last:
            total = of.towers * of.outer
            out = draft.gemm(out, draft.input("L", total, total), draft.input("l", 1, total))
        return draft.program(out)

    def _own(self, t: int) -> str:
        """The rows of x that a tower reads."""
        return self.draft.columns(self.x, t * self.of.width, self.of.width) if self.of.is_divided else self.x

    def _by_tower(self, w: str, bias: str | None = None) -> str:
        """[N, columns]: every tower's rows times its weights, side by side."""
        of, draft = self.of, self.draft
        if not of.is_divided:
            shift = None if bias is None else draft.input(bias, 1, of.columns)
            return draft.gemm(self.x, draft.input(w, of.width, of.columns), shift)
        return draft.join([
            self._project(t, f"{w}{t}", None if bias is None else f"{bias}{t}", of.width)
            for t in range(of.towers)
        ])  # fmt: skip

    def _project(self, t: int, w: str, bias: str | None, columns: int) -> str:
        shift = None if bias is None else self.draft.input(bias, 1, columns)
        return self.draft.gemm(self._own(t), self.draft.input(w, self.of.width, columns), shift)

    def _aggregates(self, far: str) -> str:
        of, draft = self.of, self.draft
        layout: dict[str, Any] = {"names": of.names, "kept": of.kept, "width": of.width, "towers": of.towers}
        layout["sections"] = of.sections
        shape = ("N", len(of.kept) * of.columns)
        if not of.is_in_blocks:
            has_ends = "max" in of.names or "min" in of.names
            more = [("ties", ("N", 2 * of.columns))] if has_ends and self.is_training else []
            return draft.add("aggregate", {"matrix": draft.matrix(), "x": far}, shape, more=more, **layout)
        near = self._by_tower("B", "b") if of.message_layers > 1 else None
        edge = draft.input("e", "E", of.edge_width) if of.edge_width else None
        reads = {"matrix": draft.matrix(), "near": near, "far": far, "edge": edge, **self._maps()}
        options: dict[str, Any] = {
            "edge_width": of.edge_width,
            "layers": of.message_layers,
            "message": "message",
        }
        return draft.add("aggregate_messages", reads, shape, **layout, **options)

    def _maps(self) -> dict[str, str | None]:
        """The parameters of a message: that of the edges' features, weights and biases of later layers."""
        of, draft = self.of, self.draft
        count = of.towers * (of.message_layers - 1)
        names = [draft.input("E", of.edge_width, of.columns)] if of.edge_width else []
        names += [draft.input(f"H{k}", of.width, of.width) for k in range(count)]
        names += [draft.input(f"h{k}", 1, of.width) for k in range(count)]
        return {f"w{k}": name for k, name in enumerate(names)}

    def _after(self, t: int, found: str) -> str:
        """The node's own part, plus the scaled products of the aggregates with the weights."""
        of, draft = self.of, self.draft
        groups = of.scalers * of.outer
        scales = draft.input("S", "N", of.scalers * (2 if of.has_summed_shift else 1))
        own = self._project(t, f"C{t}", f"c{t}", of.outer + (groups if of.has_summed_shift else 0))
        shift = self._project(t, f"D{t}", f"d{t}", groups) if of.has_shift else None
        inner = len(of.names) * of.width
        rows = draft.gemm(found, draft.input(f"W{t}", inner, groups), None, shift)
        out = self._weigh(rows, draft.columns(scales, 0, of.scalers), draft.columns(own, 0, of.outer))
        if not of.has_summed_shift:
            return out
        by_degree = draft.columns(scales, of.scalers, of.scalers)
        return self._weigh(draft.columns(own, of.outer, groups), by_degree, out)

    def _weigh(self, x: str, scales: str, addend: str) -> str:
        reads = {"x": x, "scales": scales, "addend": addend}
        return self.draft.add("weigh", reads, ("N", self.of.outer))

    def _before(self, t: int, found: str) -> str:
        """The node's own part, plus scaled and shifted copies of the aggregates times the weights."""
        of, draft = self.of, self.draft
        inner = len(of.names) * of.width
        if of.has_shift or of.has_summed_shift:
            often = draft.input("O", "N", len(of.names))
            u = self._project(t, f"U{t}", f"u{t}", of.width)
            reads = {"x": u, "scales": often, "addend": found}
            found = draft.add("weighed_copies", reads, ("N", inner))
        reads = {"x": found, "scales": draft.input("S", "N", of.scalers)}
        copies = draft.add("weighed_copies", reads, ("N", of.scalers * inner))
        own = self._project(t, f"C{t}", f"c{t}", of.outer)
        return draft.gemm(copies, draft.input(f"W{t}", of.scalers * inner, of.outer), None, own)
