"""The rows of exchanges between ranks that each hold some nodes: halos, and all rows of some columns.

Sizes of a program over ranks: N rows of this rank's nodes, H with the halo behind them, G rows of all nodes,
S rows that other ranks need of this one, and K/P of this rank's columns of a matrix K wide.
"""

from __future__ import annotations

from collections.abc import Mapping

from plait.ops.operation import Operation, Reverse, Setting, View, register
from plait.ops.program import Step
from plait.ops.work import Amount, Request, row_flops

__all__ = ["EXCHANGES", "wire_numbers"]

EXCHANGES = ("exchange", "to_columns", "to_rows")


def wire_numbers(step: Step, setting: Setting) -> tuple[int, int]:
    """Numbers this rank sends and numbers it receives in one such step."""
    (rows, cols), (rows_in, cols_in) = setting.size(step.out), setting.size(step["x"])
    if step.op == "exchange":
        shared = setting.sizes["S"]
        return ((rows_in - rows) * cols, shared * cols) if step.is_transposed else (
            shared * cols, (rows - rows_in) * cols
        )  # fmt: skip
    if step.op == "to_columns":
        return rows_in * (cols_in - cols), (rows - rows_in) * cols
    return (rows_in - rows) * cols_in, rows * (cols - cols_in)


def _request(step: Step, setting: Setting) -> Request:
    """The busier direction: a link carries both at once."""
    return Request(step.op, max(wire_numbers(step, setting)), 1)


def _flops(step: Step, view: View) -> Mapping[str, Amount]:
    if step.op != "exchange" or not step.is_transposed:
        return {"vertex update": row_flops(*view.size(step.out), 0)}
    # gradients of rows lent to other ranks are added up; over all ranks as many as come back from halos
    return {"vertex update": (view.size(step["x"])[0] - view.size(step.out)[0]) * view.size(step.out)[1]}


def _depth(step: Step, view: View) -> Amount:
    return int(step.op == "exchange" and step.is_transposed)


def _of_exchange(reverse: Reverse, step: Step, grad: str) -> None:
    _back(reverse, step, grad, "exchange", not step.is_transposed)


def _of_columns(reverse: Reverse, step: Step, grad: str) -> None:
    _back(reverse, step, grad, "to_rows")


def _of_rows(reverse: Reverse, step: Step, grad: str) -> None:
    _back(reverse, step, grad, "to_columns")


def _back(reverse: Reverse, step: Step, grad: str, op: str, is_transposed: bool = False) -> None:
    """Gradients travel the way the rows came."""
    x = step["x"]
    if x in reverse.needed:
        shaped = reverse.forward.shapes[x]
        reverse.share(x, reverse.add(op, x, [("x", grad)], shaped, is_transposed=is_transposed))


register(
    Operation("exchange", ("x",), _flops, _depth, _request, _of_exchange, may_hoist=True),
    Operation("to_columns", ("x",), _flops, _depth, _request, _of_columns, may_hoist=True),
    Operation("to_rows", ("x",), _flops, _depth, _request, _of_rows, may_hoist=True),
)
