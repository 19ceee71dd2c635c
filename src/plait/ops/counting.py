"""Counts that several operations share."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from plait.ops.operation import Pattern, Setting, View
from plait.ops.program import Step
from plait.ops.symbolic import ceil_log2
from plait.ops.work import Amount, Request, dense_flops, row_flops, sparse_flops

__all__ = [
    "after", "ceil_log2", "chain", "dense", "no_depth", "no_request", "passes", "pattern_of",
    "products_depth", "streamed", "summed", "sums_depth", "tree",
]  # fmt: skip


def pattern_of(step: Step, view: View) -> Pattern:
    """The pattern of a step's sparse matrix, transposed if the step reads it transposed."""
    found = view.pattern(step["matrix"], step.is_transposed)
    assert found is not None
    return found


def sums_depth(step: Step, view: View) -> Amount:
    """The longest chain in sums over neighbours of products: one of them, then the longest row's sum."""
    return 1 + ceil_log2(pattern_of(step, view).degree)


def products_depth(step: Step, view: View) -> Amount:
    """The same where a message is made of two dependent operations."""
    return 1 + sums_depth(step, view)


def passes(count: int, role: str = "") -> Callable[[Step, View], Mapping[str, Amount]]:
    """So many operations per number of an operand, or of the result."""

    def flops(step: Step, view: View) -> Mapping[str, Amount]:
        return {"vertex update": row_flops(*view.size(step[role] if role else step.out), count)}

    return flops


def chain(length: int) -> Callable[[Step, View], Amount]:
    """So many operations one after the other for each number."""
    return lambda step, view: length


def tree(role: str, axis: int) -> Callable[[Step, View], Amount]:
    """The longest chain in sums of products over an axis of an operand: a product, then their sum."""
    return lambda step, view: 1 + ceil_log2(view.size(step[role])[axis])


def streamed(parts: int, role: str = "") -> Callable[[Step, Setting], Request]:
    """The request of a pass over an operand, or over the result, that reads `parts` matrices of its size."""
    return lambda step, setting: Request(
        step.op, *setting.size(step[role] if role else step.out), parts=parts
    )


def no_depth(step: Step, view: View) -> Amount:
    """The depth of a step that computes nothing."""
    return 0


def no_request(step: Step, setting: Setting) -> None:
    """Returns None: the price of a step that moves no data depends on nothing."""
    return None


def after(step: Step) -> int:
    """Operations per entry fused into a product's result: scaling, added term, its scaling, bias."""
    return sum(step.get(role) is not None for role in ("target", "addend", "addend_scale", "bias"))


def dense(view: View, left: str, is_transposed: bool, rows: Amount, inner: Amount, cols: Amount) -> Amount:
    """Operations of a dense product, or of one whose left operand is kept sparse."""
    pattern = view.pattern(left, is_transposed)
    if pattern is None:
        return dense_flops(rows, inner, cols)
    return sparse_flops(pattern.edges, cols, pattern.is_weighted)


def summed(view: View, left: str, is_transposed: bool) -> Amount:
    """How many terms an entry of a dense product sums: the inner width, or the longest sparse row."""
    pattern = view.pattern(left, is_transposed)
    if pattern is not None:
        return pattern.degree
    rows, cols = view.size(left)
    return rows if is_transposed else cols
