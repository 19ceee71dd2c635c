"""Attention in pieces on a GPU, by Triton: the second column of their rows in the table."""

from __future__ import annotations

from typing import cast

from torch import Tensor

from plait.ops.program import Step
from plait.runtime.bind import Binding, Bound, kernel
from plait.runtime.chain import Env
from plait.runtime.cuda import whole_rows
from plait.runtime.pieces import seen

__all__: list[str] = []


@kernel("edge_dots", "cuda", "triton")
def _dots(b: Binding, step: Step, owns: bool) -> Bound:
    from plait.kernels.attention import gpu_pieces as gpu  # here: it needs triton

    sources, targets = cast(Tensor, seen(b.orders, step).pattern.indices), b.orders.targets
    near, far, heads, is_shared = (
        step["near"],
        step["far"],
        step.option("heads"),
        bool(step.option("is_shared")),
    )

    def run(env: Env) -> Tensor:
        ends = whole_rows(env[near]), whole_rows(env[far])
        return gpu.edge_dots(targets, sources, *ends, heads, is_shared=is_shared)

    return run


@kernel("edge_sums", "cuda", "triton")
def _sums(b: Binding, step: Step, owns: bool) -> Bound:
    from plait.kernels.attention import gpu_pieces as gpu

    edges, weight, far = seen(b.orders, step), step["weight"], step["far"]
    rows = edges.transpose if step.is_transposed else edges.pattern
    order = cast(Tensor, edges.order) if step.is_transposed else None
    heads, columns = step.option("heads"), int(b.program.shapes[step.out][1])
    is_shared, is_out_shared = bool(step.option("is_shared")), bool(step.option("is_out_shared"))

    def run(env: Env) -> Tensor:
        x = whole_rows(env[far])
        out = b.room(env, step.out, rows.num_rows, columns, x)
        return gpu.edge_sums(
            rows, order, env[weight].contiguous(), x, heads, out, far_is_shared=is_shared,
            out_is_shared=is_out_shared,
        )  # fmt: skip

    return run


@kernel("edge_softmax", "cuda", "triton")
def _softmax(b: Binding, step: Step, owns: bool) -> Bound:
    from plait.kernels.attention import gpu_pieces as gpu

    rows, scores = b.orders.pattern, step["scores"]
    return lambda env: gpu.edge_softmax(rows, env[scores])


@kernel("edge_softmax_back", "cuda", "triton")
def _softmax_back(b: Binding, step: Step, owns: bool) -> Bound:
    from plait.kernels.attention import gpu_pieces as gpu

    rows, weight, grad = b.orders.pattern, step["weight"], step["grad"]
    return lambda env: gpu.edge_softmax_gradient(rows, env[weight], env[grad])
