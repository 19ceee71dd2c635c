"""Several aggregators on a GPU, by Triton: the second column of their rows in the table."""

from __future__ import annotations

from torch import Tensor

from plait.ops.program import Step
from plait.runtime.bind import Binding, Bound, kernel
from plait.runtime.chain import Env
from plait.runtime.cuda import whole_rows
from plait.runtime.pna import layout_of

__all__: list[str] = []


@kernel("aggregate", "cuda", "triton")
def _aggregate(b: Binding, step: Step, owns: bool) -> Bound:
    from plait.kernels.multi import gpu  # here: it needs triton

    rows, layout, x = b.matrix(step).operands(False)[0], layout_of(step), step["x"]
    width = len(layout.kept) * layout.columns
    counted = step.more[0] if step.more and step.more[0] in b.run.kept else ""

    def run(env: Env) -> Tensor:
        v = whole_rows(env[x])
        out = b.room(env, step.out, rows.num_rows, width, v)
        ties = None
        if counted:
            ties = env[counted] = gpu.ties_like(v, rows.num_rows, layout)
        return gpu.aggregate(rows, v, layout, out, ties)

    return run


@kernel("aggregate_shares", "cuda", "triton")
def _aggregate_shares(b: Binding, step: Step, owns: bool) -> Bound:
    from plait.kernels.multi import gpu

    rows, layout, names = b.matrix(step).operands(False)[0], layout_of(step), dict(step.reads)
    grad, made, ties = names["grad"], names["made"], names.get("ties", "")

    def run(env: Env) -> Tensor:
        return gpu.aggregate_shares(rows, layout, whole_rows(env[grad]), whole_rows(env[made]), env.get(ties))

    return run


@kernel("aggregate_sources", "cuda", "triton")
def _aggregate_sources(b: Binding, step: Step, owns: bool) -> Bound:
    from plait.kernels.multi import gpu

    rows, layout = b.matrix(step).operands(True)[0], layout_of(step)
    x, shares = step["x"], step["shares"]

    def run(env: Env) -> Tensor:
        v = whole_rows(env[x])
        out = b.room(env, step.out, v.shape[0], v.shape[1], v)
        return gpu.aggregate_sources(rows, v, layout, env[shares], out)

    return run
