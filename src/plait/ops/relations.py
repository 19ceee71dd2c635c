"""The operations of layers whose edges have relations, each relation with its own weights.

`relate` multiplies rows by their relation's weights. Its `layout` says how rows, columns and relations lie:
"inner": a row holds the inputs of all relations side by side, their products are added up; "outer": it holds
one input, and its products with all relations' weights go side by side; "rows": every row is of one relation,
and `groups` says where each relation's rows begin. Weights of `blocks` diagonal blocks lie below one another.
"""

from __future__ import annotations

from collections.abc import Mapping

from plait.ops.counting import after, ceil_log2, pattern_of, products_depth, tree
from plait.ops.operation import Operation, Reverse, Setting, View, register
from plait.ops.program import Step
from plait.ops.work import Amount, Request, dense_flops, row_flops

__all__: list[str] = []


def _times(step: Step) -> int:
    """How often a row of `relate` is multiplied: once per block, and per relation where it holds them all."""
    blocks = int(step.option("blocks"))
    return blocks if step.option("layout") == "rows" else blocks * int(step.option("relations"))


def _block(step: Step) -> tuple[int, int]:
    """Rows and columns of one block of weights."""
    return int(step.option("inner")), int(step.option("width"))


def _relate_flops(step: Step, view: View) -> Mapping[str, Amount]:
    rows, cols = view.size(step.out)
    products = dense_flops(_times(step) * rows, *_block(step))
    return {"vertex update": products + row_flops(rows, cols, after(step))}


def _relate_depth(step: Step, view: View) -> Amount:
    inner, width = _block(step)
    return 1 + ceil_log2(width if step.is_transposed else inner)


def _relate_request(step: Step, setting: Setting) -> Request:
    inner, width = _block(step)
    inner, width = (width, inner) if step.is_transposed else (inner, width)
    rows, calls = setting.size(step.out)[0], step.option("relations") * step.option("blocks")
    addends = int(step.get("addend") is not None)
    return Request("relate", _times(step) * rows, width, inner, addends=addends, parts=calls)


def _of_relate(reverse: Reverse, step: Step, grad: str) -> None:
    shapes, bias, w = reverse.forward.shapes, step.get("bias"), step["w"]
    if bias is not None and bias in reverse.needed:
        reverse.share(bias, reverse.add("colsum", bias, [("x", grad)], shapes[bias]))
    reverse.share(step.get("addend"), grad)
    groups = ("groups", step.get("groups"))
    if w in reverse.needed:
        reads = [("left", step["x"]), ("right", grad), groups]
        reverse.share(w, reverse.add("relate_weights", w, reads, shapes[w], options=step.options))
    if step["x"] in reverse.needed:
        back = [("x", grad), ("w", w), groups]
        reverse.product(step["x"], "relate", back, is_transposed=True, options=step.options)


def _weights_flops(step: Step, view: View) -> Mapping[str, Amount]:
    return {"vertex update": dense_flops(_times(step) * view.size(step["left"])[0], *_block(step))}


def _weights_request(step: Step, setting: Setting) -> Request:
    inner, width = _block(step)
    rows, calls = setting.size(step["left"])[0], step.option("relations") * step.option("blocks")
    return Request("relate_weights", _times(step) * rows, width, inner, parts=calls)


# Bases ----------------------------------------------------------------------------------------------------


def _sums_flops(step: Step, view: View) -> Mapping[str, Amount]:
    # every edge is weighted by its relation's share of each basis
    (rows, cols), edges = view.size(step.out), pattern_of(step, view).edges
    each = (cols if step.op == "basis_sums" else cols * step.option("bases")) * edges
    weights = edges * step.option("bases") * int(step.option("is_mean"))
    return {
        "edge update": each + weights, "aggregate": each, "vertex update": row_flops(rows, cols, after(step))
    }  # fmt: skip


def _sums_request(step: Step, setting: Setting) -> Request:
    matrix, bases = setting.matrix(step["matrix"], step.is_transposed), step.option("bases")
    rows, cols = setting.size(step.out)
    width = cols // bases if step.op == "basis_sums" else cols
    return Request(step.op, rows, width, matrix=matrix, parts=bases)


def _of_sums(reverse: Reverse, step: Step, grad: str) -> None:
    x, comp = step["x"], step["comp"]
    known: list[tuple[str, str | None]] = [
        ("matrix", step["matrix"]), ("relations", step["relations"]), ("grad", grad)
    ]  # fmt: skip
    if comp in reverse.needed:
        shaped = reverse.forward.shapes[comp]
        made = reverse.add("basis_shares", comp, [*known, ("x", x)], shaped, options=step.options)
        reverse.share(comp, made)
    if x in reverse.needed:
        reads = [*known, ("comp", comp)]
        reverse.product(x, "basis_sources", reads, is_transposed=True, options=step.options)


def _shares_flops(step: Step, view: View) -> Mapping[str, Amount]:
    edges, bases = pattern_of(step, view).edges, step.option("bases")
    cols = view.size(step["x"])[1]
    return {
        "edge update": (2 * cols + int(step.option("is_mean"))) * edges * bases,
        "aggregate": edges * bases,
    }


def _shares_depth(step: Step, view: View) -> Amount:
    return 2 + ceil_log2(view.size(step["x"])[1]) + ceil_log2(pattern_of(step, view).edges)


def _shares_request(step: Step, setting: Setting) -> Request:
    matrix, (_, cols) = setting.matrix(step["matrix"], False), setting.size(step["x"])
    return Request("basis_shares", matrix.rows, cols, matrix=matrix, parts=step.option("bases"))


_GEMM = "plait.kernels.gemm.reference"

register(
    Operation(
        "relate", ("x", "w", "groups?", "addend?", "addend_scale?", "bias?"), _relate_flops, _relate_depth,
        _relate_request, _of_relate, overwrites="addend", reference=f"{_GEMM}:gemm",
        says="multiply by each relation's weights",
    ),
    Operation(
        "relate_weights", ("left", "right", "groups?"), _weights_flops, tree("left", 0), _weights_request,
        reference=f"{_GEMM}:gemm_transposed", says="gradient of each relation's weights",
    ),
    Operation(
        "basis_sums", ("matrix", "x", "comp", "relations"), _sums_flops, products_depth, _sums_request,
        _of_sums, reference="plait.kernels.spmm.reference:spmm", says="sum neighbours' rows for every basis",
    ),
    Operation(
        "basis_sources", ("matrix", "comp", "relations", "grad", "addend?", "addend_scale?"), _sums_flops,
        products_depth, _sums_request, overwrites="addend", reference="plait.kernels.spmm.reference:spmm",
        says="send gradients back for every basis",
    ),
    Operation(
        "basis_shares", ("matrix", "x", "relations", "grad"), _shares_flops, _shares_depth, _shares_request,
        says="gradient of the relations' shares",
    ),
)  # fmt: skip
