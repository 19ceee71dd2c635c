"""plait.compile and plait.explain: the same model, its layers planned."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from statistics import median
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from plait.errors import InputError
from plait.measure.environment import BusyElsewhere
from plait.plan.dial import parse_bytes
from plait.plan.plan import Plan
from plait.pyg.ahead import is_for_inference, look_ahead
from plait.pyg.call import Call, call_of
from plait.pyg.calling import timed_calls
from plait.pyg.captured import TrainingStep, training_step
from plait.pyg.planned import install, is_disabled
from plait.pyg.quiet import gradients, quietly
from plait.pyg.view import CompiledModel, never_planned, plan_of, view_of
from plait.runtime.clock import now
from plait.runtime.deferred import held_rows
from plait.runtime.forms import chosen_names
from plait.runtime.session import Options, Session

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

    The compiled model is a second view of the given one: parameters, children, hooks and modes are the same
    objects, whichever view changes them. Layers run planned when they are called through the compiled view,
    by any of its methods; called through the original, the very same layers run in PyG.

    data: a PyG Data with x and edge_index, for which the plan is made now; without it, at the first call.
    rows: the rows the loss reads, as a mask or node numbers. In training the last layer computes only those,
        and the others when something else reads them.
    memory_limit: the most a training step of the whole model may hold, in bytes or as text such as "8GB" or
        "512 MiB". Layers keep less and compute more where that is needed (docs/planning.md).
    epochs: the number of steps among which the cost of work done once is divided.
    mode: "training" or "inference", for the plan made now (default: model.training).
    forms: the graph forms that may be used where a timed check finds them faster: "csr", "hag" (shared
        neighbours summed once), "twins" (nodes that no layer can tell apart computed once), and, only if
        named, "diff" (rows as differences: often faster, but outliers lose digits). Without "csr" the others
        are used untimed.
    capture: return a `TrainingStep` instead (docs/gpu.md). Its `.step()` runs `loss(model, data)`, the
        backward pass and the `optimizer`, if given, as one CUDA graph; `.step(batch)` does so for a
        mini-batch; `.model` is the compiled model.
    """
    if not capture and (loss is not None or optimizer is not None):
        raise InputError("loss, optimizer: they belong to a captured step; pass capture=True too")
    _check_arguments(model, epochs, mode)
    limit = None if memory_limit is None else parse_bytes(memory_limit)
    call = None if data is None else _apart(call_of(model, data))
    install()
    session = Session(Options(_row_numbers(rows, data), limit, epochs, chosen_names(forms)))
    compiled = view_of(model, session)
    for name, reason in never_planned(compiled).items():
        _log.info("layer %s runs in PyG: %s", name, reason)
    if not is_disabled() and data is not None:
        look_ahead(compiled, session, call, mode or ("training" if model.training else "inference"))
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
    """The plan of a model on a graph; with analyze=True the model is run and every step is timed.

    `data` is a PyG Data whose attributes are named like the parameters of the model's forward. If `args` or
    `kwargs` are given, the model is called with them instead. `options` are those of `compile`. The model is
    left as it was: no gradients, no changed buffers, no drawn random numbers.
    """
    _check_arguments(model, options.get("epochs", 1), options.get("mode"))
    call = _apart(_given_call(args, kwargs) or call_of(model, data))
    compiled: Any = model
    if not isinstance(model, CompiledModel):
        compiled = compile(model, data if args is None and kwargs is None else None, **options)
    session: Session = compiled._plait_plan_session
    mode = options.get("mode") or ("training" if model.training else "inference")
    if not session.plans.of(mode) and not is_disabled():
        look_ahead(compiled, session, call, mode)
    if analyze:
        return _analyze(compiled, session, call, mode)
    # a model without learned parameters computes no gradients: its only plan is one for inference
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
    with quietly(model, call, is_training), torch.set_grad_enabled(is_training), within or nullcontext():
        return call(view_of(model, session))


def _apart(call: Call | None) -> Call | None:
    return None if call is None else call.apart()


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
    try:
        rows = torch.as_tensor(rows)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"rows: {rows!r}; pass a mask or a vector of node numbers") from None
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
    ends = (int(rows.min()), int(rows.max())) if rows.numel() else ()
    for node in ends:
        if node < 0 or (count is not None and node >= count):
            of = "" if count is None else f" of a graph with {count} nodes"
            raise InputError(
                f"rows: node {node}{of}; pass node numbers from 0, or a mask with one flag for each node"
            )
    # a row named twice is computed once; otherwise its gradient would count twice
    once: Tensor = torch.unique(rows.long().cpu())
    return once


_REPEATS = 7
_BUSY = 0.1  # share of the processor used by others from which measured times are called doubtful


# EXPLAIN ANALYZE ---------------------------------------------------------------------------------------


def _analyze(model: Any, session: Session, call: Call | None, mode: str) -> Plan:
    """Run the model a few times and time every step; the median of each is stored with its price."""
    if call is None:
        raise InputError(
            "analyze: the model's arguments are not attributes of data; give them as args=(x, edge_index)"
        )
    if mode == "training" and is_for_inference(model, call):
        mode = "inference"
    samples: dict[str, list[Any]] = {}
    beside: dict[str, dict[str, list[float]]] = {}
    whole: list[float] = []
    with (
        BusyElsewhere() as busy,
        quietly(model, call, mode == "training"),
        torch.inference_mode(torch.is_inference_mode_enabled() and mode == "inference"),
    ):
        for repeat in range(_REPEATS + 2):
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
                        gradients(model, call, out)
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
