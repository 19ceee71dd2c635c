"""Layers as the strategies see them: counted passes, widths, parameters, what they hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from plait.analysis.work import Phase, of_layer
from plait.ir import leaves
from plait.ops.work import size_of
from plait.plan.plan import LayerPlan, NotPlanned, Plan

__all__ = ["EMPTY", "Layer", "layers_of"]

EMPTY = Phase(0, 0, 0, 0.0, 0.0, 0.0, {})


@dataclass(frozen=True)
class Layer:
    """One layer: its passes by name, and what strategies need to know about it."""

    name: str
    text: str
    phases: Mapping[str, Phase]
    width_in: int
    width_out: int
    parameters: int
    held_bytes: int  # what it keeps and makes at its peak
    note: str = ""
    has_passes: bool = False  # it is a program of passes over edges, not a matrix expression

    @property
    def forward(self) -> Phase:
        """The forward pass; empty for a black box."""
        return self.phases.get("forward", EMPTY)

    @property
    def backward(self) -> Phase:
        """The backward pass; empty for a black box."""
        return self.phases.get("backward", EMPTY)

    @property
    def is_black_box(self) -> bool:
        """Whether the layer runs in PyG and is not counted."""
        return not self.phases

    @property
    def is_exact(self) -> bool:
        """Whether all its counts are exact."""
        return bool(self.phases) and all(phase.is_exact for phase in self.phases.values())

    def to_dict(self) -> dict[str, Any]:
        """The layer as plain data."""
        return {
            "name": self.name,
            "expression": self.text,
            "width_in": self.width_in,
            "width_out": self.width_out,
            "parameters": self.parameters,
            "held_bytes": self.held_bytes,
            "is_black_box": self.is_black_box,
            "is_exact": self.is_exact,
            "note": self.note,
            "forward": self.forward.to_dict(),
            "backward": self.backward.to_dict(),
            **({"once": self.phases["once"].to_dict()} if "once" in self.phases else {}),
        }


def layers_of(plan: Plan) -> list[Layer]:
    """The layers of a plan in the order they run; those that run in PyG follow, as black boxes."""
    return [_of_plan(layer) for layer in plan.layers] + [_black_box(layer) for layer in plan.not_planned]


def _of_plan(plan: LayerPlan) -> Layer:
    if not plan.forward.outputs:
        return Layer(plan.layer, plan.text, {}, 0, 0, 0, 0, f"a black box: {plan.because}")
    phases = of_layer(plan)
    out = plan.forward.shapes[plan.forward.outputs[0]][1]
    given = plan.forward.shapes.get("X") or plan.hoisted.shapes.get("X")
    return Layer(
        name=plan.layer,
        text=plan.describe(),
        phases=phases,
        width_in=0 if given is None else size_of(given[1], plan.sizes),
        width_out=size_of(out, plan.sizes),
        parameters=_parameters(plan),
        held_bytes=plan.peak_bytes,
        has_passes=plan.expr is None,
    )


def _parameters(plan: LayerPlan) -> int:
    """How many numbers a layer learns."""
    if plan.expr is None:
        given = (plan.forward.shapes[name] for name in plan.forward.inputs if name not in _ROWS)
        return sum(size_of(rows, plan.sizes) * size_of(cols, plan.sizes) for rows, cols in given)
    learnt = [leaf for leaf in leaves(plan.expr).values() if getattr(leaf, "role", "") == "learnable"]
    return sum(_numbers(leaf, plan.sizes) for leaf in learnt)


_ROWS = ("X", "X1", "Y", "E", "T")  # inputs of programs that are not parameters


def _numbers(leaf: Any, sizes: Mapping[str, int]) -> int:
    """How many numbers a leaf holds."""
    if not hasattr(leaf, "rows"):
        return 1
    return size_of(leaf.rows, sizes) * size_of(leaf.cols, sizes)


def _black_box(layer: NotPlanned) -> Layer:
    return Layer(layer.layer, "runs in PyG", {}, 0, 0, 0, 0, f"a black box: {layer.reason}")
