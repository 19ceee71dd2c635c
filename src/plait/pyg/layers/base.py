"""What lowering rules share: the call they look at, their result, the leaves, and reasons against a layer."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch_geometric.nn.aggr import MaxAggregation, MeanAggregation, MinAggregation, SumAggregation
from torch_geometric.nn.dense.linear import Linear as PyGLinear

from plait.ir import Aggregate, Dense, Expr, Scalar, Sparse, total
from plait.ir.build import propagation
from plait.pyg.operators import Operator

__all__ = [
    "RULES", "Apply", "Call", "Lowered", "NotLowered", "Numbers", "Rule", "aggregation", "bias",
    "bound_to_torch", "features", "has_hooks", "is_lazy", "is_parametrized", "is_plain_linear", "is_renamed",
    "is_resized", "linear_size", "linear_values", "neighbours", "not_plain", "not_summed", "number_in",
    "rule", "scalar", "scalar_value", "sizes", "weight", "with_bias",
]  # fmt: skip

Apply = Callable[[tuple[Expr, ...], Mapping[str, "Tensor | None"]], Tensor]
"""Runs one planned expression out of equal ones; the planner picks."""


@dataclass(frozen=True, slots=True)
class Call:
    """What a call looks like, as far as lowering cares."""

    is_bipartite: bool = False
    """x is a pair."""
    has_root: bool = True
    """x[1] is not None."""
    is_weighted: bool = False
    """edge_weight is given, or adj_t carries values other than ones."""
    is_sparse: bool = False
    """edge_index is a torch sparse adj_t, not an edge list."""


Numbers = tuple[str, Mapping[str, Tensor]]
"""(which of a layer's expressions is meant, its numbers by name)."""


@dataclass(frozen=True, slots=True)
class Lowered:
    """A layer as matrix expressions over one propagation matrix."""

    operator: Operator
    run: Callable[[Any, Apply, Tensor, Tensor | None], Tensor]
    """(module, apply, source features, root features or None) -> output; the root is read of pairs only."""
    keeps_graph: bool = False
    """cached=True: the first graph the layer meets serves every later call, whatever edges come with it."""
    is_steady: bool = False
    """What `run` gives to its expression depends only on the layer's options and parameters, not on values of
    its buffers: as long as the layer is unchanged, the next call is given the same (runtime/recipe.py)."""
    numbers: Callable[[Any, Tensor], Numbers | None] | None = None
    """(module, features) -> the numbers that a steady layer's `run` reads at every call, which may change."""
    scheduled: frozenset[str] = frozenset()
    """Options, plain numbers, that only `numbers` reads: another number is lowered to the same."""


@dataclass(frozen=True, slots=True)
class NotLowered:
    """A layer that keeps running in PyG, with the reason in words."""

    reason: str


Rule = Callable[[Any, Call], "Lowered | NotLowered"]
RULES: dict[type[nn.Module], Rule] = {}


def rule(layer: type[nn.Module]) -> Callable[[Rule], Rule]:
    """Registers the lowering of a layer class."""

    def register(function: Rule) -> Rule:
        RULES[layer] = function
        return function

    return register


# Leaves -------------------------------------------------------------------------------------------------


def sizes(call: Call) -> tuple[str, str]:
    """Names of the numbers of targets and sources."""
    return ("N", "M") if call.is_bipartite else ("N", "N")


def features(call: Call | None = None) -> Dense:
    """X: the source features."""
    return Dense("X", "N" if call is None else sizes(call)[1], "K1")


def weight(name: str = "W", rows: str = "K1", cols: str = "K2") -> Dense:
    """A learnable matrix [in, out]: the transpose of a PyG weight."""
    return Dense(name, rows, cols, "learnable")


def bias(cols: str = "K2") -> Dense:
    """b: a learnable row."""
    return Dense("b", 1, cols, "learnable")


def scalar(name: str) -> Scalar:
    """A number of the layer that is not learned but may be scheduled: an input, not part of the plan."""
    return Scalar(name, None, "data")


def scalar_value(value: float, x: Tensor) -> Tensor:
    """The value of such a number for features x; half precision is summed in float32."""
    return torch.tensor(value, dtype=x.dtype if x.dtype.itemsize > 2 else torch.float32)


_read: dict[int, tuple[weakref.ref[Tensor], int, float]] = {}
_MOST_READ = 256


def number_in(value: Tensor) -> float:
    """The number in a tensor of one element; one on a GPU is read again when torch counted a write to it."""
    if value.is_cpu:
        return float(value)
    known, version, number = _read.get(id(value), (None, -1, 0.0))
    if known is None or known() is not value or version != value._version:
        number = float(value)
        while len(_read) >= _MOST_READ:
            _read.pop(next(iter(_read)))
        _read[id(value)] = weakref.ref(value), value._version, number
    return number


def with_bias(forms: tuple[Expr, ...], has_bias: bool) -> tuple[Expr, ...]:
    """Every expression with the bias row added, where there is one."""
    return tuple(total(form, bias()) for form in forms) if has_bias else forms


def neighbours(reduce: str, call: Call) -> Expr:
    """The sum, mean, max or min over a node's neighbours, of X."""
    rows, cols = sizes(call)
    x = features(call)
    if reduce in ("max", "min"):
        return Aggregate(reduce, Sparse("A", rows, cols), x)  # type: ignore[arg-type]
    matrix = propagation(is_weighted=call.is_weighted, left=reduce == "mean", rows=rows, cols=cols)
    return matrix @ x


# What stops a layer ---------------------------------------------------------------------------------------

_REDUCE = {SumAggregation: "sum", MeanAggregation: "mean", MaxAggregation: "max", MinAggregation: "min"}
_NAMED = {"add": "sum", **{name: name for name in _REDUCE.values()}}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def aggregation(module: Any) -> str | None:
    """The layer's aggregation by name; None where it is none of sum, mean, max and min.

    None also where its module was replaced: on sparse matrices PyG goes by the name, on edge lists not.
    """
    found = _REDUCE.get(type(module.aggr_module))
    name = module.aggr if isinstance(module.aggr, str) else None
    return found if _NAMED.get(name or "", found) == found else None


def is_renamed(module: Any) -> bool:
    """Whether `aggr` names another aggregation than the layer was made with."""
    found = _REDUCE.get(type(module.aggr_module))
    return found is not None and aggregation(module) is None


def has_hooks(module: nn.Module) -> bool:
    """True when something watches or changes what goes in or out of the module."""
    return any(getattr(module, name, None) for name in _HOOKS)


def bound_to_torch() -> str | None:
    """Why torch must see every operation of a call, which then runs in PyG; None where it need not."""
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        return "autocast is on; the layer runs in PyG, which follows it"
    if torch._C._are_functorch_transforms_active():
        return "a torch.func transform is active; the layer runs in PyG, which it can trace"
    if forward_ad._current_level >= 0:
        return "forward-mode differentiation is on; the layer runs in PyG, which carries tangents"
    return None


def is_plain_linear(module: Any) -> bool:
    """True for a linear map whose weight and bias are all it does: no hooks, forward not replaced."""
    known = getattr(type(module), "forward", None) in (PyGLinear.forward, nn.Linear.forward)
    return known and "forward" not in vars(module) and not has_hooks(module) and not is_lazy(module)


def is_resized(linear: Any) -> bool:
    """Whether the weight or bias of a linear map was replaced by one of another size: it makes other rows."""
    weight, bias = map(linear._parameters.get, ("weight", "bias"))
    size = linear_size(linear)
    if weight is not None and size[1] < 1:  # a lazy map that was loaded before its first call does not know
        size = size[0], weight.shape[-1]
    return (weight is not None and weight.shape != size) or (bias is not None and bias.shape != size[:1])


def linear_size(linear: Any) -> tuple[int, int]:
    """(out, in) as a linear map was made."""
    if isinstance(linear, PyGLinear):
        return linear.out_channels, linear.in_channels
    return linear.out_features, linear.in_features


def is_parametrized(module: nn.Module) -> bool:
    """True where a parameter is computed each time it is read: spectral_norm changes its state then."""
    return any("parametrizations" in part._modules for part in module.modules())


def is_lazy(module: nn.Module) -> bool:
    """True while a parameter waits for the first input to learn its size."""
    # walked by hand: `parameters()` collects names that are not needed, and this runs at every call
    own = module._parameters.values()
    return any(isinstance(p, nn.parameter.UninitializedParameter) for p in own) or any(
        child is not None and is_lazy(child) for child in module._modules.values()
    )


def linear_values(module: Any) -> dict[str, Tensor | None]:
    """{W: [in, out], b: [out]} of a linear map; b is left out where it has none."""
    values: dict[str, Tensor | None] = {"W": module.weight.t()}
    bias = module.bias
    if bias is not None:
        values["b"] = bias
    return values


def not_plain(module: Any, *names: str, width: int | None = None) -> NotLowered | None:
    """The reason against a layer one of whose linear maps is more than its weight and bias.

    width: that of the rows they make, where the layer goes by what it was made for.
    """
    for name in names:
        linear = getattr(module, name)
        if not is_plain_linear(linear) or width not in (None, linear_size(linear)[0]):
            return NotLowered(f"{type(module).__name__}: {name} has hooks or was replaced")
    return None


def not_summed(module: Any, call: Call) -> NotLowered | None:
    """The reason against a layer of one node set that must aggregate by sums."""
    name = type(module).__name__
    if call.is_bipartite:
        return NotLowered(f"{name}: x is a pair; the layer takes one feature matrix")
    if aggregation(module) != "sum":
        return NotLowered(f"{name}(aggr={module.aggr!r}): only sums of normalised messages are planned")
    return None
