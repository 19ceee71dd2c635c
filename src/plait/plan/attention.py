"""Plans of attention layers: which rows are gathered, where the scores come from, and the prices.

reuse      project once, gather the projected rows (heads x out wide); scores from them, or folded into W
recompute  gather the raw rows once for all heads, project each head after: wins where the input is narrower
           than a head's output
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from plait.cost.machine import MachineProfile
from plait.cost.price import Price, Pricer, Request
from plait.cost.work import Matrix, Work
from plait.errors import PlanError
from plait.plan.plan import Measured, Rejected

__all__ = ["AttentionPlan", "AttentionProblem", "AttentionStep", "candidates", "choose"]

# Times of the passes beside a weighted sparse product of the same rows, and of a score beside the machine's
# time for an edge. Rough: set from a few timings on a busy two-core machine, not fitted, and the figure for
# shared heads is a guess. `plait calibrate` does not measure them yet.
_SCORE = 5.0  # edge times for one (edge, head): score, exponential, weight
_SHARED_HEAD = 0.35  # a further head on a row that is already gathered, against gathering it
_SOURCES = {"gat": 1.6, "leaky": 2.9, "dot": 2.6}
_FORWARD = {"gat": 1.1, "leaky": 1.9, "dot": 1.6}
_TARGETS = {"leaky": 1.3, "dot": 1.1}


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
    float_bytes: int = 4
    threads: int | None = None
    memory_limit: int | None = None

    @property
    def columns(self) -> int:
        return self.heads * self.width

    @property
    def lanes(self) -> int:
        return 1 << (self.heads - 1).bit_length()


@dataclass(frozen=True)
class AttentionStep:
    """One kernel call of an attention plan, with its price."""

    title: str
    phase: str
    price: Price


@dataclass(frozen=True)
class AttentionPlan:
    """The plan of one attention layer; the same surface as a LayerPlan."""

    layer: str
    kind: str
    choice: str
    text: str
    steps: tuple[AttentionStep, ...]
    seconds: float
    peak_bytes: int
    sizes: Mapping[str, int]
    mode: str
    machine: str
    is_default_machine: bool
    rejected: tuple[Rejected, ...] = ()
    because: str = ""
    measured: Mapping[str, Measured] = field(default_factory=dict)

    def describe(self) -> str:
        return self.text

    def to_dict(self) -> dict[str, Any]:
        return {
            "layer": self.layer,
            "expression": self.text,
            "form": self.choice,
            "mode": self.mode,
            "sizes": dict(self.sizes),
            "seconds": self.seconds,
            "peak_bytes": self.peak_bytes,
            "machine": self.machine,
            "is_default_machine": self.is_default_machine,
            "because": self.because,
            "hoisted": [],
            "steps": [_step_dict(step, self.seconds) for step in self.steps],
            "rejected": [
                {"candidate": r.candidate, "seconds": r.seconds, "peak_bytes": r.peak_bytes, "why": r.why}
                for r in self.rejected
            ],
        }

    def lines(self, most_rejected: int = 6) -> list[str]:
        """The plan as text, at most 100 columns wide."""
        sizes = ", ".join(f"{name}={value}" for name, value in self.sizes.items())
        out = [f"{self.layer}: {self.text}"]
        out += [
            f"   {self.mode}, {sizes};",
            f"     predicted {_ms(self.seconds)}, peak {_mb(self.peak_bytes)}",
        ]
        out.append(f"   because {self.because}")
        out.append(f"   {'step':<43}{'backend':<8}{'Mflop':>9}{'MB':>8}{'predicted':>12}{'share':>7}")
        for step in self.steps:
            share = step.price.seconds / self.seconds if self.seconds else 0.0
            work = step.price.work
            name = f"{step.phase:<5}{step.title}"
            name = name if len(name) <= 42 else name[:41] + "…"
            out.append(
                f"   {name:<43}{step.price.backend:<8}{work.flops / 1e6:>9.1f}"
                f"{work.bytes_gathered / 1e6:>8.1f}"
                f"{_ms(step.price.seconds):>12}{share:>7.0%}"
            )
        if self.rejected:
            out.append("   rejected:")
        for loser in self.rejected[:most_rejected]:
            price = "" if loser.seconds is None else f" {_ms(loser.seconds)}, {_mb(loser.peak_bytes or 0)}:"
            out += [f"     - {loser.candidate}:{price}", f"       {loser.why}"]
        return out


def _step_dict(step: AttentionStep, seconds: float) -> dict[str, Any]:
    work = step.price.work
    return {
        "phase": {"fwd": "forward", "bwd": "backward"}[step.phase],
        "op": step.title,
        "backend": step.price.backend,
        "flops": work.flops,
        "bytes_least": work.bytes_least,
        "bytes_gathered": work.bytes_gathered,
        "seconds": step.price.seconds,
        "share": step.price.seconds / seconds if seconds else 0.0,
        "because": step.price.because,
    }


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"


def _mb(count: int) -> str:
    return f"{count / 1e6:.1f} MB"


# Prices -----------------------------------------------------------------------------------------------------


class _Steps:
    """The steps of one candidate, priced as they are added."""

    def __init__(self, problem: AttentionProblem):
        self.problem = problem
        self.pricer = Pricer(problem.machine, problem.float_bytes, problem.threads)
        self.made: list[AttentionStep] = []

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
        self.made.append(
            AttentionStep(title, phase, Price(seconds * times, work, "plait", "tall blocks in registers"))
        )

    def gather(self, title: str, phase: str, matrix: Matrix, cols: int, factor: float, because: str) -> None:
        """A pass over the edges that gathers rows of `cols` columns and scores every edge and head."""
        p = self.problem
        base = self.pricer.price(Request("spmm", matrix.rows, cols, matrix=matrix, addends=1))
        scored = matrix.edges * p.lanes * _SCORE * p.machine.edge_seconds * self.pricer.slowdown
        work = Work(base.work.flops * factor, base.work.bytes_least, base.work.bytes_gathered)
        self.made.append(
            AttentionStep(title, phase, Price(base.seconds * factor + scored, work, "plait", because))
        )

    def sum_slopes(self, matrix: Matrix) -> None:
        base = self.pricer.price(Request("spmm", matrix.rows, self.problem.lanes, matrix=matrix, addends=1))
        self.made.append(AttentionStep("sum of score gradients by target", "bwd", base))


def _reuse(problem: AttentionProblem, is_folded: bool) -> list[AttentionStep]:
    p, steps = problem, _Steps(problem)
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
        steps.sum_slopes(p.matrix)
        if not is_folded:
            steps.gemm("gradient through the scores", "bwd", rows, scores, columns)
            steps.gemm("weight gradient of the scores", "bwd", rows, scores, columns)
        if p.wants_input_grad:
            steps.gemm("input gradient", "bwd", rows, total, p.inner)
        steps.gemm("weight gradient", "bwd", rows, p.inner, total)
    return steps.made


def _recompute(problem: AttentionProblem) -> list[AttentionStep]:
    p, steps = problem, _Steps(problem)
    rows, scores = p.matrix.columns, 2 * p.lanes
    more = 1.0 + _SHARED_HEAD * (p.heads - 1)
    steps.gemm(f"scores of raw rows -> {rows}x{scores}", "fwd", rows, p.inner, scores)
    steps.gather(
        "attend, gathers raw rows", "fwd", p.matrix, p.inner, _FORWARD["gat"] * more, "shared by heads"
    )
    steps.gemm("project each head", "fwd", p.matrix.rows, p.inner, p.width, p.heads)
    if p.is_training:
        steps.gemm("gradient of each head's mean", "bwd", p.matrix.rows, p.width, p.inner, p.heads)
        steps.gemm("weight gradient by head", "bwd", p.matrix.rows, p.inner, p.width, p.heads)
        turned = p.matrix.transposed()
        steps.gather(
            "attendᵀ, gathers means' gradients", "bwd", turned, p.heads * p.inner, _SOURCES["gat"],
            "weights are recomputed",
        )  # fmt: skip
        steps.sum_slopes(p.matrix)
        steps.gemm("gradient through the scores", "bwd", rows, scores, p.inner)
        steps.gemm("weight gradient of the scores", "bwd", rows, scores, p.inner)
    return steps.made


def _rows(problem: AttentionProblem) -> list[AttentionStep]:
    """GATv2 and Transformer: the scores need the projected rows of both ends."""
    p, steps = problem, _Steps(problem)
    rows, total = p.matrix.columns, p.parts * p.columns
    steps.gemm(f"project -> {rows}x{total}", "fwd", rows, p.inner, total)
    gathered = p.columns * (2 if p.kind == "dot" else 1)
    steps.gather("attend", "fwd", p.matrix, gathered, _FORWARD[p.kind] / gathered * p.columns, "one gather")
    if p.is_training:
        turned = p.matrix.transposed()
        factor = _SOURCES[p.kind] / 2
        steps.gather("attendᵀ, gathers both", "bwd", turned, 2 * p.columns, factor, "weights are recomputed")
        steps.gather(
            "gradient of the targets", "bwd", p.matrix, p.columns, _TARGETS[p.kind], "by score gradients"
        )
        if p.wants_input_grad:
            steps.gemm("input gradient", "bwd", rows, total, p.inner)
        steps.gemm("weight gradient", "bwd", rows, p.inner, total)
    return steps.made


def _peak_bytes(problem: AttentionProblem, choice: str) -> int:
    """Bytes the layer holds at once: rows kept, rows of gradients, one number per edge and head."""
    p = problem
    rows, targets, size = p.matrix.columns, p.matrix.rows, p.float_bytes
    statistics = targets * 4 * p.lanes
    if choice == "recompute":
        forward = rows * 2 * p.lanes + targets * (p.heads * p.inner + p.columns) + statistics
        backward = targets * p.heads * p.inner + rows * p.inner
    else:
        total = p.parts * p.columns + 2 * p.lanes
        forward = rows * total + targets * p.columns + statistics
        backward = rows * total + rows * p.inner
    backward += p.matrix.edges * p.lanes
    return int(size * (forward + (backward if p.is_training else 0)))


_TEXT = {
    "gat": "softmax(leaky(X W aₛ + (X W aₜ)ᵀ)) (X W), reuse",
    "gat folded": "softmax(leaky(X (W aₛ) + (X (W aₜ))ᵀ)) (X W), reuse",
    "recompute": "(softmax(leaky(X (W aₛ) + (X (W aₜ))ᵀ)) X) W, recompute",
    "leaky": "softmax(a · leaky(X Wₗ + X Wᵣ)) (X Wₗ)",
    "dot": "softmax((X Q) · (X K) / √width) (X V)",
}


def candidates(problem: AttentionProblem) -> dict[str, list[AttentionStep]]:
    """Every legal way to compute the layer, by name, with priced steps."""
    if problem.kind != "gat":
        return {problem.kind: _rows(problem)}
    found = {"gat": _reuse(problem, False), "gat folded": _reuse(problem, True)}
    if problem.can_recompute:
        found["recompute"] = _recompute(problem)
    return found


def choose(problem: AttentionProblem) -> AttentionPlan:
    """The cheapest candidate that fits the memory limit, with the losers and their prices."""
    priced = []
    for name, steps in candidates(problem).items():
        priced.append((sum(step.price.seconds for step in steps), _peak_bytes(problem, name), name, steps))
    priced.sort(key=lambda entry: entry[0])
    limit = problem.memory_limit
    fitting = [entry for entry in priced if limit is None or entry[1] <= limit]
    if not fitting:
        least = min(entry[1] for entry in priced)
        raise PlanError(
            f"{problem.layer}: memory_limit of {limit} bytes is below the leanest plan's {least}; raise it"
        )
    seconds, peak, name, steps = fitting[0]
    rejected = tuple(
        Rejected(_TEXT[other], s, b, _why(s, seconds, b, limit)) for s, b, other, _ in priced if other != name
    )
    return AttentionPlan(
        layer=problem.layer, kind=problem.kind, choice=name, text=_TEXT[name], steps=tuple(steps),
        seconds=seconds, peak_bytes=peak, sizes=_sizes(problem),
        mode="training" if problem.is_training else "inference",
        machine=problem.machine.name, is_default_machine=problem.machine.is_default, rejected=rejected,
        because=_because(problem, name),
    )  # fmt: skip


def _why(seconds: float, best: float, held: int, limit: int | None) -> str:
    if limit is not None and held > limit:
        return f"needs {_mb(held)}, more than the limit of {_mb(limit)}"
    return f"{seconds / best:.2f} times the price" if best else "no cheaper"


def _sizes(problem: AttentionProblem) -> dict[str, int]:
    p = problem
    return {"N": p.matrix.rows, "E": p.matrix.edges, "K1": p.inner, "heads": p.heads, "F": p.width}


def _because(problem: AttentionProblem, choice: str) -> str:
    p = problem
    if choice == "recompute":
        return f"raw rows of {p.inner} columns serve all heads; projected ones have {p.columns}"
    if choice == "gat folded":
        return (
            f"scores come from {p.inner} input columns by W a, cheaper than from {p.columns} projected ones"
        )
    if choice == "gat":
        return f"scores come from the {p.columns} projected columns, cheaper than from {p.inner} input ones"
    return "scores need the projected rows of both ends; nothing of edges x width is kept"
