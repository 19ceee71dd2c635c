"""Counts that several operations share."""

from __future__ import annotations

from collections.abc import Mapping

from plait.ops.operation import Pattern, Setting, View
from plait.ops.program import Step
from plait.ops.symbolic import ceil_log2
from plait.ops.work import Amount, dense_flops, row_flops, sparse_flops

__all__ = [
    "after", "ceil_log2", "dense", "dots_depth", "no_depth", "no_request", "one_flop", "pattern_of",
    "products_depth", "summed", "sums_depth",
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


def dots_depth(step: Step, view: View) -> Amount:
    """The longest chain in dots of rows: a product, then their sum."""
    return 1 + ceil_log2(view.size(step["near"])[1])


def one_flop(step: Step, view: View) -> Mapping[str, Amount]:
    """One operation per entry of the result."""
    return {"vertex update": row_flops(*view.size(step.out), 1)}


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
