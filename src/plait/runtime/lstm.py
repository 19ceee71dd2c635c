"""An LSTM over every node's neighbours in order: each distinct prefix of the neighbour lists is run once.

Lists are padded with zeros at their ends to the longest one's length and the state after the padding is the
answer, as in PyG. All prefixes of one length advance together. The input's part of the gates is computed
once per node instead of once per edge, the state's part once per shorter prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from plait.graph import Graph, hag
from plait.kernels.spmm import Pattern, spmm
from plait.runtime.twice import differentiable

__all__ = ["Gates", "Prefixes", "lstm"]


class Gates(NamedTuple):
    """The weights of torch's LSTM: [4 H, K], [4 H, H], and two biases [4 H] or None."""

    of_input: Tensor
    of_state: Tensor
    input_bias: Tensor | None = None
    state_bias: Tensor | None = None


class Prefixes:
    """The distinct prefixes of a graph's neighbour lists, ready for torch."""

    def __init__(self, graph: Graph):
        self.graph = graph

    @cached_property
    def is_listed_by_target(self) -> bool:
        """Whether the caller's edges come target after target, which PyG demands of sequences."""
        order = self.graph.order
        if order is None:
            return True
        target = np.empty(self.graph.num_edges, np.int64)
        target[order] = self.graph.edge_rows()
        return bool((target[1:] >= target[:-1]).all())

    @cached_property
    def levels(self) -> hag.PrefixLevels:
        """The prefixes by length."""
        return hag.prefix_levels(self.graph)

    @cached_property
    def start(self) -> list[int]:
        found: list[int] = self.levels.start.tolist()
        return found

    @cached_property
    def parent(self) -> Tensor:
        return torch.from_numpy(self.levels.parent)

    @cached_property
    def column(self) -> Tensor:
        return torch.from_numpy(self.levels.column)

    @cached_property
    def last(self) -> Tensor:
        return torch.from_numpy(self.levels.last)

    def span(self, k: int) -> slice:
        """The prefixes of k + 1 elements."""
        return slice(self.start[k], self.start[k + 1])

    def parents(self, k: int) -> Tensor | None:
        """What the prefixes of k + 1 elements extend; None where each extends the one of its own number."""
        if self.start[k + 1] - self.start[k] == self.start[k] - self.start[k - 1]:
            return None
        return self.parent[self.span(k)]

    @cached_property
    def of_column(self) -> Pattern:
        """Row j: the prefixes that end with column j."""
        return _grouped(self.levels.column, self.levels.num_sources + 1)

    @cached_property
    def of_last(self) -> Pattern:
        """Row p: the nodes whose whole list is prefix p."""
        return _grouped(self.levels.last, int(self.start[-1] - self.start[-2]))

    @cached_property
    def _children(self) -> list[Pattern | None]:
        made: list[Pattern | None] = [None]
        for k in range(1, self.levels.length):
            parents = self.parents(k)
            count = self.start[k] - self.start[k - 1]
            made.append(None if parents is None else _grouped(parents.numpy(), count))
        return made

    def summed(self, k: int, values: Tensor) -> Tensor:
        """Rows of the prefixes of k + 1 elements summed over what they extend."""
        pattern = self._children[k]
        if pattern is None:
            return values
        return spmm(pattern, values, values.new_empty((pattern.num_rows, values.shape[1])))


def _grouped(label: np.ndarray[Any, Any], count: int) -> Pattern:
    """Row j: the positions whose label is j, ascending."""
    indptr = np.zeros(count + 1, np.int64)
    np.cumsum(np.bincount(label, minlength=count), out=indptr[1:])
    order = np.argsort(label, kind="stable")
    kind = np.int32 if order.size < 2**31 else np.int64
    return Pattern(indptr.astype(kind), order.astype(kind), order.size)


def lstm(x: Tensor, gates: Gates, prefixes: Prefixes) -> Tensor:
    """[num_nodes, H]: the state after every node's padded list of neighbours."""
    values = (x, *gates)
    if torch.is_grad_enabled() and any(v is not None and v.requires_grad for v in values):
        return _Sequence.apply(prefixes, *values)  # type: ignore[no-any-return, no-untyped-call]
    with torch.no_grad():
        return _forward(prefixes, x, gates, None)[prefixes.last]


def _inputs(x: Tensor, gates: Gates) -> Tensor:
    """The input's part of the gates, biases included; the last row is the padding's, of zeros."""
    bias = x.new_zeros(gates.of_input.shape[0])
    for given in gates[2:]:
        bias = bias if given is None else bias + given
    made = x.new_empty((x.shape[0] + 1, bias.shape[0]))
    torch.addmm(bias, x, gates.of_input.t(), out=made[:-1])
    made[-1] = bias
    return made


class _Kept(NamedTuple):
    """What the backward pass needs of every prefix: its gates (input, forget, cell, output) and its cell."""

    gates: Tensor
    cell: Tensor


def _forward(prefixes: Prefixes, x: Tensor, gates: Gates, kept: _Kept | None) -> Tensor:
    """The states of the longest prefixes; without `kept` only one length is held at a time."""
    inputs = _inputs(x, gates)
    width = gates.of_state.shape[1]
    h = c = None
    for k in range(prefixes.levels.length):
        span = prefixes.span(k)
        size = span.stop - span.start
        z = inputs.new_empty((size, 4 * width)) if kept is None else kept.gates[span]
        torch.index_select(inputs, 0, prefixes.column[span], out=z)
        if h is not None and c is not None:
            parents = prefixes.parents(k)
            if parents is None:
                z.addmm_(h, gates.of_state.t())
            else:
                z.add_(torch.mm(h, gates.of_state.t()).index_select(0, parents))
                c = c.index_select(0, parents)
        i, f, g, o = _activated(z, width)
        made = torch.mul(i, g, out=inputs.new_empty((size, width)) if kept is None else kept.cell[span])
        c = made if c is None else made.addcmul_(f, c)
        h = torch.tanh(c).mul_(o)
    assert h is not None
    return h


def _parts(z: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return z[:, :width], z[:, width : 2 * width], z[:, 2 * width : 3 * width], z[:, 3 * width :]


def _activated(z: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gates in place: logistic, and the hyperbolic tangent of the third."""
    z[:, : 2 * width].sigmoid_()
    z[:, 2 * width : 3 * width].tanh_()
    z[:, 3 * width :].sigmoid_()
    return _parts(z, width)


class _Sequence(torch.autograd.Function):
    """The whole recurrence as one node of torch's graph."""

    @staticmethod
    def forward(ctx: Any, prefixes: Prefixes, x: Tensor, *gates: Tensor | None) -> Tensor:
        named = Gates(*gates)  # type: ignore[arg-type]
        width, steps = named.of_state.shape[1], prefixes.levels.num_steps
        kept = _Kept(x.new_empty((steps, 4 * width)), x.new_empty((steps, width)))
        h = _forward(prefixes, x, named, kept)
        ctx.prefixes = prefixes
        ctx.save_for_backward(x, *gates, *kept)
        return h[prefixes.last]

    @staticmethod
    @differentiable(lambda *given: _in_torch(*given))
    def backward(ctx: Any, grad: Tensor) -> Any:
        saved = ctx.saved_tensors
        gates, kept = Gates(*saved[1:5]), _Kept(*saved[5:])
        wants = ctx.needs_input_grad[1:]
        return (None, *_gradients(ctx.prefixes, saved[0], gates, kept, grad.contiguous(), wants))


def _in_torch(ctx: Any, grad: Tensor, saved: Sequence[Any]) -> tuple[Tensor, tuple[Any, ...]]:
    """The recurrence in operations that torch records."""
    prefixes: Prefixes = ctx.prefixes
    x, given = saved[0], Gates(*saved[1:5])
    width = given.of_state.shape[1]
    inputs = torch.cat([x, x.new_zeros(1, x.shape[1])]) @ given.of_input.t()
    for bias in given[2:]:
        inputs = inputs if bias is None else inputs + bias
    h = c = None
    for k in range(prefixes.levels.length):
        z = inputs.index_select(0, prefixes.column[prefixes.span(k)])
        if h is not None and c is not None:
            parents = prefixes.parents(k)
            h, c = (h, c) if parents is None else (h.index_select(0, parents), c.index_select(0, parents))
            z = z + h @ given.of_state.t()
        i, f, g, o = _parts(z, width)
        fresh = i.sigmoid() * g.tanh()
        c = fresh if c is None else fresh + f.sigmoid() * c
        h = o.sigmoid() * c.tanh()
    assert h is not None
    return h.index_select(0, prefixes.last), (None, x, *given)


def _gradients(
    prefixes: Prefixes, x: Tensor, gates: Gates, kept: _Kept, grad: Tensor, wants: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """Of x and the four weights, where wanted."""
    width = gates.of_state.shape[1]
    last = prefixes.of_last
    dh = spmm(last, grad, grad.new_empty((last.num_rows, width)))
    dc: Tensor | None = None
    dz = torch.empty_like(kept.gates)
    of_state = torch.zeros_like(gates.of_state)
    for k in reversed(range(prefixes.levels.length)):
        span = prefixes.span(k)
        before = kept.cell[prefixes.span(k - 1)] if k else None
        parents = prefixes.parents(k) if k else None
        shorter = before if parents is None or before is None else before.index_select(0, parents)
        dc = _gate_gradients(kept.gates[span], kept.cell[span], shorter, dh, dc, dz[span], width)
        if before is None:
            break
        dc, through = prefixes.summed(k, dc), prefixes.summed(k, dz[span])
        output = kept.gates[prefixes.span(k - 1), 3 * width :]
        of_state.addmm_(through.t(), torch.tanh(before).mul_(output))
        dh = torch.mm(through, gates.of_state)
    columns = prefixes.of_column
    dinputs = spmm(columns, dz, dz.new_empty((columns.num_rows, 4 * width)))
    dx = torch.mm(dinputs[:-1], gates.of_input) if wants[0] else None
    of_input = torch.mm(dinputs[:-1].t(), x) if wants[1] else None
    bias = dinputs.sum(0) if any(wants[3:]) else None
    return (dx, of_input, of_state if wants[2] else None, *(bias if wanted else None for wanted in wants[3:]))


def _gate_gradients(
    gates: Tensor, cell: Tensor, shorter: Tensor | None, dh: Tensor, dc: Tensor | None, dz: Tensor, width: int
) -> Tensor:
    """Fill dz, the gradient before the gates' functions; the gradient of the shorter prefixes' cells."""
    i, f, g, o = _parts(gates, width)
    di, df, dg, do = _parts(dz, width)
    tanh = torch.tanh(cell)
    torch.mul(dh, tanh, out=do)
    do.mul_(o - o * o)
    of_cell = dh * o
    of_cell.addcmul_(of_cell * tanh, tanh, value=-1.0)
    if dc is not None:
        of_cell += dc
    torch.mul(of_cell, g, out=di)
    di.mul_(i - i * i)
    torch.mul(of_cell, i, out=dg)
    dg.addcmul_(dg * g, g, value=-1.0)
    if shorter is None:
        df.zero_()
    else:
        torch.mul(of_cell, shorter, out=df)
        df.mul_(f - f * f)
    return of_cell.mul_(f)
