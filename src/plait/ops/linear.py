"""The operations of matrix expressions: sparse and dense products, sums, scalings, extrema."""

from __future__ import annotations

from collections.abc import Mapping

from plait.ops.counting import (
    after,
    ceil_log2,
    chain,
    dense,
    no_depth,
    no_request,
    passes,
    pattern_of,
    streamed,
    summed,
)
from plait.ops.operation import Operation, Reverse, Setting, View, register
from plait.ops.program import Step
from plait.ops.work import Amount, Request, row_flops, sparse_flops

__all__: list[str] = []

# Sparse products ------------------------------------------------------------------------------------------


def _sparse_flops(step: Step, view: View) -> Mapping[str, Amount]:
    pattern, (rows, cols) = pattern_of(step, view), view.size(step.out)
    total = sparse_flops(pattern.edges, cols, pattern.is_weighted or step.get("source") is not None)
    each = pattern.edges * cols
    return {
        "edge update": total - each,
        "aggregate": each,
        "vertex update": row_flops(rows, cols, after(step)),
    }


def _sparse_depth(step: Step, view: View) -> Amount:
    pattern = pattern_of(step, view)
    is_weighted = pattern.is_weighted or step.get("source") is not None
    return ceil_log2(pattern.degree) + int(is_weighted) + int(step.get("target") is not None)


def _sparse_request(step: Step, setting: Setting) -> Request:
    rows, cols = setting.size(step.out)
    matrix = setting.matrix(step["matrix"], step.is_transposed)
    addends = int(step.get("addend") is not None)
    return Request(step.op, rows, cols, 0, matrix, step.get("source") is not None, addends)


def _of_spmm(reverse: Reverse, step: Step, grad: str) -> None:
    _of_bias(reverse, step, grad)
    scale, addend = step.get("addend_scale"), step.get("addend")
    reverse.share(addend, grad, scale)
    if scale in reverse.needed and scale is not None and addend is not None:
        reverse.share(scale, reverse.add("dot", scale, [("left", grad), ("right", addend)], (1, 1)))
    if step["x"] in reverse.needed:
        reads = [
            ("matrix", step["matrix"]),
            ("x", grad),
            ("source", step.get("target")),
            ("target", step.get("source")),
            ("factor", step.get("factor")),
        ]
        reverse.product(step["x"], "spmm", reads, is_transposed=not step.is_transposed)


def _of_bias(reverse: Reverse, step: Step, grad: str) -> None:
    name = step.get("bias")
    if name in reverse.needed and name is not None:
        reverse.share(name, reverse.add("colsum", name, [("x", grad)], reverse.forward.shapes[name]))


# Extrema --------------------------------------------------------------------------------------------------


def _extremum_flops(step: Step, view: View) -> Mapping[str, Amount]:
    # per edge one comparison, and where ties are counted one more and a count
    each = pattern_of(step, view).edges * view.size(step.out)[1]
    return {"aggregate": (3 if any(map(view.keeps, step.more)) else 1) * each}


def _extremum_gather_flops(step: Step, view: View) -> Mapping[str, Amount]:
    rows, cols = view.size(step.out)
    each = pattern_of(step, view).edges * cols
    return {"edge update": each, "aggregate": each, "vertex update": row_flops(rows, cols, after(step))}


def _extremum_gather_depth(step: Step, view: View) -> Amount:
    return ceil_log2(pattern_of(step, view).degree) + 1


def _of_extremum(reverse: Reverse, step: Step, grad: str) -> None:
    x = step["x"]
    if x not in reverse.needed:
        return
    shaped = reverse.forward.shapes[step.out]
    share = reverse.add("extremum_share", step.out, [("x", grad), ("ties", step.more[0])], shaped)
    reads: list[tuple[str, str | None]] = [
        ("matrix", step["matrix"]), ("x", x), ("best", step.out), ("share", share)
    ]  # fmt: skip
    reverse.product(x, "extremum_gather", reads, is_transposed=True)


# Dense products -------------------------------------------------------------------------------------------


def _gemm_flops(step: Step, view: View) -> Mapping[str, Amount]:
    rows, cols = view.size(step.out)
    product = dense(view, step["x"], False, rows, view.size(step["x"])[1], cols)
    return {"vertex update": product + row_flops(rows, cols, after(step))}


def _gemm_transposed_flops(step: Step, view: View) -> Mapping[str, Amount]:
    rows, cols = view.size(step.out)
    return {"vertex update": dense(view, step["left"], True, view.size(step["left"])[0], rows, cols)}


def _gemm_request(step: Step, setting: Setting) -> Request:
    rows, cols = setting.size(step.out)
    addends = int(step.get("addend") is not None)
    if step["x"] in setting.sparse:
        return Request("spmm_features", rows, cols, 0, setting.sparse[step["x"]], False, addends)
    return Request("gemm", rows, cols, setting.size(step["x"])[1], None, False, addends)


def _gemm_transposed_request(step: Step, setting: Setting) -> Request:
    rows, cols = setting.size(step.out)
    if step["left"] in setting.sparse:
        matrix = setting.sparse[step["left"]].transposed()
        return Request("spmm_features", rows, cols, 0, matrix, kind="transposed")
    return Request("gemm_transposed", setting.size(step["left"])[0], cols, rows)


def _of_gemm(reverse: Reverse, step: Step, grad: str) -> None:
    _of_bias(reverse, step, grad)
    reverse.share(step.get("addend"), grad)
    w = step["w"]
    if w in reverse.needed:
        reads = [("left", step["x"]), ("right", grad)]
        reverse.share(w, reverse.add("gemm_transposed", w, reads, reverse.forward.shapes[w]))
    if step["x"] in reverse.needed:
        reverse.product(step["x"], "gemm", [("x", grad), ("w", w)], is_transposed=True)


# Rows and columns side by side --------------------------------------------------------------------------


def _streamed(step: Step, setting: Setting) -> Request:
    rows, cols = setting.size(step.out)
    operands = sum(1 for role, _ in step.reads if role.startswith("x") or role == "left")
    return Request(step.op, rows, cols, parts=max(1, operands))


def _of_stack(reverse: Reverse, step: Step, grad: str) -> None:
    _of_parts(reverse, step, grad, "rows_of", "part")


def _of_concat(reverse: Reverse, step: Step, grad: str) -> None:
    _of_parts(reverse, step, grad, "columns_of", "of")


def _of_parts(reverse: Reverse, step: Step, grad: str, op: str, role: str) -> None:
    """The gradient of every part is a view of the gradient of the whole."""
    others = tuple((f"{role}{k}", name) for k, (_, name) in enumerate(step.reads))
    for k, (_, part) in enumerate(step.reads):
        if part in reverse.needed:
            shaped = reverse.forward.shapes[part]
            reverse.share(part, reverse.add(op, part, [("x", grad), *others], shaped, factors=(float(k),)))


# Row by row -----------------------------------------------------------------------------------------------


def _combine_flops(step: Step, view: View) -> Mapping[str, Amount]:
    scaled = sum(factor != 1.0 for factor in step.factors)
    count = scaled + len(step.factors) - 1 + after(step)
    return {"vertex update": row_flops(*view.size(step.out), count)}


def _of_scale_rows(reverse: Reverse, step: Step, grad: str) -> None:
    reverse.share(step["x"], grad, step["scale"])


def _of_scale(reverse: Reverse, step: Step, grad: str) -> None:
    scalar = step["scalar"]
    reverse.share(step["x"], grad, scalar)
    if scalar in reverse.needed:
        reverse.share(scalar, reverse.add("dot", scalar, [("left", grad), ("right", step["x"])], (1, 1)))


def _of_combine(reverse: Reverse, step: Step, grad: str) -> None:
    _of_bias(reverse, step, grad)
    terms = [name for role, name in step.reads if role != "bias"]
    for factor, name in zip(step.factors, terms, strict=True):
        reverse.share(name, grad, None, factor)


def _of_relu(reverse: Reverse, step: Step, grad: str) -> None:
    if step["x"] in reverse.needed:
        reads = [("x", grad), ("made", step.out)]
        made = reverse.add("relu_backward", step["x"], reads, reverse.forward.shapes[step.out])
        reverse.share(step["x"], made)


# Sums over all rows ---------------------------------------------------------------------------------------


def _colsum_flops(step: Step, view: View) -> Mapping[str, Amount]:
    return {"vertex update": row_flops(view.size(step["x"])[0], view.size(step.out)[1], 1)}


def _colsum_depth(step: Step, view: View) -> Amount:
    return ceil_log2(view.size(step["x"])[0])


def _dot_depth(step: Step, view: View) -> Amount:
    rows, cols = view.size(step["left"])
    return 1 + ceil_log2(rows * cols)


_AFTER = ("addend?", "addend_scale?", "bias?")
_SPMM = "plait.kernels.spmm.reference"

register(
    Operation(
        "spmm", ("matrix", "x", "source?", "target?", "factor?", *_AFTER),
        _sparse_flops, _sparse_depth, _sparse_request, _of_spmm,
        overwrites="addend", may_hoist=True, reference=f"{_SPMM}:spmm",
    ),
    Operation(
        "extremum", ("matrix", "x"), _extremum_flops, _sparse_depth, _sparse_request, _of_extremum,
        may_hoist=True, reference=f"{_SPMM}:extremum",
    ),
    Operation("extremum_share", ("x", "ties"), passes(1), chain(1), _streamed, overwrites="x"),
    Operation(
        "extremum_gather", ("matrix", "x", "best", "share", *_AFTER[:2]),
        _extremum_gather_flops, _extremum_gather_depth, _sparse_request, overwrites="addend",
        reference=f"{_SPMM}:extremum_backward",
    ),
    Operation(
        "gemm", ("x", "w", "addend?", "bias?"), _gemm_flops,
        lambda step, view: 1 + ceil_log2(summed(view, step["x"], False)), _gemm_request, _of_gemm,
        overwrites="addend", reference="plait.kernels.gemm.reference:gemm",
    ),
    Operation(
        "gemm_transposed", ("left", "right"), _gemm_transposed_flops,
        lambda step, view: 1 + ceil_log2(summed(view, step["left"], True)), _gemm_transposed_request,
        reference="plait.kernels.gemm.reference:gemm_transposed",
    ),
    Operation("stack", ("part*",), passes(0), no_depth, _streamed, _of_stack),
    Operation("rows_of", ("x", "part*"), passes(0), no_depth, no_request, is_view=True),
    Operation("concat", ("x*",), passes(0), no_depth, _streamed, _of_concat, may_hoist=True),
    Operation("columns_of", ("x", "of*"), passes(0), no_depth, no_request, is_view=True),
    Operation("scale_rows", ("scale", "x"), passes(1), chain(1), _streamed, _of_scale_rows, may_hoist=True),
    Operation("scale", ("scalar", "x"), passes(1), chain(1), _streamed, _of_scale, may_hoist=True),
    Operation("combine", ("x*", "bias?"), _combine_flops, no_depth, _streamed, _of_combine, may_hoist=True),
    Operation("relu", ("x",), passes(1), chain(1), _streamed, _of_relu, overwrites="x"),
    Operation("relu_backward", ("x", "made"), passes(1), chain(1), _streamed, overwrites="x"),
    Operation("colsum", ("x",), _colsum_flops, _colsum_depth, streamed(0, "x")),
    Operation("dot", ("left", "right"), passes(2, "left"), _dot_depth, streamed(1, "left")),
)  # fmt: skip
