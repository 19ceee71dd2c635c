"""A call of a layer made ready: lowered and bound to its graph and constants, or why it runs in PyG."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from plait.errors import GraphError, InputError, TypesError
from plait.ir import Expr
from plait.pyg import autocast
from plait.pyg.active import Kept, Seat, active, parameters_of
from plait.pyg.arguments import features_of, node_counts, refused, refused_edges
from plait.pyg.edges import read
from plait.pyg.layers import attention
from plait.pyg.layers.base import Apply
from plait.pyg.layers.fused import FUSED, Run, check_widths, layer_of
from plait.pyg.layers.fused import refused_edges as not_listed
from plait.pyg.learned import say_input, with_learned_weights
from plait.pyg.lower import APART, Call, Lowered, NotLowered, lower, not_as_written
from plait.pyg.once import once_weighted
from plait.pyg.operators import Operator, propagate
from plait.pyg.recall import Layer, lie_with
from plait.runtime import expressions
from plait.runtime.constants import Constants
from plait.runtime.edges import Edges
from plait.runtime.expressions import may_recall
from plait.runtime.identity import identity
from plait.runtime.latest import Latest
from plait.runtime.session import Session

__all__ = ["Prepared", "argument_names", "cache_of", "is_narrow", "prepared"]

_HALVES = (torch.bfloat16, torch.float16)


def is_narrow(x: Tensor) -> bool:
    """Whether x is in half precision: such features are widened first."""
    return x.dtype in _HALVES


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Prepared:
    """A call that will be planned, for any features."""

    session: Session
    name: str
    lowered: Lowered
    edges: Edges
    constants: Constants
    latest: Latest = field(default_factory=Latest, compare=False)

    def __call__(self, module: Any, x: Tensor, root: Tensor | None, known: Layer | None = None) -> Tensor:
        session, edges = self.session, self.edges
        if known is None or type(x) is not Tensor or x.dtype in _HALVES or not may_recall(session, edges):
            return self._anew(module, x, root)
        given = known.given(self.lowered, module, x)
        if given is ...:
            return known.learn(self.lowered, module, self._apply(), x)
        if given is None:
            return self._anew(module, x, root)
        return expressions.recalled(session, self.name, edges, self.constants, *given, x, self.latest)

    def _anew(self, module: Any, x: Tensor, root: Tensor | None) -> Tensor:
        """The call with everything that the layer reads."""
        apply = self._apply()

        def widened(forms: tuple[Expr, ...], inputs: Mapping[str, Tensor | None]) -> Tensor:
            given = (value for value in inputs.values() if value is not None and value.dim())
            if any(value.dtype != x.dtype for value in given):
                raise TypesError(f"{self.name}: x is {x.dtype}, not all weights are; convert the model or x")
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


def prepared(
    layer: type[nn.Module],
    module: Any,
    seat: Seat,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    known: Layer | None,
) -> Prepared | Run | str:
    """The call made ready to be planned, or why it runs in PyG; `known`: the layer as it was and still is."""
    kind = module.__class__.__name__
    names = argument_names(layer)  # type: ignore[arg-type]  # mypy takes a class of modules for unhashable
    if len(args) > len(names) or not kwargs.keys() <= set(names[len(args) :]):
        return f"{kind}: forward takes {', '.join(names)}; PyG says what is wrong"
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    x = given.get("x")
    fused = None if known is not None else layer_of(module)
    takes_lists = fused is not None and FUSED[fused] is not attention.prepare  # which takes matrices too
    if takes_lists and _is_sparse(given.get("edge_index")):
        return f"{kind}{not_listed(given['edge_index'])}"
    is_written = fused is not None and seat.is_as_written(module)
    if known is None:
        parameters = parameters_of(module) if is_written else module.parameters()
        if not lie_with(parameters, x[0] if isinstance(x, tuple | list) else x):
            return f"{kind}{APART}"
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


def _is_sparse(edges: Any) -> bool:
    return isinstance(edges, Tensor) and edges.layout is not torch.strided


def _lowered(
    module: Any, seat: Seat, x: Any, edge_index: Any, given: dict[str, Any], known: Layer | None
) -> Prepared | Run | str:
    """A layer that is a matrix expression; `given` are the arguments after x and edge_index."""
    kind = module.__class__.__name__
    edge_weight = given.pop("edge_weight", None)
    size = given.pop("size", None)
    unusual = [name for name, value in given.items() if value is not None]
    if unusual:
        return f"{kind}: called with {', '.join(unusual)}, which is not planned"
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
        return f"{kind}: flow='target_to_source' on a pair of feature matrices is not planned"
    kept = _held(module, seat, source, (num_targets, num_sources), edge_index, edge_weight, is_swapped)
    if isinstance(kept, str):
        return f"{kind}(cached=True): {kept}"
    session = active.seats.session  # type: ignore[union-attr]
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
    if wants_weight or _are_used_once(session, edges, lowered, kept, source):
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
        made_from = () if weight is None else identity(weight)
        seat.kept = replace(kept, made_from=made_from, operator=lowered.operator)
        return f"{kind}(cached=True): PyG makes its cache of the first graph"
    if lowered.keeps_graph and lowered.operator != kept.operator:
        return f"{kind}(cached=True): its options changed since PyG's cache was made"
    dtype = torch.float32 if source.dtype in _HALVES else source.dtype
    is_made = (lowered.operator, kept.weight_key, dtype) in edges.constants
    if kept.cache is not None and not is_made and not kept.has_its_weight():
        return f"{kind}(cached=True): the weights that PyG's cache was made from were changed in place"
    constants = _constants(edges, lowered.operator, weight, kept.weight_key, dtype)
    return Prepared(session, seat.name, lowered, edges, constants)


def _held(
    module: Any,
    seat: Seat,
    x: Tensor,
    sizes: tuple[int, int],
    edge_index: Any,
    edge_weight: Tensor | None,
    is_swapped: bool,
) -> Kept | str:
    """The graph of a call between `sizes` = (targets, sources): that of PyG's cache where there is one."""
    kept = seat.kept
    if kept is not None and kept.cache is cache_of(module):
        return _refused_cache(kept, x, sizes[0], is_swapped) or kept
    session = active.seats.session  # type: ignore[union-attr]
    try:
        handed = read(edge_index, edge_weight, *sizes, is_swapped)
        edges = session.edges_for(handed.key, handed.owners, handed.build)
    except (GraphError, InputError):
        caches = (cache_of(module), *(vars(module).get(name) for name in autocast.CACHED_FEATURES))
        if all(cache is None for cache in caches):
            raise
        return "the edges do not fit, and PyG, which has its cache, does not read them"
    weight = handed.weight if handed.weight is not None else edges.weight
    return Kept(None, edges, weight, handed.weight_key, handed.is_sparse, is_swapped)


def _are_used_once(session: Session, edges: Edges, lowered: Lowered, kept: Kept, x: Tensor) -> bool:
    """Whether the weights of this graph keep changing and these are new: no plan is made for them."""
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


def cache_of(module: Any) -> Any:
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


@functools.cache
def argument_names(layer: type[nn.Module]) -> tuple[str, ...]:
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
