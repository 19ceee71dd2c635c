"""The `forward` of PyG's layers: planned while a compiled model is being called, PyG's own otherwise."""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from plait.errors import TypesError
from plait.pyg import autocast, exported, recorded
from plait.pyg.active import Seat, Seats, active, entered, is_explained, traced
from plait.pyg.checkpoints import called, note_in_pyg, runs_again
from plait.pyg.layers.base import RULES, Apply
from plait.pyg.layers.fused import FUSED, layer_of
from plait.pyg.listening import is_followed, is_listened_to
from plait.pyg.lower import (
    APART,
    EXPLAINED,
    FOLLOWED,
    LISTENED,
    as_in_pyg,
)
from plait.pyg.once import Once, once
from plait.pyg.overwritten import copied, may_be_overwritten, ordinary
from plait.pyg.prepared import Prepared, argument_names, cache_of, prepared
from plait.pyg.recall import Layer, call_key
from plait.pyg.relisted import note_listed, relisted
from plait.pyg.repeated import note, note_ready, repeated
from plait.runtime import expressions
from plait.runtime.again import now
from plait.runtime.deferred import whole
from plait.runtime.identity import counts_writes, identity
from plait.runtime.session import Session
from plait.runtime.trace import is_profiling

__all__ = ["PlannedForward", "install", "is_disabled", "is_planned"]

_log = logging.getLogger("plait")


def is_disabled() -> bool:
    """Whether PLAIT_DISABLE=1 asks for plain PyG."""
    return os.environ.get("PLAIT_DISABLE", "") not in ("", "0")


class PlannedForward:
    """Replaces a layer class's `forward`; returns PyG's own except inside calls of a compiled model.

    A descriptor, not a wrapper: `GCNConv.forward` and `layer.forward` are PyG's own function and method to
    TorchScript, to `inspect` and to the original model. Inside a compiled model's call, modules with hooks,
    direct calls of `layer.forward` and a subclass's `super().forward` all arrive here.
    """

    def __init__(self, layer: type[nn.Module], original: Callable[..., Any]):
        self.layer, self.original = layer, original
        functools.update_wrapper(self, original)  # type: ignore[arg-type]

    def __get__(self, module: Any, cls: Any = None) -> Any:
        if module is None:
            return self.original
        if torch.compiler.is_compiling():
            if traced.seats is None:
                return functools.partial(self.original, module)  # torch 2.11 does not follow `__get__`
            return functools.partial(exported.call, traced.seats, self.original, module)
        if active.seats is None:
            return MethodType(self.original, module)
        call = _named if is_profiling() else _forward
        return functools.partial(call, self.layer, self.original, module)


def is_planned(layer: type[nn.Module]) -> bool:
    """True for a class whose own or inherited `forward` is planned inside compiled models."""
    return isinstance(inspect.getattr_static(layer, "forward", None), PlannedForward)


def _edges_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """The edges and the argument behind them, None where they are not; FAConv has features before them."""
    at = 2 if len(args) > 2 and _is_matrix(args[1]) else 1
    edges = args[at] if len(args) > at else kwargs.get("edge_index")
    return edges, args[at + 1] if len(args) > at + 1 else kwargs.get("edge_weight")


def _is_matrix(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided and value.is_floating_point()


def _set_aside(session: Session, name: str) -> None:
    """Note that the layer runs in PyG because that was measured to be faster."""
    if session.not_planned.get(name) != session.aside.reason:
        session.not_planned[name] = session.aside.reason
        session.plans.pop(name, None)


def _is_pygs_turn(session: Session, seat: Seat, module: Any, edges: Any) -> bool:
    """Whether PyG runs this call, so that both can be timed."""
    aside = session.aside
    if runs_again() or aside.is_off or aside.is_over(seat.name, edges):
        return False
    if not aside.is_pygs_turn(seat.name, edges, _is_tried_again(session, module)):
        return False
    note_in_pyg()
    return True


def _is_tried_again(session: Session, module: Any) -> bool:
    """Whether PyG may be tried on a small graph seen again too.

    Not with dropout inside, which draws other numbers than PyG's: a clock must not choose between the two.
    Nor where a matrix expression computes some rows only, or has a limit of memory.
    """
    draws = module.training and float(getattr(module, "dropout", 0.0) or 0.0) > 0.0
    if draws or session.over_ranks is not None:
        return False
    is_restricted = session.restricted_layer is not None or session.dial.limit is not None
    return layer_of(module) is not None or not (session.has_twins or is_restricted)


def _hide_from_compiler(code: Any, with_callees: bool = False) -> None:
    """Keep torch.compile, which looks at every frame, from this one (and from all it calls)."""
    frames: Any = torch._C._dynamo.eval_frame
    if hasattr(frames, "skip_code"):  # torch 2.6
        frames.skip_code(code)
    elif hasattr(frames, "_FrameExecStrategy"):
        action = frames._FrameAction
        callees = action.SKIP if with_callees else action.DEFAULT
        frames.set_code_exec_strategy(code, frames._FrameExecStrategy(action.SKIP, callees))


@functools.cache
def install() -> None:
    """Install the descriptor on all layer classes that have a rule; once per process."""
    _hide_from_compiler(PlannedForward.__get__.__code__)  # it would read the attribute and so open the next
    for planned in (_named, _forward):  # met inside a compiled model by what the user gave to torch.compile
        _hide_from_compiler(planned.__code__, with_callees=True)
    for layer in {*RULES, *FUSED}:
        as_in_pyg(layer)
        own = vars(layer).get("forward")
        if isinstance(own, FunctionType):
            layer.forward = PlannedForward(layer, own)  # type: ignore[assignment]


def _named(
    layer: type[nn.Module], original: Callable[..., Any], module: Any, *args: Any, **kwargs: Any
) -> Any:
    """The same call as a range that the running profiler shows."""
    seats = active.seats
    name = layer.__name__ if seats is None else seats.of(module).name
    with record_function(f"plait layer {name}"):
        return _forward(layer, original, module, *args, **kwargs)


def _forward(
    layer: type[nn.Module], original: Callable[..., Any], module: Any, *args: Any, **kwargs: Any
) -> Any:
    """The planned result, or PyG's with the reason noted."""
    if torch.is_inference_mode_enabled():
        # what is kept from call to call must serve training too, where such tensors are refused
        with torch.inference_mode(False), torch.no_grad():
            return _forward(layer, _inferring(original), module, *args, **kwargs)
    seats = active.seats
    if seats is None or torch._C._get_tracing_state() is not None or torch._C._len_torch_dispatch_stack():
        return original(module, *args, **kwargs)  # tracers see PyG's operations
    if autocast.is_on():
        made = autocast.run(_forward, layer, original, module, args, kwargs)
        if made is not None:
            return made
    session = seats.session
    if session.over_ranks is not None:
        here = functools.partial(_run, layer, original, module, seats, seats.of(module), None)
        return session.over_ranks(module, seats, here, argument_names(layer), args, kwargs)  # type: ignore[arg-type]
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:  # asked at every call
        out = repeated(seats, module, args, kwargs)
        out = relisted(seats, module, args, kwargs) if out is None else out
        return out if out is not None else _here(layer, original, module, seats, args, kwargs)
    before, now.call = now.call, called(seats, module)
    try:
        if now.call is not None and now.call.is_second and now.call.is_pygs:
            return original(module, *args, **kwargs)
        return _here(layer, original, module, seats, args, kwargs)
    finally:
        now.call = before


def _inferring(original: Callable[..., Any]) -> Callable[..., Any]:
    """PyG's method as the caller entered it: outside of inference_mode it refuses an EdgeIndex cut inside."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        with torch.inference_mode():
            return original(*args, **kwargs)

    return forward


def _here(
    layer: type[nn.Module],
    original: Callable[..., Any],
    module: Any,
    seats: Seats,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """The planned result on one process, or PyG's where timing has found PyG to be faster."""
    session = seats.session
    may_defer = session.has_twins or session.restricted_layer is not None
    if may_defer and layer_of(module) is not None:
        whole((args, kwargs))  # its passes read memory, a row for every node
    seat = seats.of(module)
    if is_explained(module):  # looked at first: an explainer calls its model hundreds of times
        seats.explained = seat.module
        return _watched(EXPLAINED, session, original, module, seat, args, kwargs)
    if is_listened_to():
        return _watched(LISTENED, session, original, module, seat, args, kwargs)
    if is_followed(*args, *kwargs.values()):
        return _watched(FOLLOWED, session, original, module, seat, args, kwargs)
    aside = session.aside
    if aside.notes and not runs_again() and aside.has_left(seat.name, *_edges_of(args, kwargs)):
        _set_aside(session, seat.name)
        note_in_pyg()
        return original(module, *args, **kwargs)
    if aside.is_trying and _is_pygs_turn(session, seat, module, _edges_of(args, kwargs)[0]):
        return original(module, *args, **kwargs)
    known = seat.as_it_was(module)
    x: Any = args[0] if args else kwargs.get("x")
    if known is not None and not known.lies_with(x):
        return _watched(APART, session, original, module, seat, args, kwargs)
    is_tensor, with_grad = isinstance(x, Tensor), torch.is_grad_enabled()
    if with_grad and (not counts_writes(x) if is_tensor else type(x) is tuple):
        args, kwargs = ordinary(args), {name: ordinary(value) for name, value in kwargs.items()}
        x = args[0] if args else kwargs["x"]
    if is_tensor and recorded.is_on_gpu(x) and len(args) == 2 and not kwargs:
        plain = functools.partial(_plainly, layer, original, module, seats, known, args[1])
        out = recorded.replayed(session, seat, module, known, args, plain)
        if out is not None:
            return out
    if with_grad and may_be_overwritten(seat, x, session.constant_input()):
        rest, named = args[1:], kwargs
        if not args:
            named = {name: value for name, value in kwargs.items() if name != "x"}
        run = functools.partial(_run, layer, original, module, seats, seat, known)
        return copied(seat, x, lambda copy: run((copy, *rest), named))
    return _run(layer, original, module, seats, seat, known, args, kwargs)


def _run(
    layer: type[nn.Module],
    original: Callable[..., Any],
    module: Any,
    seats: Seats,
    seat: Seat,
    known: Layer | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """The call planned, or PyG's answer; `known`: the layer as it was and still is."""
    try:
        return _run_planned(layer, original, module, seats, seat, known, args, kwargs)
    except TypesError:
        return _watched(APART, seats.session, original, module, seat, args, kwargs)


def _run_planned(
    layer: type[nn.Module],
    original: Callable[..., Any],
    module: Any,
    seats: Seats,
    seat: Seat,
    known: Layer | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """The same; TypesError where x and the weights are not all of one type."""
    session = seats.session
    key = None if known is None else call_key(known.token, args, kwargs)
    run = None if key is None else session.recall(key)
    if run is not None and run.lowered.keeps_graph and not (seat.kept and seat.kept.is_as_made()):
        run = None
    if run is None and now.call is not None and now.call.is_second:
        run = now.call.prepared
    given, weight = _edges_of(args, kwargs)
    is_asked = run is None or (not runs_again() and session.aside.may_be_pygs(given))
    if is_asked and _is_pygs_turn(session, seat, module, given):
        return original(module, *args, **kwargs)
    session.aside.planned_in = session.aside.calls
    if run is not None and known is not None and key is not None and now.call is None:
        if known.has_recipe(run.lowered, module, args[0]):
            note(seats, seat, known, run, args[0], given, weight)
    elif run is None:
        if known is not None and key is not None:
            listed = _listed(layer, module, seat, known, key, args, kwargs, given, weight)
            if listed is not None:
                note_listed(seat, known, listed, args, kwargs)
                session.not_planned.pop(seat.name, None)
                return listed(module, args[0])
        run = prepared(layer, module, seat, args, kwargs, known)
        if isinstance(run, str):
            if session.not_planned.get(seat.name) != run:
                _log.info("layer %s runs in PyG: %s", seat.name, run)
            session.not_planned[seat.name] = run
            session.plans.pop(seat.name, None)  # an earlier call may have been planned
            return _in_pyg(original, module, seat, args, kwargs)
        if not isinstance(run, Prepared):
            session.not_planned.pop(seat.name, None)
            note_ready(seats, seat, run, args, kwargs)
            return run()
        record = seat.look(module) if known is None else known
        record.note(run.lowered)
        if not run.lowered.keeps_graph or session.edges.get(run.edges.key) is run.edges:
            made = call_key(record.token, args, kwargs) if key is None else key
            session.keep(made, run.edges, run)
        if run.lowered.keeps_graph and now.call is not None:
            now.call.prepared = run  # other layers' constants may take the place of its own
    if session.not_planned:
        session.not_planned.pop(seat.name, None)
    x: Any = args[0] if args else kwargs["x"]
    return run(module, x, None, known) if isinstance(x, Tensor) else run(module, x[0], x[1])


def _plainly(
    layer: type[nn.Module],
    original: Callable[..., Any],
    module: Any,
    seats: Seats,
    known: Layer | None,
    edges: Tensor,
    x: Tensor,
) -> Any:
    """The call without a replay; a backward pass may make it too."""
    with entered(seats):
        return _run(layer, original, module, seats, seats.of(module), known, (x, edges), {})


def _listed(
    layer: type[nn.Module],
    module: Any,
    seat: Seat,
    known: Layer,
    key: tuple[Any, ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    edges: Any,
    weight: Any,
) -> Once | None:
    """The call on the edges as listed, where the graph is seen only once; None: it is planned."""
    session = active.seats.session  # type: ignore[union-attr]

    def planned() -> Apply:
        run = prepared(layer, module, seat, args, kwargs, known)
        assert isinstance(run, Prepared), "the layer was lowered before"
        return functools.partial(expressions.apply, session, seat.name, run.edges, run.constants)

    return once(session, known, module, key, args[0], edges, weight, planned)


def _in_pyg(
    original: Callable[..., Any],
    module: Any,
    seat: Seat,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """PyG's result, which fills the cache of a layer with cached=True.

    Later calls are planned for as long as the cache is that one: it is the model's, whichever view fills it.
    """
    before = cache_of(module)
    note_in_pyg()
    out = original(module, *args, **kwargs)
    kept, after = seat.kept, cache_of(module)
    if kept is not None and kept.cache is None:
        is_new = before is None and after is not None
        shared = _shared_edges(after, _edges_of(args, kwargs)[0])
        seat.kept = replace(kept, cache=after, shared=shared) if is_new else None
    return out


def _watched(
    reason: str,
    session: Session,
    original: Callable[..., Any],
    module: Any,
    seat: Seat,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """PyG's result, for a call that is not planned for this reason, such as hooks that observe the layer."""
    session.not_planned[seat.name] = f"{module.__class__.__name__}{reason}"
    session.plans.pop(seat.name, None)
    return _in_pyg(original, module, seat, args, kwargs)


def _shared_edges(cache: Any, edge_index: Any) -> tuple[Any, ...]:
    """(edges, their identity) where PyG's cache holds the caller's own: without loops to add they stay so."""
    cached: Any = cache[0] if isinstance(cache, tuple) else None
    for edges in (cached, edge_index):
        if not isinstance(edges, Tensor) or edges.layout is not torch.strided:
            return ()
        if torch._C._functorch.is_functorch_wrapped_tensor(edges):  # a transform's: it has no memory to share
            return ()
    if cached.data_ptr() != edge_index.data_ptr():
        return ()
    return cached, identity(cached)
