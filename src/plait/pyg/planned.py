"""The `forward` of PyG's layers: planned while a compiled model is being called, PyG's own otherwise."""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from plait.errors import GraphError, InputError
from plait.ir import Expr
from plait.pyg import autocast, exported, recorded
from plait.pyg.active import Kept, Seat, Seats, active, entered, is_explained, parameters_of, traced
from plait.pyg.arguments import features_of, node_counts, refused, refused_edges
from plait.pyg.checkpoints import called, note_in_pyg, runs_again
from plait.pyg.edges import read
from plait.pyg.layers.base import RULES, Apply
from plait.pyg.layers.fused import FUSED, Run, check_widths, layer_of
from plait.pyg.learned import say_input, with_learned_weights
from plait.pyg.listening import is_followed, is_listened_to
from plait.pyg.lower import (
    EXPLAINED,
    FOLLOWED,
    LISTENED,
    Call,
    Lowered,
    NotLowered,
    as_in_pyg,
    lower,
    not_as_written,
)
from plait.pyg.once import Once, once, once_weighted
from plait.pyg.operators import Operator, propagate
from plait.pyg.overwritten import copied, may_be_overwritten, ordinary
from plait.pyg.recall import Layer, call_key, lie_with
from plait.runtime import expressions
from plait.runtime.again import now
from plait.runtime.constants import Constants
from plait.runtime.deferred import whole
from plait.runtime.edges import Edges
from plait.runtime.expressions import may_recall
from plait.runtime.identity import counts_writes, identity
from plait.runtime.session import Session
from plait.runtime.trace import is_profiling

__all__ = ["PlannedForward", "install", "is_disabled", "is_planned"]

_log = logging.getLogger("plait")
_HALVES = (torch.bfloat16, torch.float16)


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
    """Note that a layer runs in PyG because that is faster."""
    if session.not_planned.get(name) != session.aside.reason:
        session.not_planned[name] = session.aside.reason
        session.plans.pop(name, None)


def _is_pygs_turn(session: Session, seat: Seat, module: Any, edges: Any) -> bool:
    """Whether PyG runs a call, so that both can be timed."""
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
        return session.over_ranks(module, seats, here, _parameters(layer), args, kwargs)  # type: ignore[arg-type]
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:  # asked at every call
        return _here(layer, original, module, seats, args, kwargs)
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
    """The same on one machine, unless timing has found PyG to be faster."""
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
        return original(module, *args, **kwargs)
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
    session = seats.session
    key = None if known is None else call_key(known.token, args, kwargs)
    run = None if key is None else session.recall(key)
    if run is None and now.call is not None and now.call.is_second:
        run = now.call.prepared
    given, weight = _edges_of(args, kwargs)
    is_asked = run is None or (not runs_again() and session.aside.may_be_pygs(given))
    if is_asked and _is_pygs_turn(session, seat, module, given):
        return original(module, *args, **kwargs)
    if run is None:
        if known is not None and key is not None:
            listed = _listed(layer, module, seat, known, key, args, kwargs, given, weight)
            if listed is not None:
                session.not_planned.pop(seat.name, None)
                return listed(module, args[0])
        run = _prepared(layer, module, seat, args, kwargs, known)
        if isinstance(run, str):
            if session.not_planned.get(seat.name) != run:
                _log.info("layer %s runs in PyG: %s", seat.name, run)
            session.not_planned[seat.name] = run
            session.plans.pop(seat.name, None)  # an earlier call may have been planned
            return _in_pyg(original, module, seat, args, kwargs)
        if not isinstance(run, _Prepared):
            session.not_planned.pop(seat.name, None)
            return run()
        if not run.lowered.keeps_graph:
            record = seat.look(module) if known is None else known
            record.note(run.lowered)
            made = call_key(record.token, args, kwargs) if key is None else key
            session.keep(made, run.edges, run)
        elif now.call is not None:
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
    """The call as it runs when it is not replayed, whoever makes it: a backward pass may."""
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
    """The call on the edges as they are listed, where its graph comes once; None: it is planned."""
    session = active.seats.session  # type: ignore[union-attr]

    def planned() -> Apply:
        run = _prepared(layer, module, seat, args, kwargs, known)
        assert isinstance(run, _Prepared), "the layer was lowered before"
        return functools.partial(expressions.apply, session, seat.name, run.edges, run.constants)

    return once(session, known, module, key, args[0], edges, weight, planned)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A call that will be planned, whatever the features are."""

    session: Session
    name: str
    lowered: Lowered
    edges: Edges
    constants: Constants

    def __call__(self, module: Any, x: Tensor, root: Tensor | None, known: Layer | None = None) -> Tensor:
        session, edges = self.session, self.edges
        if known is None or type(x) is not Tensor or x.dtype in _HALVES or not may_recall(session, edges):
            return self._anew(module, x, root)
        given = known.given(self.lowered, module, x)
        if given is ...:
            return known.learn(self.lowered, module, self._apply(), x)
        if given is None:
            return self._anew(module, x, root)
        return expressions.recalled(session, self.name, edges, self.constants, *given, x)

    def _anew(self, module: Any, x: Tensor, root: Tensor | None) -> Tensor:
        """The call with all that the layer reads for it."""
        apply = self._apply()

        def widened(forms: tuple[Expr, ...], inputs: Mapping[str, Tensor | None]) -> Tensor:
            wide = {name: None if value is None else value.float() for name, value in inputs.items()}
            return apply(forms, wide).to(x.dtype)

        # half precision in, half precision out, summed in float32
        return self.lowered.run(module, widened if x.dtype in _HALVES else apply, x, root)

    def _apply(self) -> Apply:
        """What runs the expressions of one call, numbered after the first."""
        count = 0

        def apply(forms: tuple[Expr, ...], inputs: Mapping[str, Tensor | None]) -> Tensor:
            nonlocal count
            label = self.name if count == 0 else f"{self.name}#{count}"
            count += 1
            return expressions.apply(self.session, label, self.edges, self.constants, forms, inputs)

        return apply


def _prepared(
    layer: type[nn.Module],
    module: Any,
    seat: Seat,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    known: Layer | None,
) -> _Prepared | Run | str:
    """The call made ready to be planned, or why it runs in PyG; `known`: the layer as it was and still is."""
    kind = module.__class__.__name__
    names = _parameters(layer)  # type: ignore[arg-type]  # mypy takes a class of modules for unhashable
    if len(args) > len(names) or not kwargs.keys() <= set(names[len(args) :]):
        return f"{kind}: forward takes {', '.join(names)}; PyG says what is wrong"
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    x = given.get("x")
    fused = None if known is not None else layer_of(module)
    is_written = fused is not None and seat.is_as_written(module)
    if known is None:
        parameters = parameters_of(module) if is_written else module.parameters()
        if not lie_with(parameters, x[0] if isinstance(x, tuple | list) else x):
            return f"{kind}: its parameters are not on the device of x"
    if fused is not None:
        check_widths(module, given)
        reason = None if is_written else not_as_written(module, fused)
        if reason is None and not is_written:
            seat.note_as_written(module)
        answer = reason or FUSED[fused](module, given)
        return f"{kind}{answer}" if isinstance(answer, str) else answer
    if len(args) > len(names) or "x" not in given or "edge_index" not in given:
        return f"{kind}: called with other arguments than forward's"
    return _lowered(module, seat, given.pop("x"), given.pop("edge_index"), given, known)


def _lowered(
    module: Any, seat: Seat, x: Any, edge_index: Any, given: dict[str, Any], known: Layer | None
) -> _Prepared | Run | str:
    """A layer that is a matrix expression; `given` are the arguments after x and edge_index."""
    kind = module.__class__.__name__
    edge_weight = given.pop("edge_weight", None)
    size = given.pop("size", None)
    unusual = [name for name, value in given.items() if value is not None]
    if unusual:
        return f"{kind}: called with {', '.join(unusual)}, which is not lowered"
    source, root, is_bipartite = features_of(x)
    if source is None:
        return f"{kind}: x is not a tensor or a pair of tensors"
    reason = refused(source, root, edge_weight) or refused_edges(edge_index, edge_weight, source)
    if reason:
        return f"{kind}: {reason}"
    num_sources, num_targets = node_counts(source, root, is_bipartite, size, edge_index)
    if num_targets is None:
        return f"{kind}: the number of target nodes is not known; pass size= or x as a pair"
    is_swapped = getattr(module, "flow", "source_to_target") == "target_to_source"
    if is_swapped and is_bipartite:
        return f"{kind}: flow='target_to_source' on a pair of feature matrices is not lowered"
    session = active.seats.session  # type: ignore[union-attr]
    kept = seat.kept
    if kept is not None and kept.cache is _cache_of(module):
        reason = _refused_cache(kept, source, num_targets, is_swapped)
        if reason:
            return f"{kind}(cached=True): {reason}"
    else:
        try:
            handed = read(edge_index, edge_weight, num_targets, num_sources, is_swapped)
            edges = session.edges_for(handed.key, handed.owners, handed.build)
        except (GraphError, InputError):
            if all(vars(module).get(name) is None for name in autocast.CACHED_FEATURES):
                raise
            return f"{kind}(cached=True): the edges do not fit x, and PyG's cache of features reads neither"
        weight = handed.weight if handed.weight is not None else edges.weight
        kept = Kept(None, edges, weight, handed.weight_key, handed.is_sparse, is_swapped)
    edges, weight = kept.edges, kept.weight
    call = Call(is_bipartite, root is not None or not is_bipartite, weight is not None, kept.is_sparse)
    lowered = None if known is None else known.lowered.get(call)
    if lowered is None:
        lowered = lower(module, call)
        if isinstance(lowered, NotLowered):
            return lowered.reason
        if known is not None:
            known.lowered[call] = lowered
            known.note(lowered)
    wants_weight = weight is not None and weight.requires_grad and torch.is_grad_enabled()
    if wants_weight and weight.is_cuda:
        return f"{kind}: edge_weight requires a gradient, which is planned only on a CPU so far"
    if wants_weight or _come_once(session, edges, lowered, kept, source):
        once_run = (
            None if wants_weight or is_bipartite else _weighted_once(seat, module, known, kept, x, edge_index)
        )
        if once_run is not None:
            return once_run
        run = with_learned_weights(
            module, session, seat.name, lowered, edges, weight, source, root, kept.is_sparse
        )
        if isinstance(run, str):
            return f"{kind}: {run}"
        if known is None:
            seat.look(module)  # the call is made ready again each time, but the layer is known
        return run
    if lowered.keeps_graph and kept.cache is None:
        seat.kept = replace(kept, made_from=() if weight is None else identity(weight))
        return f"{kind}(cached=True): PyG makes its cache of the first graph"
    dtype = torch.float32 if source.dtype in _HALVES else source.dtype
    is_made = (lowered.operator, kept.weight_key, dtype) in edges.constants
    if kept.cache is not None and not is_made and not kept.has_its_weight():
        return f"{kind}(cached=True): the weights that PyG's cache was made from were changed in place"
    constants = _constants(edges, lowered.operator, weight, kept.weight_key, dtype)
    return _Prepared(session, seat.name, lowered, edges, constants)


def _come_once(session: Session, edges: Edges, lowered: Lowered, kept: Kept, x: Tensor) -> bool:
    """Whether the weights on a graph keep changing and these have not come back: no plan is made for them."""
    weight = kept.weight
    if weight is None or kept.is_sparse or lowered.keeps_graph or not edges.meets_many_weights:
        return False
    if weight.is_cuda or x.dtype is not weight.dtype or weight.dim() != 1 or not session.lists_values():
        return False
    if (lowered.operator, kept.weight_key, x.dtype) in edges.constants or lowered.operator.diagonals is None:
        return False
    return session.listings.of(kept.weight_key, weight, session.num_calls) is not None


def _weighted_once(
    seat: Seat, module: Any, known: Layer | None, kept: Kept, x: Tensor, edge_index: Tensor
) -> Run | None:
    """The call on the edges as they are listed with weights seen only once, where the layer allows it."""
    session = active.seats.session  # type: ignore[union-attr]
    edges, weight = kept.edges, kept.weight
    if known is None:
        return None

    def planned() -> Apply:
        operator = known.lowered[Call(is_weighted=True)].operator
        constants = _constants(edges, operator, weight, kept.weight_key, x.dtype)
        return functools.partial(expressions.apply, session, seat.name, edges, constants)

    found = once_weighted(session, known, module, kept.weight_key, x, edges, edge_index, weight, planned)
    if found is None:
        return None

    def run() -> Tensor:
        say_input(session, seat.name, edges.graph, weight)
        return found(module, x)

    return run


def _cache_of(module: Any) -> Any:
    """What PyG keeps of the first graph of a layer with cached=True; None before there was one."""
    own = vars(module)
    return next(
        (own[name] for name in ("_cached_edge_index", "_cached_adj_t") if own.get(name) is not None), None
    )


def _refused_cache(kept: Kept, x: Tensor, num_targets: int, is_swapped: bool) -> str | None:
    """Why PyG has to run a call on what its cache holds, or None."""
    if not kept.is_as_made():
        return "the edges that PyG's cache holds were changed in place"
    if kept.is_swapped != is_swapped:
        return "PyG's cache was made for the other flow"
    graph = kept.edges.graph
    if (graph.num_nodes, graph.num_sources) != (num_targets, x.shape[0]):
        return f"x has {x.shape[0]} rows, the graph that PyG's cache holds has {graph.num_sources} nodes"
    weight = kept.cache[1] if isinstance(kept.cache, tuple) else kept.cache
    if isinstance(weight, Tensor) and weight.dtype != x.dtype:
        return f"PyG's cache holds {weight.dtype} and x is {x.dtype}; PyG promotes them"
    return None


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
    before = _cache_of(module)
    note_in_pyg()
    out = original(module, *args, **kwargs)
    kept, after = seat.kept, _cache_of(module)
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
    """PyG's result for someone who watches what is inside the layer."""
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


@functools.cache
def _parameters(layer: type[nn.Module]) -> tuple[str, ...]:
    """Names of the forward arguments."""
    return tuple(inspect.signature(layer.forward).parameters)[1:]


def _constants(
    edges: Edges, operator: Operator, weight: Tensor | None, weight_key: tuple[Any, ...], dtype: torch.dtype
) -> Constants:
    """The operator's matrices on this graph, made when first asked for."""
    key = (operator, weight_key, dtype)
    found = edges.constants.get(key)
    if found is None:
        if weight is not None and weight.dim() > 1 and weight.numel() != weight.shape[0]:
            raise InputError(f"edge_weight: shape {tuple(weight.shape)}; pass one number for each edge")
        with torch.no_grad():
            made = propagate(
                operator, edges.graph, None if weight is None else weight.detach().reshape(-1), dtype
            )
        diagonals = {name: getattr(made, name) for name in "plq" if getattr(made, name) is not None}
        unit_loops = operator.has_unit_loops(weight is not None)
        found = Constants(
            made.graph, made.edge_weight, {**diagonals, **made.extra}, dtype, unit_loops=unit_loops
        )
        edges.keep_constants(key, found, weight)
    return found
