"""The operations of the sequence aggregator: an LSTM over the distinct prefixes of neighbour lists.

The operand `lists` is not a tensor: its size is (distinct prefixes, elements of the longest list).
"""

from __future__ import annotations

from collections.abc import Mapping

from plait.ops.counting import ceil_log2
from plait.ops.operation import Operation, Reverse, Setting, View, register
from plait.ops.program import Step
from plait.ops.work import Amount, Request, dense_flops, row_flops

__all__: list[str] = []

_LOGISTIC, _TANH = 4, 6  # operations: negate, exponential, add, divide; two more for the hyperbolic tangent
_STEP = 3 * _LOGISTIC + 2 * _TANH + 4  # per unit: its gates and the cell's tangent, two products, sum, output
_BACK = 3 * 3 + 2 * 3 + _TANH + 9  # derivatives of gates and tangents, the tangent again, products and sums
_PASSES, _PASSES_BACK = 3, 6  # over the gates of a step: activations, cell and state; their gradients


def _units(step: Step, view: View) -> tuple[Amount, Amount]:
    """(units of the state, columns of the gates)."""
    return view.size(step["w"])


def _flops(step: Step, view: View) -> Mapping[str, Amount]:
    # the state before a list's first element is zero; its product counts like the others
    (steps, _), (units, gates) = view.size(step["lists"]), _units(step, view)
    return {
        "aggregate": dense_flops(steps, units, gates) + row_flops(steps, gates, 1) + _STEP * steps * units
    }


def _back_flops(step: Step, view: View) -> Mapping[str, Amount]:
    (steps, _), (units, gates) = view.size(step["lists"]), _units(step, view)
    products = 2 * dense_flops(steps, units, gates)  # the gradients of states and weights
    return {"aggregate": products + row_flops(steps, gates, 1) + _BACK * steps * units}


def _depth(step: Step, view: View) -> Amount:
    """One list length after another: a product, its gates, the cell and the state."""
    (_, length), (units, _) = view.size(step["lists"]), _units(step, view)
    return length * (ceil_log2(units) + _LOGISTIC + _TANH + 5)


def _request(step: Step, setting: Setting) -> Request:
    (steps, length), (units, gates) = setting.size(step["lists"]), setting.size(step["w"])
    passes = _PASSES_BACK if step.op == "sequence_back" else _PASSES
    return Request(
        step.op, steps, gates, units, parts=passes, kind=step.option("kind", ""), calls=length
    )  # fmt: skip


def _of_sequence(reverse: Reverse, step: Step, grad: str) -> None:
    """One pass back over the lengths gives all gradients; those of weights only if they are needed."""
    shapes, x = reverse.forward.shapes, step["x"]
    more = {}
    for role in ("w", "bias"):
        name = step.get(role)
        if name in reverse.needed and name is not None:
            more[role] = (name, reverse.fresh(name, shapes[name]))
    reads = [("lists", step["lists"]), ("w", step["w"]), ("grad", grad)]
    reads += list(zip(("gates", "cell"), step.more, strict=True))
    options = (*step.options, *((f"to_{role}", made) for role, (_, made) in more.items()))
    made = tuple(value for _, value in more.values())
    back = reverse.add("sequence_back", x, reads, shapes[x], more=made, options=options)
    reverse.share(x, back)
    for name, value in more.values():
        reverse.share(name, value)


register(
    Operation(
        "sequence", ("lists", "x", "w", "bias?"), _flops, _depth, _request, _of_sequence,
        says="run the LSTM over the neighbour lists",
    ),
    Operation(
        "sequence_back", ("lists", "w", "gates", "cell", "grad"), _back_flops, _depth, _request,
        says="send gradients back through the LSTM",
    ),
)  # fmt: skip
