"""Kernels of matrix expressions on a GPU: sparse products by Triton or cuSPARSE, dense ones by cuBLAS."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from plait.ops.program import Step
from plait.runtime.bind import Binding, Bound, kernel
from plait.runtime.chain import Env, turned

__all__ = ["whole_rows", "why_not"]


def why_not() -> str | None:
    """Why nothing can be planned on this GPU; None if it can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (it comes with CUDA builds of torch)"
    return None


def whole_rows(x: torch.Tensor) -> torch.Tensor:
    """Kernels read rows of contiguous elements."""
    return x if x.stride(-1) == 1 and (x.shape[0] < 2 or x.stride(0) >= x.shape[1]) else x.contiguous()


def _not_torch(b: Binding, step: Step) -> str | None:
    if b.backend(step) != "torch":
        return "not chosen"
    has_rest = b.matrix(step).operands(step.is_transposed)[0].has_rest
    return "edges of no row are among those of the matrix" if has_rest else None


@kernel("spmm", "cuda", "torch", _not_torch)
def _spmm_by_torch(b: Binding, step: Step, owns: bool) -> Bound:
    matrix = b.matrix(step)
    rows = matrix.operands(step.is_transposed)[0].num_rows
    target_of = b.target(step, rows)

    def run(env: Env) -> torch.Tensor:
        x = env[step["x"]]
        out = torch.mm(matrix.as_torch(step.is_transposed, x.dtype), whole_rows(x))
        target, bias = target_of(env), env.get(step.get("bias") or "")
        if target is not None:
            out.mul_(target.unsqueeze(1))
        return out if bias is None else out.add_(bias)

    return run


@kernel("spmm", "cuda", "triton")
def _spmm(b: Binding, step: Step, owns: bool) -> Bound:
    from plait.kernels.spmm import gpu  # here: it needs triton

    rows, weight = b.matrix(step).operands(step.is_transposed)
    names, take, count = dict(step.reads), b.take, rows.num_rows
    x_name, addend_name, bias_name = names["x"], names.get("addend", ""), names.get("bias", "")
    source, target = b.vector(step, "source"), b.target(step, count)
    scale = b.row_scale(step, "addend_scale", count)
    if weight is not None and source is not None:  # the kernel takes one of them: their product
        weight, source = weight * source[rows.indices.long()], None

    def run(env: Env) -> torch.Tensor:
        x = whole_rows(env[x_name])
        addend: Any = whole_rows(env[addend_name]) if addend_name else None
        is_in_place = owns and addend is env[addend_name]
        return gpu.spmm(
            rows, x, addend if is_in_place else take(count, x.shape[1], x.dtype), edge=weight, source=source,
            target=target(env), addend=addend, addend_scale=scale(env), bias=env.get(bias_name),
        )  # fmt: skip

    return run


@kernel("extremum", "cuda", "triton")
def _extremum(b: Binding, step: Step, owns: bool) -> Bound:
    from plait.kernels.spmm import gpu

    rows, _ = b.matrix(step).operands(False)
    ties = step.more[0] if step.more[0] in b.run.kept else None

    def run(env: Env) -> torch.Tensor:
        x = whole_rows(env[step["x"]])
        out = b.take(rows.num_rows, x.shape[1], x.dtype)
        if ties is None:
            return gpu.spmm(rows, x, out, reduce=step.reduce)
        env[ties] = torch.empty(out.shape, dtype=torch.int32, device=out.device)
        return gpu.extremum(rows, x, out, env[ties], step.reduce)

    return run


@kernel("extremum_gather", "cuda", "triton")
def _extremum_gather(b: Binding, step: Step, owns: bool) -> Bound:
    from plait.kernels.spmm import gpu

    rows, _ = b.matrix(step).operands(True)
    scale_of = b.row_scale(step, "addend_scale", rows.num_rows)

    def run(env: Env) -> torch.Tensor:
        x, best, share = (whole_rows(env[step[role]]) for role in ("x", "best", "share"))
        addend = env.get(step.get("addend") or "")
        if addend is not None and (scale := scale_of(env)) is not None:
            addend = addend * scale.unsqueeze(1)
        out = b.take(x.shape[0], x.shape[1], x.dtype)
        return gpu.extremum_gather(rows, x, best, share, out, addend)

    return run


@kernel("gemm", "cuda", "cublas")
def _gemm(b: Binding, step: Step, owns: bool) -> Bound:
    names = dict(step.reads)
    x_name, w_name = names["x"], turned(names["w"]) if step.is_transposed else names["w"]
    addend_name, bias_name = names.get("addend", ""), names.get("bias", "")

    def run(env: Env) -> torch.Tensor:
        x, w, bias = env[x_name], env[w_name], env.get(bias_name)
        if not addend_name:
            return torch.mm(x, w) if bias is None else torch.addmm(bias, x, w)
        addend = env[addend_name]
        out = addend.addmm_(x, w) if owns else torch.addmm(addend, x, w)
        return out if bias is None else out.add_(bias)

    return run


@kernel("gemm_transposed", "cuda", "cublas")
def _gemm_transposed(b: Binding, step: Step, owns: bool) -> Bound:
    def run(env: Env) -> torch.Tensor:
        left, right = env[step["left"]], env[step["right"]]
        # PyG's weights lie [out, in]: their gradient is made the same way round
        made = env[turned(step.out)] = torch.mm(right.t(), left)
        return made.t()

    return run


@kernel("colsum", "cuda", "triton")
def _colsum(b: Binding, step: Step, owns: bool) -> Bound:
    from plait.kernels.colsum.gpu import column_sums

    name = step["x"]
    return lambda env: column_sums(whole_rows(env[name]))
