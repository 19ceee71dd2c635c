"""plait.compile and plait.explain: the same model, its layers planned."""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parameter import is_lazy
from torch_geometric.nn import MessagePassing

from plait.errors import InputError
from plait.plan.plan import Plan
from plait.pyg.planned import install, is_disabled
from plait.pyg.view import CompiledModel, plan_of, view_of
from plait.runtime.deferred import held_rows
from plait.runtime.forms import chosen_names
from plait.runtime.session import Options, Session
from plait.runtime.twins import find_twins

__all__ = ["compile", "explain"]


def compile(
    model: nn.Module,
    data: Any = None,
    *,
    rows: Tensor | None = None,
    memory_limit: int | None = None,
    epochs: int = 200,
    mode: str | None = None,
    forms: Sequence[str] | None = None,
) -> nn.Module:
    """The same model with its PyG layers planned: same parameters, same state_dict keys, same outputs.

    `data` (a PyG Data with x and edge_index) lets the plan be made now; without it, it is made at the first
    call. `rows` (a mask or node numbers) names the rows the loss needs: in training the last layer computes
    only those, and the others when anything but those rows is asked for. `memory_limit` bounds the bytes a
    layer's plan may hold. `epochs` is how many steps work done once is spread over. `mode` is "training" or
    "inference" for the plan made now (default: model.training). `forms` names the graph forms that may be
    used, where a timed check says so: "csr", "hag" (shared neighbours summed once), "twins" (nodes no layer
    can tell apart computed once), and, only where named, "diff" (rows as differences: often faster, but
    outliers cancel); without "csr" the others are used untimed.
    The compiled model is a second view of the one handed in: parameters, children, hooks and modes are the
    same objects, whichever view changes them. Called through the compiled view, by any of its methods, layers
    run planned; called through the original, the very same layers run in PyG.
    """
    _check_arguments(model, memory_limit, epochs, mode)
    install()
    session = Session(Options(_row_numbers(rows, data), memory_limit, epochs, chosen_names(forms)))
    compiled = view_of(model, session)
    if not is_disabled() and data is not None:
        _look_ahead(compiled, session, data, mode or ("training" if model.training else "inference"))
    return compiled


def explain(model: nn.Module, data: Any, analyze: bool = False, **options: Any) -> Plan:
    """The plan of a model on a graph; with analyze=True it is run and every step has its measured time."""
    compiled: Any = model if isinstance(model, CompiledModel) else compile(model, data, **options)
    session: Session = compiled._plait_plan_session
    mode = options.get("mode") or ("training" if model.training else "inference")
    if not session.plans:
        _look_ahead(compiled, session, data, mode)
    return _analyze(compiled, session, data, mode) if analyze else plan_of(compiled)


def _check_arguments(model: Any, memory_limit: Any, epochs: Any, mode: Any) -> None:
    if not isinstance(model, nn.Module):
        raise InputError(
            f"model: {type(model).__name__} is not a torch.nn.Module; "
            "pass the model itself, not its class or output"
        )
    if memory_limit is not None and (
        not isinstance(memory_limit, int) or isinstance(memory_limit, bool) or memory_limit <= 0
    ):
        raise InputError(f"memory_limit: {memory_limit!r}; pass a positive number of bytes")
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
        return rows.nonzero().reshape(-1)
    if rows.dtype.is_floating_point or rows.dim() != 1:
        raise InputError(
            f"rows: {rows.dtype} of shape {tuple(rows.shape)}; pass a mask or a vector of node numbers"
        )
    if rows.numel() and (int(rows.min()) < 0 or (count is not None and int(rows.max()) >= count)):
        raise InputError(f"rows: node numbers must lie in 0..{(count or 0) - 1}")
    # a row named twice is wanted once; its gradient would count twice
    once: Tensor = torch.unique(rows.long())
    return once


_CACHES = ("_cached_",)  # what layers with cached=True keep of their first call


# Looking ahead -----------------------------------------------------------------------------------------


def _look_ahead(model: nn.Module, session: Session, data: Any, mode: str) -> None:
    """Run the model once on the data, without dropout and with the random state kept, to plan it."""
    if mode == "training" and _is_for_inference(model, data):
        session.notes.append("planned for inference: tensors made in inference_mode have no gradients")
        mode = "inference"
    with torch.inference_mode(torch.is_inference_mode_enabled() and mode == "inference"):
        _plan_ahead(model, session, data, mode)


def _is_for_inference(model: nn.Module, data: Any) -> bool:
    """Whether a tensor of the model or the data was made in inference_mode: autograd does not take those."""
    values = [value for store in getattr(data, "stores", ()) for value in store.values()]
    made = [t for t in (*model.parameters(), *values) if isinstance(t, Tensor) and not is_lazy(t)]
    return any(t.is_inference() for t in made)


def _plan_ahead(model: nn.Module, session: Session, data: Any, mode: str) -> None:
    """Run the model as it will be run, then look for faster forms of its graphs."""
    x = getattr(data, "x", None)
    if isinstance(x, Tensor):
        session.constant_input = weakref.ref(x)
    arguments = _call_arguments(model, data)
    if arguments is None:
        session.notes += ["the model's arguments are not attributes of data: planned at the first call"]
        return
    ran: list[nn.Module] = []
    has_layers = any(isinstance(m, MessagePassing) for m in model.modules())
    try:
        with _quietly(model), _recorded(ran), torch.set_grad_enabled(mode == "training"):
            model(*arguments)
            if any(getattr(m, "cached", False) for m in ran):
                model(*arguments)  # the first call fills PyG's cache
    except Exception:
        if has_layers:
            raise  # a model of other things is not plait's to complain about
    if not any(isinstance(m, MessagePassing) for m in ran):
        session.notes += ["no PyG layer was found in the model: nothing to plan"]
        return
    run = functools.partial(_run_once, model, arguments, mode == "training")
    if mode == "training" and session.options.rows is not None:
        _restrict_last(model, session, ran, data.num_nodes, run)
    find_twins(session, run)
    if session.find_forms():
        run()


def _run_once(model: nn.Module, arguments: tuple[Any, ...], with_grad: bool, backward: bool = False) -> Any:
    """What the model gives, with the gradients behind it where asked for; nobody's own .grad is touched."""
    with _quietly(model), torch.set_grad_enabled(with_grad):
        out = model(*arguments)
        if backward and (wanted_rows := held_rows(out)) is not None:
            out = wanted_rows  # a training step with rows= reads no others
        if not backward or not isinstance(out, Tensor) or not out.requires_grad:
            return out
        wanted: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
        wanted += [a for a in arguments if isinstance(a, Tensor) and a.requires_grad]
        return out, torch.autograd.grad(out, wanted, torch.ones_like(out), allow_unused=True)


def _restrict_last(
    model: Any, session: Session, ran: list[nn.Module], num_nodes: int, run: Callable[[], object]
) -> None:
    """Let the last layer compute the wanted rows first, where nothing after it asks for all of them."""
    layers = [m for m in ran if isinstance(m, MessagePassing)]
    if not layers:
        return
    name = model._plait_seats.of(layers[-1]).name
    session.restrict(name, num_nodes)
    session.forget(name)
    run()
    if session.asked_by is not None:
        session.stop_restricting(f"{session.asked_by} asks for all rows")
        session.forget(name)
        run()


def _call_arguments(model: nn.Module, data: Any) -> tuple[Any, ...] | None:
    """What to call the model with: attributes of data named like forward's parameters, or data."""
    forward = model.__class__.forward
    parameters = [p for p in list(inspect.signature(forward).parameters.values())[1:]]
    names = [
        p.name
        for p in parameters
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if not names or any(p.kind == p.VAR_POSITIONAL for p in parameters):
        # torch_geometric.nn.Sequential takes *args in the order of its description
        described = getattr(model, "signature", None)
        names = [p.name for p in described] if isinstance(described, list) else ["x", "edge_index"]
    aliases = {"input": "x", "inputs": "x", "adj": "edge_index", "adj_t": "adj_t"}
    values = []
    for name in names:
        value = getattr(data, name, None)
        value = getattr(data, aliases.get(name, name), None) if value is None else value
        if value is None:
            return (data,) if len(names) == 1 else None
        values.append(value)
    return tuple(values)


@contextmanager
def _quietly(model: nn.Module) -> Iterator[None]:
    """Evaluation mode; afterwards the caller's random state and the layers' own caches are as before.

    Modules that no tree of children leads to (in lists, closures) are found when they are called.
    """
    was: dict[nn.Module, tuple[bool, dict[str, Any]]] = {}

    def quiet(module: nn.Module, _: Any = None) -> None:
        if module not in was:
            kept = {k: v for k, v in module.__dict__.items() if k.startswith(_CACHES)}
            was[module] = (module.training, kept)
            module.training = False

    state = torch.get_rng_state()
    for module in model.modules():
        quiet(module)
    handle = register_module_forward_pre_hook(_in_this_thread(quiet))
    try:
        yield
    finally:
        handle.remove()
        for module, (training, kept) in was.items():
            module.training = training
            for name in [k for k in module.__dict__ if k.startswith(_CACHES)]:
                del module.__dict__[name]
            module.__dict__.update(kept)
        torch.set_rng_state(state)


@contextmanager
def _recorded(ran: list[nn.Module]) -> Iterator[None]:
    """Append every module to `ran` when it has run; what is inside a layer counts as the layer."""

    def record(module: nn.Module, _: Any, __: Any) -> None:
        if isinstance(module, MessagePassing):
            inside = {id(m) for m in module.modules()}
            ran[:] = [m for m in ran if id(m) not in inside]
        ran.append(module)

    handle = register_module_forward_hook(_in_this_thread(record))
    try:
        yield
    finally:
        handle.remove()


def _in_this_thread(hook: Callable[..., None]) -> Callable[..., None]:
    """The hook for calls of this thread; a hook on all modules hears of the others' too."""
    own = threading.get_ident()

    def listen(*args: Any) -> None:
        if threading.get_ident() == own:
            hook(*args)

    return listen


# EXPLAIN ANALYZE ---------------------------------------------------------------------------------------


def _analyze(model: nn.Module, session: Session, data: Any, mode: str, repeats: int = 7) -> Plan:
    """Run the model a few times with a clock on every step; the median of each goes beside its price."""
    arguments = _call_arguments(model, data)
    if arguments is None:
        raise InputError(
            "analyze: the model's arguments are not attributes of data; call it once and use .plan"
        )
    if mode == "training" and _is_for_inference(model, data):
        mode = "inference"
    samples: dict[str, list[Any]] = {}
    kept = [(parameter, parameter.grad) for parameter in model.parameters()]
    with _quietly(model), torch.inference_mode(torch.is_inference_mode_enabled() and mode == "inference"):
        for repeat in range(repeats + 2):
            trace: list[tuple[str, Any]] = []
            session.trace = trace
            try:
                with torch.set_grad_enabled(mode == "training"):
                    out = model(*arguments)
                    if (wanted_rows := held_rows(out)) is not None:
                        out = wanted_rows
                    if isinstance(out, Tensor) and out.requires_grad:
                        torch.autograd.backward(out, torch.ones_like(out))
            finally:
                session.trace = None
            if repeat >= 2:
                for name, measured in trace:
                    samples.setdefault(name, []).append(measured)
    for parameter, grad in kept:
        parameter.grad = grad
    return _with_measurements(plan_of(model), samples)


def _with_measurements(plan: Plan, samples: dict[str, list[Any]]) -> Plan:
    layers = []
    for layer in plan.layers:
        measured = {}
        for name, seen in samples.items():
            owner, _, value = name.partition("\0")
            if owner == layer.layer:
                measured[value] = sorted(seen, key=lambda m: m.seconds)[len(seen) // 2]
        layers.append(replace(layer, measured=measured))
    return replace(plan, layers=tuple(layers))
