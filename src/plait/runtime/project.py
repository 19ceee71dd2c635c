"""Dense products on plait's kernels under autograd: of parameters, and inside functions of edges' rows.

What a layer multiplies once per node is a step of its program (gemm); these products are in what programs are
given: weights folded into each other, and the linear layers of a map that blocks of edges go through.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from plait.graph import Graph
from plait.ops.program import Program
from plait.plan.draft import Draft
from plait.plan.ways import direct
from plait.runtime import executor
from plait.runtime.buffers import Buffers
from plait.runtime.constants import Constants
from plait.runtime.orders import EdgeOrders

__all__ = ["Projector"]

_NO_GRAPH = Graph.from_edge_index([], [], 0)


class Projector:
    """x @ w + bias on plait's tall product, in a pooled buffer; bound once for what needs gradients."""

    def __init__(self, buffers: Buffers):
        self._buffers = buffers
        self._runs: dict[tuple[bool | None, ...], executor.Run] = {}

    def __call__(self, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
        if not x.is_cpu:  # cuBLAS
            return torch.mm(x, w) if bias is None else torch.addmm(bias, x, w)
        with_grad = torch.is_grad_enabled()
        key = (with_grad, x.requires_grad, w.requires_grad, None if bias is None else bias.requires_grad)
        run = self._runs.get(key)
        if run is None:
            wrt = tuple(name for name, wants in zip("XWb", key[1:], strict=True) if with_grad and wants)
            run = self._runs[key] = self._bound(bias is not None, wrt)
        return executor.apply(run, {"X": x, "W": w} if bias is None else {"X": x, "W": w, "b": bias})

    def _bound(self, has_bias: bool, wrt: tuple[str, ...]) -> executor.Run:
        constants = Constants(_NO_GRAPH, None, {}, torch.float32)
        plan = direct(_product(has_bias), wrt)
        return executor.Run(plan, constants, self._buffers, orders=EdgeOrders(_NO_GRAPH))


@functools.cache
def _product(has_bias: bool) -> Program:
    draft = Draft()
    x, w = draft.input("X", "N", "K"), draft.input("W", "K", "C")
    return draft.program(draft.gemm(x, w, draft.input("b", 1, "C") if has_bias else None))
