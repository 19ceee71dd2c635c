"""Messages of known functions on a GPU, by Triton: gathered, computed, summed and dropped in one pass.

Steps of other functions run in blocks of edges (runtime/messages.py).
The rows that edge features add to a message are made a block at a time.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from plait.ops.program import Step
from plait.runtime.bind import Binding, Bound, kernel
from plait.runtime.chain import Env
from plait.runtime.cuda import whole_rows
from plait.runtime.cuda_orders import PlacedBlock, PlacedOrders
from plait.runtime.messages import BoundMessages

__all__: list[str] = []

_EDGE_ROWS_BYTES = 2 << 30  # of rows that edge features make; every block adds to all sources once more


def _no_form(b: Binding, step: Step) -> str | None:
    form = step.option("form")
    if form is None:
        return "its function has no kernel"
    if form[0] == "score" and step.get("attr") is not None:
        return "scores with features of edges are made in blocks"
    makes = dict(step.option("makes", ()))
    return "the temperature requires a gradient" if form[0] == "softmax" and "p0" in makes else None


class _Known:
    """A step of a known function, bound to a graph."""

    def __init__(self, b: Binding, step: Step):
        self.of, (self.form, self.eps) = BoundMessages(b, step), step.option("form")
        self.orders = cast(PlacedOrders, b.orders)
        self.is_soft = self.form == "softmax"
        self.has_edges = bool(self.of.attr)

    def ends(self, env: Env) -> tuple[Tensor, Tensor]:
        """Rows of the targets and of the sources."""
        return whole_rows(env[self.of.near]), whole_rows(env[self.of.far])

    def temperature(self, env: Env) -> Tensor:
        """One number on the device; for functions that have none, any number."""
        found: Tensor = env[self.of.parameters[0][1] if self.is_soft else self.of.far]
        return found

    def edge_rows(self, env: Env, block: PlacedBlock) -> Tensor | None:
        """What edge features add to the rows of a block: themselves, or by the function's weight."""
        if not self.has_edges:
            return None
        attr: Tensor = env[self.of.attr][block.edges]
        return whole_rows(attr) if self.is_soft else torch.mm(attr, env[self.of.parameters[0][1]])

    def blocks(self, env: Env) -> list[PlacedBlock]:
        """All edges at once where nothing of them is written; else as many as there is room for."""
        far: Tensor = env[self.of.far]
        if not self.has_edges:
            return self.orders.blocks(max(1, self.orders.pattern.num_edges))
        return self.orders.blocks(max(1, _EDGE_ROWS_BYTES // max(1, far.shape[1] * far.element_size())))


@kernel("messages", "cuda", "triton", _no_form)
def _messages(b: Binding, step: Step, owns: bool) -> Bound:
    from plait.kernels.messages import gpu  # here: it needs triton
    from plait.kernels.spmm import gpu as sparse

    known, columns, rows = _Known(b, step), int(b.program.shapes[step.out][1]), b.orders.pattern.num_rows
    function, of = step["function"], known.of

    def scores(env: Env) -> Tensor:
        """A function of the source alone: made once per node."""
        made = whole_rows(env[function](None, env[of.far], None, *of.values(env)))
        return sparse.spmm(b.orders.pattern, made, b.take(rows, columns, made.dtype), reduce=step.reduce)

    def run(env: Env) -> Tensor:
        near, far = known.ends(env)
        out, t = b.take(rows, columns, far.dtype), known.temperature(env)
        for block in known.blocks(env):
            edge = known.edge_rows(env, block)
            gpu.sums(
                block.local, known.form, near[block.rows], far, edge, t, out[block.rows], known.eps
            )  # fmt: skip
        return out

    return scores if known.form == "score" else run


@kernel("messages_back", "cuda", "triton", _no_form)
def _messages_back(b: Binding, step: Step, owns: bool) -> Bound:
    from plait.kernels.messages import gpu

    known, grad = _Known(b, step), step["grad"]
    of, makes = known.of, known.of.makes

    def without_edges(env: Env) -> Tensor:
        (near, far), slope, t = known.ends(env), whole_rows(env[grad]), known.temperature(env)
        if "near" in makes:
            env[makes["near"]] = to_near = b.room_like(env, makes["near"], near)
            gpu.sums_targets(
                b.orders.pattern, known.form, near, far, None, t, slope, to_near, None, known.eps
            )  # fmt: skip
        to_far = b.room_like(env, step.out, far)
        return gpu.sums_sources(b.orders.transpose, known.form, near, far, t, slope, to_far, known.eps)

    def with_edges(env: Env) -> Tensor:
        (near, far), slope, t = known.ends(env), whole_rows(env[grad]), known.temperature(env)
        to_near = None
        if "near" in makes:
            to_near = env[makes["near"]] = b.room_like(env, makes["near"], near)
        attr: Tensor = env[of.attr]
        w = None if known.is_soft else env[of.parameters[0][1]]
        to_attr = to_w = None
        if "attr" in makes:
            to_attr = env[makes["attr"]] = torch.empty_like(attr)
        if w is not None and "p0" in makes:
            to_w = env[makes["p0"]] = torch.zeros_like(w, memory_format=torch.contiguous_format)
        to_far = b.room_like(env, step.out, far).zero_()
        for block in known.blocks(env):
            edge = known.edge_rows(env, block)
            assert edge is not None
            to_edge = torch.empty_like(edge)
            own = None if to_near is None else to_near[block.rows]
            gpu.sums_targets(
                block.local, known.form, near[block.rows], far, edge, t, slope[block.rows], own, to_edge,
                known.eps,
            )  # fmt: skip
            block.scatter(to_edge, to_far)
            if to_attr is not None:
                to_attr[block.edges] = to_edge if w is None else to_edge @ w.t()
            if to_w is not None:
                to_w.addmm_(attr[block.edges].t(), to_edge)
        return to_far

    return with_edges if known.has_edges else without_edges
