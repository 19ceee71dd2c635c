"""plait.compile and plait.explain: the same model, its layers planned."""

from __future__ import annotations

import functools
import logging
import random
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from statistics import median
from typing import Any, Literal, overload

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parameter import is_lazy
from torch_geometric.nn import MessagePassing

from plait.errors import InputError
from plait.measure.environment import BusyElsewhere
from plait.plan.dial import parse_bytes
from plait.plan.plan import Plan
from plait.pyg.call import Call, call_of
from plait.pyg.calling import in_this_thread, timed_calls
from plait.pyg.captured import TrainingStep, training_step
from plait.pyg.planned import install, is_disabled
from plait.pyg.view import CompiledModel, never_planned, plan_of, view_of
from plait.runtime.clock import now
from plait.runtime.deferred import held_rows
from plait.runtime.dial import follow
from plait.runtime.forms import chosen_names
from plait.runtime.identity import counts_writes
from plait.runtime.session import Options, Session
from plait.runtime.twins import find_twins

__all__ = ["compile", "explain", "rehearse"]

_log = logging.getLogger("plait")


@overload
def compile(
    model: nn.Module,
    data: Any = None,
    *,
    rows: Tensor | None = None,
    memory_limit: int | None = None,
    epochs: int = 200,
    mode: str | None = None,
    forms: Sequence[str] | None = None,
    capture: Literal[False] = False,
    loss: None = None,
    optimizer: None = None,
) -> nn.Module: ...


@overload
def compile(
    model: nn.Module,
    data: Any = None,
    *,
    rows: Tensor | None = None,
    memory_limit: int | None = None,
    epochs: int = 200,
    mode: str | None = None,
    forms: Sequence[str] | None = None,
    capture: Literal[True],
    loss: Callable[[nn.Module, Any], Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> TrainingStep: ...


def compile(
    model: nn.Module,
    data: Any = None,
    *,
    rows: Tensor | None = None,
    memory_limit: int | str | None = None,
    epochs: int = 200,
    mode: str | None = None,
    forms: Sequence[str] | None = None,
    capture: bool = False,
    loss: Callable[[nn.Module, Any], Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> nn.Module | TrainingStep:
    """The same model with its PyG layers planned: same parameters, same state_dict keys, same outputs.

    `data` (a PyG Data with x and edge_index) lets the plan be made now; without it, it is made at the first
    call. `rows` (a mask or node numbers) names the rows the loss needs: in training the last layer computes
    only those, and the others when something else reads them. `memory_limit`, bytes or
    text such as "8GB" or "512 MiB", bounds what a step of the whole model holds: layers keep less and compute
    more where that is needed (docs/planning.md). `epochs` is how many steps work done once is spread over.
    `mode` is "training" or "inference" for the plan made now (default: model.training). `forms` names the
    graph forms that may be used, where a timed check finds them faster: "csr", "hag" (shared neighbours
    summed once), "twins" (nodes no layer can tell apart computed once), and, only if named, "diff" (rows as
    differences: often faster, but outliers lose digits); without "csr" the others are used untimed.
    The compiled model is a second view of the given one: parameters, children, hooks and modes are the
    same objects, whichever view changes them. Called through the compiled view, by any of its methods, layers
    run planned; called through the original, the very same layers run in PyG.
    `capture=True` returns a training step instead (docs/gpu.md): `.step()` runs `loss(model, data)`, its
    backward pass and, where given, the optimizer as one CUDA graph, `.step(batch)` the same on a mini-batch;
    `.model` is the compiled model.
    """
    if not capture and (loss is not None or optimizer is not None):
        raise InputError("loss, optimizer: they belong to a captured step; pass capture=True too")
    _check_arguments(model, epochs, mode)
    limit = None if memory_limit is None else parse_bytes(memory_limit)
    call = None if data is None else call_of(model, data)
    install()
    session = Session(Options(_row_numbers(rows, data), limit, epochs, chosen_names(forms)))
    compiled = view_of(model, session)
    for name, reason in never_planned(compiled).items():
        _log.info("layer %s runs in PyG: %s", name, reason)
    if not is_disabled() and data is not None:
        _look_ahead(compiled, session, call, mode or ("training" if model.training else "inference"))
    return training_step(compiled, data, loss, optimizer) if capture else compiled


def explain(
    model: nn.Module,
    data: Any = None,
    analyze: bool = False,
    *,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    **options: Any,
) -> Plan:
    """The plan of a model on a graph; with analyze=True it is run and every step gets its measured time.

    `data` is a PyG Data whose attributes are named like the parameters of the model's forward; `args` and
    `kwargs`, where given, are what the model is called with instead. `options` are those of `compile`.
    The model is left as it was: no gradients, no changed buffers, no drawn random numbers.
    """
    _check_arguments(model, options.get("epochs", 1), options.get("mode"))
    call = _given_call(args, kwargs) or call_of(model, data)
    compiled: Any = model
    if not isinstance(model, CompiledModel):
        compiled = compile(model, data if args is None and kwargs is None else None, **options)
    session: Session = compiled._plait_plan_session
    mode = options.get("mode") or ("training" if model.training else "inference")
    if not session.plans.of(mode) and not is_disabled():
        _look_ahead(compiled, session, call, mode)
    if analyze:
        return _analyze(compiled, session, call, mode)
    # a model of which nothing is learned computes no gradients in training: its only plan is one without
    return plan_of(compiled, mode if session.plans.of(mode) else None)


def rehearse(
    model: nn.Module,
    session: Session,
    call: Call,
    mode: str,
    within: AbstractContextManager[Any] | None = None,
) -> Any:
    """The model's output from one call with its layers planned by a session; all state is restored.

    `within` surrounds the call alone.
    """
    install()
    is_training = mode == "training"
    with _quietly(model, call, is_training), torch.set_grad_enabled(is_training), within or nullcontext():
        return call(view_of(model, session))


def _given_call(args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None) -> Call | None:
    """The call with the user's own arguments, if any were given."""
    if args is None and kwargs is None:
        return None
    if not isinstance(args, tuple | list | None):
        raise InputError(f"args: {type(args).__name__}; pass a tuple such as args=(x, edge_index)")
    if not isinstance(kwargs, Mapping | None):
        raise InputError(f"kwargs: {type(kwargs).__name__}; pass a dictionary of arguments by name")
    return Call(tuple(args or ()), dict(kwargs or {}))


def _check_arguments(model: Any, epochs: Any, mode: Any) -> None:
    if not isinstance(model, nn.Module):
        raise InputError(
            f"model: {type(model).__name__} is not a torch.nn.Module; "
            "pass the model itself, not its class or output"
        )
    if not isinstance(epochs, int) or epochs < 1:
        raise InputError(f"epochs: {epochs!r}; pass how many training steps the plan will serve, 1 or more")
    if mode not in (None, "training", "inference"):
        raise InputError(f"mode: {mode!r}; pass 'training' or 'inference'")


def _row_numbers(rows: Tensor | None, data: Any) -> Tensor | None:
    if rows is None:
        return None
    rows = torch.as_tensor(rows)
    count = getattr(data, "num_nodes", None)
    if rows.dtype == torch.bool:
        if count is not None and rows.shape != (count,):
            raise InputError(
                f"rows: a mask of shape {tuple(rows.shape)} for {count} nodes; pass one flag for each node"
            )
        return rows.nonzero().reshape(-1).cpu()
    if rows.dtype.is_floating_point or rows.dim() != 1:
        raise InputError(
            f"rows: {rows.dtype} of shape {tuple(rows.shape)}; pass a mask or a vector of node numbers"
        )
    if rows.numel() and (int(rows.min()) < 0 or (count is not None and int(rows.max()) >= count)):
        raise InputError(f"rows: node numbers must lie in 0..{(count or 0) - 1}")
    # a row named twice is computed once; otherwise its gradient would count twice
    once: Tensor = torch.unique(rows.long().cpu())
    return once


_BUSY = 0.1  # share of the processor used by others from which measured times are called doubtful
# what layers with cached=True keep of their first call, and SuperGATConv of its last
_CACHES = ("_cached_", "att_x", "att_y")


# Looking ahead -----------------------------------------------------------------------------------------


def _look_ahead(model: nn.Module, session: Session, call: Call | None, mode: str) -> None:
    """Run the model once to plan it, in the mode the plan is for, and leave everything as it was."""
    if mode == "training" and _is_for_inference(model, call):
        session.notes.append("planned for inference: tensors made in inference_mode have no gradients")
        mode = "inference"
    session.dial.is_paused = True
    try:
        with torch.inference_mode(torch.is_inference_mode_enabled() and mode == "inference"):
            _plan_ahead(model, session, call, mode)
    finally:
        session.dial.is_paused = False


def _is_for_inference(model: nn.Module, call: Call | None) -> bool:
    """Whether a tensor of the model or the call was made in inference_mode: autograd does not take those."""
    values = () if call is None else call.tensors()
    return any(not counts_writes(t) for t in (*model.parameters(), *values) if not is_lazy(t))


def _plan_ahead(model: nn.Module, session: Session, call: Call | None, mode: str) -> None:
    """Run the model as it will be run, then look for faster forms of its graphs.

    Dropout in front of a layer makes its input another tensor at every step: only a run in training mode
    shows that, and nothing is hoisted then that training would never use.
    """
    if call is None:
        session.notes += ["the model's arguments are not attributes of data: planned at the first call"]
        return
    if call.features is not None:
        session.constant_input = weakref.ref(call.features)
    ran: list[nn.Module] = []
    has_layers = any(isinstance(m, MessagePassing) for m in model.modules())
    quietly = functools.partial(_quietly, model, call, mode == "training")
    try:
        if mode == "training" and not _runs_in_training(model, session, call, ran):
            quietly = functools.partial(_quietly, model, call, False)
        if not ran:
            with quietly(), _recorded(ran), torch.set_grad_enabled(mode == "training"):
                _follow(model, session, call, call(model), mode)
        if any(getattr(m, "cached", False) for m in ran):
            with quietly(), torch.set_grad_enabled(mode == "training"):
                call(model)
                call(model)  # the first call fills PyG's cache
    except Exception:
        if call.is_guessed:
            session.notes += ["the model's arguments are not named like attributes of data: "
                             "planned at the first call"]  # fmt: skip
            return
        if has_layers:
            raise  # no warning for a model that has nothing to do with graphs
    if not any(isinstance(m, MessagePassing) for m in ran):
        session.notes += ["no PyG layer was found in the model: nothing to plan"]
        return
    run = functools.partial(_run_once, model, call, quietly, mode == "training")
    if mode == "training" and session.options.rows is not None:
        _restrict_last(model, session, ran, call.num_nodes, run)
    find_twins(session, run)
    if session.find_forms():
        run()
    _turn_dial(model, session, call, quietly, mode)


_MOST_TURNS = 5  # what others save may depend a little on the ways that were chosen


def _turn_dial(
    model: nn.Module,
    session: Session,
    call: Call,
    quietly: Callable[[], AbstractContextManager[None]],
    mode: str,
) -> None:
    """Under memory_limit: observe what a step holds, choose variants that fit, and repeat until they stay."""
    if session.options.memory_limit is None:
        return
    for turns in range(_MOST_TURNS):
        with quietly(), torch.set_grad_enabled(mode == "training"):
            out = call(model)
            _follow(model, session, call, out, mode)
            if mode == "training" and isinstance(out, Tensor) and out.requires_grad:
                _gradients(model, call, out)  # what a graph's gradients need is made now, and counts
        # the first step is unlike the others: inputs are copied until their layers' gradients were computed
        if turns and not session.dial.turn(session, mode):
            return


def _follow(model: nn.Module, session: Session, call: Call, out: Any, mode: str) -> None:
    """Note who saved what in the run that gave `out`."""
    outputs = [t for t in (out if isinstance(out, tuple | list) else (out,)) if isinstance(t, Tensor)]
    given = [*model.parameters(), *model.buffers(), *call.tensors()]
    try:
        session.dial.trails[mode] = follow(outputs, [t for t in given if not is_lazy(t)])
    except RuntimeError:  # a foreign tensor subclass
        if session.options.memory_limit is not None:
            raise  # else it is a prediction that nobody asked for


def _runs_in_training(model: nn.Module, session: Session, call: Call, ran: list[nn.Module]) -> bool:
    """Whether the model could be run in training mode; what ran is then in `ran`.

    It cannot where, say, a normalisation needs more than one row; then the run without dropout is used.
    """
    try:
        with _quietly(model, call, True), _recorded(ran), torch.enable_grad():
            _follow(model, session, call, call(model), "training")
    except Exception:
        ran.clear()
        session.plans.clear()
        return False
    return True


def _run_once(
    model: nn.Module,
    call: Call,
    quietly: Callable[[], AbstractContextManager[None]],
    with_grad: bool,
    backward: bool = False,
) -> Any:
    """The model's output, with gradients computed if asked for; no .grad is touched."""
    with quietly(), torch.set_grad_enabled(with_grad):
        out = call(model)
        if backward and (wanted_rows := held_rows(out)) is not None:
            out = wanted_rows  # a training step with rows= reads no others
        if not backward or not isinstance(out, Tensor) or not out.requires_grad:
            return out
        return out, _gradients(model, call, out)


def _gradients(model: nn.Module, call: Call, out: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients a training step computes; nothing is added to any .grad."""
    wanted: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
    wanted += [tensor for tensor in call.tensors() if tensor.requires_grad]
    if not wanted:
        return ()
    if _has_reentrant_checkpoint(out):  # which takes no other way, and says so when half the graph is freed
        return _by_backward(wanted, out)
    return torch.autograd.grad(out, wanted, torch.ones_like(out), allow_unused=True)


def _has_reentrant_checkpoint(out: Tensor) -> bool:
    """Whether a checkpoint with use_reentrant=True is behind `out`."""
    seen: set[Any] = set()
    nodes: list[Any] = [out.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        if node.name() == "CheckpointFunctionBackward":
            return True
        seen.add(node)
        nodes += [before for before, _ in node.next_functions]
    return False


def _by_backward(wanted: list[Tensor], out: Tensor) -> tuple[Tensor | None, ...]:
    """The same by `backward`, with every .grad restored."""
    before = [tensor.grad for tensor in wanted]
    try:
        for tensor in wanted:
            tensor.grad = None
        out.backward(torch.ones_like(out))  # type: ignore[no-untyped-call]
        return tuple(tensor.grad for tensor in wanted)
    finally:
        for tensor, grad in zip(wanted, before, strict=True):
            tensor.grad = grad


def _restrict_last(
    model: Any, session: Session, ran: list[nn.Module], num_nodes: int, run: Callable[[], object]
) -> None:
    """Let the last layer compute the requested rows first, where nothing after it needs all of them."""
    layers = [m for m in ran if isinstance(m, MessagePassing)]
    if not layers:
        return
    if any(p.is_cuda for p in layers[-1].parameters()):
        session.notes.append("rows= is not used: it is for models on a CPU so far")
        return
    name = model._plait_seats.of(layers[-1]).name
    session.restrict(name, num_nodes)
    session.forget(name)
    run()
    if session.asked_by is not None:
        session.stop_restricting(f"{session.asked_by} asks for all rows")
        session.forget(name)
        run()


@contextmanager
def _quietly(model: nn.Module, call: Call, is_training: bool) -> Iterator[None]:
    """Runs in the requested mode; afterwards random states, buffers, inputs and layer caches are restored.

    In training the modules' own modes stay where the model is in training already: a part that was put in
    evaluation mode trains so. Modules that no tree of children leads to (in lists, closures) are found when
    they are called.
    """
    was: dict[nn.Module, tuple[bool, dict[str, Any], list[_Kept]]] = {}
    keeps_modes = is_training and model.training

    def quiet(module: nn.Module, _: Any = None) -> None:
        if module not in was:
            kept = {k: v for k, v in module.__dict__.items() if k.startswith(_CACHES)}
            own = [_Kept(b, False) for b in module._buffers.values() if b is not None] if is_training else []
            was[module] = (module.training, kept, own)
            if not keeps_modes:
                module.training = is_training

    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    given = call.tensors() if is_training else ()
    inputs = [_Kept(t, True) for t in given if t.is_floating_point() and counts_writes(t)]
    for module in model.modules():
        quiet(module)
    handle = register_module_forward_pre_hook(in_this_thread(quiet))
    try:
        yield
    finally:
        handle.remove()
        for module, (training, kept, own) in was.items():
            module.training = training
            for name in [k for k in module.__dict__ if k.startswith(_CACHES)]:
                del module.__dict__[name]
            module.__dict__.update(kept)
            inputs += own
        for tensor in inputs:
            tensor.restore()
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])


class _Kept:
    """A tensor as it was, to be put back where a run in training mode changed it."""

    def __init__(self, tensor: Tensor, counts_changes: bool):
        self._tensor, self._copy = tensor, tensor.detach().clone()
        self._version = tensor._version if counts_changes else None

    def restore(self) -> None:
        """Put it back; what batch_norm does to its statistics is not counted, so values are compared."""
        if self._version is None:
            is_same = torch.equal(self._tensor, self._copy)
        else:
            is_same = self._tensor._version == self._version
        if not is_same:
            with torch.no_grad():
                self._tensor.copy_(self._copy)


@contextmanager
def _recorded(ran: list[nn.Module]) -> Iterator[None]:
    """Append every module to `ran` when it has run; what is inside a layer counts as the layer."""

    def record(module: nn.Module, _: Any, __: Any) -> None:
        if isinstance(module, MessagePassing):
            inside = {id(m) for m in module.modules()}
            ran[:] = [m for m in ran if id(m) not in inside]
        ran.append(module)

    handle = register_module_forward_hook(in_this_thread(record))
    try:
        yield
    finally:
        handle.remove()


# EXPLAIN ANALYZE ---------------------------------------------------------------------------------------


def _analyze(model: Any, session: Session, call: Call | None, mode: str, repeats: int = 7) -> Plan:
    """Run the model a few times and time every step; the median of each is stored with its price."""
    if call is None:
        raise InputError(
            "analyze: the model's arguments are not attributes of data; give them as args=(x, edge_index)"
        )
    if mode == "training" and _is_for_inference(model, call):
        mode = "inference"
    samples: dict[str, list[Any]] = {}
    beside: dict[str, dict[str, list[float]]] = {}
    whole: list[float] = []
    with (
        BusyElsewhere() as busy,
        _quietly(model, call, mode == "training"),
        torch.inference_mode(torch.is_inference_mode_enabled() and mode == "inference"),
    ):
        for repeat in range(repeats + 2):
            trace: list[tuple[str, Any]] = []
            # only plait's own steps are measured
            session.trace, was_off, session.aside.is_off = trace, session.aside.is_off, True
            started = now()
            try:
                with torch.set_grad_enabled(mode == "training"), timed_calls(model._plait_seats) as calls:
                    out = call(model)
                    if (wanted_rows := held_rows(out)) is not None:
                        out = wanted_rows
                    if mode == "training" and isinstance(out, Tensor) and out.requires_grad:
                        _gradients(model, call, out)
            finally:
                session.trace, session.aside.is_off = None, was_off
            if repeat >= 2:
                whole.append(now() - started)
                for name, measured in trace:
                    samples.setdefault(name, []).append(measured)
                for name, times in calls.beside(session.plans, trace).items():
                    for phase, seconds in times.items():
                        beside.setdefault(name, {}).setdefault(phase, []).append(seconds)
    plan = replace(_with_measurements(plan_of(model, mode), samples, beside), measured_seconds=median(whole))
    if busy.share is None or busy.share <= _BUSY:
        return plan
    text = f"other processes used {busy.share:.0%} of the processor while this was measured: times are high"
    return replace(plan, warnings=(*plan.warnings, text))


def _with_measurements(
    plan: Plan, samples: dict[str, list[Any]], beside: dict[str, dict[str, list[float]]]
) -> Plan:
    """The plan with the median of every step, and of what calling a layer took besides them."""
    layers = []
    for layer in plan.layers:
        measured = {}
        for name, seen in samples.items():
            owner, _, value = name.partition("\0")
            if owner == layer.layer:
                measured[value] = sorted(seen, key=lambda m: m.seconds)[len(seen) // 2]
        calling = {phase: median(times) for phase, times in beside.get(layer.layer, {}).items()}
        layers.append(replace(layer, measured=measured, calling=calling))
    return replace(plan, layers=tuple(layers))
