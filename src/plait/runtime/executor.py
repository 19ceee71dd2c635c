"""Carries out a plan under torch autograd: one autograd function per expression, each step on its kernel."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.profiler import record_function

from plait.errors import InputError
from plait.ops.exchange import EXCHANGES
from plait.ops.operation import operation
from plait.ops.program import Program, Step
from plait.plan.plan import LayerPlan, Measured
from plait.runtime import attention as attention  # enter their kernels
from plait.runtime import cuda as cuda
from plait.runtime import cuda_messages as cuda_messages
from plait.runtime import cuda_passes as cuda_passes
from plait.runtime import cuda_pieces as cuda_pieces
from plait.runtime import cuda_pna as cuda_pna
from plait.runtime import cuda_relations as cuda_relations
from plait.runtime import edgewise as edgewise
from plait.runtime import entries as entries
from plait.runtime import gated as gated
from plait.runtime import known as known
from plait.runtime import lstm as lstm
from plait.runtime import messages as messages
from plait.runtime import pieces as pieces
from plait.runtime import pna as pna
from plait.runtime import relational as relational
from plait.runtime.adjoint import leaf_turned_by
from plait.runtime.bind import Binding, bind
from plait.runtime.buffers import Buffers
from plait.runtime.chain import ChainOutline, Env, turned
from plait.runtime.clock import clock_of
from plait.runtime.constants import Constants
from plait.runtime.evaluate import evaluate, gradients_depend_on
from plait.runtime.identity import counts_writes
from plait.runtime.linear import marks_of
from plait.runtime.meaning import evaluate_program
from plait.runtime.orders import EdgeOrders
from plait.runtime.replayed import Replayed, capture, noted
from plait.runtime.trace import is_profiling
from plait.runtime.twice import added, differentiable

__all__ = ["Inputs", "Run", "apply", "apply_to", "in_torch", "stored"]


_CPU = torch.device("cpu")
_ALL = slice(None)  # steps of a program


class Outline:
    """The part of a plan's run that does not depend on the graph: order of calls, what is kept and saved.

    Where graphs change at every step, a plan is bound to each new one and this part is reused.
    """

    def __init__(self, plan: LayerPlan):
        self.plan = plan
        self.prices = {step.step.out: step.price for step in (*plan.hoisted_steps, *reversed(plan.steps))}
        self.kept = _kept(plan)
        # a result that is hoisted or an input: the caller, who may write to it, gets a copy
        self.is_output_kept = all(step.out != plan.forward.outputs[0] for step in plan.forward.steps)
        # the output, where a program's backward pass reads it: it goes to the caller, who may write to it
        self.output = next((n for n in plan.forward.outputs if plan.expr is None and n in self.kept), None)
        self.held = tuple(name for name in self.kept if name != self.output)  # what autograd saves of them
        self.forward = _placed(plan.forward, (*self.kept, *plan.forward.outputs))
        self.chains: dict[str, ChainOutline] = {}  # by what they make; the plan is for these widths
        self._saved: dict[tuple[str, ...], _Saved] = {}

    @functools.cached_property
    def backward(self) -> Placed:
        assert self.plan.backward is not None
        return _placed(self.plan.backward, self.plan.backward.outputs)

    @functools.cached_property
    def gradient_of(self) -> dict[str, str]:
        """Input -> the value that is its gradient; that of a turned input is turned."""
        assert self.plan.backward is not None
        found = dict(zip(self.plan.wrt, self.plan.backward.outputs, strict=True))
        return found | {turned(name): turned(output) for name, output in found.items()}

    @functools.cached_property
    def depends_on(self) -> frozenset[str]:
        """The inputs that gradients depend on or the backward pass reads; of others it may know the shape."""
        assert self.plan.backward is not None
        read = {
            name
            for step in self.plan.backward.steps
            for role, name in step.reads
            if role == "x" or step.op not in ("columns_of", "rows_of")
        }
        if self.plan.expr is None:
            return frozenset(read)
        return frozenset(read) | gradients_depend_on(self.plan.expr, self.plan.wrt)

    def saved(self, names: tuple[str, ...]) -> _Saved:
        """What is kept of inputs with these names."""
        found = self._saved.get(names)
        if found is None:
            assert self.plan.backward is not None
            places = tuple(
                k for k, name in enumerate(names) if not self.depends_on.isdisjoint((name, turned(name)))
            )
            read = {name for step in self.plan.backward.steps for _, name in step.reads}
            shaped = (k for k, name in enumerate(names) if not read.isdisjoint((name, turned(name))))
            found = self._saved[names] = _Saved(
                places,
                tuple(k for k in range(len(names)) if k not in places),
                (*(names[k] for k in places), *self.held),
                tuple(self.gradient_of.get(name) for name in names),
                tuple(k for k in shaped if k not in places),
            )
        return found


_MOST_OUTLINES = 512
_outlines: dict[int, Outline] = {}


def _outline(plan: LayerPlan) -> Outline:
    """The plan's outline; found by the plan's identity, which lasts as long as the outline that holds it."""
    found = _outlines.get(id(plan))
    if found is None:
        while len(_outlines) >= _MOST_OUTLINES:
            _outlines.pop(next(iter(_outlines)), None)
        found = _outlines[id(plan)] = Outline(plan)
    return found


def _kept(plan: LayerPlan) -> tuple[str, ...]:
    """Values made by the forward pass that the backward pass reads."""
    made = {name for step in plan.forward.steps for name in (step.out, *step.more)}
    reads = {name for step in plan.backward.steps for _, name in step.reads} if plan.backward else set()
    extrema = [step for step in plan.forward.steps if step.op == "extremum"]
    marks = {marks_of(step.out) for step in extrema if step.more[0] in reads}
    return tuple(sorted((made & reads) | marks))


@dataclass
class Run:
    """A plan bound to one graph: its constants, its buffers, the values hoisted for the current inputs."""

    plan: LayerPlan
    constants: Constants
    buffers: Buffers
    hoisted: Mapping[str, Any] = field(default_factory=dict)
    place: torch.device = _CPU
    orders: EdgeOrders | None = None  # the edges both ways round, for passes over them
    serves: int | None = None  # the token of the input that stays the same, where it was made to stay too
    may_replay: bool = True  # results of replayed programs stay allocated
    trace: list[tuple[str, Measured]] | None = None  # filled by explain(analyze=True)
    _forward: Compiled | None = None
    _backward: Compiled | None = None
    layouts: dict[tuple[str, ...], Inputs] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._is_on_cpu = self.place.type == "cpu"
        self.outline = _outline(self.plan)  # of the plan as it was bound: what is said about it may change

    def forward(self, env: Env, part: slice | None = None) -> None:
        """The forward pass; `part`: only these of its steps, on a CPU."""
        if self._forward is None:
            self._forward = Compiled(self.plan.forward, self, self.outline.forward)
        self._run(self._forward, env, part)

    def backward(self, env: Env, part: slice | None = None) -> None:
        """The backward pass; `part`: only these of its steps, on a CPU."""
        if self._backward is None:
            assert self.plan.backward is not None
            self._backward = Compiled(self.plan.backward, self, self.outline.backward)
        self._run(self._backward, env, part)

    def _run(self, program: Compiled, env: Env, part: slice | None) -> None:
        if self._is_on_cpu:
            if self.trace is None and not is_profiling():
                return program.run_plainly(env, part)
            return program.run(env, part)
        if self.place.index == torch.cuda.current_device():
            return program.run_on_gpu(env)
        with torch.cuda.device(self.place):  # kernels start on the current one
            program.run_on_gpu(env)

    @property
    def kept(self) -> tuple[str, ...]:
        """Values made by the forward pass that the backward pass reads."""
        return self.outline.kept

    def output(self, env: Env) -> torch.Tensor:
        """The result of a forward pass."""
        result: torch.Tensor = env[self.plan.forward.outputs[0]]
        return result.clone() if self.outline.is_output_kept else result

    def layout(self, names: tuple[str, ...], values: Sequence[torch.Tensor]) -> Inputs:
        """What is kept of these inputs, remembered in `layouts`; the plan is for their shapes."""
        saved = self.outline.saved(names)
        shapes = tuple([value.shape for value in values])
        blank = {names[k]: torch.empty(shapes[k], dtype=values[k].dtype, device="meta") for k in saved.shaped}
        found = Inputs(names, shapes, saved.places, saved.others, saved.keys, saved.outputs, blank)
        self.layouts[names] = found
        return found

    def hoist(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The values that stay the same from call to call, computed now."""
        program = self.plan.hoisted
        env = Env(inputs)
        Compiled(program, self, _placed(program, program.outputs), may_pool=False).run(env)
        return {name: env[name] for name in program.outputs}


@dataclass(frozen=True, slots=True)
class _Saved:
    """What is saved of inputs with given names; see Inputs."""

    places: tuple[int, ...]
    others: tuple[int, ...]
    keys: tuple[str, ...]
    outputs: tuple[str | None, ...]
    shaped: tuple[int, ...]  # inputs of which the backward pass reads the shape alone


@dataclass(frozen=True, slots=True)
class Inputs:
    """The inputs of a planned expression as a call hands them over."""

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    saved: tuple[int, ...]  # those some gradient depends on
    others: tuple[int, ...]  # those that may change before the backward pass
    keys: tuple[str, ...]  # names of all that is saved: these inputs, then what forward made for backward
    outputs: tuple[str | None, ...]  # of the backward program: the gradient of each input
    blank: Mapping[str, torch.Tensor]  # inputs that are not saved and whose shape is read

    def gradients(self, env: Env) -> list[torch.Tensor | None]:
        """Those of all inputs, after the backward pass."""
        grads: list[torch.Tensor | None] = []
        for output, shape in zip(self.outputs, self.shapes, strict=True):
            made = None if output is None else env[output]
            # a vector's gradient may come as a matrix of one row
            grads.append(made if made is None or made.dim() == len(shape) else made.reshape(shape))
        return grads


Placed = tuple[tuple[Step, bool, tuple[str, ...]], ...]
"""Steps in order, whether each may overwrite its operand, and the values that nothing reads after it."""


def _placed(program: Program, keep: tuple[str, ...]) -> Placed:
    """The steps of a program of which these values are kept."""
    made = {name for step in program.steps for name in (step.out, *step.more)}
    last = {name: k for k, step in enumerate(program.steps) for _, name in step.reads if name in made}
    views = {step.out for step in program.steps if operation(step.op).is_view}
    placed = []
    for k, step in enumerate(program.steps):
        dead = tuple(name for name in last if last[name] == k and name not in keep)
        placed.append((step, _owns(step, program, dead) not in (None, *views), dead))
    return tuple(placed)


class Compiled:
    """A program as a list of calls on one graph.

    It refers to its run weakly, as what it binds does: in a cycle the graphs seen only once would wait for
    the collector, and every step would be computed in memory that no cache holds.
    """

    def __init__(self, program: Program, run: Run, placed: Placed, may_pool: bool = True):
        self._run, self.program = weakref.ref(run), program
        binding = Binding(program, run, may_pool)
        self.calls = [(step.out, bind(binding, step, owns), dead) for step, owns, dead in placed]
        is_replayed = run.place.type == "cuda" and run.may_replay
        self._replayed = Replayed(self.run, capture) if is_replayed else None

    @property
    def run_of(self) -> Run:
        """The run it is part of, which lasts as long as anyone carries it out."""
        run = self._run()
        assert run is not None
        return run

    def run_on_gpu(self, env: Env) -> None:
        """The same, replayed if the values are at the same addresses as before."""
        replayed, index = self._replayed, self.run_of.place.index
        if replayed is None or self.run_of.trace is not None or is_profiling():
            return self.run(env)
        if torch.cuda.is_current_stream_capturing():  # somebody else's graph
            if noted.runs is not None:
                noted.runs.append(self.run_of)
            return self.run(env)
        replayed.run(env, torch._C._cuda_getCurrentRawStream(index))

    def run(self, env: Env, part: slice | None = None) -> None:
        trace = self.run_of.trace
        if trace is not None:
            return self._run_timed(env, trace, part or _ALL)
        if is_profiling():
            return self._run_named(env, part or _ALL)
        self.run_plainly(env, part)

    def run_plainly(self, env: Env, part: slice | None = None) -> None:
        """The same where nobody times the steps or watches them."""
        for out, call, dead in self.calls if part is None else self.calls[part]:
            env[out] = call(env)
            for name in dead:
                env.pop(name, None)  # a chain's block that nobody keeps was never there

    def _run_named(self, env: Env, part: slice) -> None:
        """The same, each step a range that the running profiler shows."""
        plan, program = self.run_of.plan, self.program
        phase = "fwd" if program is plan.forward else "bwd" if program is plan.backward else "once"
        for (out, call, dead), step in zip(self.calls[part], program.steps[part], strict=True):
            with record_function(f"plait {plan.layer}: {phase} {step.op} -> {out}"):
                env[out] = call(env)
            for name in dead:
                env.pop(name, None)

    def _run_timed(self, env: Env, trace: list[tuple[str, Measured]], part: slice) -> None:
        calls = self.calls[part]
        clock, sizes = clock_of(self.run_of.place, len(calls)), []
        for out, call, dead in calls:
            result = env[out] = clock.time(call, env)
            sizes.append(result.nbytes if isinstance(result, torch.Tensor) else 0)
            for name in dead:
                env.pop(name, None)
        for (out, _, _), size, seconds in zip(calls, sizes, clock.seconds(), strict=True):
            trace.append((f"{self.run_of.plan.layer}\0{out}", Measured(seconds, size)))


def _owns(step: Step, program: Program, dead: tuple[str, ...]) -> str | None:
    """The value whose memory the step may write its result to: it is not read again, nor twice in the step.

    A sparse product gathers from x while it writes: an added term that is x too must stay as it is.
    """
    role = operation(step.op).overwrites
    name = step.get(role) if role else None
    if name is None or name not in dead or program.shapes[name] != program.shapes[step.out]:
        return None
    return name if [other for _, other in step.reads].count(name) == 1 else None


class _Expression(torch.autograd.Function):
    """One planned expression as one node of torch's graph; transposed inputs come as they are stored."""

    @staticmethod
    def forward(
        ctx: Any, run: Run, layout: Inputs, given: Mapping[str, Any] | None, *inputs: torch.Tensor
    ) -> torch.Tensor:
        env = Env(zip(layout.names, inputs, strict=True))
        if given:
            env.update(given)
        if run.hoisted:
            env.update(run.hoisted)
        run.forward(env)
        ctx.run, ctx.layout, ctx.given = run, layout, given
        if run.plan.expr is None:
            ctx.rest = _Rest(run, layout, inputs, env)
        saved, held = [inputs[k] for k in layout.saved], run.outline.held
        # intermediates go the same way as inputs, so that autograd frees them after the backward pass
        ctx.save_for_backward(*saved, *(map(env.get, held) if held else ()))
        return run.output(env)

    @staticmethod
    @differentiable(lambda ctx, grad, saved: _in_torch(ctx, grad, saved))
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        run: Run = ctx.run
        layout: Inputs = ctx.layout
        # saved_tensors once: checkpointing unpacks a tensor a single time
        env = Env(layout.blank)
        if ctx.given:
            env.update(ctx.given)
        # where nothing is saved, nothing was freed: such a pass may run again
        if layout.keys:
            env.update(zip(layout.keys, ctx.saved_tensors, strict=True))
        if run.outline.output is not None:
            ctx.rest.put_output(env)
        if run.hoisted:
            env.update(run.hoisted)
        env["grad"] = _rows_contiguous(grad, run.buffers)
        run.backward(env)
        return (None, None, None, *layout.gradients(env))


# without the wrapper in Python, which serves torch.func only: see runtime/deferred.py
_expression: Callable[..., torch.Tensor] = super(torch.autograd.Function, _Expression).apply


def _in_torch(
    ctx: Any, grad: torch.Tensor, saved: Sequence[Any]
) -> tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]:
    """(the expression's value in torch's operations, the inputs it was computed from)."""
    run: Run = ctx.run
    layout: Inputs = ctx.layout
    if run.plan.expr is None:
        return _program_in_torch(ctx, saved)
    out, inputs = in_torch(run, layout, dict(zip(layout.keys, saved, strict=True)), grad)
    return out, (None, None, None, *inputs)


def in_torch(
    run: Run, layout: Inputs, known: Mapping[str, torch.Tensor], like: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """(the expression's value in torch's operations, all inputs), given those inputs that were saved."""
    if any(step.op in EXCHANGES for step in (*run.plan.forward.steps, *run.plan.hoisted.steps)):
        raise InputError(
            "create_graph: a layer that exchanges rows with other ranks has first derivatives only; compute "
            "derivatives of derivatives on one process, with plait.compile in the place of plait.shard"
        )
    inputs = [
        known[name] if name in known else added(shape, like)
        for name, shape in zip(layout.names, layout.shapes, strict=True)
    ]
    values = Env(zip(layout.names, inputs, strict=True))
    assert run.plan.expr is not None
    return evaluate(run.plan.expr, values, run.constants), inputs


class _Rest:
    """What a program's backward pass needs besides what autograd saved for it.

    The output: it goes to the caller, and if it was written to, it is computed again. Inputs that only a
    derivative of the derivative reads: they may change until one is asked for.
    """

    def __init__(self, run: Run, layout: Inputs, inputs: Sequence[torch.Tensor], env: Env):
        self._run, self._layout = run, layout
        name = run.outline.output
        self._output = None if name is None else (env[name].detach(), _version(env[name]))
        self._unsaved = [(inputs[k], _version(inputs[k])) for k in layout.others]

    @property
    def output(self) -> torch.Tensor | None:
        """The output, where the backward pass reads it."""
        return None if self._output is None else self._output[0]

    def put_output(self, env: Env) -> None:
        """Put the output under its name, beside what was saved."""
        name, names = self._run.outline.output, self._layout.names
        assert name is not None
        assert self._output is not None
        value, version = self._output
        if _version(value) != version:
            unsaved = zip(self._layout.others, self._unsaved, strict=True)
            again = Env({names[k]: given for k, (given, _) in unsaved} | env)
            self._run.forward(again)
            value = again[name]
        env[name] = value

    def inputs(self, saved: Sequence[Any]) -> list[torch.Tensor]:
        """All inputs, for a derivative of the derivative."""
        found = dict(zip(self._layout.saved, saved, strict=False))
        for k, (value, version) in zip(self._layout.others, self._unsaved, strict=True):
            if _version(value) != version:
                raise RuntimeError(
                    f"{self._layout.names[k]} of layer {self._run.plan.layer} was modified by an inplace "
                    "operation before a derivative of its gradient was computed; clone it first"
                )
            found[k] = value.view_as(value) if value.requires_grad else value
        return [found[k] for k in range(len(self._layout.names))]


def _version(value: torch.Tensor) -> int:
    return value._version if counts_writes(value) else 0


def _program_in_torch(ctx: Any, saved: Sequence[Any]) -> tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]:
    """The same of a layer that is a program: each of its steps in torch's operations."""
    inputs = ctx.rest.inputs(saved)
    env = Env(zip(ctx.layout.names, inputs, strict=True))
    env.update(ctx.given or {})
    return evaluate_program(ctx.run, env), (None, None, None, *inputs)


def _stored(value: torch.Tensor) -> torch.Tensor | None:
    """The parameter that `value` is the transpose of, where its gradient is wanted.

    PyG stores weights [out, in] and expressions read them [in, out]. A gradient that goes to the stored
    matrix passes one node fewer and is not copied to be turned.
    """
    # the way back must lead to a leaf right away, and it must still have the memory that was turned
    leaf = leaf_turned_by(value.grad_fn)
    if leaf is None or value._base is not leaf or value.dim() != 2 or value.stride(1) == 1:
        return None
    return leaf if value.data_ptr() == leaf.data_ptr() and value.shape == leaf.shape[::-1] else None


def _rows_contiguous(grad: torch.Tensor, buffers: Buffers) -> torch.Tensor:
    """Kernels need rows of contiguous elements; the gradient of a sum is one number with strides of zero."""
    if grad.stride(1) == 1 and (grad.shape[0] <= 1 or grad.stride(0) >= grad.shape[1]):
        return grad
    if not grad.is_cpu:
        return grad.contiguous()
    return buffers.take(grad.shape[0], grad.shape[1], grad.dtype).copy_(grad)


def apply(
    run: Run, inputs: Mapping[str, torch.Tensor], given: Mapping[str, Any] | None = None
) -> torch.Tensor:
    """The value of the planned expression; differentiable where inputs are. `given`: what is not a tensor."""
    if run.plan.backward is None:
        return apply_to(run, tuple(inputs), tuple(inputs.values()), given)
    return apply_to(run, *stored(inputs), given)


def stored(inputs: Mapping[str, torch.Tensor]) -> tuple[tuple[str, ...], list[torch.Tensor]]:
    """Inputs by name, transposes of parameters as these are stored."""
    names, values = [], []
    for name, value in inputs.items():
        leaf = _stored(value)
        names.append(name if leaf is None else turned(name))
        values.append(value if leaf is None else leaf)
    return tuple(names), values


def apply_to(
    run: Run,
    names: tuple[str, ...],
    values: Sequence[torch.Tensor],
    given: Mapping[str, Any] | None = None,
) -> torch.Tensor:
    """The same of inputs by name, transposes of parameters as these are stored."""
    if run.plan.backward is None:
        env = Env(zip(names, values, strict=True))  # no input needs a gradient: nothing is recorded
        if run.hoisted:
            env.update(run.hoisted)
        if given:
            env.update(given)
        run.forward(env)
        return run.output(env)
    layout = run.layouts.get(names) or run.layout(names, values)
    if torch._C._are_functorch_transforms_active():  # torch raises the error
        return _Expression.apply(run, layout, given, *values)  # type: ignore[no-any-return, no-untyped-call]
    return _expression(run, layout, given, *values)
