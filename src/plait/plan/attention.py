"""Plans of attention layers: which rows are gathered, where the scores come from, and the prices.

reuse      project once, gather the projected rows (heads x out wide); scores from them, or folded into W
recompute  gather the raw rows once for all heads, project each head after: wins where the input is narrower
           than a head's output; Transformer's raw rows are keys too, scored by queries times (Q Kᵀ)
lean       (after any of them) the backward pass keeps no number of an edge: its pass over targets gathers the
           values again; for memory_limit=, or where that is cheaper
pieces     where edges bring features to the scores of rows, or their weights are asked for: scores of edges,
           softmax and sums apart, one number an edge and head kept between them
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from plait.cost.machine import MachineProfile
from plait.cost.price import Price, Pricer
from plait.ops.work import Matrix, Request, Work
from plait.plan.fused import FusedCandidate, FusedPlan, FusedStep, choose_among

__all__ = ["AttentionProblem", "candidates", "choose", "correction", "without_lean"]

# Times of the passes beside a weighted sparse product of the same rows, and of a score beside the machine's
# time for an edge. Rough: set from a few timings on a busy two-core machine, not fitted, and the figure for
# shared heads is a guess; a profile that measured them (bench/calibrate_attention.py) corrects each step.
_SCORE = 5.0  # edge times for one (edge, head): score, exponential, weight
_SHARED_HEAD = 0.35  # a further head on a row that is already gathered, against gathering it
_SOURCES = {"gat": 1.6, "leaky": 2.9, "dot": 2.6}
_FORWARD = {"gat": 1.1, "leaky": 1.9, "dot": 1.6}
_TARGETS = {"gat": 0.2, "leaky": 1.3, "dot": 1.1}
_LIKE = {"bwd targets again": "fwd attend"}
_AGAIN = {"gat": 1.4, "leaky": 2.7, "dot": 2.2}


@dataclass(frozen=True)
class AttentionProblem:
    """One attention layer on one graph, in numbers. kind: gat, leaky (GATv2) or dot (Transformer)."""

    layer: str
    kind: str
    matrix: Matrix
    inner: int  # columns of x
    width: int  # columns of one head's output
    heads: int
    parts: int  # projected matrices side by side (GAT 1, GATv2 2, Transformer 3 or 4)
    machine: MachineProfile
    is_training: bool = True
    wants_input_grad: bool = True
    can_recompute: bool = True
    can_be_lean: bool = True  # nobody wants a gradient of an edge
    is_in_pieces: bool = False
    edge_width: int = 0  # features of an edge that enter the scores of rows
    float_bytes: int = 4
    threads: int | None = None
    memory_limit: int | None = None

    @property
    def columns(self) -> int:
        return self.heads * self.width

    @property
    def lanes(self) -> int:
        return 1 << (self.heads - 1).bit_length()


# Prices -----------------------------------------------------------------------------------------------------


def correction(machine: MachineProfile, choice: str, step: str) -> float:
    """What the profile says of a candidate's step: seen over predicted seconds, 1 where it says nothing."""
    found = machine.measured.get("attention")
    found = found if isinstance(found, Mapping) else {}
    # a profile made before there were lean passes knows the forward pass, which is much like them
    value = found.get(f"{choice} {step}", found.get(f"{choice} {_LIKE.get(step, step)}", 1.0))
    is_number = isinstance(value, int | float) and math.isfinite(value) and value > 0
    return float(value) if is_number else 1.0


class _Steps:
    """The steps of one candidate, priced as they are added."""

    def __init__(self, problem: AttentionProblem, choice: str):
        self.problem, self.choice = problem, choice
        self.pricer = Pricer(problem.machine, problem.float_bytes, problem.threads)
        self.made: list[FusedStep] = []

    def gemm(self, title: str, phase: str, rows: int, inner: int, cols: int, times: int = 1) -> None:
        op = "gemm_transposed" if title.startswith("weight gradient") else "gemm"
        price = self.pricer.price(Request(op, rows, cols, inner))
        # attention layers run their products on plait's own kernel
        table = self.problem.machine.gemm_transposed if op == "gemm_transposed" else self.problem.machine.gemm
        rate = table["plait"].at(inner, cols) * 1e9 * 4 / self.problem.float_bytes / self.pricer.slowdown
        floor = price.work.bytes_least / self.problem.machine.stream_bytes_per_s
        seconds = max(price.work.flops / rate, floor) + self.problem.machine.call_seconds
        work = Work(
            price.work.flops * times, price.work.bytes_least * times, price.work.bytes_gathered * times
        )
        self._add(title, phase, Price(seconds * times, work, "plait", "tall blocks in registers"))

    def by_head(self, title: str, phase: str, products: int) -> None:
        """Products of one pass over the rows of all heads, by head between `inner` and `width` columns."""
        p = self.problem
        self.gemm(title, phase, p.matrix.rows, p.inner, p.width, products * p.heads)

    def gather(self, title: str, phase: str, matrix: Matrix, cols: int, factor: float, because: str) -> None:
        """A pass over the edges that gathers rows of `cols` columns and scores every edge and head."""
        p = self.problem
        base = self.pricer.price(Request("spmm", matrix.rows, cols, matrix=matrix, addends=1))
        scored = matrix.edges * p.lanes * _SCORE * p.machine.edge_seconds * self.pricer.slowdown
        work = Work(base.work.flops * factor, base.work.bytes_least, base.work.bytes_gathered)
        self._add(title, phase, Price(base.seconds * factor + scored, work, "plait", because))

    def of_edges(self, title: str, phase: str, cols: int) -> None:
        """A pass that streams `cols` numbers of every edge."""
        self.made.append(
            FusedStep(title, phase, self.pricer.price(Request("stream", self.problem.matrix.edges, cols)))
        )

    def targets_of_gat(self, cols: int, is_lean: bool, factor: float = 1.0) -> None:
        """The gradients of the targets' scores: the edges' are summed, or computed again."""
        matrix = self.problem.matrix
        if is_lean:
            factor *= _AGAIN["gat"]
            self.gather("targets again, gathers values", "bwd", matrix, cols, factor, "keeps no edge")
            return
        base = self.pricer.price(Request("spmm", matrix.rows, self.problem.lanes, matrix=matrix, addends=1))
        self._add("sum of score gradients by target", "bwd", base)

    def _add(self, title: str, phase: str, price: Price) -> None:
        step = FusedStep(title, phase, price)
        factor = correction(self.problem.machine, self.choice, step.name)
        self.made.append(replace(step, price=replace(price, seconds=price.seconds * factor)))


def _reuse(problem: AttentionProblem, is_folded: bool, is_lean: bool) -> list[FusedStep]:
    p, steps = problem, _Steps(problem, "gat folded" if is_folded else "gat")
    rows, columns, scores = p.matrix.columns, p.columns, 2 * p.lanes
    total = columns + scores if is_folded else columns
    steps.gemm(f"project -> {rows}x{total}", "fwd", rows, p.inner, total)
    if not is_folded:
        steps.gemm(f"scores of projected rows -> {rows}x{scores}", "fwd", rows, columns, scores)
    steps.gather("attend, gathers projected rows", "fwd", p.matrix, columns, _FORWARD["gat"], "one gather")
    if p.is_training:
        turned = p.matrix.transposed()
        steps.gather(
            "attendᵀ, gathers gradients", "bwd", turned, columns, _SOURCES["gat"], "weights are recomputed"
        )
        steps.targets_of_gat(columns, is_lean)
        if not is_folded:
            steps.gemm("gradient through the scores", "bwd", rows, scores, columns)
            steps.gemm("weight gradient of the scores", "bwd", rows, scores, columns)
        if p.wants_input_grad:
            steps.gemm("input gradient", "bwd", rows, total, p.inner)
        steps.gemm("weight gradient", "bwd", rows, p.inner, total)
    return steps.made


def _recompute(problem: AttentionProblem, is_lean: bool) -> list[FusedStep]:
    p, steps = problem, _Steps(problem, "recompute")
    rows, scores = p.matrix.columns, 2 * p.lanes
    more = 1.0 + _SHARED_HEAD * (p.heads - 1)
    steps.gemm(f"scores of raw rows -> {rows}x{scores}", "fwd", rows, p.inner, scores)
    steps.gather(
        "attend, gathers raw rows", "fwd", p.matrix, p.inner, _FORWARD["gat"] * more, "shared by heads"
    )
    steps.by_head("project each head", "fwd", 1)
    if p.is_training:
        steps.by_head("gradients by head", "bwd", 2)
        turned = p.matrix.transposed()
        steps.gather(
            "attendᵀ, gathers means' gradients", "bwd", turned, p.heads * p.inner, _SOURCES["gat"],
            "weights are recomputed",
        )  # fmt: skip
        steps.targets_of_gat(p.inner, is_lean, more)
        steps.gemm("gradient through the scores", "bwd", rows, scores, p.inner)
        steps.gemm("weight gradient of the scores", "bwd", rows, scores, p.inner)
    return steps.made


def _rows(problem: AttentionProblem, is_lean: bool) -> list[FusedStep]:
    """GATv2 and Transformer: the scores need the projected rows of both ends."""
    p, steps = problem, _Steps(problem, problem.kind)
    rows, total = p.matrix.columns, p.parts * p.columns
    steps.gemm(f"project -> {rows}x{total}", "fwd", rows, p.inner, total)
    gathered = p.columns * (2 if p.kind == "dot" else 1)
    steps.gather("attend", "fwd", p.matrix, gathered, _FORWARD[p.kind] / gathered * p.columns, "one gather")
    if p.is_training:
        turned = p.matrix.transposed()
        factor = _SOURCES[p.kind] / 2
        steps.gather("attendᵀ, gathers both", "bwd", turned, 2 * p.columns, factor, "weights are recomputed")
        if is_lean:
            again = _AGAIN[p.kind] / gathered * p.columns
            steps.gather("targets again, gathers both", "bwd", p.matrix, gathered, again, "keeps no edge")
        else:
            steps.gather(
                "gradient of the targets", "bwd", p.matrix, p.columns, _TARGETS[p.kind], "by score gradients"
            )
        if p.wants_input_grad:
            steps.gemm("input gradient", "bwd", rows, total, p.inner)
        steps.gemm("weight gradient", "bwd", rows, p.inner, total)
    return steps.made


def _recompute_rows(problem: AttentionProblem, is_lean: bool) -> list[FusedStep]:
    """Transformer without keys: one gather of a raw row serves scores and values of all heads."""
    p, steps = problem, _Steps(problem, "dot recompute")
    rows, queries, has_skip = p.matrix.rows, p.heads * p.inner, p.parts == 4
    more = 1.0 + _SHARED_HEAD * (p.heads - 1)
    steps.gemm("one weight of queries and keys", "fwd", p.inner, p.width, p.inner, p.heads)
    steps.gemm(f"queries of raw rows -> {rows}x{queries}", "fwd", rows, p.inner, queries)
    steps.gather(
        "attend, gathers raw rows", "fwd", p.matrix, p.inner, _FORWARD["dot"] * more, "shared by heads"
    )
    steps.by_head("project each head", "fwd", 2 if has_skip else 1)
    if p.is_training:
        steps.by_head("gradients by head", "bwd", 3 if has_skip else 2)
        if p.wants_input_grad:
            steps.gather(
                "attendᵀ, gathers queries and gradients", "bwd", p.matrix.transposed(), 2 * queries,
                _SOURCES["dot"] / 2, "weights are recomputed",
            )  # fmt: skip
        if is_lean:
            factor = _AGAIN["dot"] * more
            steps.gather("targets again, gathers raw rows", "bwd", p.matrix, p.inner, factor, "keeps no edge")
        else:
            factor = _TARGETS["dot"] * more
            steps.gather(
                "gradient of the targets, gathers raw rows", "bwd", p.matrix, p.inner, factor,
                "by score gradients",
            )  # fmt: skip
        total = queries + (p.columns if has_skip else 0)
        if p.wants_input_grad:
            steps.gemm("input gradient", "bwd", rows, total, p.inner)
        steps.gemm("weight gradient", "bwd", rows, p.inner, queries)
        steps.gemm("gradients of queries and keys", "bwd", p.width, p.inner, p.inner, 2 * p.heads)
    return steps.made


def _pieces(problem: AttentionProblem) -> list[FusedStep]:
    """Scores, softmax and sums apart: features of edges meet W once a node (dot) or in blocks (leaky)."""
    p, steps = problem, _Steps(problem, f"{problem.kind} pieces")
    rows, total = p.matrix.columns, p.parts * p.columns
    steps.gemm(f"project -> {rows}x{total}", "fwd", rows, p.inner, total)
    steps.gather("scores of edges", "fwd", p.matrix, p.columns, _FORWARD[p.kind], "dots of both ends")
    steps.of_edges("softmax by target", "fwd", p.lanes)
    steps.gather("sums by weights", "fwd", p.matrix, p.columns, 1.0, "one gather")
    if p.edge_width:
        steps.of_edges("features of edges", "fwd", p.edge_width * (p.heads if p.kind == "dot" else p.columns))
    if p.is_training:
        turned = p.matrix.transposed()
        steps.gather("gradient of the weights", "bwd", p.matrix, p.columns, 1.0, "dots of both ends")
        steps.gather("gradient of the values", "bwd", turned, p.columns, 1.0, "one gather")
        steps.of_edges("gradient of the softmax", "bwd", 2 * p.lanes)
        steps.gather("gradient of the sources", "bwd", turned, p.columns, _SOURCES[p.kind] / 2, "by slopes")
        steps.gather("gradient of the targets", "bwd", p.matrix, p.columns, _TARGETS[p.kind], "by slopes")
        if p.edge_width:
            width = p.edge_width * (2 * p.heads if p.kind == "dot" else 2 * p.columns)
            steps.of_edges("gradient of edge features", "bwd", width)
        if p.wants_input_grad:
            steps.gemm("input gradient", "bwd", rows, total, p.inner)
        steps.gemm("weight gradient", "bwd", rows, p.inner, total)
    return steps.made


def _peak_bytes(problem: AttentionProblem, choice: str) -> int:
    """Bytes the layer holds at once: rows kept, rows of gradients, one number per edge and head."""
    p = problem
    rows, targets, size = p.matrix.columns, p.matrix.rows, p.float_bytes
    statistics = targets * 4 * p.lanes
    if choice.startswith("dot recompute"):
        forward = targets * (2 * p.heads * p.inner + p.columns) + statistics
        backward = targets * 2 * p.heads * p.inner + rows * p.inner
    elif choice.startswith("recompute"):
        forward = rows * 2 * p.lanes + targets * (p.heads * p.inner + p.columns) + statistics
        backward = targets * p.heads * p.inner + rows * p.inner
    else:
        total = p.parts * p.columns + 2 * p.lanes
        forward = rows * total + targets * p.columns + statistics
        backward = rows * total + rows * p.inner
    if not choice.endswith(_LEAN):
        backward += p.matrix.edges * p.lanes
    if p.is_in_pieces:
        forward += p.matrix.edges * (2 * p.lanes + p.edge_width)
        backward += p.matrix.edges * (2 * p.lanes + p.edge_width)
    return int(size * (forward + (backward if p.is_training else 0)))


_LEAN = " lean"  # after a candidate's name
_TEXT = {
    "gat": "softmax(leaky(X W aₛ + (X W aₜ)ᵀ)) (X W), reuse",
    "gat folded": "softmax(leaky(X (W aₛ) + (X (W aₜ))ᵀ)) (X W), reuse",
    "recompute": "(softmax(leaky(X (W aₛ) + (X (W aₜ))ᵀ)) X) W, recompute",
    "leaky": "softmax(a · leaky(X Wₗ + X Wᵣ)) (X Wₗ)",
    "dot": "softmax((X Q) · (X K) / √width) (X V)",
    "dot recompute": "(softmax((X (Q Kᵀ)) · X / √width) X) V, recompute",
    "gat pieces": "softmax(leaky(X (W aₛ) + (X (W aₜ))ᵀ)) (X W), in pieces",
    "leaky pieces": "softmax(a · leaky(X Wₗ + X Wᵣ + E Wₑ)) (X Wₗ), in pieces",
    "dot pieces": "softmax((X Q) · (X K) + (X Q Wₑ) · E) [X V, E Wₑ], in pieces",
}


def candidates(problem: AttentionProblem) -> dict[str, list[FusedStep]]:
    """Every legal way to compute the layer, by name, with priced steps."""
    if problem.is_in_pieces:
        return {f"{problem.kind} pieces": _pieces(problem)}
    found: dict[str, list[FusedStep]] = {}
    for is_lean in (False, True) if problem.is_training and problem.can_be_lean else (False,):
        suffix = _LEAN if is_lean else ""
        if problem.kind != "gat":
            found[problem.kind + suffix] = _rows(problem, is_lean)
            # nothing is asked of the sources without an input gradient; their pass makes the edges' numbers
            is_asked = is_lean or problem.wants_input_grad or not problem.is_training
            if problem.kind == "dot" and problem.can_recompute and is_asked:
                found["dot recompute" + suffix] = _recompute_rows(problem, is_lean)
            continue
        found["gat" + suffix] = _reuse(problem, False, is_lean)
        found["gat folded" + suffix] = _reuse(problem, True, is_lean)
        if problem.can_recompute:
            found["recompute" + suffix] = _recompute(problem, is_lean)
    return found


def choose(problem: AttentionProblem) -> FusedPlan:
    """The cheapest candidate that fits the memory limit, with the losers and their prices."""
    found = [
        FusedCandidate(name, _text(name), tuple(steps), _peak_bytes(problem, name), _because(problem, name))
        for name, steps in candidates(problem).items()
    ]
    return choose_among(
        found, layer=problem.layer, kind=problem.kind, sizes=_sizes(problem), machine=problem.machine,
        is_training=problem.is_training, memory_limit=problem.memory_limit,
    )  # fmt: skip


def without_lean(choice: str) -> str:
    """The candidate a lean one is made from; itself where it is not lean."""
    return choice.removesuffix(_LEAN)


def _text(choice: str) -> str:
    base = without_lean(choice)
    return _TEXT[base] + (", lean" if base != choice else "")


def _sizes(problem: AttentionProblem) -> dict[str, int]:
    p = problem
    return {"N": p.matrix.rows, "E": p.matrix.edges, "K1": p.inner, "heads": p.heads, "F": p.width}


def _because(problem: AttentionProblem, choice: str) -> str:
    p = problem
    if choice.endswith(_LEAN):
        kept = p.matrix.edges * p.lanes * p.float_bytes
        base = _because(problem, without_lean(choice))
        return (
            f"{base}; the backward pass gathers values again instead of keeping {kept / 1e6:.1f} MB of edges"
        )
    if choice == "dot recompute":
        return f"raw rows of {p.inner} columns are all heads' keys and values; projected, {2 * p.columns}"
    if choice == "recompute":
        return f"raw rows of {p.inner} columns serve all heads; projected ones have {p.columns}"
    if choice == "gat folded":
        return (
            f"scores come from {p.inner} input columns by W a, cheaper than from {p.columns} projected ones"
        )
    if choice == "gat":
        return f"scores come from the {p.columns} projected columns, cheaper than from {p.inner} input ones"
    if choice == "gat pieces":
        return "more heads than the fused passes take, or weights after dropout; edges x heads are kept"
    if choice == "leaky pieces":
        return (
            "features of edges are bent with both ends, in blocks of edges, or the weights were asked for; "
            "numbers of edges x heads are kept"
        )
    if choice == "dot pieces":
        return (
            "features of edges meet Wₑ once a node, or the weights were asked for; "
            "numbers of edges x heads are kept"
        )
    return "scores need the projected rows of both ends; nothing of edges x width is kept"
