"""Carries out a plan under torch autograd: one function per expression, steps on their backends."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from plait.kernels import gemm as dense
from plait.kernels import spmm as sparse
from plait.kernels.partial import partial_sums
from plait.plan.plan import LayerPlan, Measured
from plait.plan.program import Program, Step
from plait.runtime.buffers import Buffers
from plait.runtime.chain import BoundChain, Env, turned
from plait.runtime.constants import Constants, SparseValue, is_finite

__all__ = ["Run", "apply"]

# edges a row up to which an extremum marks who attains it: a bit an edge and column, half the memory of the
# counts of ties at most. The second look at more neighbours takes as long as the gradient saves (a step of
# SAGE by maxima, 256 columns, one core: 9 and 12% less at 4 edges a row, 4% more at 31).
_MOST_MARKED = 16


@dataclass
class Run:
    """A plan bound to one graph: its constants, its buffers, the values hoisted for the inputs at hand."""

    plan: LayerPlan
    constants: Constants
    buffers: Buffers
    hoisted: Mapping[str, Any] = field(default_factory=dict)
    trace: list[tuple[str, Measured]] | None = None  # filled by explain(analyze=True)
    _forward: Compiled | None = None
    _backward: Compiled | None = None

    def forward(self, env: Env) -> None:
        if self._forward is None:
            self._forward = Compiled(self.plan.forward, self, keep=(*self.kept, *self.plan.forward.outputs))
        self._forward.run(env)

    def backward(self, env: Env) -> None:
        assert self.plan.backward is not None
        if self._backward is None:
            self._backward = Compiled(self.plan.backward, self, keep=self.plan.backward.outputs)
        self._backward.run(env)

    @functools.cached_property
    def kept(self) -> tuple[str, ...]:
        """Values made by the forward pass that the backward pass reads."""
        made = {name for step in self.plan.forward.steps for name in (step.out, *step.more)}
        backward = self.plan.backward
        reads = {name for step in backward.steps for _, name in step.reads} if backward else set()
        extrema = [step for step in self.plan.forward.steps if step.op == "extremum"]
        marks = {_marks_of(step.out) for step in extrema if step.more[0] in reads}
        return tuple(sorted((made & reads) | marks))

    @functools.cached_property
    def is_output_kept(self) -> bool:
        """Whether the result is a hoisted value or an input: the caller, who may write to it, gets a copy."""
        forward = self.plan.forward
        return all(step.out != forward.outputs[0] for step in forward.steps)

    def output(self, env: Env) -> torch.Tensor:
        """The result of a forward pass."""
        result: torch.Tensor = env[self.plan.forward.outputs[0]]
        return result.clone() if self.is_output_kept else result

    @functools.cached_property
    def gradient_of(self) -> dict[str, str]:
        """Input -> the value that is its gradient; that of a turned input is turned."""
        assert self.plan.backward is not None
        found = dict(zip(self.plan.wrt, self.plan.backward.outputs, strict=True))
        return found | {turned(name): turned(output) for name, output in found.items()}

    def hoist(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The values that stay the same from call to call, computed now."""
        program = self.plan.hoisted
        env = Env(inputs)
        Compiled(program, self, keep=program.outputs, may_pool=False).run(env)
        return {name: env[name] for name in program.outputs}


class Compiled:
    """A program as a list of calls, with what each one may free or overwrite worked out once."""

    def __init__(self, program: Program, run: Run, keep: tuple[str, ...], may_pool: bool = True):
        self.run_of = run
        self.program = program
        self.take = run.buffers.take if may_pool else _fresh
        self.known: dict[str, Any] = {}  # constants by name, looked up once
        self.prices = {step.out: run.plan.price_of(step.out) for step in program.steps}
        made = {name for step in program.steps for name in (step.out, *step.more)}
        last = {name: k for k, step in enumerate(program.steps) for _, name in step.reads if name in made}
        views = {step.out for step in program.steps if step.op in ("columns_of", "rows_of")}
        self.calls: list[tuple[str, Callable[[Env], Any], tuple[str, ...]]] = []
        for k, step in enumerate(program.steps):
            dead = tuple(name for name in last if last[name] == k and name not in keep)
            addend = step.get("addend")
            # the added term's buffer becomes the result where nobody reads it again
            owns = addend is not None and addend in dead and addend not in views
            if owns and addend is not None:
                # ... nor reads it in this very step: a sparse product gathers from x while it writes
                is_read_once = [name for _, name in step.reads].count(addend) == 1
                owns = is_read_once and program.shapes[addend] == program.shapes[step.out]
            if step.op in (
                "relu",
                "relu_backward",
                "extremum_share",
            ):  # works in place on what nobody else reads
                owns = step["x"] in dead and step["x"] not in views
            self.calls.append((step.out, self._bind(step, owns), dead))

    def _bind(self, step: Step, owns: bool) -> Callable[[Env], Any]:
        """The step as a function of the values at hand; what never changes is looked up now."""
        bind = {"spmm": self._bound_spmm, "chain": self._bound_chain, "gemm": self._bound_gemm}.get(step.op)
        if bind is not None:
            return bind(step, owns)
        call = getattr(self, f"_{step.op}")
        return lambda env: call(step, env, owns)

    def run(self, env: Env) -> None:
        trace = self.run_of.trace
        if trace is not None:
            return self._run_timed(env, trace)
        for out, call, dead in self.calls:
            env[out] = call(env)
            for name in dead:
                env.pop(name, None)  # a chain's block that nobody keeps was never there

    def _run_timed(self, env: Env, trace: list[tuple[str, Measured]]) -> None:
        for out, call, dead in self.calls:
            started = time.perf_counter()
            result = env[out] = call(env)
            seconds = time.perf_counter() - started
            size = result.nbytes if isinstance(result, torch.Tensor) else 0
            trace.append((f"{self.run_of.plan.layer}\0{out}", Measured(seconds, size)))
            for name in dead:
                env.pop(name, None)

    # Operands ---------------------------------------------------------------------------------

    def _out(
        self, step: Step, env: Env, owns: bool, rows: int, cols: int, like: torch.Tensor
    ) -> torch.Tensor:
        if owns:
            result: torch.Tensor = env[step["addend"]]
            return result
        return self.take(rows, cols, like.dtype)

    def _like(self, x: torch.Tensor) -> torch.Tensor:
        """An uninitialised result of the shape of x."""
        return self.take(x.shape[0], x.shape[1], x.dtype)

    def _constant(self, step: Step, role: str) -> torch.Tensor | None:
        name = step.get(role)
        value: torch.Tensor | None = None if name is None else self._named(name)
        return value

    def _row_scale(self, step: Step, role: str, env: Env, rows: int) -> torch.Tensor | None:
        return self._bound_scale(step, role, rows)(env)

    def _bound_scale(self, step: Step, role: str, rows: int) -> Callable[[Env], torch.Tensor | None]:
        """A scaling by rows: a constant diagonal, or a scalar input spread over the rows."""
        name = step.get(role)
        if name is None or name in self.program.constants:
            constant = self._constant(step, role)
            return lambda env: constant
        return lambda env: _spread(name, None, None, rows, env)

    def _bound_target(self, step: Step, rows: int) -> Callable[[Env], torch.Tensor | None]:
        """What the rows of a sparse product are multiplied by: a diagonal, a number of the call, or both."""
        target, factor, name = self._constant(step, "target"), step.get("factor"), step.get("target")
        if factor is None:
            return lambda env: target
        return lambda env: _spread(factor, name, target, rows, env)

    def _matrix(self, step: Step) -> SparseValue:
        matrix: SparseValue = self._named(step["matrix"])
        return matrix

    def _named(self, name: str) -> Any:
        value = self.known.get(name)
        if value is None:
            value = self.known[name] = self.run_of.constants.value(self.program.constants[name])
        return value

    # Sparse products --------------------------------------------------------------------------

    def _bound_spmm(self, step: Step, owns: bool) -> Callable[[Env], torch.Tensor]:
        matrix, price, take = self._matrix(step), self.prices[step.out], self.take
        pattern, weight = matrix.operands(step.is_transposed)
        rows = pattern.num_rows
        if price is not None and price.backend == "torch":
            return lambda env: self._spmm_torch(step, env, owns, matrix, rows)
        names = dict(step.reads)
        x_name, addend_name, bias_name = names["x"], names.get("addend", ""), names.get("bias", "")
        source, target = self._constant(step, "source"), self._bound_target(step, rows)
        scale = self._bound_scale(step, "addend_scale", rows)
        form = self.run_of.constants.form_of(self.program.constants[step["matrix"]])
        if price is not None and form is not None and price.backend == form.name and weight is None:
            sums = form.direction(step.is_transposed).sums

            def shared(env: Env) -> torch.Tensor:
                x: torch.Tensor = env[x_name]
                addend: Any = env[addend_name] if addend_name else None
                width, dtype = x.shape[1], x.dtype
                return partial_sums(
                    sums, x, addend if owns else take(rows, width, dtype), source=source, target=target(env),
                    addend=addend, addend_scale=scale(env), bias=env.get(bias_name),
                    shared=self.run_of.buffers.take(sums.num_shared, width, dtype),
                )  # fmt: skip

            return shared
        if weight is not None and source is not None:  # the kernel takes one of them: their product
            weight, source = self._joined(step, pattern, weight, source), None
        slab = price.slab if price is not None else 0

        def plain(env: Env) -> torch.Tensor:
            x: torch.Tensor = env[x_name]
            addend: Any = env[addend_name] if addend_name else None
            return sparse.spmm(
                pattern, x, addend if owns else take(rows, x.shape[1], x.dtype),
                edge=weight, source=source, target=target(env), addend=addend, addend_scale=scale(env),
                bias=env.get(bias_name), slab=slab,
            )  # fmt: skip

        return plain

    def _joined(
        self, step: Step, pattern: sparse.Pattern, weight: torch.Tensor, source: torch.Tensor
    ) -> torch.Tensor:
        """Edge weights times the scaling of their sources, computed once per graph."""
        return self.run_of.constants.remember(
            f"{step['matrix']}{'ᵀ' if step.is_transposed else ''} | {step['source']}",
            lambda: weight * source[torch.from_numpy(pattern.indices.astype(np.int64))],
        )

    def _spmm_torch(self, step: Step, env: Env, owns: bool, matrix: SparseValue, rows: int) -> torch.Tensor:
        x = env[step["x"]]
        out = self._out(step, env, owns, rows, x.shape[1], x)
        torch.mm(matrix.as_torch(step.is_transposed, x.dtype), x, out=out)
        target, bias = self._bound_target(step, rows)(env), env.get(step.get("bias") or "")
        if target is not None:
            out.mul_(target.unsqueeze(1))
        return out if bias is None else out.add_(bias)

    def _extremum(self, step: Step, env: Env, owns: bool) -> torch.Tensor:
        x = env[step["x"]]
        pattern, _ = self._matrix(step).operands(False)
        out = self._out(step, env, owns, pattern.num_rows, x.shape[1], x)
        ties = step.more[0] if step.more[0] in self.run_of.kept else None
        if ties is not None:
            env[ties] = self._like(out)
        price, form = self.prices[step.out], self.run_of.constants.forms.get("max")
        is_by_form = price is not None and form is not None and price.backend == form.name
        if is_by_form and form is not None and (ties is None or form.is_disjoint):
            counts = None if ties is None else env[ties]
            return partial_sums(form.forward.sums, x, out, reduce=step.reduce, ties=counts)
        if ties is None:
            return sparse.spmm(pattern, x, out, reduce=step.reduce)
        marks = None
        if pattern.num_edges <= _MOST_MARKED * pattern.num_rows:
            width = sparse.marks_bytes(x.shape[1], x.dtype)
            marks = env[_marks_of(step.out)] = self.take(pattern.num_edges, width, torch.uint8)
        return sparse.extremum(pattern, x, out, env[ties], step.reduce, marks)

    def _extremum_share(self, step: Step, env: Env, owns: bool) -> torch.Tensor:
        grad = env[step["x"]]
        return torch.div(grad, env[step["ties"]], out=grad if owns else self._like(grad))

    def _extremum_gather(self, step: Step, env: Env, owns: bool) -> torch.Tensor:
        x, best, share = env[step["x"]], env[step["best"]], env[step["share"]]
        matrix = self._matrix(step)
        pattern, _ = matrix.operands(True)
        out = self._out(step, env, owns, x.shape[0], x.shape[1], x)
        addend = env.get(step.get("addend") or "")
        if (
            addend is not None
            and (scale := self._row_scale(step, "addend_scale", env, x.shape[0])) is not None
        ):
            addend = torch.mul(addend, scale.unsqueeze(1), out=self._like(x))
        marks = env.get(_marks_of(step["best"]))
        if marks is None:
            return sparse.extremum_gather(pattern, x, best, share, out, addend)
        order = self.run_of.constants.remember(
            f"{step['matrix']}ᵀ | order", lambda: _order(matrix.graph.transpose_order, pattern)
        )
        return sparse.marked_gather(pattern, order, marks, share, out, addend)

    # Dense products ---------------------------------------------------------------------------

    def _bound_gemm(self, step: Step, owns: bool) -> Callable[[Env], torch.Tensor]:
        names = dict(step.reads)
        x_name, w_name = names["x"], turned(names["w"]) if step.is_transposed else names["w"]
        addend_name, bias_name = names.get("addend", ""), names.get("bias", "")
        price, take = self.prices[step.out], self.take
        is_torch = price is not None and price.backend == "torch"

        def run(env: Env) -> torch.Tensor:
            x, w, bias = env[x_name], env[w_name], env.get(bias_name)
            addend: Any = env[addend_name] if addend_name else None
            if isinstance(x, SparseValue) and not is_finite(w):
                x = x.to_dense()  # 0 * NaN is NaN
            if isinstance(x, SparseValue):
                pattern, weight = x.operands(False)
                out = addend if owns else take(pattern.num_rows, w.shape[1], w.dtype)
                return sparse.spmm(pattern, w.contiguous(), out, edge=weight, addend=addend, bias=bias)
            out = addend if owns else take(x.shape[0], w.shape[1], x.dtype)
            if is_torch:
                return _mm(x, w, out, addend, bias)
            return dense.gemm(x, w, out, addend=addend, bias=bias)

        return run

    def _gemm_transposed(self, step: Step, env: Env, owns: bool) -> torch.Tensor:
        left, right = env[step["left"]], env[step["right"]]
        if isinstance(left, SparseValue) and not is_finite(right):
            left = left.to_dense()
        if isinstance(left, SparseValue):
            pattern, weight = left.operands(True)
            out = torch.empty((pattern.num_rows, right.shape[1]), dtype=right.dtype)
            return sparse.spmm(pattern, right, out, edge=weight)
        price = self.prices[step.out]
        # vector lanes run over the second operand's columns; of two as wide, PyG's weights lie [out, in]
        is_turned = left.shape[1] >= right.shape[1]
        if is_turned:
            left, right = right, left
        if price is not None and price.backend == "torch":
            made = torch.mm(left.t(), right)
        else:
            made = dense.gemm_transposed(left, right, self.run_of.buffers.take)
        if not is_turned:
            return made
        env[turned(step.out)] = made
        return made.t()

    def _bound_chain(self, step: Step, owns: bool) -> Callable[[Env], torch.Tensor]:
        """Products of the same rows in one pass over blocks of them; made for the shapes of the first run."""
        bound: BoundChain | None = None

        def run(env: Env) -> torch.Tensor:
            nonlocal bound
            if bound is None:
                bound = self._bound(step, env)
            return bound.run(env, owns)

        return run

    def _bound(self, step: Step, env: Env) -> BoundChain:
        if step.get("block") is None:
            return BoundChain(step, env, None, {}, lambda env: None, self.take)
        pattern, weight = self._matrix(step).operands(step.is_transposed)
        source = self._constant(step, "source")
        if weight is not None and source is not None:
            weight, source = self._joined(step, pattern, weight, source), None
        constants = {"edge": weight, "source": source, "target": self._constant(step, "target")}
        scale = self._bound_scale(step, "block_scale", pattern.num_rows)
        return BoundChain(step, env, pattern, constants, scale, self.take)

    def _stack(self, step: Step, env: Env, owns: bool) -> torch.Tensor:
        return torch.cat([env[name] for _, name in step.reads])

    def _rows_of(self, step: Step, env: Env, owns: bool) -> torch.Tensor:
        which = int(step.factors[0])
        names = [name for role, name in step.reads if role.startswith("part")]
        first = sum(env[name].shape[0] for name in names[:which])
        stacked: torch.Tensor = env[step["x"]]
        return stacked[first : first + env[names[which]].shape[0]]

    # Everything else --------------------------------------------------------------------------

    def _columns_of(self, step: Step, env: Env, owns: bool) -> torch.Tensor:
        which = int(step.factors[0])
        names = [name for role, name in step.reads if role.startswith("of")]
        first = sum(env[name].shape[1] for name in names[:which])
        whole: torch.Tensor = env[step["x"]]
        return whole[:, first : first + env[names[which]].shape[1]]

    def _concat(self, step: Step, env: Env, owns: bool) -> torch.Tensor:
        parts = [env[name] for _, name in step.reads]
        out = self._out(step, env, False, parts[0].shape[0], sum(p.shape[1] for p in parts), parts[0])
        return torch.cat(parts, dim=1, out=out)

    def _scale_rows(self, step: Step, env: Env, owns: bool) -> torch.Tensor:
        x = env[step["x"]]
        scale = self._constant(step, "scale")
        assert scale is not None
        out = self._like(x)
        return torch.mul(x, scale.unsqueeze(1), out=out)

    def _scale(self, step: Step, env: Env, owns: bool) -> torch.Tensor:
        x = env[step["x"]]
        out = self._like(x)
        return torch.mul(x, env[step["scalar"]].detach().reshape(()), out=out)

    def _combine(self, step: Step, env: Env, owns: bool) -> torch.Tensor:
        values = [env[name] for role, name in step.reads if role != "bias"]
        bias = env.get(step.get("bias") or "")
        out = self._like(values[0])
        if len(values) > 1 and step.factors[0] == 1.0:
            torch.add(values[0], values[1], alpha=step.factors[1], out=out)
            rest = zip(values[2:], step.factors[2:], strict=True)
        else:
            torch.mul(values[0], step.factors[0], out=out)
            rest = zip(values[1:], step.factors[1:], strict=True)
        for value, factor in rest:
            out.add_(value, alpha=factor)
        return out if bias is None else out.add_(bias)

    def _relu(self, step: Step, env: Env, owns: bool) -> torch.Tensor:
        x = env[step["x"]]
        if owns:
            return torch.relu_(x)
        return torch.clamp_min(x, 0, out=self._like(x))

    def _relu_backward(self, step: Step, env: Env, owns: bool) -> torch.Tensor:
        grad = env[step["x"]]
        out = grad if owns else self._like(grad)
        return torch.ops.aten.threshold_backward.grad_input(grad, env[step["made"]], 0, grad_input=out)  # type: ignore[no-any-return]

    def _colsum(self, step: Step, env: Env, owns: bool) -> torch.Tensor:
        return dense.column_sums(env[step["x"]])

    def _dot(self, step: Step, env: Env, owns: bool) -> torch.Tensor:
        return torch.dot(env[step["left"]].reshape(-1), env[step["right"]].reshape(-1)).reshape(1)


def _spread(
    scalar: str, name: str | None, diagonal: torch.Tensor | None, rows: int, env: Env
) -> torch.Tensor:
    """A number of the call on every row, times a diagonal where there is one; made once in a pass."""
    place = f"{scalar}|{name}|{rows}"
    found: torch.Tensor | None = env.get(place)
    if found is None:
        number = env[scalar].detach().reshape(1)
        found = number.expand(rows).contiguous() if diagonal is None else diagonal * number
        env[place] = found
    return found


def _marks_of(name: str) -> str:
    """Where the marks of an extremum are kept, if it made any."""
    return f"{name}|marks"


def _order(order: np.ndarray[Any, Any], pattern: sparse.Pattern) -> torch.Tensor:
    """A column of edge numbers as the kernels read them."""
    return torch.from_numpy(np.ascontiguousarray(order, pattern.indices.dtype)).unsqueeze(1)


def _fresh(rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty((rows, cols), dtype=dtype)


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


class _Expression(torch.autograd.Function):
    """One planned expression as one node of torch's graph; transposed inputs come as they are stored."""

    @staticmethod
    def forward(ctx: Any, run: Run, names: tuple[str, ...], *inputs: torch.Tensor) -> torch.Tensor:
        env = Env(zip(names, inputs, strict=True))
        if run.hoisted:
            env.update(run.hoisted)
        run.forward(env)
        ctx.run, ctx.names = run, names
        # intermediates go the same way as inputs, so that autograd frees them after the backward pass
        ctx.save_for_backward(*inputs, *[env.get(name) for name in run.kept])
        return run.output(env)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        # what forbids a second derivative takes as long as the rest; it is only needed where one is asked for
        return _differentiable_once(ctx, grad) if torch.is_grad_enabled() else _gradients(ctx, grad)


def _gradients(ctx: Any, grad: torch.Tensor) -> Any:
    run: Run = ctx.run
    saved = ctx.saved_tensors  # once: checkpointing unpacks a tensor a single time
    env = Env(zip((*ctx.names, *run.kept), saved, strict=True))
    if run.hoisted:
        env.update(run.hoisted)
    env["grad"] = _rows_contiguous(grad, run.buffers)
    run.backward(env)
    grads: list[torch.Tensor | None] = [None, None]
    for name, value in zip(ctx.names, saved, strict=False):
        output = run.gradient_of.get(name)
        made = None if output is None else env[output]
        grads.append(made if made is None or made.shape == value.shape else made.reshape(value.shape))
    return tuple(grads)


_differentiable_once = once_differentiable(_gradients)


def _stored(value: torch.Tensor) -> torch.Tensor | None:
    """The matrix that `value` is the transpose of, where both want a gradient.

    PyG stores weights [out, in] and expressions read them [in, out]. A gradient that goes to the stored
    matrix passes one node fewer and is not copied to be turned.
    """
    base = value._base
    if (
        base is None
        or base.dim() != 2
        or value.dim() != 2
        or not (value.requires_grad and base.requires_grad)
    ):
        return None
    is_turned = (
        value.shape == base.shape[::-1]
        and value.stride() == base.stride()[::-1]
        and value.data_ptr() == base.data_ptr()
        and value.stride(1) != 1
    )
    return base if is_turned else None


def _rows_contiguous(grad: torch.Tensor, buffers: Buffers) -> torch.Tensor:
    """Kernels want rows of contiguous elements; the gradient of a sum is one number, strides zero."""
    if grad.stride(1) == 1 and (grad.shape[0] <= 1 or grad.stride(0) >= grad.shape[1]):
        return grad
    return buffers.take(grad.shape[0], grad.shape[1], grad.dtype).copy_(grad)


def apply(run: Run, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The value of the planned expression; differentiable where inputs are."""
    if run.plan.backward is None:
        env = Env(inputs, **run.hoisted)  # no input wants a gradient: nothing is recorded
        run.forward(env)
        return run.output(env)
    names, values = [], []
    for name, value in inputs.items():
        stored = _stored(value)
        names.append(name if stored is None else turned(name))
        values.append(value if stored is None else stored)
    return _Expression.apply(run, tuple(names), *values)  # type: ignore[no-any-return, no-untyped-call]
