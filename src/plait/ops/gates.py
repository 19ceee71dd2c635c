"""The operations of gated sums: act(near[i] + far[j]) * value[j] over the edges, and their gradients."""

from __future__ import annotations

from collections.abc import Mapping

from plait.ops.counting import after, ceil_log2
from plait.ops.operation import Operation, Pattern, Reverse, Setting, View, register
from plait.ops.program import Step
from plait.ops.work import Amount, Request, row_flops

__all__: list[str] = []

_ACT = 4  # operations of a sigmoid: negate, exponential, add, divide
_SLOPE = 2  # of its derivative, from it


def _pattern(step: Step, view: View) -> Pattern:
    found = view.pattern(step["matrix"], step.is_transposed)
    assert found is not None
    return found


def _gate_flops(step: Step, view: View) -> Mapping[str, Amount]:
    # per edge and column: both ends added, the gate, times the value, added up; the same with its slope
    (rows, cols), edges = view.size(step.out), _pattern(step, view).edges
    slopes = int(any(map(view.keeps, step.more)))
    return {
        "edge update": (1 + _ACT + 1 + slopes * (_SLOPE + 1)) * edges * cols,
        "aggregate": (1 + slopes) * edges * cols,
        "vertex update": row_flops(rows, cols, after(step)),
    }


def _targets_flops(step: Step, view: View) -> Mapping[str, Amount]:
    (rows, cols), edges = view.size(step.out), _pattern(step, view).edges
    return {
        "edge update": (1 + _ACT + _SLOPE + 1) * edges * cols,
        "aggregate": edges * cols,
        "vertex update": row_flops(rows, cols, 1),
    }


def _sources_flops(step: Step, view: View) -> Mapping[str, Amount]:
    # both sums times the gradient of the target; the value is multiplied by once per row
    (rows, cols), edges = view.size(step.out), _pattern(step, view).edges
    return {
        "edge update": (1 + _ACT + _SLOPE + 2) * edges * cols,
        "aggregate": 2 * edges * cols,
        "vertex update": row_flops(rows, cols, 1),
    }


def _depth(step: Step, view: View) -> Amount:
    return 1 + _ACT + 1 + ceil_log2(_pattern(step, view).degree)


def _request(step: Step, setting: Setting) -> Request:
    rows, cols = setting.size(step.out)
    matrix = setting.matrix(step["matrix"], step.is_transposed)
    kind = "kept" if step.op == "gate" and step.more else ""
    return Request(step.op, rows, 2 * cols, matrix=matrix, addends=1, kind=kind)


def _of_gate(reverse: Reverse, step: Step, grad: str) -> None:
    shapes = reverse.forward.shapes
    bias = step.get("bias")
    if bias is not None and bias in reverse.needed:
        reverse.share(bias, reverse.add("colsum", bias, [("x", grad)], shapes[bias]))
    reverse.share(step.get("addend"), grad)
    ends = [(role, step[role]) for role in ("matrix", "near", "far", "value")]
    near, far, value = step["near"], step["far"], step["value"]
    if {far, value} & reverse.needed:
        to_value = reverse.fresh(value, shapes[value])
        to_far = reverse.add(
            "gate_sources", far, [*ends, ("grad", grad)], shapes[far], is_transposed=True, more=(to_value,)
        )
        reverse.share(far, to_far)
        reverse.share(value, to_value)
    if near not in reverse.needed:
        return
    if step.more:
        reads = [("left", step.more[0]), ("right", grad)]
        reverse.share(near, reverse.add("multiply", near, reads, shapes[near]))
    else:
        reverse.share(near, reverse.add("gate_targets", near, [*ends, ("grad", grad)], shapes[near]))


def _product_flops(step: Step, view: View) -> Mapping[str, Amount]:
    return {"vertex update": row_flops(*view.size(step.out), 1)}


def _product_request(step: Step, setting: Setting) -> Request:
    return Request("multiply", *setting.size(step.out), parts=2)


_ENDS = ("matrix", "near", "far", "value")
_GATE = "plait.kernels.gate.reference"

register(
    Operation(
        "gate", (*_ENDS, "addend?", "bias?"), _gate_flops, _depth, _request, _of_gate,
        reference=f"{_GATE}:gate", says="gate neighbours' rows and sum them",
    ),
    Operation(
        "gate_targets", (*_ENDS, "grad"), _targets_flops, _depth, _request,
        reference=f"{_GATE}:gate_backward", says="gates again, for the gradient of the targets",
    ),
    Operation(
        "gate_sources", (*_ENDS, "grad"), _sources_flops, _depth, _request,
        reference=f"{_GATE}:gate_backward", says="send gradients back through the gates",
    ),
    Operation(
        "multiply", ("left", "right"), _product_flops, lambda step, view: 1, _product_request,
        says="multiply entry by entry",
    ),
)  # fmt: skip
