"""The operations of gated sums: act(near[i] + far[j]) * value[j] over the edges, and their gradients.

The option `act` is sigmoid, or relu, which has no value: the message is the rectified sum itself.
"""

from __future__ import annotations

from collections.abc import Mapping

from plait.ops.counting import after, ceil_log2, chain, passes, pattern_of, streamed
from plait.ops.operation import Operation, Reverse, Setting, View, register
from plait.ops.program import Step
from plait.ops.work import Amount, Request, row_flops

__all__: list[str] = []

_ACTS = {"sigmoid": 4, "relu": 1}  # operations: negate, exponential, add, divide; a comparison
_SLOPES = {"sigmoid": 2, "relu": 0}  # of the derivative, from it


def _of_act(step: Step) -> tuple[int, int, int]:
    """Operations per edge and column: of the gate, of its slope, and one where there is a value."""
    act = step.option("act", "sigmoid")
    return _ACTS[act], _SLOPES[act], int(step.get("value") is not None)


def _gate_flops(step: Step, view: View) -> Mapping[str, Amount]:
    # per edge and column: both ends added, the gate, times the value, added up; the same with its slope
    (rows, cols), edges = view.size(step.out), pattern_of(step, view).edges
    slopes = int(any(map(view.keeps, step.more)))
    act, slope, value = _of_act(step)
    return {
        "edge update": (1 + act + value + slopes * (slope + value)) * edges * cols,
        "aggregate": (1 + slopes) * edges * cols,
        "vertex update": row_flops(rows, cols, after(step)),
    }


def _targets_flops(step: Step, view: View) -> Mapping[str, Amount]:
    (rows, cols), edges = view.size(step.out), pattern_of(step, view).edges
    return {
        "edge update": (1 + sum(_of_act(step))) * edges * cols,
        "aggregate": edges * cols,
        "vertex update": row_flops(rows, cols, 1),
    }


def _sources_flops(step: Step, view: View) -> Mapping[str, Amount]:
    # both sums times the target's gradient; the multiplication by the value is once per row
    (rows, cols), edges = view.size(step.out), pattern_of(step, view).edges
    act, slope, value = _of_act(step)
    return {
        "edge update": (1 + act + slope + 1 + value) * edges * cols,
        "aggregate": (1 + value) * edges * cols,
        "vertex update": row_flops(rows, cols, 1),
    }


def _depth(step: Step, view: View) -> Amount:
    act, _, value = _of_act(step)
    return 1 + act + value + ceil_log2(pattern_of(step, view).degree)


def _request(step: Step, setting: Setting) -> Request:
    rows, cols = setting.size(step.out)
    matrix = setting.matrix(step["matrix"], step.is_transposed)
    act = "" if step.option("act", "sigmoid") == "sigmoid" else step.option("act")
    kind = f"{act} kept".strip() if step.op == "gate" and step.more else act
    is_single = step.get("value") is None and step.op != "gate_sources"  # else two rows per edge
    return Request(step.op, rows, (1 if is_single else 2) * cols, matrix=matrix, addends=1, kind=kind)


def _of_gate(reverse: Reverse, step: Step, grad: str) -> None:
    shapes = reverse.forward.shapes
    bias = step.get("bias")
    if bias is not None and bias in reverse.needed:
        reverse.share(bias, reverse.add("colsum", bias, [("x", grad)], shapes[bias]))
    reverse.share(step.get("addend"), grad)
    ends = [(role, step.get(role)) for role in ("matrix", "near", "far", "value")]
    near, far, value = step["near"], step["far"], step.get("value")
    reads = [*ends, ("grad", grad)]
    if {far, value} & reverse.needed:
        made = () if value is None else (reverse.fresh(value, shapes[value]),)
        to_far = reverse.add(
            "gate_sources", far, reads, shapes[far], is_transposed=True, more=made, options=step.options
        )
        reverse.share(far, to_far)
        for to_value in made:
            reverse.share(value, to_value)
    if near not in reverse.needed:
        return
    if step.more:
        both = [("left", step.more[0]), ("right", grad)]
        reverse.share(near, reverse.add("multiply", near, both, shapes[near]))
    else:
        reverse.share(near, reverse.add("gate_targets", near, reads, shapes[near], options=step.options))


_ENDS = ("matrix", "near", "far", "value?")
_GATE = "plait.kernels.gate.reference"

register(
    Operation(
        "gate", (*_ENDS, "addend?", "bias?"), _gate_flops, _depth, _request, _of_gate,
        reference=f"{_GATE}:gate", says="gate neighbours' rows and sum them",
    ),
    Operation(
        "gate_targets", (*_ENDS, "grad"), _targets_flops, _depth, _request,
        reference=f"{_GATE}:gate_backward", says="evaluate gates again, for the targets' gradients",
    ),
    Operation(
        "gate_sources", (*_ENDS, "grad"), _sources_flops, _depth, _request,
        reference=f"{_GATE}:gate_backward", says="send gradients back through the gates",
    ),
    Operation(
        "multiply", ("left", "right"), passes(1), chain(1), streamed(2),
        says="multiply elementwise",
    ),
)  # fmt: skip
