"""The operations that exchange rows between ranks: halos, and all rows of some columns.

Sizes of a program over ranks: N rows of this rank's nodes, B of its halo, H of both, G of all nodes, S that
other ranks need of this one, and K/P of this rank's columns of a matrix K wide.

`exchange` brings rows and halo together. `send` and `receive` are its two halves, so that other work can be
done in between. Each is the gradient of the other: the gradient of receiving a halo is sending its gradients.
`pick` takes the rows that other ranks need, for a `send` of rows picked before (plan/early.py).
"""

from __future__ import annotations

from collections.abc import Mapping

from plait.ops.counting import no_depth, no_request, passes, streamed
from plait.ops.operation import Operation, Reverse, Setting, View, register
from plait.ops.program import Step
from plait.ops.work import Amount, Request, row_flops

__all__ = ["EXCHANGES", "TRADE_MEETING", "copied_numbers", "meetings", "wire_numbers"]

EXCHANGES = ("exchange", "receive", "to_columns", "to_rows")
"""Where the time of an exchange is spent; what was sent asynchronously is waited for in `receive`."""

# What ranks lose where they trade columns, in terms of what they lose where they exchange rows. Each does as
# much as the others before a trade, and a trade is one operation, not a send and a receive for each of them:
# 0.3 to 0.5 ms lost per trade and 0.65 to 0.75 per exchange, with messages of 0.5 ms (2 processes on 2 cores,
# GCN and SAGE on two graphs, means of 120 steps, unrecorded).
TRADE_MEETING = 0.5


def meetings(op: str) -> float:
    """How many times over ranks lose what an exchange of rows costs them beside its messages."""
    return TRADE_MEETING if op in ("to_columns", "to_rows") else 1.0


def wire_numbers(step: Step, setting: Setting) -> tuple[int, int]:
    """Numbers this rank sends and numbers it receives in one such step."""
    (rows, cols), (rows_in, cols_in) = setting.size(step.out), setting.size(step["x"])
    if step.op in ("exchange", "receive"):
        lent, halo = setting.sizes["S"] * cols, setting.sizes["B"] * cols
        return (halo, lent) if step.is_transposed else (lent, halo)
    if step.op == "to_columns":
        return rows_in * (cols_in - cols), (rows - rows_in) * cols
    return (rows_in - rows) * cols_in, rows * (cols - cols_in)


def copied_numbers(step: Step, setting: Setting) -> int:
    """Numbers this rank gathers, packs and scatters for one such step."""
    (rows, cols), (rows_in, cols_in) = setting.size(step.out), setting.size(step["x"])
    if step.op == "exchange":  # a rank's own rows are copied with the halo, or added to
        return int((setting.sizes["S"] + setting.sizes["N"]) * cols)
    if step.op == "receive":
        return int(setting.sizes["S"] * cols)
    # all of a rank's rows are packed or unpacked, and those columns of them that stay here copied once more
    return rows_in * (cols_in + cols) if step.op == "to_columns" else rows * (cols + cols_in)


def _request(step: Step, setting: Setting) -> Request:
    """The busier direction, since a link carries both at once; `inner` is what is copied at this end."""
    return Request(step.op, max(wire_numbers(step, setting)), 1, copied_numbers(step, setting))


def _flops(step: Step, view: View) -> Mapping[str, Amount]:
    rows, cols = view.size(step["x"])
    if not step.is_transposed or step.op == "send":
        return {"vertex update": row_flops(rows, cols, 0)}
    # gradients of rows sent to other ranks are added up; over all ranks as many as halos return
    halo = rows - view.size(step.out)[0] if step.op == "exchange" else rows
    return {"vertex update": halo * cols}


def _depth(step: Step, view: View) -> Amount:
    return int(step.op != "send" and step.is_transposed)


def _of_exchange(reverse: Reverse, step: Step, grad: str) -> None:
    _back(reverse, step, grad, "exchange", not step.is_transposed)


def _of_send(reverse: Reverse, step: Step, grad: str) -> None:
    """`grad`: the gradients on their way back, to be added to whatever the rows were used for here."""
    if step["x"] in reverse.needed:
        reverse.product(step["x"], "receive", [("x", grad)], is_transposed=True)


def _of_receive(reverse: Reverse, step: Step, grad: str) -> None:
    _back(reverse, step, grad, "send", True)


def _of_columns(reverse: Reverse, step: Step, grad: str) -> None:
    _back(reverse, step, grad, "to_rows")


def _of_rows(reverse: Reverse, step: Step, grad: str) -> None:
    _back(reverse, step, grad, "to_columns")


def _back(reverse: Reverse, step: Step, grad: str, op: str, is_transposed: bool = False) -> None:
    """Gradients are sent the way the rows came."""
    x = step["x"]
    if x in reverse.needed:
        shaped = reverse.forward.shapes[x]
        reverse.share(x, reverse.add(op, x, [("x", grad)], shaped, is_transposed=is_transposed))


register(
    Operation(
        "pick", ("x",), passes(0), no_depth, streamed(1), may_hoist=True,
        says="pick the rows that others need",
    ),
    Operation("exchange", ("x",), _flops, _depth, _request, _of_exchange, may_hoist=True),
    Operation("send", ("x",), _flops, _depth, no_request, _of_send, may_hoist=True),
    Operation(
        "receive", ("x", "addend?", "addend_scale?"), _flops, _depth, _request, _of_receive,
        overwrites="addend", may_hoist=True,
    ),
    Operation("to_columns", ("x",), _flops, _depth, _request, _of_columns, may_hoist=True),
    Operation("to_rows", ("x",), _flops, _depth, _request, _of_rows, may_hoist=True),
)  # fmt: skip
