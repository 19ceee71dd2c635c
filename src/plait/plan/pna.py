"""Plans of layers with several aggregators and degree scalers (PNAConv).

after   the aggregates meet every scaler's weights at once, the scalers weigh the results
before  scaled copies of the aggregates meet the weights in one product: less to write where outputs are wide

Messages with features of edges, or of more than one layer, are made in blocks of edges in either.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from plait.cost.machine import MachineProfile
from plait.ops.work import Matrix
from plait.plan.fused import FusedCandidate, FusedPlan, FusedStep, choose_among
from plait.plan.passes import Steps

__all__ = ["AggregatorsProblem", "candidates", "choose"]

# Times of the passes beside a sparse product of the same columns; from a few timings, not fitted.
_ALL, _BACK = 1.5, 1.2


@dataclass(frozen=True)
class AggregatorsProblem:
    """One such layer on one graph, in numbers; width and outer are those of one tower."""

    layer: str
    matrix: Matrix
    inner: int  # columns of x that a tower reads
    width: int  # columns of a tower's messages
    outer: int  # columns of a tower's output
    towers: int
    aggregators: int
    sections: int  # rows that backward gathers for an edge
    scalers: int
    is_folded: bool  # the last linear map is folded into the towers' own
    machine: MachineProfile
    is_training: bool = True
    wants_input_grad: bool = True
    float_bytes: int = 4
    threads: int | None = None
    memory_limit: int | None = None
    edge_width: int = 0  # features of an edge
    message_layers: int = 1

    @property
    def is_in_blocks(self) -> bool:
        return self.edge_width > 0 or self.message_layers > 1


def _messages(p: AggregatorsProblem, steps: Steps, phase: str) -> None:
    """Blocks of edges: rows gathered, mapped and aggregated; in the backward pass all of it again."""
    edges, columns = p.matrix.edges, p.towers * p.width
    times = 1 if phase == "fwd" else 3
    if p.edge_width:
        steps.gemm("features of edges", phase, edges, p.edge_width, columns, times)
    if p.message_layers > 1:
        steps.gemm(
            "later layers of messages",
            phase,
            edges,
            p.width,
            p.width,
            times * p.towers * (p.message_layers - 1),
        )
    if phase == "fwd":
        steps.stream("all aggregators of messages in blocks", phase, edges, columns, 4)
    else:
        steps.stream("messages again", phase, edges, columns, 8 + p.sections)


def _steps(p: AggregatorsProblem, is_before: bool) -> list[FusedStep]:
    steps = Steps(p.machine, p.float_bytes, p.threads)
    rows, columns, t = p.matrix.rows, p.towers * p.width, p.towers
    steps.gemm(f"project the neighbours' part -> {rows}x{columns}", "fwd", rows, p.inner, p.width, t)
    if p.is_in_blocks:
        _messages(p, steps, "fwd")
    else:
        steps.gather("all aggregators", "fwd", p.matrix, columns, _ALL, "one gather for all")
    back = _weigh_before(p, steps) if is_before else _weigh_after(p, steps)
    if not p.is_folded:
        steps.gemm("last linear map", "fwd", rows, p.outer * t, p.outer * t)
    if not p.is_training:
        return steps.made
    if not p.is_folded:
        steps.gemm("last linear map's gradients", "bwd", rows, p.outer * t, p.outer * t, 2)
    back()
    if p.is_in_blocks:
        _messages(p, steps, "bwd")
    else:
        steps.stream("shares of the targets", "bwd", rows, p.sections * columns, 2)
        turned = p.matrix.transposed()
        steps.gather(
            "gradient of the messages", "bwd", turned, p.sections * columns, _BACK, "gathers the shares"
        )
    steps.gemm("weight gradient of the messages", "bwd", rows, p.inner, p.width, t, is_transposed=True)
    if p.wants_input_grad:
        steps.gemm("input gradient of the messages", "bwd", rows, p.width, p.inner, t)
    return steps.made


def _weigh_after(p: AggregatorsProblem, steps: Steps) -> Callable[[], None]:
    """Forward steps from aggregates to outputs; the backward ones are added when called."""
    rows, t = p.matrix.rows, p.towers
    results, kept = (1 + p.scalers) * p.outer, p.aggregators * p.width
    steps.gemm("own part and shifts", "fwd", rows, p.inner, results, t)
    steps.gemm("aggregates with every scaler's weights", "fwd", rows, kept, p.scalers * p.outer, t)
    steps.stream("weigh by degree", "fwd", rows, p.outer * t, 1 + p.scalers)

    def back() -> None:
        steps.stream("weigh by degree", "bwd", rows, results * t)
        steps.gemm("gradient of the aggregates", "bwd", rows, p.scalers * p.outer, kept, t)
        steps.gemm("weight gradient", "bwd", rows, kept, p.scalers * p.outer, t, is_transposed=True)
        steps.gemm("own weight gradient", "bwd", rows, p.inner, results, t, is_transposed=True)
        if p.wants_input_grad:
            steps.gemm("own input gradient", "bwd", rows, results, p.inner, t)

    return back


def _weigh_before(p: AggregatorsProblem, steps: Steps) -> Callable[[], None]:
    rows, t = p.matrix.rows, p.towers
    copies = (1 + p.scalers * p.aggregators) * p.width
    steps.gemm("targets' part", "fwd", rows, p.inner, p.width, t)
    steps.stream("shift, and copies by degree", "fwd", rows, copies * t, 2)
    steps.gemm("copies with the weights", "fwd", rows, copies, p.outer, t)

    def back() -> None:
        steps.gemm("gradient of the copies", "bwd", rows, p.outer, copies, t)
        steps.gemm("weight gradient", "bwd", rows, copies, p.outer, t, is_transposed=True)
        steps.stream("copies and shift, back", "bwd", rows, copies * t, 2)
        steps.gemm(
            "weight gradient of the targets' part", "bwd", rows, p.inner, p.width, t, is_transposed=True
        )
        if p.wants_input_grad:
            steps.gemm("own input gradient", "bwd", rows, p.width, p.inner, t)

    return back


_TEXT = {"after": "Σₖ Sₖ (X Cₖ + agg(X V) Wₖ)", "before": "[X, Sₖ (agg(X V) + X U) …] W"}


def candidates(p: AggregatorsProblem) -> list[FusedCandidate]:
    """Where the scalers weigh."""
    columns = p.towers * p.width
    results = {
        "after": p.towers * (1 + p.scalers) * p.outer,
        "before": (1 + (1 + p.scalers) * p.aggregators) * columns,
    }
    because = f"{p.aggregators} aggregators share one gather" + (
        ", messages are made in blocks of edges" if p.is_in_blocks else ""
    )
    why = {
        "after": f"{because}; the targets' part is folded into the weights",
        "before": f"{because}; copies of the aggregates are narrower than the outputs",
    }
    found = []
    for name, more in results.items():
        held = (1 + p.aggregators) * columns + more + p.towers * p.outer
        if p.is_training:
            held += (2 + p.aggregators + p.sections + 1) * columns + more + p.inner
        bytes_held = held * p.matrix.rows * p.float_bytes
        if p.is_training:
            bytes_held += p.matrix.edges * p.edge_width * p.float_bytes
        steps = tuple(_steps(p, name == "before"))
        found.append(FusedCandidate(name, _TEXT[name], steps, bytes_held, why[name]))
    return found


def choose(p: AggregatorsProblem) -> FusedPlan:
    """The cheapest candidate that fits the memory limit, with the losers and their prices."""
    sizes = {"N": p.matrix.rows, "E": p.matrix.edges, "K1": p.inner, "K2": p.outer * p.towers, "T": p.towers}
    return choose_among(
        candidates(p), layer=p.layer, kind="aggregators", sizes=sizes, machine=p.machine,
        is_training=p.is_training, memory_limit=p.memory_limit,
    )  # fmt: skip
