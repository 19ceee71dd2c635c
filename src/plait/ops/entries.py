"""The operations of matrices whose values are inputs: neighbour sums, dot products of rows, normalisation.

The entries of such a matrix are one column: the values of its edges by target, followed, with the option
`has_own`, by those on its diagonal. The option `identity` is a number added to the diagonal.
"""

from __future__ import annotations

from collections.abc import Mapping

from plait.ops.counting import ceil_log2, pattern_of, sums_depth, tree
from plait.ops.operation import Operation, Reverse, Setting, View, register
from plait.ops.program import Step
from plait.ops.work import Amount, Request, row_flops, sparse_flops

__all__: list[str] = []

_NORMALISED = 3  # operations per entry: its sum by row, two factors
_NORMALISED_BACK = 6  # both factors of the entry's gradient, its share in the gradients of the two row sums


def _has_diagonal(step: Step) -> bool:
    return bool(step.option("has_own") or step.option("identity"))


def _sums_flops(step: Step, view: View) -> Mapping[str, Amount]:
    pattern, (rows, cols) = pattern_of(step, view), view.size(step.out)
    each = pattern.edges * cols
    return {
        "edge update": sparse_flops(pattern.edges, cols, True) - each,
        "aggregate": each,
        "vertex update": row_flops(rows, cols, 2 * _has_diagonal(step)),
    }


def _sums_request(step: Step, setting: Setting) -> Request:
    matrix = setting.matrix(step["matrix"], step.is_transposed)
    return Request("spmm", *setting.size(step.out), 0, matrix, True, int(_has_diagonal(step)))


def _of_sums(reverse: Reverse, step: Step, grad: str) -> None:
    entries, x, shapes = step["entries"], step["x"], reverse.forward.shapes
    if entries in reverse.needed:
        reads = [("matrix", step["matrix"]), ("near", grad), ("far", x)]
        reverse.share(
            entries, reverse.add("entry_dots", entries, reads, shapes[entries], options=step.options)
        )
    if x in reverse.needed:
        reads = [("matrix", step["matrix"]), ("entries", entries), ("x", grad)]
        turned = not step.is_transposed
        reverse.share(
            x, reverse.add("entry_sums", x, reads, shapes[x], is_transposed=turned, options=step.options)
        )


def _dots_flops(step: Step, view: View) -> Mapping[str, Amount]:
    cols = view.size(step["near"])[1]
    return {"edge update": 2 * view.size(step.out)[0] * cols}


def _dots_request(step: Step, setting: Setting) -> Request:
    matrix = setting.matrix(step["matrix"], False)
    return Request("edge_dots", *setting.size(step.out), setting.size(step["near"])[1], matrix, addends=1)


def _normalise_flops(step: Step, view: View) -> Mapping[str, Amount]:
    each = _NORMALISED if step.op == "normalise" else _NORMALISED_BACK
    return {"edge update": each * view.size(step.get("grad") or step.out)[0]}


def _normalise_depth(step: Step, view: View) -> Amount:
    return 2 + ceil_log2(view.size(step.get("grad") or step.out)[0])


def _normalise_request(step: Step, setting: Setting) -> Request:
    return Request(step.op, *setting.size(step.get("grad") or step.out), parts=2)


def _of_normalise(reverse: Reverse, step: Step, grad: str) -> None:
    weight = step["weight"]
    reads = [("places", step["places"]), ("grad", grad)]
    reverse.share(weight, reverse.add("normalise_back", weight, reads, reverse.forward.shapes[weight]))


register(
    Operation(
        "entry_sums", ("matrix", "entries", "x"), _sums_flops, sums_depth, _sums_request, _of_sums,
        says="sum neighbours' rows weighted by matrix entries",
    ),
    Operation(
        "entry_dots", ("matrix", "near", "far"), _dots_flops, tree("near", 1), _dots_request,
        says="one dot product of rows per entry",
    ),
    Operation(
        "normalise", ("places", "weight"), _normalise_flops, _normalise_depth, _normalise_request,
        _of_normalise, reference="plait.kernels.normalised.reference:reference",
        says="normalise edge weights by the sums of their rows",
    ),
    Operation(
        "normalise_back", ("places", "grad"), _normalise_flops, _normalise_depth, _normalise_request,
        says="gradient of the edge weights through their normalisation",
    ),
)  # fmt: skip
