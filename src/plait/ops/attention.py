"""The operations of attention: softmax of scores over each target's edges, weighted sums, and the gradients.

`kind` says how an edge is scored: "gat" adds one number of each end, "leaky" applies a leaky ReLU to the sum
of their rows (GATv2), "dot" takes their dot product (Transformer). `order` says how the backward pass works:

sources         over sources first, which needs the output; one number per edge and head is kept for targets
lean            the same with nothing kept per edge: the pass over targets computes it again
targets         over targets first, which needs no output; two numbers per edge and head are kept for sources
targets, lean   the same with nothing kept: the pass over sources computes it again
"""

from __future__ import annotations

from collections.abc import Mapping

from plait.ops.counting import after, ceil_log2, chain, no_depth, pattern_of, products_depth, streamed, tree
from plait.ops.operation import Operation, Reverse, Setting, View, register
from plait.ops.program import Step
from plait.ops.work import Amount, Request, row_flops

__all__ = ["padded"]

Reads = list[tuple[str, str | None]]

_SOFTMAX = 4  # operations per edge and head: largest score, minus it, exponential, sum
_AGAIN = 3  # the same from kept values: minus the largest, exponential, divided by the sum
_SCORE = {"gat": 3, "leaky": 0, "dot": 0}  # per edge and head: add both ends, compare, apply the slope
_BENT = {"gat": 0, "leaky": 5, "dot": 2}  # per edge and column of a score made from rows
_ENDS = ("matrix", "far", "near", "value", "edge", "att")


def padded(heads: int) -> int:
    """Heads as kernels lay them out: the next power of two."""
    return 1 << (heads - 1).bit_length()


# Work -----------------------------------------------------------------------------------------------------


def _columns(step: Step, view: View) -> Amount:
    """Columns of all heads: of the values, or of a shared row once for every head."""
    columns = view.size(step["value"])[1]
    return columns * step.option("heads") if step.option("is_shared") else columns


def _score(step: Step) -> int:
    """Operations per edge and head to compute its score; a term from the edge itself is one more addition."""
    kind = step.option("kind")
    return _SCORE[kind] + int(kind == "gat" and step.get("edge") is not None)


def _attend_flops(step: Step, view: View) -> Mapping[str, Amount]:
    kind, heads, edges = step.option("kind"), step.option("heads"), pattern_of(step, view).edges
    columns, rows = _columns(step, view), view.size(step.out)[0]
    return {
        "edge update": edges * ((_score(step) + _SOFTMAX) * heads + (_BENT[kind] + 1) * columns),
        "aggregate": edges * columns,
        # one over the sum of each head, then every column times that
        "vertex update": row_flops(rows, columns, 1 + after(step)) + rows * heads,
    }


def _sources_flops(step: Step, view: View) -> Mapping[str, Amount]:
    """Weights again, the gradient of a weight (a dot product), softmax and score, sums of gradients."""
    kind, heads, edges = step.option("kind"), step.option("heads"), pattern_of(step, view).edges
    columns = _columns(step, view)
    # gat: the gradient of a source's score is a sum of its own
    far = heads if kind == "gat" and step.option("to_far") is not None else 0
    if step.get("kept") is not None:
        return {"edge update": edges * (1 + _BENT[kind]) * columns, "aggregate": edges * (columns + far)}
    scored = (_score(step) + _AGAIN + 4) * heads
    return {
        "edge update": edges * (scored + (3 + 2 * _BENT[kind]) * columns),
        "aggregate": edges * (columns + far if kind == "gat" else 2 * columns),
    }


def _targets_flops(step: Step, view: View) -> Mapping[str, Amount]:
    kind, heads, edges = step.option("kind"), step.option("heads"), pattern_of(step, view).edges
    if kind == "gat":
        return {"aggregate": edges * heads}
    columns = view.size(step.out)[1]
    return {"edge update": edges * columns * (_BENT[kind] + 1), "aggregate": edges * columns}


def _again_flops(step: Step, view: View) -> Mapping[str, Amount]:
    kind, heads, edges = step.option("kind"), step.option("heads"), pattern_of(step, view).edges
    columns = _columns(step, view)
    # the softmax's sum term, where it is found from a row's edges and not from its output: a sum, a product
    term = 2 if step.option("kept") is not None else 0
    scored = (_score(step) + _AGAIN + 4 + term) * heads
    summed = heads if kind == "gat" else columns
    return {"edge update": edges * (scored + (2 + 2 * _BENT[kind]) * columns), "aggregate": edges * summed}


def _dots_flops(step: Step, view: View) -> Mapping[str, Amount]:
    return {"vertex update": row_flops(*view.size(step["grad"]), 2 + after(step))}


def _depth(step: Step, view: View) -> Amount:
    """A score, two trees over the edges of the longest row (softmax, sum), a few operations between them."""
    kind, tree = step.option("kind"), ceil_log2(pattern_of(step, view).degree)
    score = 2 if kind == "gat" else 2 + ceil_log2(_columns(step, view))
    return score + tree + 3 + tree + 1


# What prices depend on ------------------------------------------------------------------------------------


def _request(step: Step, setting: Setting) -> Request:
    """The columns gathered per edge; `parts`: scores per edge; `inner`: heads that share a gathered row."""
    kind, heads = step.option("kind"), step.option("heads")
    is_shared, is_back = bool(step.option("is_shared")), step.op == "attend_sources"
    columns = setting.size(step["value"])[1]
    if is_back and is_shared:
        columns *= heads  # the gradients of all heads are gathered
    if kind == "dot" and not is_shared:
        columns *= 2  # keys and values
    elif is_back and kind != "gat":
        columns *= 2  # the targets' rows and gradients
    sharing = heads if is_shared and not is_back else 1
    variant = f"{kind} kept" if step.get("kept") else f"{kind} first" if step.option("is_first") else kind
    matrix = setting.matrix(step["matrix"], step.is_transposed)
    return Request(
        step.op, matrix.rows, columns, sharing, matrix, addends=1, parts=padded(heads), kind=variant
    )


def _targets_request(step: Step, setting: Setting) -> Request:
    kind, heads = step.option("kind"), step.option("heads")
    matrix = setting.matrix(step["matrix"], step.is_transposed)
    if kind == "gat":
        return Request("spmm", matrix.rows, padded(heads), matrix=matrix, addends=1)
    sharing = heads if step.option("is_shared") else 1
    columns = setting.size(step["far"])[1]
    return Request(step.op, matrix.rows, columns, sharing, matrix, addends=1, parts=padded(heads), kind=kind)


# Gradients ------------------------------------------------------------------------------------------------


def _of_attend(reverse: Reverse, step: Step, grad: str) -> None:
    shapes, bias = reverse.forward.shapes, step.get("bias")
    if bias is not None and bias in reverse.needed:
        reverse.share(bias, reverse.add("colsum", bias, [("x", grad)], shapes[bias]))
    reverse.share(step.get("addend"), grad)
    inputs = {step.get(role) for role in _ENDS[1:]} & reverse.needed
    if not inputs:
        return
    reads: Reads = [(role, step.get(role)) for role in _ENDS]
    reads += [("statistics", step.more[0]), ("grad", grad)]
    order = step.option("order")
    if order.startswith("targets"):
        _targets_first(reverse, step, reads, is_lean=order != "targets")
    else:
        _sources_first(reverse, step, reads, grad, is_lean=order == "lean")


def _sources_first(reverse: Reverse, step: Step, reads: Reads, grad: str, is_lean: bool) -> None:
    shapes, lanes = reverse.forward.shapes, padded(step.option("heads"))
    operands: Reads = [(role, step.get(role)) for role in ("addend", "bias")]
    operands += [("grad", grad), ("out", step.out), ("statistics", step.more[0])]
    heads = (("heads", step.option("heads")),)
    dots = reverse.add("attend_dots", step.out, operands, ("N", lanes), options=heads)
    reads = [*reads, ("dots", dots)]
    slopes = None if is_lean else reverse.fresh("slopes", ("E", lanes))
    if slopes is not None or {step["value"], step["far"]} & reverse.needed:
        _back_to_sources(reverse, step, reads, slopes)
    near, edge = step["near"], step.get("edge")
    if near in reverse.needed or step.get("att") in reverse.needed:
        part = _att_part(reverse, step)
        if slopes is None:
            made = reverse.add("attend_again", near, reads, shapes[near], more=part, options=step.options)
        else:
            operands = [(role, step.get(role)) for role in ("matrix", "far", "near", "att", "value")]
            operands.append(("slopes", slopes))
            made = reverse.add(
                "attend_targets", near, operands, shapes[near], more=part, options=step.options
            )
        _give(reverse, step, near, made, part)
    if edge is not None and edge in reverse.needed:
        reverse.share(edge, reverse.add("edge_order", edge, [("x", slopes)], shapes[edge]))


def _targets_first(reverse: Reverse, step: Step, reads: Reads, is_lean: bool) -> None:
    shapes, lanes = reverse.forward.shapes, padded(step.option("heads"))
    near, edge = step["near"], step.get("edge")
    part = _att_part(reverse, step)
    kept = None if is_lean else reverse.fresh("kept", ("E", 2 * lanes))
    wants_edge = edge is not None and edge in reverse.needed
    to_edge = reverse.fresh(str(edge), shapes[edge]) if is_lean and wants_edge and edge is not None else None
    more = (*part, *(name for name in (kept, to_edge) if name is not None))
    options = (*step.options, ("is_first", True), ("kept", kept), ("to_edge", to_edge))
    # less the bias, the output tells a target's part of the softmax on some devices
    operands: Reads = [*reads, ("out", step.out), ("bias", step.get("bias"))] if is_lean else reads
    made = reverse.add("attend_again", near, operands, shapes[near], more=more, options=options)
    _give(reverse, step, near, made, part)
    if {step["value"], step["far"]} & reverse.needed or part:
        _back_to_sources(reverse, step, [*reads, ("kept", kept)], None)
    if wants_edge and edge is not None and kept is not None:
        columns = (("start", lanes), ("width", lanes))
        reverse.share(edge, reverse.add("columns", edge, [("x", kept)], shapes[edge], options=columns))
    elif to_edge is not None:
        reverse.share(edge, to_edge)


def _back_to_sources(reverse: Reverse, step: Step, reads: Reads, slopes: str | None) -> None:
    """The pass over sources: gradients of values, of the sources' parts of scores, of the scores."""
    shapes, value, far = reverse.forward.shapes, step["value"], step["far"]
    part = _att_part(reverse, step)
    to_far = None if far == value else reverse.fresh(far, shapes[far])
    more = (*part, *(name for name in (slopes, to_far) if name is not None))
    options = (*step.options, ("slopes", slopes), ("to_far", to_far))
    made = reverse.add(
        "attend_sources", value, reads, shapes[value], is_transposed=True, more=more, options=options
    )
    reverse.share(value, made)
    if to_far is not None:
        reverse.share(far, to_far)
    if part:
        reverse.share(step.get("att"), part[0])


def _att_part(reverse: Reverse, step: Step) -> tuple[str, ...]:
    """What a pass adds to the gradient of the scoring vector."""
    att = step.get("att")
    return () if att is None else (reverse.fresh(att, reverse.forward.shapes[att]),)


def _give(reverse: Reverse, step: Step, near: str, made: str, part: tuple[str, ...]) -> None:
    reverse.share(near, made)
    if part:
        reverse.share(step.get("att"), part[0])


# Products by head -----------------------------------------------------------------------------------------


def _heads_flops(step: Step, view: View) -> Mapping[str, Amount]:
    (rows, columns), inner = view.size(step.out), view.size(step["w"])[0]
    total = 2 * rows * inner * columns
    if step.get("skip") is not None:
        total = total + 2 * rows * view.size(step["skip"])[0] * columns
    terms = sum(step.get(role) is not None for role in ("bias", "skip", "skip_bias"))
    return {"vertex update": total + row_flops(rows, columns, terms)}


def _heads_back_flops(step: Step, view: View) -> Mapping[str, Amount]:
    (rows, columns), inner = view.size(step["grad"]), view.size(step["w"])[0]
    total = 4 * rows * inner * columns + rows * columns
    if step.get("own") is not None:
        total = total + 2 * rows * view.size(step["own"])[1] * columns
    return {"vertex update": total}


def _heads_request(step: Step, setting: Setting) -> Request:
    rows, columns = setting.size(step["grad"] if step.op == "heads_backward" else step.out)
    heads, inner = step.option("heads"), setting.size(step["w"])[0]
    products = 2 if step.op == "heads_backward" else 1
    products += int((step.get("own") or step.get("skip")) is not None)
    return Request("heads", rows, columns // heads, inner, parts=products * heads)


def _of_heads(reverse: Reverse, step: Step, grad: str) -> None:
    shapes = reverse.forward.shapes
    x, w, own, skip = step["x"], step["w"], step.get("own"), step.get("skip")
    to_w, sums = reverse.fresh(w, shapes[w]), reverse.fresh("sums", (1, shapes[step.out][1]))
    to_skip = None if skip is None else reverse.fresh(skip, shapes[skip])
    reads: Reads = [("x", x), ("w", w), ("grad", grad), ("own", own if skip is not None else None)]
    more = (to_w, sums) if to_skip is None else (to_w, sums, to_skip)
    made = reverse.add("heads_backward", x, reads, shapes[x], more=more, options=step.options)
    for name, value in ((x, made), (w, to_w), (skip, to_skip), (step.get("skip_bias"), sums)):
        if name is not None and value is not None:
            reverse.share(name, value)
    if own is not None and skip is not None and own in reverse.needed:
        reverse.product(own, "gemm", [("x", grad), ("w", skip)], is_transposed=True)
    bias = step.get("bias")
    if bias is None or bias not in reverse.needed:
        return
    if step.option("is_bare_without"):
        sums = reverse.add("bare_sums", bias, [("sums", sums), ("grad", grad)], shapes[bias])
    reverse.share(bias, sums)


def _bare_flops(step: Step, view: View) -> Mapping[str, Amount]:
    return {"vertex update": view.size(step.out)[1]}


def _nothing(step: Step, view: View) -> Mapping[str, Amount]:
    return {"edge update": 0}


_REFERENCE = "plait.kernels.attention.reference"
_BACK = ("matrix", "far", "near", "value", "edge?", "att?", "statistics", "grad", "dots?")

register(
    Operation(
        "attend", ("matrix", "far", "near", "value", "edge?", "att?", "addend?", "bias?"),
        _attend_flops, _depth, _request, _of_attend, reference=f"{_REFERENCE}:attend",
        says="score edges, then sum neighbours' rows by weight",
    ),
    Operation(
        "attend_dots", ("grad", "out", "statistics", "addend?", "bias?"), _dots_flops, tree("grad", 1),
        streamed(1, "grad"), says="dot products of gradients and outputs, by head",
    ),
    Operation(
        "attend_sources", (*_BACK, "kept?"), _sources_flops, _depth, _request,
        reference=f"{_REFERENCE}:attend_backward", says="send gradients back along the edges, by weight",
    ),
    Operation(
        "attend_targets", ("matrix", "far", "near", "value", "att?", "slopes"),
        _targets_flops, products_depth, _targets_request, reference=f"{_REFERENCE}:attend_backward",
        says="sum the gradients of scores by target",
    ),
    Operation(
        "attend_again", (*_BACK, "out?", "bias?"), _again_flops, _depth, _request,
        reference=f"{_REFERENCE}:attend_backward", says="score edges again, for the targets' gradients",
    ),
    Operation(
        "edge_order", ("x",), _nothing, no_depth, streamed(1),
        says="put edge gradients in the order of edge_index",
    ),
    Operation(
        "heads", ("x", "w", "bias?", "own?", "skip?", "skip_bias?"), _heads_flops, tree("w", 0),
        _heads_request, _of_heads, says="multiply each head by its weights",
    ),
    Operation(
        "heads_backward", ("x", "w", "grad", "own?"), _heads_back_flops, tree("grad", 0), _heads_request,
        says="gradients of each head and its weights",
    ),
    Operation(
        "bare_sums", ("sums", "grad"), _bare_flops, chain(1), streamed(1),
        says="gradient of the values' bias",
    ),
)  # fmt: skip
