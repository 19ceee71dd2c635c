"""An LSTM over every node's neighbours in order: each distinct prefix of the neighbour lists is run once.

Lists are padded with zeros at their ends to the longest one's length and the state after the padding is the
answer, as in PyG. All prefixes of one length advance together. The input's part of the gates is computed
once per node instead of once per edge, the state's part once per shorter prefix.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plait.graph import Graph, hag
from plait.kernels.spmm import Pattern, spmm
from plait.ops.program import Step
from plait.runtime.bind import Binding, Bound, kernel
from plait.runtime.chain import Env
from plait.runtime.meaning import meaning
from plait.runtime.orders import EdgeOrders

__all__ = ["Prefixes"]


class Prefixes:
    """The distinct prefixes of a graph's neighbour lists, ready for torch."""

    def __init__(self, graph: Graph):
        self.graph = graph

    @cached_property
    def is_listed_by_target(self) -> bool:
        """Whether the caller's edges are sorted by target, which PyG requires for sequences."""
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


@kernel("sequence", "cpu")
def _sequence(b: Binding, step: Step, owns: bool) -> Bound:
    lists, x, w, bias = step["lists"], step["x"], step["w"], step.get("bias") or ""
    gates, cell = step.more or ("", "")

    def run(env: Env) -> Tensor:
        prefixes: Prefixes = env[lists]
        inputs, of_state = _with_padding(b, env[x], env.get(bias)), env[w]
        if gates:
            steps, (units, columns) = prefixes.levels.num_steps, of_state.shape
            env[gates] = b.take(steps, columns, inputs.dtype)
            env[cell] = b.take(steps, units, inputs.dtype)
        h = _states(prefixes, inputs, of_state, env.get(gates), env.get(cell))
        out = b.take(len(prefixes.last), h.shape[1], h.dtype)
        return torch.index_select(h, 0, prefixes.last, out=out)

    return run


def _with_padding(b: Binding, x: Tensor, bias: Tensor | None) -> Tensor:
    """The inputs' part of the gates, in one more row that of the padding, of zeros."""
    made = b.take(x.shape[0] + 1, x.shape[1], x.dtype)
    made[:-1] = x
    made[-1] = 0.0 if bias is None else bias
    return made


def _states(
    prefixes: Prefixes, inputs: Tensor, of_state: Tensor, gates: Tensor | None, cell: Tensor | None
) -> Tensor:
    """The states of the longest prefixes; gates and cells of all are kept where there is room for them."""
    units, columns = of_state.shape
    h = c = None
    for k in range(prefixes.levels.length):
        span = prefixes.span(k)
        size = span.stop - span.start
        z = inputs.new_empty((size, columns)) if gates is None else gates[span]
        torch.index_select(inputs, 0, prefixes.column[span], out=z)
        if h is not None and c is not None:
            parents = prefixes.parents(k)
            if parents is None:
                z.addmm_(h, of_state)
            else:
                z.add_(torch.mm(h, of_state).index_select(0, parents))
                c = c.index_select(0, parents)
        i, f, g, o = _activated(z, units)
        made = torch.mul(i, g, out=inputs.new_empty((size, units)) if cell is None else cell[span])
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


@meaning("sequence")
def _sequence_in_torch(step: Step, env: Env, edges: EdgeOrders) -> Tensor:
    prefixes: Prefixes = env[step["lists"]]
    x, of_state = env[step["x"]], env[step["w"]]
    bias = step.get("bias")
    padding = x.new_zeros(1, x.shape[1]) if bias is None else env[bias].view(1, -1)
    inputs = torch.cat([x, padding])
    h = c = None
    for k in range(prefixes.levels.length):
        z = inputs.index_select(0, prefixes.column[prefixes.span(k)])
        if h is not None and c is not None:
            parents = prefixes.parents(k)
            h, c = (h, c) if parents is None else (h.index_select(0, parents), c.index_select(0, parents))
            z = z + h @ of_state
        i, f, g, o = _parts(z, of_state.shape[0])
        fresh = i.sigmoid() * g.tanh()
        c = fresh if c is None else fresh + f.sigmoid() * c
        h = o.sigmoid() * c.tanh()
    assert h is not None
    return h.index_select(0, prefixes.last)


@kernel("sequence_back", "cpu")
def _sequence_back(b: Binding, step: Step, owns: bool) -> Bound:
    lists, w, gates, cell, grad = (step[role] for role in ("lists", "w", "gates", "cell", "grad"))
    to_w, to_bias = step.option("to_w"), step.option("to_bias")

    def run(env: Env) -> Tensor:
        prefixes: Prefixes = env[lists]
        # as torch stores it, [gates, units]: its gradient then lies as it does
        of_state = torch.zeros_like(env[w].t(), memory_format=torch.contiguous_format) if to_w else None
        dz = b.like(env[gates])
        _fill_gradients(prefixes, env[w].t(), env[gates], env[cell], env[grad], dz, of_state)
        columns = prefixes.of_column
        dinputs = spmm(columns, dz, b.take(columns.num_rows, dz.shape[1], dz.dtype))
        if of_state is not None:
            env[to_w] = of_state.t()
        if to_bias:
            env[to_bias] = dinputs[-1:]
        return dinputs[:-1]

    return run


def _fill_gradients(
    prefixes: Prefixes,
    w: Tensor,
    gates: Tensor,
    cell: Tensor,
    grad: Tensor,
    dz: Tensor,
    of_state: Tensor | None,
) -> None:
    """dz: the gradient before the gates' functions of every prefix; that of w is added to `of_state`."""
    width = cell.shape[1]
    last = prefixes.of_last
    dh = spmm(last, grad, grad.new_empty((last.num_rows, width)))
    dc: Tensor | None = None
    for k in reversed(range(prefixes.levels.length)):
        span = prefixes.span(k)
        before = cell[prefixes.span(k - 1)] if k else None
        parents = prefixes.parents(k) if k else None
        shorter = before if parents is None or before is None else before.index_select(0, parents)
        dc = _gate_gradients(gates[span], cell[span], shorter, dh, dc, dz[span], width)
        if before is None:
            break
        dc, through = prefixes.summed(k, dc), prefixes.summed(k, dz[span])
        if of_state is not None:
            output = gates[prefixes.span(k - 1), 3 * width :]
            of_state.addmm_(through.t(), torch.tanh(before).mul_(output))
        dh = torch.mm(through, w)


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
