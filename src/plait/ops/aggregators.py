"""The operations of layers with several aggregators and degree scalers, and their gradients.

`names` are the aggregators. `kept` lists what lies side by side in a tower's columns: the names, and the mean
where a variance needs it for its gradient. `sections` are the rows that the backward pass keeps per tower.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from plait.ops.counting import after, ceil_log2, chain, passes, pattern_of, products_depth, streamed, tree
from plait.ops.operation import Operation, Reverse, Setting, View, register
from plait.ops.program import Step
from plait.ops.work import Amount, Request, dense_flops, row_flops

__all__: list[str] = []

_SPREAD = ("var", "std")
_ENDS = ("max", "min")
_ON_ROWS = {"mean": 1, "var": 3, "std": 1}  # over the degree; less the squared mean; the root


def _names(step: Step) -> tuple[str, ...]:
    return tuple(step.option("kept"))


def _columns(step: Step) -> int:
    """Columns of a node's messages, all towers."""
    return int(step.option("width") * step.option("towers"))


def _of_edges(names: tuple[str, ...]) -> int:
    """Operations per edge and column: a sum, the sum of squares, a comparison for each extremum."""
    has_spread = any(name in _SPREAD for name in names)
    has_sum = has_spread or "mean" in names or "sum" in names
    return int(has_sum) + 2 * int(has_spread) + sum(name in _ENDS for name in names)


def _aggregate_flops(step: Step, view: View) -> Mapping[str, Amount]:
    names, columns, pattern = _names(step), _columns(step), pattern_of(step, view)
    on_rows = sum(_ON_ROWS.get(name, 0) for name in {*names, *(["var"] if "std" in names else [])})
    return {
        "aggregate": _of_edges(names) * pattern.edges * columns,
        "vertex update": row_flops(pattern.rows, columns, on_rows),
    }


def _aggregate_depth(step: Step, view: View) -> Amount:
    return 1 + ceil_log2(pattern_of(step, view).degree) + sum(_ON_ROWS.get(name, 0) for name in _names(step))


def _aggregate_request(step: Step, setting: Setting) -> Request:
    matrix = setting.matrix(step["matrix"], False)
    return Request("aggregate", setting.size(step.out)[0], _columns(step), matrix=matrix)


def _of_aggregate(reverse: Reverse, step: Step, grad: str) -> None:
    x, options = step["x"], step.options
    if x not in reverse.needed:
        return
    reads = [("matrix", step["matrix"]), ("grad", grad), ("made", step.out)]
    reads += [("ties", step.more[0])] if step.more else []
    rows = reverse.forward.shapes[step.out][0]
    shaped = (rows, step.option("sections") * _columns(step))
    shares = reverse.add("aggregate_shares", step.out, reads, shaped, options=options)
    back = [("matrix", step["matrix"]), ("x", x), ("shares", shares)]
    shape = reverse.forward.shapes[x]
    reverse.share(x, reverse.add("aggregate_sources", x, back, shape, is_transposed=True, options=options))


def _sources_flops(step: Step, view: View) -> Mapping[str, Amount]:
    # the shares are added up; that of the variance is multiplied by x, those of extrema are compared
    names, edges = _names(step), pattern_of(step, view).edges
    each = 2 * any(name in _SPREAD for name in names) + 2 * sum(name in _ENDS for name in names)
    return {"edge update": each * edges * _columns(step), "aggregate": edges * _columns(step)}


def _sources_request(step: Step, setting: Setting) -> Request:
    matrix = setting.matrix(step["matrix"], True)
    columns = step.option("sections") * _columns(step)
    return Request("aggregate_sources", setting.size(step.out)[0], columns, matrix=matrix)


# Messages in blocks of edges ------------------------------------------------------------------------------


def _inner(step: Step) -> int:
    """Columns that an edge's products sum over, per column of its message: its features, later layers."""
    layers = step.option("layers") - 1
    return int(step.option("edge_width") + layers * step.option("width"))


def _messages_flops(step: Step, view: View) -> Mapping[str, Amount]:
    found = _aggregate_flops(step, view)
    products = dense_flops(pattern_of(step, view).edges, _inner(step), _columns(step))
    return {"edge update": products, **found}


def _messages_depth(step: Step, view: View) -> Amount:
    return _aggregate_depth(step, view) + step.option("layers") * (1 + ceil_log2(step.option("width")))


def _messages_request(step: Step, setting: Setting) -> Request:
    matrix = setting.matrix(step["matrix"], False)
    return Request("aggregate_messages", matrix.edges, _columns(step), _inner(step), matrix, parts=4)


def _of_messages(reverse: Reverse, step: Step, grad: str) -> None:
    """Messages are computed again; one pass gives the gradients of node rows, edge rows and parameters."""
    wanted = [(role, name) for role, name in step.reads if role != "matrix" and name in reverse.needed]
    if not wanted:
        return
    shapes = reverse.forward.shapes
    (_, first), *rest = wanted
    more = tuple(reverse.fresh(name, shapes[name]) for _, name in rest)
    options = (*step.options, ("wanted", tuple(role for role, _ in wanted)))
    reads = [*step.reads, ("grad", grad)]
    made = reverse.add("aggregate_messages_back", first, reads, shapes[first], more=more, options=options)
    for (_, name), value in zip(wanted, (made, *more), strict=True):
        reverse.share(name, value)


def _messages_back_flops(step: Step, view: View) -> Mapping[str, Amount]:
    # the messages again, two products for each of their products; the shares of the aggregates
    edges, columns = pattern_of(step, view).edges, _columns(step)
    each = 2 * _of_edges(_names(step))
    return {
        "edge update": 3 * dense_flops(edges, _inner(step), columns) + each * edges * columns,
        "aggregate": (_of_edges(_names(step)) + 1) * edges * columns,
    }


def _messages_back_request(step: Step, setting: Setting) -> Request:
    matrix = setting.matrix(step["matrix"], False)
    parts = 8 + step.option("sections")
    return Request(step.op, matrix.edges, _columns(step), 3 * _inner(step), matrix, parts=parts)


# Rows scaled one by one -----------------------------------------------------------------------------------


def _weigh_flops(step: Step, view: View) -> Mapping[str, Amount]:
    rows, cols = view.size(step["x"])
    return {"vertex update": row_flops(rows, cols, 2) - (0 if after(step) else rows * view.size(step.out)[1])}


def _weigh_depth(step: Step, view: View) -> Amount:
    return 1 + ceil_log2(view.size(step["scales"])[1] + after(step))


def _weigh_request(step: Step, setting: Setting) -> Request:
    rows, cols = setting.size(step.out)
    return Request("weigh", rows, cols, parts=setting.size(step["scales"])[1] + after(step))


def _of_weigh(reverse: Reverse, step: Step, grad: str) -> None:
    _of_scaled(reverse, step, grad, "weighed_copies", [("wide", step["x"]), ("narrow", grad)])


def _of_scaled(
    reverse: Reverse, step: Step, grad: str, adjoint: str, dots: Sequence[tuple[str, str]]
) -> None:
    """The gradients of rows times scales: of x by the adjoint, of a scale by a dot product of two rows."""
    reverse.share(step.get("addend"), grad)
    x, scales, shapes = step["x"], step["scales"], reverse.forward.shapes
    if x in reverse.needed:
        reads = [("x", grad), ("scales", scales)]
        reverse.share(x, reverse.add(adjoint, x, reads, shapes[x]))
    if scales in reverse.needed:
        reverse.share(scales, reverse.add("row_dots", scales, list(dots), shapes[scales]))


def _copies_flops(step: Step, view: View) -> Mapping[str, Amount]:
    return {"vertex update": row_flops(*view.size(step.out), 1 + after(step))}


def _copies_depth(step: Step, view: View) -> Amount:
    return 1 + after(step)


def _copies_request(step: Step, setting: Setting) -> Request:
    return Request("weighed_copies", *setting.size(step.out), parts=1 + after(step))


def _of_copies(reverse: Reverse, step: Step, grad: str) -> None:
    _of_scaled(reverse, step, grad, "weigh", [("wide", grad), ("narrow", step["x"])])


_MESSAGE = ("matrix", "near?", "far", "edge?", "w*")
_MULTI = "plait.kernels.multi.reference"

register(
    Operation(
        "aggregate", ("matrix", "x"), _aggregate_flops, _aggregate_depth, _aggregate_request, _of_aggregate,
        reference=f"{_MULTI}:aggregate", says="apply all aggregators to neighbours' rows",
    ),
    Operation(
        "aggregate_shares", ("matrix", "grad", "made", "ties?"), passes(2), chain(2), streamed(2),
        reference=f"{_MULTI}:aggregate_backward",
        says="split gradients among aggregators",
    ),
    Operation(
        "aggregate_sources", ("matrix", "x", "shares"), _sources_flops, products_depth, _sources_request,
        reference=f"{_MULTI}:aggregate_backward", says="send gradients back along the edges",
    ),
    Operation(
        "aggregate_messages", _MESSAGE, _messages_flops, _messages_depth, _messages_request, _of_messages,
        reference=f"{_MULTI}:aggregate", says="apply all aggregators to blocks of messages",
    ),
    Operation(
        "aggregate_messages_back", (*_MESSAGE, "grad"), _messages_back_flops, _messages_depth,
        _messages_back_request, reference=f"{_MULTI}:aggregate_backward",
        says="compute messages again, for gradients",
    ),
    Operation(
        "weigh", ("x", "scales", "addend?"), _weigh_flops, _weigh_depth, _weigh_request, _of_weigh,
        overwrites="addend", says="sum the weighted parts",
    ),
    Operation(
        "weighed_copies", ("x", "scales", "addend?"), _copies_flops, _copies_depth, _copies_request,
        _of_copies, overwrites="addend", says="scale copies row by row",
    ),
    Operation(
        "row_dots", ("wide", "narrow"), passes(2, "wide"), tree("narrow", 1), streamed(1, "wide"),
        says="gradient of the rows' weights",
    ),
)  # fmt: skip
