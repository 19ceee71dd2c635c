"""The operations of learned messages: a function of both ends of an edge, in blocks, reduced by target.

The operand `function` is not a tensor but a callable: (rows of the targets, of the sources, of the edges,
*parameters) -> rows. The option `products` lists its dense products per edge as (inner, columns). With
`is_paired` the function gets the sum of both ends' rows instead, and the parameters. `attained` has the
option `act` instead where a kernel knows the function by name.
"""

from __future__ import annotations

from collections.abc import Mapping

from plait.ops.counting import ceil_log2, chain, passes, pattern_of, streamed
from plait.ops.operation import Operation, Reverse, Setting, View, register
from plait.ops.program import Step
from plait.ops.work import Amount, Request, dense_flops

__all__: list[str] = []


def _columns(step: Step, view: View | Setting) -> Amount:
    """Columns gathered per edge; a pair of rows is added while gathering."""
    names = [step.get("near"), step["far"], step.get("attr")]
    widths = [view.size(name)[1] for name in names if name is not None]
    return widths[-1] if step.option("is_paired") else sum(widths)


def _products(step: Step) -> tuple[tuple[int, int], ...]:
    found: tuple[tuple[int, int], ...] = step.option("products", ())
    return found


# Work -----------------------------------------------------------------------------------------------------


def _flops(step: Step, view: View) -> Mapping[str, Amount]:
    """The products of the function, one operation per number of a message, and the reduction."""
    edges, cols = pattern_of(step, view).edges, view.size(step.out)[1]
    made = sum((dense_flops(edges, a, b) for a, b in _products(step)), 0)
    return {"edge update": made + edges * _columns(step, view), "aggregate": edges * cols}


def _back_flops(step: Step, view: View) -> Mapping[str, Amount]:
    """Messages again; every product has two more for its gradients; sums by target and by source."""
    edges, columns = pattern_of(step, view).edges, _columns(step, view)
    made = sum((3 * dense_flops(edges, a, b) for a, b in _products(step)), 0)
    again = 0 if step.get("marks") is None else dense_flops(edges, *_products(step)[-1])
    if step.option("act"):
        return _marked_flops(step, view)
    return {"edge update": made - again + 3 * edges * columns, "aggregate": 2 * edges * columns}


def _marked_flops(step: Step, view: View) -> Mapping[str, Amount]:
    """Rows again, in both passes; one edge per target and column has a gradient: three products of these."""
    edges, columns = pattern_of(step, view).edges, _columns(step, view)
    rows, cols = view.size(step["grad"])
    return {
        "edge update": 3 * dense_flops(rows, columns, cols) + 4 * edges * columns,
        "aggregate": 2 * edges * columns,
    }


def _depth(step: Step, view: View) -> Amount:
    inner = sum((1 + ceil_log2(a) for a, _ in _products(step)), 0)
    return inner + 1 + ceil_log2(pattern_of(step, view).degree)


def _request(step: Step, setting: Setting) -> Request:
    rows, cols = setting.size(step.out)
    matrix = setting.matrix(step["matrix"], False)
    return Request(
        step.op, rows, cols, _columns(step, setting), matrix, kind=_kind(step), products=_products(step)
    )  # fmt: skip


def _kind(step: Step) -> str:
    """What its kernels are: one pass for a known form, tiles for a known map, with marks, or blocks."""
    form = step.option("form")
    if form is not None and (form[0] == "softmax" or step.get("attr") is None):
        return str(form[0])
    return "rectified" if step.option("act") else "marked" if step.get("marks") is not None else ""


# Gradients ------------------------------------------------------------------------------------------------


def _of_messages(reverse: Reverse, step: Step, grad: str) -> None:
    if not step.option("is_fixed"):
        _back(reverse, step, grad, "messages_back")


def _of_attained(reverse: Reverse, step: Step, grad: str) -> None:
    _back(reverse, step, grad, "attained_back")


def _back(reverse: Reverse, step: Step, grad: str, op: str) -> None:
    """One pass over the blocks gives the gradients of the sources and of everything else that needs one."""
    shapes, far = reverse.forward.shapes, step["far"]
    reads = list(step.reads)
    if step.more:
        grad = reverse.add(
            "extremum_share", step.out, [("x", grad), ("ties", step.more[0])], shapes[step.out]
        )
        reads += [("marks", step.more[1])] if op == "attained_back" else [("best", step.out)]
    fixed = step.option("fixed", ())
    makes = {
        role: (name, reverse.fresh(name, shapes[name]))
        for role, name in step.reads
        if role not in ("matrix", "function", "far", *fixed) and name in reverse.needed
    }
    options = (*step.options, ("makes", tuple((role, made) for role, (_, made) in makes.items())))
    more = tuple(made for _, made in makes.values())
    to_far = reverse.add(
        op, far, [*reads, ("grad", grad)], shapes[far], more=more, options=options, reduce=step.reduce
    )
    reverse.share(far, to_far)
    for name, made in makes.values():
        reverse.share(name, made)


# Rows counted by their edges ------------------------------------------------------------------------------


def _of_per_edge(reverse: Reverse, step: Step, grad: str) -> None:
    x, shapes = step["x"], reverse.forward.shapes
    if x not in reverse.needed:
        return
    reads = [("matrix", step["matrix"]), ("x", grad)]
    reverse.share(x, reverse.add("per_edge", x, reads, shapes[x], options=step.options))


_ENDS = ("matrix", "function", "near?", "far", "attr?", "p*")
_MARKED = ("matrix", "function?", *_ENDS[2:], "w", "bias?")

register(
    Operation(
        "messages", _ENDS, _flops, _depth, _request, _of_messages,
        says="compute messages in blocks and reduce them",
    ),
    Operation(
        "messages_back", (*_ENDS, "best?", "grad"), _back_flops, _depth, _request,
        says="compute messages again, send gradients back",
    ),
    Operation(
        "attained", _MARKED, _flops, _depth, _request, _of_attained,
        says="compute messages in blocks, mark the extrema",
    ),
    Operation(
        "attained_back", (*_MARKED, "marks", "grad"), _back_flops, _depth, _request,
        says="send gradients back to the marked messages",
    ),
    Operation(
        "per_edge", ("matrix", "x"), passes(1), chain(1), streamed(1), _of_per_edge,
        says="count rows once per edge",
    ),
)  # fmt: skip
