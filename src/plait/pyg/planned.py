"""A PyG layer whose forward is planned: the same class, parameters and hooks, another way of computing."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from plait.errors import InputError
from plait.ir import Expr
from plait.pyg.edges import check_weight, read
from plait.pyg.layers.fused import FUSED, Run, check_widths, layer_of
from plait.pyg.lower import Call, Lowered, NotLowered, lower, not_as_written
from plait.pyg.operators import Operator, propagate
from plait.pyg.recall import Layer, Seen, call_key
from plait.runtime.constants import Constants
from plait.runtime.deferred import whole
from plait.runtime.session import Edges, Session

__all__ = ["PlannedLayer", "is_disabled", "planned_class"]

_FLOATS = (torch.float32, torch.float64)
_HALVES = (torch.bfloat16, torch.float16)


def is_disabled() -> bool:
    """PLAIT_DISABLE=1 gives back plain PyG."""
    return os.environ.get("PLAIT_DISABLE", "") not in ("", "0")


class PlannedLayer:
    """Mixed in before the layer's own class; `plait_original` is that class."""

    plait_original: type[nn.Module]
    _plait_session: Session
    _plait_name: str

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if is_disabled():
            return self.plait_original.forward(self, *args, **kwargs)
        session = self._plait_session
        if session.may_defer and layer_of(cast("nn.Module", self)) is not None:
            whole((args, kwargs))  # its passes read memory, a row for every node
        layer = Seen.as_it_was(self)
        key = None if layer is None else call_key(layer.token, args, kwargs)
        run = None if key is None else session.recall(key)
        if run is None:
            run = _prepared(self, args, kwargs, layer)
            if isinstance(run, str):
                session.not_planned[self._plait_name] = run
                session.plans.pop(self._plait_name, None)  # an earlier call may have been planned
                return self.plait_original.forward(self, *args, **kwargs)
            if not isinstance(run, _Prepared):
                session.not_planned.pop(self._plait_name, None)
                return run()
            if not run.lowered.keeps_graph:
                session.keep(call_key(Seen.look(self).token, args, kwargs), run.edges, run)
        if session.not_planned:
            session.not_planned.pop(self._plait_name, None)
        x = args[0] if args else kwargs["x"]
        return run(self, x, None) if isinstance(x, Tensor) else run(self, x[0], x[1])

    def reset_parameters(self) -> None:
        self.__dict__.pop("_plait_kept", None)
        original: Any = self.plait_original
        original.reset_parameters(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        state = {name: value for name, value in self.__dict__.items() if name != "_plait_kept"}
        return _rebuild, (self.plait_original,), state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state) if hasattr(super(), "__setstate__") else self.__dict__.update(state)  # type: ignore[misc]


def _planned_class(original: type[nn.Module]) -> type[nn.Module]:
    """The planned twin of a layer class; `isinstance` of the original still holds."""
    return type(
        original.__name__,
        (PlannedLayer, original),
        {"plait_original": original, "__module__": original.__module__},
    )


# typed by hand: mypy takes a class of modules for unhashable
planned_class = cast("Callable[[type[nn.Module]], type[nn.Module]]", functools.cache(_planned_class))


def _rebuild(original: type[nn.Module]) -> nn.Module:
    twin = planned_class(original)
    return twin.__new__(twin)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A call that will be planned, whatever the features are."""

    session: Session
    name: str
    lowered: Lowered
    edges: Edges
    constants: Constants
    weight: Tensor | None  # kept, so that its address stays its own

    def __call__(self, module: Any, x: Tensor, root: Tensor | None) -> Tensor:
        count = 0

        def apply(forms: tuple[Expr, ...], inputs: Mapping[str, Tensor | None]) -> Tensor:
            nonlocal count
            label = self.name if count == 0 else f"{self.name}#{count}"
            count += 1
            return self.session.apply(label, self.edges, self.constants, forms, inputs)

        def widened(forms: tuple[Expr, ...], inputs: Mapping[str, Tensor | None]) -> Tensor:
            wide = {name: None if value is None else value.float() for name, value in inputs.items()}
            return apply(forms, wide).to(x.dtype)

        # half precision in, half precision out, summed in float32
        return self.lowered.run(module, widened if x.dtype in _HALVES else apply, x, root)


def _prepared(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], layer: Layer | None
) -> _Prepared | Run | str:
    """The call made ready to be planned, or why it runs in PyG; `layer`: as the module was and still is."""
    names = _parameters(module.plait_original)
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    kind = None if layer is not None else layer_of(module)
    if kind is not None:
        check_widths(module, given)
        answer = not_as_written(module, kind) or FUSED[kind](module, given)
        return f"{type(module).__name__}{answer}" if isinstance(answer, str) else answer
    if len(args) > len(names) or "x" not in given or "edge_index" not in given:
        return f"{type(module).__name__}: called with other arguments than forward's"
    return _lowered(module, given.pop("x"), given.pop("edge_index"), given, layer)


def _lowered(
    module: Any, x: Any, edge_index: Any, given: dict[str, Any], layer: Layer | None
) -> _Prepared | str:
    """A layer that is a matrix expression; `given` are the arguments after x and edge_index."""
    edge_weight = given.pop("edge_weight", None)
    size = given.pop("size", None)
    unusual = [name for name, value in given.items() if value is not None]
    if unusual:
        return f"{type(module).__name__}: called with {', '.join(unusual)}, which is not lowered"
    source, root, is_bipartite = _features(x)
    if source is None:
        return f"{type(module).__name__}: x is not a tensor or a pair of tensors"
    reason = _refused(source, root, edge_weight) or _refused_edges(edge_index, edge_weight)
    if reason:
        return f"{type(module).__name__}: {reason}"
    num_sources, num_targets = _node_counts(source, root, is_bipartite, size, edge_index)
    if num_targets is None:
        return f"{type(module).__name__}: the number of target nodes is not known; pass size= or x as a pair"
    is_swapped = getattr(module, "flow", "source_to_target") == "target_to_source"
    if is_swapped and is_bipartite:
        return (
            f"{type(module).__name__}: flow='target_to_source' on a pair of feature matrices is not lowered"
        )
    session: Session = module._plait_session
    kept = module.__dict__.get("_plait_kept")
    if kept is None:
        handed = read(edge_index, edge_weight, num_targets, num_sources, is_swapped)
        edges = session.edges_for(handed.key, handed.owners, handed.build)
        weight = handed.weight if handed.weight is not None else edges.weight
        kept = (edges, weight, handed.weight_key, handed.is_sparse)
    edges, weight, weight_key, is_sparse = kept
    if weight is not None and weight.requires_grad:
        return f"{type(module).__name__}: edge_weight wants a gradient, which needs the messages one by one"
    call = Call(is_bipartite, root is not None or not is_bipartite, weight is not None, is_sparse)
    lowered = None if layer is None else layer.lowered.get(call)
    if lowered is None:
        lowered = lower(module, call)
        if isinstance(lowered, NotLowered):
            return lowered.reason
        if layer is not None:
            layer.lowered[call] = lowered
    if lowered.keeps_graph:  # PyG's cached=True: the first graph and weights serve every later call
        module.__dict__["_plait_kept"] = kept
    dtype = torch.float32 if source.dtype in _HALVES else source.dtype
    constants = _constants(edges, lowered.operator, weight, weight_key, dtype)
    return _Prepared(session, module._plait_name, lowered, edges, constants, weight)


@functools.cache
def _parameters(layer: type[nn.Module]) -> tuple[str, ...]:
    """Names of the forward arguments."""
    return tuple(inspect.signature(layer.forward).parameters)[1:]


def _features(x: Any) -> tuple[Tensor | None, Tensor | None, bool]:
    if isinstance(x, Tensor):
        return x, None, False
    if isinstance(x, tuple | list) and len(x) == 2 and isinstance(x[0], Tensor):
        return x[0], x[1], True
    return None, None, False


def _refused(x: Tensor, root: Tensor | None, edge_weight: Tensor | None) -> str | None:
    """What plait's CPU path does not take; PyG does, or says why not."""
    for name, value in (("x", x), ("x[1]", root), ("edge_weight", edge_weight)):
        if value is None:
            continue
        if value.device.type != "cpu":
            return f"{name} is on {value.device}; plait runs on the CPU so far"
        if value.layout != torch.strided:
            return f"{name} is a sparse tensor, which is not lowered"
    if x.dtype not in (*_FLOATS, *_HALVES):
        return f"x is {x.dtype}; plait takes float32, float64 and bfloat16"
    if x.dim() != 2 or (root is not None and root.dim() != 2):
        return f"x has {x.dim()} dimensions; plait takes [nodes, width]"
    if edge_weight is not None and edge_weight.dtype != x.dtype:
        return f"edge_weight is {edge_weight.dtype} and x is {x.dtype}; PyG promotes them"
    if torch.is_autocast_enabled("cpu"):
        return "autocast is on; the layer runs in PyG, which follows it"
    if torch._C._are_functorch_transforms_active():
        return "a torch.func transform is active; the layer runs in PyG, which it can trace"
    return None


def _refused_edges(edge_index: Any, edge_weight: Tensor | None) -> str | None:
    """Forms of edges that PyG treats by rules of their own."""
    if not isinstance(edge_index, Tensor):
        kind = type(edge_index).__name__
        return f"edges as {kind} follow rules of their own; pass edge_index, torch CSR or COO"
    if edge_index.layout == torch.strided:
        return None
    if edge_index.layout not in (torch.sparse_csr, torch.sparse_coo):
        return f"a matrix of layout {edge_index.layout} is not lowered; pass torch CSR or COO"
    if edge_weight is not None:
        return "edge_weight beside a sparse matrix, which has values of its own, is not lowered"
    return None


def _node_counts(
    x: Tensor, root: Tensor | None, is_bipartite: bool, size: Any, edge_index: Any
) -> tuple[int, int | None]:
    if size is not None and size[1] is not None:
        return x.shape[0], int(size[1])
    if not is_bipartite:
        return x.shape[0], x.shape[0]
    if root is not None:
        return x.shape[0], root.shape[0]
    is_list = edge_index.layout == torch.strided
    return x.shape[0], None if is_list else int(edge_index.shape[0])


def _constants(
    edges: Edges, operator: Operator, weight: Tensor | None, weight_key: tuple[Any, ...], dtype: torch.dtype
) -> Constants:
    """The operator's matrices on this graph, made when first asked for."""
    key = (operator, weight_key, dtype)
    found = edges.constants.get(key)
    if found is None:
        if weight is not None:
            check_weight(weight)
            if weight.dim() > 1 and weight.numel() != weight.shape[0]:
                raise InputError(f"edge_weight: shape {tuple(weight.shape)}; pass one number for each edge")
        with torch.no_grad():
            made = propagate(
                operator, edges.graph, None if weight is None else weight.detach().reshape(-1), dtype
            )
        diagonals = {name: getattr(made, name) for name in "plq" if getattr(made, name) is not None}
        found = Constants(made.graph, made.edge_weight, {**diagonals, **made.extra}, dtype)
        edges.keep_constants(key, found, weight)
    return found
