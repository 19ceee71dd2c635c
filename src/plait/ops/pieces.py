"""The operations of attention in pieces: dot products per edge, weighted sums, softmax, leaky scores.

Values of edges are [edges, lanes], one number per head, heads padded to a power of two. The option `heads`
counts the heads; `is_shared`: a far row serves all heads; `is_out_shared`: a result row is the sum over them;
`of_edges`: the far rows are rows per edge, read in order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait.ops.counting import ceil_log2, pattern_of, streamed, sums_depth, tree
from plait.ops.operation import Operation, Reverse, Setting, View, register
from plait.ops.program import Step
from plait.ops.work import Amount, Request, dense_flops

__all__: list[str] = []

_SOFTMAX = 5  # operations per edge and head: largest, minus it, exponential, sum, division
_SOFTMAX_BACK = 4  # weight times gradient, its sum, minus it, times the weight
_BEND = 2  # a comparison, a product


def _gathered(step: Step, view: View | Setting) -> Amount:
    """Columns processed per edge, all heads together."""
    if step.op == "edge_dots":
        return view.size(step["near"])[1]
    columns = view.size(step["far"])[1]
    return columns * step.option("heads") if step.option("is_shared") else columns


# Dots and sums --------------------------------------------------------------------------------------------


def _dots_flops(step: Step, view: View) -> Mapping[str, Amount]:
    return {"edge update": 2 * pattern_of(step, view).edges * _gathered(step, view)}


def _sums_flops(step: Step, view: View) -> Mapping[str, Amount]:
    each = pattern_of(step, view).edges * _gathered(step, view)
    return {"edge update": each, "aggregate": each}


def _gather_request(step: Step, setting: Setting) -> Request:
    matrix, columns = setting.matrix(step["matrix"], step.is_transposed), _gathered(step, setting)
    kind = "in order" if step.option("of_edges") else ""
    return Request(step.op, *setting.size(step.out), columns, matrix, addends=1, kind=kind)


def _options(step: Step, **more: Any) -> tuple[tuple[str, Any], ...]:
    """The heads of a step, which rows it gathers, and which of them all heads share."""
    same = {name: step.option(name) for name in ("heads", "of_edges") if step.option(name)}
    return tuple({**same, **{name: True for name, value in more.items() if value}}.items())


def _of_dots(reverse: Reverse, step: Step, grad: str) -> None:
    near, far, shapes = step["near"], step["far"], reverse.forward.shapes
    is_shared = step.option("is_shared")
    both = [("matrix", step["matrix"]), ("weight", grad)]
    if near in reverse.needed:
        options = _options(step, is_shared=is_shared)
        reverse.share(
            near, reverse.add("edge_sums", near, [*both, ("far", far)], shapes[near], options=options)
        )
    if far in reverse.needed:
        options = _options(step, is_out_shared=is_shared)
        reads = [*both, ("far", near)]
        to_far = reverse.add("edge_sums", far, reads, shapes[far], is_transposed=True, options=options)
        reverse.share(far, to_far)


def _of_sums(reverse: Reverse, step: Step, grad: str) -> None:
    weight, far, shapes = step["weight"], step["far"], reverse.forward.shapes
    is_shared, matrix = step.option("is_shared"), ("matrix", step["matrix"])
    if weight in reverse.needed:
        reads, options = [matrix, ("near", grad), ("far", far)], _options(step, is_shared=is_shared)
        reverse.share(weight, reverse.add("edge_dots", weight, reads, shapes[weight], options=options))
    if far in reverse.needed:
        reads, options = [matrix, ("weight", weight), ("far", grad)], _options(step, is_out_shared=is_shared)
        to_far = reverse.add("edge_sums", far, reads, shapes[far], is_transposed=True, options=options)
        reverse.share(far, to_far)


# The softmax ----------------------------------------------------------------------------------------------


def _softmax_flops(step: Step, view: View) -> Mapping[str, Amount]:
    each = _SOFTMAX if step.op == "edge_softmax" else _SOFTMAX_BACK
    edges, lanes = view.size(step.out)
    return {"edge update": (each - 1) * edges * lanes, "aggregate": edges * lanes}


def _softmax_depth(step: Step, view: View) -> Amount:
    return 3 + 2 * ceil_log2(pattern_of(step, view).degree)


def _of_softmax(reverse: Reverse, step: Step, grad: str) -> None:
    scores = step["scores"]
    reads = [("matrix", step["matrix"]), ("weight", step.out), ("grad", grad)]
    reverse.share(scores, reverse.add("edge_softmax_back", scores, reads, reverse.forward.shapes[scores]))


# Leaky scores ---------------------------------------------------------------------------------------------


def _products(step: Step, view: View | Setting) -> tuple[tuple[Amount, Amount], ...]:
    """(inner, columns) of what is multiplied for every edge: its features, the bent rows."""
    columns, lanes = view.size(step["spread"])
    attr = step.get("attr")
    return ((columns, lanes),) if attr is None else ((view.size(attr)[1], columns), (columns, lanes))


def _leaky_flops(step: Step, view: View) -> Mapping[str, Amount]:
    edges, columns = pattern_of(step, view).edges, view.size(step["spread"])[0]
    made = sum((dense_flops(edges, a, b) for a, b in _products(step, view)), 0)
    return {"edge update": made + (1 + _BEND) * edges * columns}


def _leaky_back_flops(step: Step, view: View) -> Mapping[str, Amount]:
    """Rows again, the slopes, two more products for each; sums by target and by source."""
    edges, columns = pattern_of(step, view).edges, view.size(step["spread"])[0]
    made = sum((3 * dense_flops(edges, a, b) for a, b in _products(step, view)), 0)
    again = dense_flops(edges, columns, view.size(step["spread"])[1])  # the scores themselves are not needed
    return {"edge update": made - again + (2 + _BEND) * edges * columns, "aggregate": 2 * edges * columns}


def _leaky_depth(step: Step, view: View) -> Amount:
    return 1 + _BEND + sum((1 + ceil_log2(a) for a, _ in _products(step, view)), 0)


def _leaky_request(step: Step, setting: Setting) -> Request:
    columns, matrix = setting.size(step["spread"])[0], setting.matrix(step["matrix"], False)
    products = _products(step, setting)
    return Request(step.op, *setting.size(step.out), 2 * columns, matrix, products=products)


def _of_leaky(reverse: Reverse, step: Step, grad: str) -> None:
    """One pass over the blocks computes the needed gradients; the option `makes` names their roles."""
    shapes = reverse.forward.shapes
    wanted = {role: name for role, name in step.reads if role != "matrix" and name in reverse.needed}
    (_, first), *rest = wanted.items()
    more = tuple(reverse.fresh(name, shapes[name]) for _, name in rest)
    options = (*step.options, ("makes", tuple(wanted)))
    reads = [*step.reads, ("grad", grad)]
    made = reverse.add("leaky_scores_back", first, reads, shapes[first], more=more, options=options)
    for name, gradient in zip(wanted.values(), (made, *more), strict=True):
        reverse.share(name, gradient)


_LEAKY = ("matrix", "near", "far", "spread", "attr?", "w?")

register(
    Operation(
        "edge_dots", ("matrix", "near", "far"), _dots_flops, tree("near", 1), _gather_request, _of_dots,
        says="multiply the rows of both ends, head by head",
    ),
    Operation(
        "edge_sums", ("matrix", "weight", "far"), _sums_flops, sums_depth, _gather_request, _of_sums,
        says="sum rows weighted by edge",
    ),
    Operation(
        "edge_softmax", ("matrix", "scores"), _softmax_flops, _softmax_depth, streamed(3), _of_softmax,
        says="softmax over the edges of each target",
    ),
    Operation(
        "edge_softmax_back", ("matrix", "weight", "grad"), _softmax_flops, _softmax_depth, streamed(3),
        says="gradient of the softmax",
    ),
    Operation(
        "leaky_scores", _LEAKY, _leaky_flops, _leaky_depth, _leaky_request, _of_leaky,
        says="score edges in blocks",
    ),
    Operation(
        "leaky_scores_back", (*_LEAKY, "grad"), _leaky_back_flops, _leaky_depth, _leaky_request,
        says="compute edge rows again, gradients of the scores",
    ),
)  # fmt: skip
