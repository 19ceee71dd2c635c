"""Columns of a matrix taken apart and put side by side again: no data moves, or one pass over it."""

from __future__ import annotations

from collections.abc import Mapping

from plait.ops.counting import no_depth, no_request
from plait.ops.operation import Operation, Reverse, Setting, View, register
from plait.ops.program import Step
from plait.ops.work import Amount, Request

__all__: list[str] = []


def _nothing(step: Step, view: View) -> Mapping[str, Amount]:
    return {"vertex update": 0}


def _of_columns(reverse: Reverse, step: Step, grad: str) -> None:
    reverse.part(step["x"], step.option("start"), grad)


def _of_reshape(reverse: Reverse, step: Step, grad: str) -> None:
    x = step["x"]
    if x in reverse.needed:
        shaped = reverse.forward.shapes[x]
        reverse.share(x, reverse.add("reshape", x, [("x", grad)], shaped, options=(("width", shaped[1]),)))


def _of_join(reverse: Reverse, step: Step, grad: str) -> None:
    for (_, name), start in zip(step.reads, step.option("starts"), strict=True):
        if name in reverse.needed:
            shaped = reverse.forward.shapes[name]
            options = (("start", start), ("width", shaped[1]))
            reverse.share(name, reverse.add("columns", name, [("x", grad)], shaped, options=options))


def _joined(step: Step, setting: Setting) -> Request | None:
    """Parts written in place are not moved; the incoming gradient lies elsewhere."""
    moved = [name for _, name in step.reads if name == "grad"]
    if not moved:
        return None
    rows, cols = setting.size(step.out)[0], sum(setting.size(name)[1] for name in moved)
    return Request("join", rows, cols, parts=1)


register(
    Operation(
        "columns", ("x",), _nothing, no_depth, no_request, _of_columns, is_view=True, says="split columns",
    ),
    Operation(
        "reshape", ("x",), _nothing, no_depth, no_request, _of_reshape, is_view=True, says="reshape rows",
    ),
    Operation("join", ("part*",), _nothing, no_depth, _joined, _of_join, says="concatenate columns"),
)  # fmt: skip
