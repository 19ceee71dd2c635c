"""Kernels of matrix expressions on a CPU: sparse and dense products by numba or MKL, the rest by torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from plait.kernels import gemm as dense
from plait.kernels import spmm as sparse
from plait.kernels.partial import partial_sums
from plait.ops.program import Step
from plait.runtime.bind import Binding, Bound, kernel
from plait.runtime.chain import BoundChain, ChainOutline, Env, turned
from plait.runtime.constants import SparseValue, is_finite

__all__ = ["marks_of"]

# Edges per row up to which an extremum marks where it is attained: one bit per edge and column, at most half
# the memory of the tie counts. The second look at more neighbours takes as long as the gradient saves (a step
# of SAGE by maxima, 256 columns, one core: 9 and 12% less at 4 edges per row, 4% more at 31).
_MOST_MARKED = 16
# Multiply-adds up to which torch's dense product takes less time, because it is called faster: 20 x 33 by
# 33 x 32 takes 2.4 us and 6.4, 200 x 33 by 33 x 32 6.0 and 7.9, 200 x 99 by 99 x 32 13.8 and 11.8 (one core).
_SMALL_PRODUCT = 1 << 18

# Sparse products ------------------------------------------------------------------------------------------


def _not_by_form(b: Binding, step: Step) -> str | None:
    constants = b.run.constants
    form = constants.form_of(b.program.constants[step["matrix"]]) if constants.forms else None
    if form is None or b.backend(step) != form.name:
        return "not chosen"
    is_weighted = b.matrix(step).operands(step.is_transposed)[1] is not None
    return "not for weighted sums" if is_weighted else None


def _not_torch(b: Binding, step: Step) -> str | None:
    return None if b.backend(step) == "torch" else "not chosen"


@kernel("spmm", "cpu", "hag", _not_by_form)
def _spmm_by_form(b: Binding, step: Step, owns: bool) -> Bound:
    form = b.run.constants.form_of(b.program.constants[step["matrix"]])
    assert form is not None
    sums = form.direction(step.is_transposed).sums
    rows = b.matrix(step).operands(step.is_transposed)[0].num_rows
    names, take = dict(step.reads), b.take
    x_name, addend_name, bias_name = names["x"], names.get("addend", ""), names.get("bias", "")
    source, target = b.vector(step, "source"), b.target(step, rows)
    scale = b.row_scale(step, "addend_scale", rows)

    def run(env: Env) -> torch.Tensor:
        x: torch.Tensor = env[x_name]
        addend: Any = env[addend_name] if addend_name else None
        width, dtype = x.shape[1], x.dtype
        return partial_sums(
            sums, x, addend if owns else take(rows, width, dtype), source=source, target=target(env),
            addend=addend, addend_scale=scale(env), bias=env.get(bias_name),
            shared=b.buffers.take(sums.num_shared, width, dtype),
        )  # fmt: skip

    return run


@kernel("spmm", "cpu", "torch", _not_torch)
def _spmm_by_torch(b: Binding, step: Step, owns: bool) -> Bound:
    matrix = b.matrix(step)
    rows = matrix.operands(step.is_transposed)[0].num_rows
    target_of = b.target(step, rows)

    def run(env: Env) -> torch.Tensor:
        x = env[step["x"]]
        out = b.out(step, env, owns, rows, x.shape[1], x)
        torch.mm(matrix.as_torch(step.is_transposed, x.dtype), x, out=out)
        target, bias = target_of(env), env.get(step.get("bias") or "")
        if target is not None:
            out.mul_(target.unsqueeze(1))
        return out if bias is None else out.add_(bias)

    return run


@kernel("spmm", "cpu")
def _spmm(b: Binding, step: Step, owns: bool) -> Bound:
    pattern, weight = b.matrix(step).operands(step.is_transposed)
    rows, take, names = pattern.num_rows, b.take, dict(step.reads)
    x_name, addend_name, bias_name = names["x"], names.get("addend", ""), names.get("bias", "")
    source, target = b.vector(step, "source"), b.target(step, rows)
    scale = b.row_scale(step, "addend_scale", rows)
    if weight is not None and source is not None:  # the kernel takes one of them: their product
        weight, source = _joined(b, step, pattern, weight, source), None
    price = b.price(step)
    slab = price.slab if price is not None else 0

    def run(env: Env) -> torch.Tensor:
        x: torch.Tensor = env[x_name]
        addend: Any = env[addend_name] if addend_name else None
        return sparse.spmm(
            pattern, x, addend if owns else take(rows, x.shape[1], x.dtype),
            edge=weight, source=source, target=target(env), addend=addend, addend_scale=scale(env),
            bias=env.get(bias_name), slab=slab,
        )  # fmt: skip

    return run


def _joined(
    b: Binding, step: Step, pattern: sparse.Pattern, weight: torch.Tensor, source: torch.Tensor
) -> torch.Tensor:
    """Edge weights times the scaling of their sources, computed once per graph."""
    return b.run.constants.remember(
        f"{step['matrix']}{'ᵀ' if step.is_transposed else ''} | {step['source']}",
        lambda: weight * source[torch.from_numpy(pattern.indices.astype(np.int64))],
    )


# Extrema --------------------------------------------------------------------------------------------------


def marks_of(name: str) -> str:
    """Where the marks of an extremum are kept, if it made any."""
    return f"{name}|marks"


@kernel("extremum", "cpu")
def _extremum(b: Binding, step: Step, owns: bool) -> Bound:
    pattern, _ = b.matrix(step).operands(False)
    ties = step.more[0] if step.more[0] in b.run.kept else None
    form = b.run.constants.forms.get("max")
    is_by_form = form is not None and b.backend(step) == form.name and (ties is None or form.is_disjoint)
    is_marked = pattern.num_edges <= _MOST_MARKED * pattern.num_rows
    counts_zero = step.option("counts_zero", True)  # in the kernel, as in PyG, a 0 is one more tie

    def run(env: Env) -> torch.Tensor:
        x = env[step["x"]]
        out = b.take(pattern.num_rows, x.shape[1], x.dtype)
        if ties is not None:
            env[ties] = b.like(out)
        if is_by_form and form is not None:
            counts = None if ties is None else env[ties]
            return partial_sums(form.forward.sums, x, out, reduce=step.reduce, ties=counts)
        if ties is None:
            return sparse.spmm(pattern, x, out, reduce=step.reduce)
        marks = None
        if is_marked:
            width = sparse.marks_bytes(x.shape[1], x.dtype)
            marks = env[marks_of(step.out)] = b.take(pattern.num_edges, width, torch.uint8)
        sparse.extremum(pattern, x, out, env[ties], step.reduce, marks)
        if not counts_zero:
            env[ties].sub_((out == 0).to(out.dtype)).clamp_(min=1)
        return out

    return run


@kernel("extremum_share", "any", "torch")
def _extremum_share(b: Binding, step: Step, owns: bool) -> Bound:
    def run(env: Env) -> torch.Tensor:
        grad = env[step["x"]]
        return torch.div(grad, env[step["ties"]], out=grad if owns else b.like(grad))

    return run


@kernel("extremum_gather", "cpu")
def _extremum_gather(b: Binding, step: Step, owns: bool) -> Bound:
    matrix = b.matrix(step)
    pattern, _ = matrix.operands(True)
    scale_of = b.row_scale(step, "addend_scale", pattern.num_rows)

    def run(env: Env) -> torch.Tensor:
        x, best, share = env[step["x"]], env[step["best"]], env[step["share"]]
        out = b.out(step, env, owns, x.shape[0], x.shape[1], x)
        addend = env.get(step.get("addend") or "")
        if addend is not None and (scale := scale_of(env)) is not None:
            addend = torch.mul(addend, scale.unsqueeze(1), out=b.like(x))
        marks = env.get(marks_of(step["best"]))
        if marks is None:
            return sparse.extremum_gather(pattern, x, best, share, out, addend)
        order = b.run.constants.remember(
            f"{step['matrix']}ᵀ | order", lambda: _order(matrix.graph.transpose_order, pattern)
        )
        return sparse.marked_gather(pattern, order, marks, share, out, addend)

    return run


def _order(order: np.ndarray[Any, Any], pattern: sparse.Pattern) -> torch.Tensor:
    """A column of edge numbers as the kernels read them."""
    return torch.from_numpy(np.ascontiguousarray(order, pattern.indices.dtype)).unsqueeze(1)


# Dense products -------------------------------------------------------------------------------------------


@kernel("gemm", "cpu")
def _gemm(b: Binding, step: Step, owns: bool) -> Bound:
    names, take, is_torch = dict(step.reads), b.take, b.backend(step) == "torch"
    x_name, w_name = names["x"], turned(names["w"]) if step.is_transposed else names["w"]
    addend_name, bias_name = names.get("addend", ""), names.get("bias", "")
    # not in layers written as programs: MKL may round equal rows differently, and a maximum over edges tells
    # such rows apart
    is_alone = not addend_name and not b.is_part(step.out) and b.run.plan.expr is not None
    stored_name = turned(w_name)

    def run(env: Env) -> torch.Tensor:
        x, bias, stored = env[x_name], env.get(bias_name), env.get(stored_name)
        if is_alone and not isinstance(x, SparseValue):
            turned_w = env[w_name].t() if stored is None else stored  # as PyG's weights lie
            if x.numel() * turned_w.shape[0] <= _SMALL_PRODUCT:
                return torch.nn.functional.linear(x, turned_w, bias)
        addend: Any = env[addend_name] if addend_name else None
        if stored is not None and not is_torch and not isinstance(x, SparseValue) and w_name not in env:
            out = addend if owns else b.room(env, step.out, x.shape[0], stored.shape[0], x)
            return dense.gemm(x, stored, out, addend=addend, bias=bias, is_turned=True)
        w = env[w_name]
        if isinstance(x, SparseValue) and not is_finite(w):
            x = x.to_dense()  # 0 * NaN is NaN
        if isinstance(x, SparseValue):
            pattern, weight = x.operands(False)
            out = addend if owns else take(pattern.num_rows, w.shape[1], w.dtype)
            rows = w if w.is_contiguous() else take(w.shape[0], w.shape[1], w.dtype).copy_(w)
            return sparse.spmm(pattern, rows, out, edge=weight, addend=addend, bias=bias)
        out = addend if owns else b.room(env, step.out, x.shape[0], w.shape[1], x)
        if is_torch:
            return _mm(x, w, out, addend, bias)
        return dense.gemm(x, w, out, addend=addend, bias=bias)

    return run


def _mm(
    x: torch.Tensor,
    w: torch.Tensor,
    out: torch.Tensor,
    addend: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    if addend is None and bias is not None:
        return torch.addmm(bias, x, w, out=out)
    if addend is None:
        return torch.mm(x, w, out=out)
    torch.addmm(addend, x, w, out=out)
    return out if bias is None else out.add_(bias)


@kernel("gemm_transposed", "cpu")
def _gemm_transposed(b: Binding, step: Step, owns: bool) -> Bound:
    is_torch, take = b.backend(step) == "torch", b.buffers.take

    def run(env: Env) -> torch.Tensor:
        made: torch.Tensor
        left, right = env[step["left"]], env[step["right"]]
        if isinstance(left, SparseValue) and not is_finite(right):
            left = left.to_dense()
        if isinstance(left, SparseValue):
            pattern, weight = left.operands(True)
            if not _is_wanted_turned(b, step.out):
                out = torch.empty((pattern.num_rows, right.shape[1]), dtype=right.dtype)
                return sparse.spmm(pattern, right, out, edge=weight)
            made = sparse.spmm(
                pattern, right, take(pattern.num_rows, right.shape[1], right.dtype), edge=weight
            )
            env[turned(step.out)] = made.t().contiguous()  # else autograd copies it, off the step's clock
            return made
        # vector lanes run over the second operand's columns; of two as wide, PyG's weights lie [out, in]
        is_turned = left.shape[1] >= right.shape[1]
        if is_turned:
            left, right = right, left
        is_small = left.numel() * right.shape[1] <= _SMALL_PRODUCT
        made = torch.mm(left.t(), right) if is_torch or is_small else dense.gemm_transposed(left, right, take)
        if not is_turned:
            return made
        env[turned(step.out)] = made
        return made.t()

    return run


def _is_wanted_turned(b: Binding, name: str) -> bool:
    """Whether a gradient goes to a parameter that is stored the other way round."""
    return any(turned(name) in layout.outputs for layout in b.run.layouts.values())


@kernel("chain", "cpu")
def _chain(b: Binding, step: Step, owns: bool) -> Bound:
    """Products of the same rows in one pass over blocks of them; made for the shapes of the first run."""
    bound: BoundChain | None = None

    def run(env: Env) -> torch.Tensor:
        nonlocal bound
        if bound is None:
            bound = _bound_chain(b, step, env)
        return bound.run(env, owns, b.take)

    return run


def _bound_chain(b: Binding, step: Step, env: Env) -> BoundChain:
    outlines = b.run.outline.chains
    outline = outlines.get(step.out)
    if outline is None:
        outline = outlines[step.out] = ChainOutline(step, env)
    if outline.block is None:
        return outline.without_graph(env[outline.some].shape[0])
    pattern, weight = b.matrix(step).operands(step.is_transposed)
    source = b.vector(step, "source")
    if weight is not None and source is not None:
        weight, source = _joined(b, step, pattern, weight, source), None
    constants = {"edge": weight, "source": source, "target": b.vector(step, "target")}
    scale = b.row_scale(step, "block_scale", pattern.num_rows)
    return BoundChain(outline, pattern.num_rows, pattern, constants, scale)


# Rows and columns -----------------------------------------------------------------------------------------

Simple = Callable[[Binding, Step, Env, bool], Any]


def _simple(operation: str) -> Callable[[Simple], Simple]:
    """Enters an operation that torch computes, on any device, with nothing to look up beforehand."""

    def enter(function: Simple) -> Simple:
        @kernel(operation, "any", "torch")
        def bound(b: Binding, step: Step, owns: bool) -> Bound:
            return lambda env: function(b, step, env, owns)

        return function

    return enter


@_simple("stack")
def _stack(b: Binding, step: Step, env: Env, owns: bool) -> torch.Tensor:
    return torch.cat([env[name] for _, name in step.reads])


@_simple("rows_of")
def _rows_of(b: Binding, step: Step, env: Env, owns: bool) -> torch.Tensor:
    which = int(step.factors[0])
    names = [name for role, name in step.reads if role.startswith("part")]
    first = sum(env[name].shape[0] for name in names[:which])
    stacked: torch.Tensor = env[step["x"]]
    return stacked[first : first + env[names[which]].shape[0]]


@_simple("columns_of")
def _columns_of(b: Binding, step: Step, env: Env, owns: bool) -> torch.Tensor:
    which = int(step.factors[0])
    names = [name for role, name in step.reads if role.startswith("of")]
    first = sum(env[name].shape[1] for name in names[:which])
    whole: torch.Tensor = env[step["x"]]
    return whole[:, first : first + env[names[which]].shape[1]]


@kernel("columns", "any", "torch")
def _columns(b: Binding, step: Step, owns: bool) -> Bound:
    x, start, width = step["x"], step.option("start"), step.option("width")
    return lambda env: env[x].narrow(1, start, width)


@_simple("reshape")
def _reshape(b: Binding, step: Step, env: Env, owns: bool) -> torch.Tensor:
    x: torch.Tensor = env[step["x"]]
    width = step.option("width")
    return x.reshape(x.numel() // max(1, width), width)


@kernel("join", "any", "torch")
def _join(b: Binding, step: Step, owns: bool) -> Bound:
    """Parts that were written where they belong stay; the others are copied, gaps are zero."""
    width, starts = int(b.program.shapes[step.out][1]), step.option("starts")
    placed = b.placed_in(step.out)
    parts = [(name, start, name in placed) for (_, name), start in zip(step.reads, starts, strict=True)]
    sizes = [int(b.program.shapes[name][1]) for _, name in step.reads]
    gaps = _gaps(list(zip(starts, sizes, strict=True)), width)

    def run(env: Env) -> torch.Tensor:
        whole: torch.Tensor | None = env.get(step.out)
        if whole is None:
            first = env[parts[0][0]]
            whole = b.take(first.shape[0], width, first.dtype)
        for name, start, is_placed in parts:
            part = env[name]
            place = whole.narrow(1, start, part.shape[1])
            if not is_placed or part.data_ptr() != place.data_ptr():
                place.copy_(part)
        for start, size in gaps:
            whole.narrow(1, start, size).zero_()
        return whole

    return run


def _gaps(parts: list[tuple[int, int]], width: int) -> list[tuple[int, int]]:
    """(start, columns) of what no part covers."""
    found, last = [], 0
    for start, size in (*parts, (width, 0)):
        if start > last:
            found.append((last, start - last))
        last = start + size
    return found


@_simple("concat")
def _concat(b: Binding, step: Step, env: Env, owns: bool) -> torch.Tensor:
    parts = [env[name] for _, name in step.reads]
    out = b.take(parts[0].shape[0], sum(p.shape[1] for p in parts), parts[0].dtype)
    return torch.cat(parts, dim=1, out=out)


@_simple("scale_rows")
def _scale_rows(b: Binding, step: Step, env: Env, owns: bool) -> torch.Tensor:
    x, scale = env[step["x"]], b.vector(step, "scale")
    assert scale is not None
    return torch.mul(x, scale.unsqueeze(1), out=b.like(x))


@_simple("scale")
def _scale(b: Binding, step: Step, env: Env, owns: bool) -> torch.Tensor:
    x = env[step["x"]]
    return torch.mul(x, env[step["scalar"]].detach().reshape(()), out=b.like(x))


@_simple("combine")
def _combine(b: Binding, step: Step, env: Env, owns: bool) -> torch.Tensor:
    values = [env[name] for role, name in step.reads if role != "bias"]
    bias = env.get(step.get("bias") or "")
    out = b.like(values[0])
    if len(values) > 1 and step.factors[0] == 1.0:
        torch.add(values[0], values[1], alpha=step.factors[1], out=out)
        rest = zip(values[2:], step.factors[2:], strict=True)
    elif len(values) == 1 and step.factors[0] == 1.0 and bias is not None:
        return torch.add(values[0], bias, out=out)
    else:
        torch.mul(values[0], step.factors[0], out=out)
        rest = zip(values[1:], step.factors[1:], strict=True)
    for value, factor in rest:
        out.add_(value, alpha=factor)
    return out if bias is None else out.add_(bias)


@_simple("relu")
def _relu(b: Binding, step: Step, env: Env, owns: bool) -> torch.Tensor:
    x = env[step["x"]]
    if owns:
        return torch.relu_(x)
    return torch.clamp_min(x, 0, out=b.like(x))


@_simple("relu_backward")
def _relu_backward(b: Binding, step: Step, env: Env, owns: bool) -> torch.Tensor:
    grad = env[step["x"]]
    out = grad if owns else b.like(grad)
    return torch.ops.aten.threshold_backward.grad_input(grad, env[step["made"]], 0, grad_input=out)  # type: ignore[no-any-return]


@kernel("colsum", "cpu")
def _colsum(b: Binding, step: Step, owns: bool) -> Bound:
    return lambda env: dense.column_sums(env[step["x"]])


@_simple("dot")
def _dot(b: Binding, step: Step, env: Env, owns: bool) -> torch.Tensor:
    return torch.dot(env[step["left"]].reshape(-1), env[step["right"]].reshape(-1)).reshape(1)
